"""What a run has left behind."""

import csv
import json
from pathlib import Path


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def result(folder):
    """The numbers of a finished run."""
    return read(Path(folder) / "result.json")


def config(folder):
    """Of its model."""
    return read(Path(folder) / "model" / "config.json")


def history(folder):
    """What the Trainer has logged."""
    return read(Path(folder) / "trainer_state.json")["log_history"]


def losses(folder):
    """Those of the steps that were logged."""
    return [line["loss"] for line in history(folder) if "loss" in line]


def rows(path):
    """Of a CSV file."""
    with Path(path).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def three(path):
    """Options for a recipe that trains, chooses and tests on one file."""
    return [word for split in ("train", "dev", "test") for word in (f"--{split}", str(path))]
