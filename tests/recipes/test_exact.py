"""Runs: who owns a folder, exact resume after a kill, the same losses however a step is shared."""

import csv
import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import fresh
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForSeq2SeqLM

import classification
import convert
import inflection
from common.finish import check_finish
from common.run import Run

RECIPES = Path(__file__).parents[2] / "recipes"

LEMMAS = ["lar", "mir", "tol", "sen", "ruk", "pim", "dov", "gal", "hem"]


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """One table of all splits: 32 words to learn, 4 to test."""
    rows = ["lang\tsplit\tlemma\tform\ttags"]
    for place, lemma in enumerate(LEMMAS):
        for number, tag in enumerate(("PST", "PRS", "FUT", "INF")):
            split = "test" if place == len(LEMMAS) - 1 else "train"
            rows.append(f"upper\t{split}\t{lemma}\t{lemma}{'aeio'[number] * (1 + place % 3)}\tV;{tag}")
            if place == 0:
                rows.append(rows[-1].replace("\ttrain\t", "\tdev\t"))
    path = tmp_path_factory.mktemp("words") / "words.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def settings(words, out, **changes):
    small = {"width": 16, "heads": 2, "layers": 1, "batch_size": 8, "epochs": 3, "lr": 0.01, "warmup": 4, "beams": 2}
    return inflection.Settings(data=words, out=str(out), **{**small, **changes})


def log(folder):
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in log(folder) if "loss" in line]


# The recipe, killed with SIGKILL after it has logged a step; a process for each folder and step, forked from one.
DRIVER = """
import json, os, signal, sys
sys.path.insert(0, {recipes!r})
import inflection
from common.run import Run
log = Run.log
for out, last in {runs!r}:
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
        continue
    def log_and_die(self, step, **values):
        log(self, step, **values)
        if step == last and "loss" in values:
            os.kill(os.getpid(), signal.SIGKILL)
    Run.log = log_and_die
    inflection.main(inflection.parse(inflection.Settings, inflection.__doc__, [*sys.argv[1:], "--out", out]))
    os._exit(1)
"""
STEPS = {"in the middle of an epoch": 7, "before the first checkpoint": 1}


