"""The clock for training steps times the steps that the recipe takes."""

import csv
import json
import statistics
import sys

import pytest

import inflection
from common.settings import parse
from recipes.lab import training_speed


@pytest.fixture
def words(tmp_path):
    folder = tmp_path / "words" / "toy"
    folder.mkdir(parents=True)
    lemmas = ["lar", "mir", "tol", "sen", "ruk", "pim", "dov", "gal"]
    rows = [f"{lemma}\t{lemma}{end}\tV;{tag}\n" for lemma in lemmas for tag, end in (("PST", "a"), ("PRS", "i"))]
    for split in ("train-medium", "dev", "test"):
        (folder / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    small = [
        "--width",
        "16",
        "--heads",
        "2",
        "--layers",
        "1",
        "--batch_size",
        "4",
        "--lr",
        "0.01",
        "--warmup",
        "4",
        "--dropout",
        "0",
    ]
    return ["--data", str(tmp_path / "words" / "{language}" / "{split}.tsv"), *small]


@pytest.mark.slow
def test_rows_of_all_settings_and_the_losses_of_the_recipe(words, tmp_path, monkeypatch, capsys):
    path = tmp_path / "speed.csv"
    monkeypatch.setattr(
        sys, "argv", ["training_speed.py", "inflection", "--steps", "32", "--results", str(path), *words]
    )
    training_speed.main()
    assert "32/32 steps" in capsys.readouterr().err
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    early, late = rows[:6], rows[6:]
    assert [(row["attention"], float(row["output_alpha"])) for row in early] == list(training_speed.SETTINGS)
    assert [(row["from_step"], row["to_step"]) for row in (early[0], late[0])] == [("8", "16"), ("16", "32")]
    assert all(float(row["time_ratio"]) == 1 for row in rows if (row["attention"], row["output_alpha"]) == ("softmax", "1.0"))  # fmt: skip
    assert all(float(row["seconds_per_step"]) > 0 and int(row["tokens_per_second"]) > 0 for row in rows)

    # The recipe itself, eight epochs of four steps, has the same losses.
    options = ["--attention", "learned", "--output_alpha", "1.5", "--epochs", "8", "--log_steps", "1"]
    inflection.main(parse(inflection.Settings, "x", [*words, *options, "--out", str(tmp_path / "run")]))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == 32
    for row, wanted in ((early[5], losses[8:16]), (late[5], losses[16:])):
        assert float(row["loss"]) == pytest.approx(statistics.mean(wanted), abs=2e-3)


def test_too_few_steps(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training_speed.py", "inflection", "--steps", "31", *words])
    with pytest.raises(SystemExit):
        training_speed.main()
    assert "--steps 31: at least 32." in capsys.readouterr().err
