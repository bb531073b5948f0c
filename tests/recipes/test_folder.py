"""The folder of a run: whose it is, and what is checked before anything is written there."""

import dataclasses
import json
import multiprocessing
import time

import pytest
import recipe_runs as runs

import inflection
from common.folder import open_folder


@pytest.fixture
def words(tmp_path):
    rows = [
        f"x\t{split}\tlar\tlar{end}\tV;{tag}"
        for split in ("train", "dev", "test")
        for end, tag in (("a", "PST"), ("i", "PRS"))
    ]
    path = tmp_path / "words.tsv"
    path.write_text("\n".join(["lang\tsplit\tlemma\tform\ttags", *rows * 4]) + "\n")
    return str(path)


def settings(words, out, **changes):
    small = runs.SMALL | {"width": 16, "warmup": 4, "dropout": 0.2, "beams": 2}
    return inflection.Settings(data=words, out=str(out), **{**small, **changes})


def test_what_it_must_not_be(words, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    for out, message in [
        (tmp_path / "file", "is a file; give a folder"),
        (tmp_path / "full", "files that are no run's"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_folder(settings(words, out), "inflection")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_whose_it_is(words, tmp_path):
    run = settings(words, tmp_path / "run")
    folder = open_folder(run, "inflection")
    open_folder(
        dataclasses.replace(run, lr=0.02), "inflection"
    )  # an earlier start that wrote no checkpoint is forgotten
    (folder / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        open_folder(run, "inflection")
    resumed = dataclasses.replace(run, resume=True, lr=0.02, log_steps=3, checkpoint_steps=9)
    open_folder(resumed, "inflection")
    with pytest.raises(ValueError, match=r"recipe was 'inflection', is now 'translation'"):
        open_folder(resumed, "translation")
    older = runs.read(folder / "settings.json")
    del older["budget"], older["ensemble"]  # as if it had been started before there were these options
    (folder / "settings.json").write_text(json.dumps(older))
    open_folder(resumed, "inflection")
    with pytest.raises(ValueError, match=r"budget was 0, is now 7"):
        open_folder(dataclasses.replace(resumed, budget=7), "inflection")


def test_nobody_else_may_work_in_it(words, tmp_path):
    several = multiprocessing.get_context("fork")
    ready = several.Event()

    def work():
        open_folder(settings(words, tmp_path / "run"), "inflection")
        ready.set()
        time.sleep(300)

    other = several.Process(target=work)
    other.start()
    try:
        assert ready.wait(100)
        with pytest.raises(ValueError, match="another process is at work there"):
            open_folder(settings(words, tmp_path / "run"), "inflection")
    finally:
        other.kill()
        other.join()
    for _ in range(2):  # it was killed: the folder is free, and this process may take it up again
        open_folder(settings(words, tmp_path / "run"), "inflection")


def test_the_hub_is_asked_before_training(words, tmp_path):
    with pytest.raises(ValueError, match=r"--push_to_hub me/mine: no access to the Hub .*hf auth login"):
        open_folder(settings(words, tmp_path / "run", push_to_hub="me/mine"), "inflection")
    assert not (tmp_path / "run").exists()


def test_accumulation_changes_nothing(words, tmp_path):
    found = []
    for parts in (1, 4):
        run = settings(words, tmp_path / str(parts), dropout=0.0, gradient_accumulation=parts, epochs=4, log_steps=1)
        inflection.main(run)
        lines = runs.history(run.out)
        found.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(found[0]) == 4
    for one, four in zip(*found, strict=True):
        assert four == pytest.approx(one, rel=2e-3)


def test_an_ensemble_has_its_card_in_the_folder(words, tmp_path):
    inflection.main(settings(words, tmp_path / "run", smoke=True))
    model = str(tmp_path / "run" / "model")
    inflection.main(settings(words, tmp_path / "both", ensemble=[model, model]))
    assert "| ensemble | 2 |" in (tmp_path / "both" / "README.md").read_text()
    with pytest.raises(ValueError, match="model='/nowhere': there is no such folder"):
        inflection.main(settings(words, tmp_path / "other", ensemble=["/nowhere"]))
    assert not (tmp_path / "other").exists()