@pytest.fixture(scope="module")
def killed_runs(words, tmp_path_factory):
    """A run to its end in the folder ``whole``, and others that were killed after so many steps; its settings."""
    folder = tmp_path_factory.mktemp("killed")
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    whole = settings(words, folder / "whole", checkpoint_steps=2, attention="learned", output_alpha=1.5, dropout=0.3)
    inflection.main(whole)
    options = {name: value for name, value in dataclasses.asdict(whole).items() if value and name != "out"}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    driver = DRIVER.format(recipes=str(RECIPES), runs=[(str(folder / str(step)), step) for step in STEPS.values()])
    ended = fresh.run(driver, *given, environment={"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_killed_run_goes_on_exactly(killed_runs, step):
    whole = Path(killed_runs.out)
    folder = whole.parent / str(step)
    killed = dataclasses.replace(killed_runs, out=str(folder))
    assert losses(folder) == losses(whole)[:step]
    with pytest.raises(ValueError, match=r"holds a run already: add --resume"):
        inflection.main(killed)
    with pytest.raises(ValueError, match=r"started differently \(lr was 0\.01, is now 0\.02; layers was 1, is now 2\)"):
        inflection.main(dataclasses.replace(killed, resume=True, lr=0.02, layers=2))
    older = json.loads((folder / "settings.json").read_text())
    del older["budget"], older["ensemble"]  # as if it had been started before there were these options
    (folder / "settings.json").write_text(json.dumps(older))
    with (folder / "log.jsonl").open("a") as lines:
        lines.write('{"step": 99, "lo')  # as if it had been killed while writing
    inflection.main(dataclasses.replace(killed, resume=True, log_steps=3))
    assert len(losses(whole)) == 12
    assert log(folder) == log(whole)
    alphas = [json.loads(line) for line in (folder / "alphas.jsonl").read_text().splitlines()]
    assert [line["step"] for line in alphas] == ([0, 9, 12] if step == 7 else [0, 3, 6, 9, 12])
    assert alphas[-1] == json.loads((whole / "alphas.jsonl").read_text().splitlines()[-1])
    results = [json.loads((place / "result.json").read_text()) for place in (whole, folder)]
    for name in ("accuracy", "optimal", "dev_accuracy", "best_step", "steps"):
        assert results[0][name] == results[1][name]


def test_accumulation_changes_nothing(words, tmp_path):
    for parts in (1, 4, 8):
        inflection.main(settings(words, tmp_path / str(parts), dropout=0.0, gradient_accumulation=parts, epochs=2))
    assert len(losses(tmp_path / "1")) == 8
    for parts in (4, 8):
        assert losses(tmp_path / str(parts)) == pytest.approx(losses(tmp_path / "1"), rel=2e-4)
        norms = [[line["gradient_norm"] for line in log(tmp_path / p) if "loss" in line] for p in ("1", str(parts))]
        assert norms[1] == pytest.approx(norms[0], rel=2e-3)


def test_accelerates_own_accumulation_changes_nothing(words, tmp_path, monkeypatch):
    inflection.main(settings(words, tmp_path / "a", dropout=0.0, epochs=1))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    inflection.main(settings(words, tmp_path / "b", dropout=0.0, epochs=1))
    a, b = ([line for line in log(tmp_path / name) if "loss" in line] for name in "ab")
    assert a == b and a[0]["gradient_norm"] > 0


def test_finished_runs_are_tested_again_and_counted_once(words, tmp_path):
    run = settings(words, tmp_path / "run", epochs=1, attention="1.5", results=str(tmp_path / "r.csv"))
    inflection.main(run)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    steps = losses(tmp_path / "run")
    inflection.main(dataclasses.replace(run, resume=True, log_steps=1, checkpoint_steps=2))
    assert losses(tmp_path / "run") == steps
    with open(tmp_path / "r.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 1
    again = (tmp_path / "run" / "model" / "README.md").read_text()
    assert card.count("## Results") == again.count("## Results") == 1
    accuracy = rows[0]["accuracy"]
    assert f"| accuracy | {accuracy} |" in again and f"value: {accuracy}" in again
    assert "inflection 1.5/1.0" in again and "alpha = 1.5 is 1.5-entmax" in again.replace(
        "alpha = 1 is the softmax, ", "alpha = "
    )
    # Whoever saves the model again, into the same folder, keeps the numbers.
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    model.save_pretrained(tmp_path / "run" / "model")
    assert (tmp_path / "run" / "model" / "README.md").read_text() == again


def test_a_softmax_baseline_has_a_card_too(words, tmp_path):
    inflection.main(settings(words, tmp_path / "run", smoke=True, results=str(tmp_path / "r.csv")))
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| accuracy |" in card and "recipes/inflection.py" in card
    assert not (tmp_path / "r.csv").exists()  # a smoke test is no result
    # An ensemble has no model of its own: its card stands in the folder of the run.
    model = str(tmp_path / "run" / "model")
    inflection.main(settings(words, tmp_path / "both", ensemble=[model, model]))
    assert "| ensemble | 2 |" in (tmp_path / "both" / "README.md").read_text()


class TestFolder:
    def test_what_it_must_not_be(self, words, tmp_path):
        (tmp_path / "file").write_text("x")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "thesis.tex").write_text("x")
        for out, message in [
            ("", "--out is missing"),
            (tmp_path / "file", "is a file; give a folder"),
            (tmp_path / "full", "holds files that are no run's"),
        ]:
            with pytest.raises(ValueError, match=message):
                Run(settings(words, out), "inflection")
        assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]

    def test_a_start_that_failed_can_be_repeated_with_other_settings(self, words, tmp_path):
        with pytest.raises(ValueError, match=r"alpha_lr=0\.1 would have no effect: attention=softmax learns no alpha"):
            inflection.main(settings(words, tmp_path / "run", alpha_lr=0.1))
        inflection.main(settings(words, tmp_path / "run", smoke=True))
        with pytest.raises(ValueError, match=r"holds a run already"):
            inflection.main(settings(words, tmp_path / "run", smoke=True))
        with pytest.raises(ValueError, match=r"recipe was 'inflection', is now 'translation'"):
            Run(settings(words, tmp_path / "run", smoke=True, resume=True), "translation")

    def test_nobody_else_may_work_in_it(self, words, tmp_path):
        several = multiprocessing.get_context("fork")
        ready = several.Event()

        def work():
            Run(inflection.Settings(data=words, out=str(tmp_path / "run")), "inflection")
            ready.set()
            time.sleep(300)

        other = several.Process(target=work)
        other.start()
        try:
            assert ready.wait(100)
            with pytest.raises(ValueError, match="another process is at work there"):
                Run(inflection.Settings(data=words, out=str(tmp_path / "run")), "inflection")
        finally:
            other.kill()
            other.join()
        given = inflection.Settings(data=words, out=str(tmp_path / "run"))
        assert not Run(given, "inflection").resumes  # it was killed: the folder is free
        assert not Run(given, "inflection").resumes  # this process may take it up again

    def test_other_data_do_not_go_on_with_it(self, words, tmp_path):
        copy = tmp_path / "words.tsv"
        copy.write_text(Path(words).read_text(encoding="utf-8"), encoding="utf-8")
        given = settings(str(copy), tmp_path / "run", epochs=1)
        inflection.main(given)
        lines = copy.read_text(encoding="utf-8").splitlines()
        place = next(i for i, line in enumerate(lines) if "\ttrain\t" in line)
        copy.write_text("\n".join([*lines[:place], *lines[place + 1 :], lines[place]]) + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match="the training data have changed since"):
            inflection.main(dataclasses.replace(given, resume=True))

    def test_models_that_are_not_there(self, words, tmp_path):
        given = {"train": "a", "dev": "b", "test": "c", "out": str(tmp_path / "run")}
        for model in ("/nowhere", "./nowhere", "runs/nowhere/model"):
            with pytest.raises(ValueError, match=f"model='{model}': there is no such folder"):
                Run(classification.Settings(**given, model=model), "classification")
        with pytest.raises(ValueError, match="model='runs/nowhere/model': there is no such folder"):
            convert.main(convert.Settings(model="runs/nowhere/model", out=str(tmp_path / "run")))
        with pytest.raises(ValueError, match="model='/nowhere': there is no such folder"):
            inflection.main(settings(words, tmp_path / "run", ensemble=["/nowhere"]))
        assert not (tmp_path / "run").exists()

    def test_batches_that_cannot_be_shared(self, words, tmp_path):
        with pytest.raises(ValueError, match=r"batch_size=8 .* 1 process\(es\) with gradient_accumulation=3"):
            Run(settings(words, tmp_path / "run", gradient_accumulation=3), "inflection")
        assert not (tmp_path / "run").exists()

    def test_trackers(self, words, tmp_path):
        for name, message in [("tensorbord", "there is no tracker 'tensorbord'"), ("aim", "'aim' is not installed")]:
            with pytest.raises(ValueError, match=message):
                Run(settings(words, tmp_path / "run", report_to=[name]), "inflection")
        assert not (tmp_path / "run").exists()
        inflection.main(settings(words, tmp_path / "run", report_to=["tensorboard"], smoke=True))
        assert list((tmp_path / "run").rglob("events.out.tfevents*"))

    def test_results_and_hub_are_checked_before_training(self, words, tmp_path, monkeypatch):
        (tmp_path / "r.csv").write_text("a,b\n")
        given = settings(words, tmp_path / "run", results=str(tmp_path / "r.csv"))
        with pytest.raises(ValueError, match=r"has the columns \['a', 'b'\]"):
            inflection.main(given)
        assert not (tmp_path / "run").exists()
        with pytest.raises(ValueError, match=r"--push_to_hub me/mine: no access to the Hub .*hf auth login"):
            check_finish(dataclasses.replace(given, results="", push_to_hub="me/mine"), ("a",))

    def test_a_full_disk_leaves_the_previous_checkpoint(self, words, tmp_path):
        """Files may not grow beyond 2 kB for a moment: torch and safetensors fail in the middle of writing, for real."""
        given = settings(words, tmp_path / "run", epochs=2, dropout=0.0)
        inflection.main(given)
        AcceleratorState._reset_state(reset_partial_state=True)
        run = Run(dataclasses.replace(given, resume=True), "inflection")
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
        run.accelerator.prepare(model)
        before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            for write, name in [
                (run.save_checkpoint, "checkpoint"),
                (
                    lambda: run.save_model(model, inflection.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")),
                    "model",
                ),
            ]:
                with pytest.raises(
                    OSError, match=rf"could not write .*{name} .*the previous one is intact in .*{name}"
                ):
                    write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, previous)
        assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
        run.save_checkpoint()
        assert not (tmp_path / "run" / "checkpoint.new").exists()

    def test_a_run_killed_between_two_renames_has_a_checkpoint(self, words, tmp_path):
        run = Run(settings(words, tmp_path / "run"), "inflection")
        run.replace("checkpoint", lambda folder: (folder.mkdir(), (folder / "a").write_text("1")))
        assert run.checkpoint == tmp_path / "run" / "checkpoint"
        os.replace(tmp_path / "run" / "checkpoint", tmp_path / "run" / "checkpoint.old")
        assert run.checkpoint == tmp_path / "run" / "checkpoint.old"

        def fail(folder):
            folder.mkdir()
            (folder / "a").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(OSError, match="No space left on device"):
            run.replace("checkpoint", fail)
        assert (run.checkpoint / "a").read_text() == "1"
