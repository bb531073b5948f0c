"""What every training recipe promises: two steps to try it, exact resume after a kill, its folder, its card, its row."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import recipe_runs as runs
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from common.settings import parse
from common.trainer import last_checkpoint
from hf_entmax import alphas
from hf_entmax.analysis.reading.trajectory import read_trajectory

LEMMAS = ("lar", "mir", "tol", "sen", "ruk", "pim", "dov", "gal")
SMALL = "--width 16 --heads 2 --layers 1 --batch_size 4 --epochs 2 --lr 0.01 --warmup 4"
SPARSE = "--attention learned --output_alpha 1.5 --dropout 0.3 --checkpoint_steps 1 --log_steps 1"


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def three(path, options):
    return path, [*runs.three(path), *options.split()]


def words(folder):
    rows = [f"x\t{split}\t{lemma}\t{lemma}a\tV;PST" for split in ("train", "dev", "test") for lemma in LEMMAS]
    path = write(folder / "words.tsv", ["lang\tsplit\tlemma\tform\ttags", *rows])
    return path, ["--data", str(path), "--test_words", "2"]


def pairs(folder):
    path = write(folder / "pairs.tsv", ["de\ten", *(f"der {lemma}\tthe {lemma[::-1]}" for lemma in LEMMAS)])
    return three(path, "--vocabulary 60 --max_tokens 20 --certificates 2")


def articles(folder):
    rows = [json.dumps({"source": [f"We saw {lemma}.", "So."], "target": [f"saw {lemma}"]}) for lemma in LEMMAS]
    return three(write(folder / "articles.jsonl", rows), "--vocabulary 60 --max_summary 8")


def texts(folder):
    rows = [f"{lemma} {'mir' if place % 2 else 'x'}\t{place % 2}" for place, lemma in enumerate(LEMMAS)]
    return three(write(folder / "texts.tsv", ["text\tlabel", *rows]), "--max_tokens 16")


def running_text(folder):
    for split in ("train", "valid", "test"):
        path = write(folder / f"{split}.txt", [" ".join(LEMMAS[-place:] + LEMMAS[:-place]) for place in range(12)])
    options = "--block 8 --vocabulary 300 --train_tokens 58 --samples 0"
    return path.with_name("train.txt"), ["--data", str(folder / "{split}.txt"), *options.split()]


#: Recipes that train from scratch; what writes their data, and returns the training data's path and options.
DATA = {
    "translation": pairs,
    "summarization": articles,
    "inflection": words,
    "classification": texts,
    "language_modeling": running_text,
}


def settings_of(recipe, options):
    return parse(importlib.import_module(recipe).Settings, "", options)


def start(recipe, options, **changes):
    importlib.import_module(recipe).main(dataclasses.replace(settings_of(recipe, options), **changes))


def seconds(folder):
    """Of all training steps."""
    return runs.read(folder / "trainer_state.json")["stateful_callbacks"]["Pace"]["attributes"]["seconds"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """For every recipe: options, among them a folder whose run was killed."""
    folder = tmp_path_factory.mktemp("killed")
    options = {}
    for recipe, data in DATA.items():
        given = [*data(folder)[1], *SMALL.split(), *SPARSE.split()]
        options[recipe] = [*given, "--out", str(folder / recipe)]
    runs.kill(options, 4)  # in the middle of the second epoch
    return options


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DATA)
def test_a_killed_run_goes_on_exactly(recipe, killed, tmp_path):
    torch.set_num_threads(1)
    options, folder = killed[recipe], Path(killed[recipe][-1])
    assert (folder / "checkpoint-3").exists() and not (folder / "model").exists()
    before = seconds(folder / "checkpoint-3")
    (folder / "checkpoint-4").mkdir(exist_ok=True)  # as if it had been killed while it wrote this one
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        start(recipe, options)
    with pytest.raises(ValueError, match=r"started differently \(seed was 0, is now 1; lr was 0\.01, is now 0\.02\)"):
        start(recipe, options, resume=True, lr=0.02, seed=1)
    data, _ = DATA[recipe](folder.parent)
    text = data.read_text()
    data.write_text(text.replace("mir", "lar"))
    with pytest.raises(ValueError, match="the training data have changed since"):
        start(recipe, options, resume=True)
    data.write_text(text)
    rows = str(tmp_path / "rows.csv")
    start(recipe, options, resume=True, results=rows)
    start(recipe, options, out=str(tmp_path / "whole"))
    one, two = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "whole", folder))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    moments = [torch.load(last_checkpoint(run) / "optimizer.pt")["state"] for run in (tmp_path / "whole", folder)]
    assert moments[0] and all(torch.equal(moments[0][key]["exp_avg"], moments[1][key]["exp_avg"]) for key in moments[0])
    whole, result = runs.result(tmp_path / "whole"), runs.result(folder)
    varies = ("train_seconds", "tokens_per_second")
    assert all(whole[name] == result[name] for name in whole if name not in varies)
    losses = [
        [(line["step"], line["loss"]) for line in runs.history(run) if "loss" in line]
        for run in (tmp_path / "whole", folder)
    ]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, len(losses[0]) + 1))
    assert seconds(folder) > before > 0  # also those before it was killed
    # A finished run only tests again, and its row is there once.
    start(recipe, options, resume=True, results=rows)
    (row,) = runs.rows(rows)
    assert tuple(row) == importlib.import_module(recipe).FIELDS
    again, steps = runs.result(folder), runs.read(folder / "trainer_state.json")["global_step"]
    assert steps == int(row["steps"]) == again["steps"] and again["command"] == row["command"]
    card = (folder / "model" / "README.md").read_text()
    assert card.count("## Results") == 1 and f"recipes/{recipe}.py" in card and "| best_step |" in card


SETTINGS = {
    "softmax": {},
    "a sparse output": {"output_alpha": 1.5},
    "a fixed alpha": {"attention": "1.5"},
    "learned alphas": {"attention": "learned", "output_alpha": 1.5},
    "a mapping": {"attention": "sparsegen_lin", "mapping_options": "{lam: 0.5}"},
}
#: Of models from scratch, where they can be chosen; a setting takes one after the other.
ARCHITECTURES = {
    "translation": ("t5", "marian", "bart"),
    "summarization": ("bart", "marian", "t5"),
    "language_modeling": ("gpt2", "gpt2", "llama"),
}
MORE = {
    ("classification", "learned alphas"): {"mixed_precision": "bf16"},
    ("classification", "a fixed alpha"): {"vocabulary": 60},
    ("language_modeling", "softmax"): {"prompt": 2, "samples": 1},
    ("language_modeling", "a fixed alpha"): {"dropout": 0.0},  # llama has none
}
#: The column that says how many symbols may follow, or how many classes are possible.
POSSIBLE = {
    "translation": "output_support",
    "inflection": "output_support",
    "language_modeling": "support_size",
    "classification": "possible_labels",
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("recipe", DATA)
def test_every_setting_is_one_option_and_two_steps_try_it(recipe, kind, tmp_path):
    run = tmp_path / "run"
    options = [*DATA[recipe](tmp_path)[1], *SMALL.split(), "--smoke", "--out", str(run)]
    changes = SETTINGS[kind] | MORE.get((recipe, kind), {})
    if recipe in ARCHITECTURES:
        names = ARCHITECTURES[recipe]
        changes["architecture"] = names[list(SETTINGS).index(kind) % len(names)]
    start(recipe, options, results=str(tmp_path / "rows.csv"), **changes)
    assert not (tmp_path / "rows.csv").exists()  # two steps are no result
    attention, output = changes.get("attention", "softmax"), changes.get("output_alpha", 1.0)
    result, stored = runs.result(run), runs.config(run)
    assert (result["attention"], result["output_alpha"], result["steps"]) == (attention, output, 2)
    assert runs.history(run) and stored["model_type"] == changes.get("architecture", stored["model_type"])
    assert ("A softmax baseline" in (run / "model" / "README.md").read_text()) == (kind == "softmax")
    assert ("entmax_config" in stored) == (kind != "softmax")
    if kind != "softmax":
        held = stored["entmax_config"]
        assert held["output_alpha"] == changes.get("output_alpha")
        mapped = (held["mapping"], held["mapping_options"]) == ("sparsegen_lin", {"lam": 0.5})
        assert mapped if kind == "a mapping" else str(held["alpha"]) == {"softmax": "1.0"}.get(attention, attention)
    densities = {name: value for name, value in result.items() if name.startswith("density")}
    assert densities and all(0 < value <= 1 for value in densities.values())
    assert attention != "softmax" or set(densities.values()) == {1}
    if recipe in POSSIBLE:  # a softmax leaves something to everything
        every = len(stored["id2label"]) if recipe == "classification" else stored["vocab_size"]
        possible = result[POSSIBLE[recipe]]
        assert possible == every if output == 1.0 else 1 <= possible <= every
    log = run / "alphas.jsonl"
    assert log.exists() == (attention == "learned")
    if attention == "learned":
        trajectory, last = read_trajectory(log), alphas(AutoModel.from_pretrained(run / "model"))
        assert trajectory.steps == [1, 2] and {values.shape for values in trajectory.alpha.values()} == {(2, 1, 2)}
        if result["best_step"] == 2:
            assert all(values[-1].allclose(last[site].double(), atol=1e-5) for site, values in trajectory.alpha.items())


@pytest.mark.parametrize("recipe", DATA)
def test_what_would_fail_later_is_said_before_anything_is_written(recipe, tmp_path):
    options = [*DATA[recipe](tmp_path)[1], *SMALL.split(), "--smoke", "--out", str(tmp_path / "run")]
    (tmp_path / "bad.csv").write_text("a,b\n")
    for changes, message in [
        ({"out": ""}, "--out is missing"),
        ({"results": str(tmp_path / "bad.csv")}, r"has the columns \['a', 'b'\]"),
        ({"batch_size": 4, "gradient_accumulation": 3}, "cannot be shared by 1 process"),
        ({"model": "./nowhere"}, "there is no such folder|left out with a pretrained model"),
    ]:
        if "model" in changes and recipe == "inflection":
            continue
        with pytest.raises(ValueError, match=message):
            start(recipe, options, **changes)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"alpha_lr=0\.1 would have no effect"):
        start(recipe, options, alpha_lr=0.1)
    with pytest.raises(SystemExit):
        settings_of(recipe, [*options, "--epoch", "3"])
