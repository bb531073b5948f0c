"""Runs that are killed, and what a run has left behind."""

import csv
import json
from pathlib import Path

import fresh

RECIPES = Path(__file__).parents[2] / "recipes"

#: Each recipe in a fork of one process, killed with SIGKILL at the end of a step, before its checkpoint is written.
DRIVER = """
import importlib, json, os, signal, sys
sys.path.insert(0, {recipes!r})
from common.settings import parse
from common.trainer import Pace
end = Pace.on_step_end
def end_and_die(self, args, state, control, **kwargs):
    end(self, args, state, control, **kwargs)
    if state.global_step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
Pace.on_step_end = end_and_die
for recipe, options in json.loads(sys.argv[1]).items():
    if not os.fork():
        module = importlib.import_module(recipe)
        module.main(parse(module.Settings, "", options))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL, recipe
"""


def kill(options, step):
    """Run recipes with their options, each until it is killed at the end of that step."""
    code = DRIVER.format(recipes=str(RECIPES), step=step)
    ended = fresh.run(code, json.dumps(options), environment={"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr


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


#: A model and a training that take a second; what a test needs otherwise it says itself.
SMALL = {
    "width": 32, "heads": 2, "layers": 1, "dropout": 0.0, "batch_size": 8, "epochs": 1, "lr": 0.01, "warmup": 20,
}  # fmt: skip


def same(path):
    """Settings of a recipe that trains, chooses and tests on one file."""
    return dict.fromkeys(("train", "dev", "test"), str(path))


def three(path):
    """Options for a recipe that trains, chooses and tests on one file."""
    return [word for split in ("train", "dev", "test") for word in (f"--{split}", str(path))]


NOUNS = {"hund": "dog", "katze": "cat", "vogel": "bird", "fisch": "fish"}
VERBS = {"läuft": "runs", "schläft": "sleeps", "isst": "eats", "sieht": "sees"}


def write_pairs(folder, **splits):
    """Sixteen sentences in two languages, ``SPLIT.de`` and ``SPLIT.en``, so many times."""
    for language, article, side in (("de", "Der", 0), ("en", "The", 1)):
        words = [(noun[side], verb[side]) for noun in NOUNS.items() for verb in VERBS.items()]
        text = "".join(f"{article} {noun} {verb}.\n" for noun, verb in words)
        for split, times in splits.items():
            (folder / f"{split}.{language}").write_text(text * times, encoding="utf-8")
    return folder
