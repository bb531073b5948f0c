"""The clock of training steps: rows of all settings, from models that learn."""

import csv
import sys

import pytest

from recipes.lab import training_speed


@pytest.mark.slow
def test_rows_of_all_settings(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "words" / "toy"
    folder.mkdir(parents=True)
    lemmas = ["lar", "mir", "tol", "sen", "ruk", "pim", "dov", "gal"]
    lines = [f"{lemma}\t{lemma}{end}\tV;{tag}\n" for lemma in lemmas for tag, end in (("PST", "a"), ("PRS", "i"))]
    for split in ("train-medium", "dev", "test"):
        (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
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
    small += ["--data", str(tmp_path / "words" / "{language}" / "{split}.tsv")]
    path = tmp_path / "speed.csv"
    monkeypatch.setattr(sys, "argv", ["", "inflection", "--steps", "32", "--results", str(path), *small])
    training_speed.main()
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    early, late = rows[:6], rows[6:]
    assert [(row["attention"], float(row["output_alpha"])) for row in early] == list(training_speed.SETTINGS)
    assert [(row["from_step"], row["to_step"]) for row in (early[0], late[0])] == [("8", "16"), ("16", "32")]
    assert float(early[0]["time_ratio"]) == float(late[0]["time_ratio_80"]) == 1
    assert all(float(row["seconds_per_step"]) > 0 and int(row["tokens_per_second"]) > 0 for row in rows)
    assert all(float(now["loss"]) < float(before["loss"]) for before, now in zip(early, late, strict=True))
    assert rows[0]["command"].startswith("python -m recipes.lab.training_speed inflection --steps 32 --width")
    monkeypatch.setattr(sys, "argv", ["", "inflection", "--steps", "31", *small])
    with pytest.raises(SystemExit):
        training_speed.main()
    assert "--steps 31: at least 32." in capsys.readouterr().err
