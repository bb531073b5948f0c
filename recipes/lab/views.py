"""One answer of a trained model in full: figures 1, 2 and 5 of Peters et al. 2019.

The word is the first of German's test words for which the model holds few answers possible, but not one alone, and the right
one among them; the numbers stand in recipes/lab/results/views.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_entmax.analysis import plots
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.generation import enumerate_hypotheses, force_decode, hypothesis_tree
from hf_entmax.generation.forced import ForcedDecoding, ForcedStep
from hf_entmax.generation.results import SearchResult

from .heads import job_of, words
from .jobs import Job
from .rows import Rows

FILE = "views.json"
#: The model, by group and options of its job.
GROUP, WANTED = "inflection_epochs", {"attention": "1.5", "output_alpha": "1.5", "seed": "1"}
#: How many answers the word may have.
FEWEST, MOST = 3, 10


def collect(jobs: Sequence[Job], results: Path, folder: Path) -> str:
    """Look for the word, write down what the model makes of it; returns what it reads.

    Raises:
        FileNotFoundError: if the model has not been trained.
        ValueError: if no word is one.
    """
    job = job_of(list(jobs), GROUP, WANTED)
    found = look(*load(job, folder), words(0, "test", ["german"]))
    write(results / FILE, {"command": job.command, **found})
    return found["source"]


def load(job: Job, folder: Path) -> tuple[Any, Any]:
    """The model that a job has trained, and its tokenizer.

    Raises:
        FileNotFoundError: if it has not.
    """
    trained = folder / job.name / "model"
    if not trained.is_dir():
        raise FileNotFoundError(f"there is no {trained}: train first, python -m recipes.lab run --only {job.group}.")
    return AutoModelForSeq2SeqLM.from_pretrained(trained).eval(), AutoTokenizer.from_pretrained(trained)


def write(path: Path, shown: Mapping[str, Any]) -> None:
    """One line for each part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in shown.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def rounded(weights: torch.Tensor) -> Any:
    """To four digits, so that no weight becomes zero."""
    if weights.dim():
        return [rounded(row) for row in weights]
    return float(f"{weights.item():.4g}")


def look(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """All answers to the first word that fits, with the right one step by step, and the attention of the last layer."""
    for source, form in pairs:
        batch, right = dict(tokenizer([source], return_tensors="pt")), tokenizer(text_target=form)["input_ids"]
        (result,) = enumerate_hypotheses(model, batch, MOST + 1)
        if result.exhaustive and FEWEST <= len(result) <= MOST and right in result.sequences:
            break
    else:
        raise ValueError(f"none of {len(pairs)} words has {FEWEST} to {MOST} answers, the right one among them.")
    (forced,) = force_decode(model, batch, [right], tokenizer)
    (example,) = collect_examples(model, [{**batch, "labels": torch.tensor([right])}], tokenizer, 1, 1000)
    cross = example.sites["cross"]
    return {
        "source": source,
        "form": form,
        "place": 1 + list(pairs).index((source, form)),
        "hypotheses": [
            [tokenizer.convert_ids_to_tokens(ids), log_probability]
            for ids, log_probability in zip(result.sequences, result.log_probabilities, strict=True)
        ],
        "forced": [dataclasses.asdict(step) for step in forced.steps],
        "queries": [token.text for token in cross.queries],
        "keys": [token.text for token in cross.keys],
        "weights": rounded(cross.weights[-1]),
    }


def view(rows: Rows) -> dict[str, Any]:
    """What `collect` wrote; nothing if it did not."""
    return read(rows.folder / FILE)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote; nothing if it did not."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tree(rows: Rows) -> str:
    """Figure 1."""
    names, log_probabilities = zip(*view(rows)["hypotheses"], strict=True)
    ids: dict[str, int] = {}
    sequences = [[ids.setdefault(token, len(ids)) for token in tokens] for tokens in names]
    count = len(sequences)
    result = SearchResult(sequences, list(log_probabilities), [True] * count, True, True, 0.0, -math.inf, 0)
    return hypothesis_tree(result, list(ids).__getitem__).to_text()


def forced(rows: Rows) -> str:
    """Figure 2."""
    steps = [ForcedStep(**{**step, "support": list(map(tuple, step["support"]))}) for step in view(rows)["forced"]]
    return ForcedDecoding(steps).to_text()


def draw(rows: Rows) -> Figure | None:
    """Figure 5: cross-attention of all heads of the last layer; nonzero weights are outlined."""
    found = view(rows)
    if not found:
        return None
    maps = [
        (f"Head {head}", torch.tensor(weights), found["queries"], found["keys"])
        for head, weights in enumerate(found["weights"])
    ]
    return plots.attention_maps(maps, columns=2)
