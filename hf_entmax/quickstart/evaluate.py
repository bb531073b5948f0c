"""Measuring on held-out verbs: accuracy by group, certificates of the search, hypotheses and supports of the output."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_entmax.generation import SearchResult, beam_search
from hf_entmax.ops import entmax
from hf_entmax.quickstart.data import GROUPS, Question, batches


@dataclasses.dataclass(frozen=True)
class Score:
    """How many answers of a group are right."""

    right: int
    total: int

    @property
    def share(self) -> float | None:
        """Accuracy in [0, 1]; None without questions."""
        return self.right / self.total if self.total else None


@dataclasses.dataclass(frozen=True)
class Certificates:
    """What the search could prove on held-out questions, as shares of them in [0, 1].

    Attributes:
        total: questions searched.
        optimal: the answer is proved to be the model's most probable one.
        exhaustive: all answers that the model gives any probability are known.
        single: the model gives all probability to one answer.
        right: the best answer of the search is right.
        hypotheses: mean number of answers with nonzero probability where all are known.
        support: mean number of characters with nonzero probability per step, along the right answers.
    """

    total: int
    optimal: float
    exhaustive: float
    single: float
    right: float
    hypotheses: float | None
    support: float


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question], console: Console, title: str
) -> list[tuple[Question, str]]:
    """The greedy answer to every question."""
    model.eval()
    given = []
    work = list(batches(asked, tokenizer))
    for part, inputs in track(work, title, console=console):
        tokens = model.generate(**on_device(inputs, model), num_beams=1, do_sample=False)  # type: ignore[operator]
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        given += [(question, text.strip()) for question, text in zip(part, texts, strict=True)]
    return given


def accuracy(given: Iterable[tuple[Question, str]]) -> dict[str, Score]:
    """Right answers per group; any variant that the table lists is right."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for question, answer in given:
        for group in question.groups:
            total[group] += 1
            right[group] += answer in question.answers
    return {group: Score(right[group], total[group]) for group in GROUPS}


def certificates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    console: Console,
    num_beams: int = 5,
) -> tuple[Certificates, list[tuple[Question, SearchResult]]]:
    """Search every question with a beam that keeps account of what it drops.

    Returns:
        The shares of the questions, and the results themselves.
    """
    found: list[tuple[Question, SearchResult]] = []
    supports: list[float] = []
    for part, inputs in track(list(batches(asked, tokenizer, 128)), "searching with certificates", console=console):
        inputs = on_device(inputs, model)
        found += zip(part, beam_search(model, inputs, num_beams=num_beams), strict=True)
        supports += _supports(model, tokenizer, part, inputs)
    results = [result for _, result in found]
    known = [len(result) for result in results if result.exhaustive]
    best = [(question, _text(tokenizer, result.best)) for question, result in found]
    return (
        Certificates(
            total=len(results),
            optimal=_share(result.optimal for result in results),
            exhaustive=_share(result.exhaustive for result in results),
            single=_share(result.exhaustive and len(result) == 1 for result in results),
            right=_share(answer in question.answers for question, answer in best),
            hypotheses=sum(known) / len(known) if known else None,
            support=sum(supports) / len(supports),
        ),
        found,
    )


def hypotheses(tokenizer: PreTrainedTokenizerBase, result: SearchResult) -> list[tuple[str, float]]:
    """Text and probability of every finished hypothesis, most probable first."""
    listed = zip(result.sequences, result.probabilities, result.finished, strict=True)
    return [(_text(tokenizer, tokens), probability) for tokens, probability, done in listed if done]


def labelled_batches(
    asked: Sequence[Question], tokenizer: PreTrainedTokenizerBase, batch_size: int = 128
) -> list[dict[str, Tensor]]:
    """Batches with the first right answer as labels, for ``hf_entmax.analysis.collect``."""
    return [{**inputs, "labels": _labels(part, tokenizer)} for part, inputs in batches(asked, tokenizer, batch_size)]


def on_device(inputs: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The inputs where the model is."""
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


@torch.no_grad()
def _supports(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, part: Sequence[Question], inputs: dict[str, Tensor]
) -> list[float]:
    """Number of possible tokens at every step of the first right answers."""
    labels = _labels(part, tokenizer).to(model.device)
    logits: Tensor = model(**inputs, labels=labels).logits
    alpha: float = model.config.entmax_config["output_alpha"]
    sizes = (entmax(logits.float(), alpha) > 0).sum(-1)
    return sizes[labels != -100].tolist()


def _labels(part: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    encoded: Any = tokenizer(text_target=[question.answers[0] for question in part], padding=True, return_tensors="pt")
    return encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | None) -> str:
    return "" if tokens is None else str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)
