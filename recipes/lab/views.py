"""Single examples in full: figures 1, 2 and 5 of Peters et al. 2019, figures 8 and 9 of Laha et al. 2018.

The word is the first of German's test words for which the model holds few answers possible, but not one alone, and the right one
among them. The sentence is the first test caption that is short enough, read by two models that differ in lambda alone
(sparsegen-lin with lambda 0 is sparsemax); of each model's last layer stands the head that is surest on it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.analysis.reading.tables import read_pairs
from hf_entmax.generation import enumerate_hypotheses, force_decode

from .heads import job_of, trained, words
from .jobs import Job

FILE, LAMBDA_FILE = "views.json", "mapping_views.json"
#: The model, by group and options of its job; how many answers the word may have.
WORD = ("inflection_epochs", {"attention": "1.5", "output_alpha": "1.5", "seed": "1"})
FEWEST, MOST = 3, 10
#: What the figure calls the models of the sentence, and the options of their jobs; its tokens in either language.
LAMBDA_GROUP = "translation_mappings"
LAMBDAS = {
    "sparsegen-lin, λ = −2": {"attention": "sparsegen_lin", "seed": "2"},
    "sparsemax (λ = 0)": {"attention": "2.0", "seed": "2"},
}
LONGEST = 14


def load(model: Path) -> tuple[Any, Any]:
    """Load a model of `trained`, and its tokenizer."""
    return AutoModelForSeq2SeqLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)


def collect_word(jobs: Sequence[Job], results: Path, folder: Path) -> str:
    """Look for the word, write down what the model makes of it; returns what it reads."""
    job = job_of(jobs, *WORD)
    found = look(*load(trained(job, folder)), words(0, "test", ["german"]))
    write(results / FILE, {"command": job.command, **found})
    return found["source"]


def look(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Find all answers to the first word that fits, with the right one step by step, and the attention of the last layer.

    Raises:
        ValueError: if no word fits.
    """
    for source, form in pairs:
        batch, right = dict(tokenizer([source], return_tensors="pt")), tokenizer(text_target=form)["input_ids"]
        (result,) = enumerate_hypotheses(model, batch, MOST + 1)
        if result.exhaustive and FEWEST <= len(result) <= MOST and right in result.sequences:
            break
    else:
        raise ValueError(f"none of {len(pairs)} words has {FEWEST} to {MOST} answers, the right one among them.")
    (forced,) = force_decode(model, batch, [right], tokenizer)
    answers = zip(result.sequences, result.log_probabilities, strict=True)
    return {
        "source": source,
        "form": form,
        "place": 1 + list(pairs).index((source, form)),
        "hypotheses": [[tokenizer.convert_ids_to_tokens(ids), log_probability] for ids, log_probability in answers],
        "forced": [dataclasses.asdict(step) for step in forced.steps],
        **cross_attention(model, tokenizer, {**batch, "labels": torch.tensor([right])}),
    }


def collect_sentence(jobs: Sequence[Job], results: Path, folder: Path) -> str:
    """Write down how the models attend in the first sentence that is short enough; returns it.

    Raises:
        ValueError: if no sentence is short enough.
    """
    chosen = {title: job_of(jobs, LAMBDA_GROUP, wanted) for title, wanted in LAMBDAS.items()}
    models = {title: load(trained(job, folder)) for title, job in chosen.items()}
    tokenizer = next(iter(models.values()))[1]
    for source, target in read_pairs("mt/multi30k_task1_raw/test_2016_flickr.{lang}.gz", "de", "en"):
        batch, ids = dict(tokenizer([source], return_tensors="pt")), tokenizer(text_target=target)["input_ids"]
        if max(batch["input_ids"].shape[1], len(ids)) <= LONGEST:
            break
    else:
        raise ValueError(f"no sentence has at most {LONGEST} tokens in both languages.")
    shown: dict[str, Any] = {"source": source, "target": target}
    for title, job in chosen.items():
        found = cross_attention(*models[title], {**batch, "labels": torch.tensor([ids])})
        heads = torch.tensor(found["weights"])
        surest = int(heads.amax(-1).mean(-1).argmax())
        shown[title] = {"command": job.command, "head": surest, **found, "weights": found["weights"][surest]}
    write(results / LAMBDA_FILE, shown)
    return source


def cross_attention(model: Any, tokenizer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the attention of all heads of the last layer while the labels are read; weights to four digits, so that none becomes zero."""
    (example,) = collect_examples(model, [batch], tokenizer, 1, 1000)
    cross = example.sites["cross"]
    weights = [[[float(f"{w:.4g}") for w in row] for row in head] for head in cross.weights[-1].tolist()]
    return {
        "queries": [token.text for token in cross.queries],
        "keys": [token.text for token in cross.keys],
        "weights": weights,
    }


#: What collects the view of a group, and where it is.
VIEWS: dict[str, tuple[Callable[[Sequence[Job], Path, Path], str], str]] = {
    WORD[0]: (collect_word, FILE),
    LAMBDA_GROUP: (collect_sentence, LAMBDA_FILE),
}


def write(path: Path, shown: Mapping[str, Any]) -> None:
    """Write one line for each part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in shown.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read what `write` wrote; nothing if it did not."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
