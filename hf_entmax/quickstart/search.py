"""What a sparse output proves about held-out verbs: certificates, numbers of answers, and the answers themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_entmax.generation import SearchResult, beam_search, support_size
from hf_entmax.ops import entmax
from hf_entmax.quickstart.data import Question, batches
from hf_entmax.quickstart.evaluate import labels_of, on_device

NUM_BEAMS = 5


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


def search(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question], console: Console
) -> list[tuple[Question, SearchResult]]:
    """Beam search that keeps account of what it drops, for every question."""
    found: list[tuple[Question, SearchResult]] = []
    for part, inputs in track(list(batches(asked, tokenizer, 128)), "searching with certificates", console=console):
        found += zip(part, beam_search(model, on_device(inputs, model), num_beams=NUM_BEAMS), strict=True)
    return found


def certificates(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, found: Sequence[tuple[Question, SearchResult]]
) -> Certificates:
    """Sum up what a search proved."""
    results = [result for _, result in found]
    known = [len(result) for result in results if result.exhaustive]
    best = [(question, _text(tokenizer, result.best)) for question, result in found]
    return Certificates(
        total=len(results),
        optimal=_share(result.optimal for result in results),
        exhaustive=_share(result.exhaustive for result in results),
        single=_share(result.exhaustive and len(result) == 1 for result in results),
        right=_share(answer in question.answers for question, answer in best),
        hypotheses=sum(known) / len(known) if known else None,
        support=_support(model, tokenizer, [question for question, _ in found]),
    )


def hypotheses(tokenizer: PreTrainedTokenizerBase, result: SearchResult) -> list[tuple[str, float]]:
    """Text and probability of every finished hypothesis, most probable first."""
    listed = zip(result.sequences, result.probabilities, result.finished, strict=True)
    return [(_text(tokenizer, tokens), probability) for tokens, probability, done in listed if done]


@torch.no_grad()
def _support(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question]) -> float:
    """Mean number of possible tokens at the steps of the first right answers."""
    alpha: float = model.config.entmax_config["output_alpha"]
    possible, steps = 0.0, 0
    for part, inputs in batches(asked, tokenizer):
        labels = labels_of(part, tokenizer).to(model.device)
        logits: Tensor = model(**on_device(inputs, model), labels=labels).logits
        count = int((labels != -100).sum())
        possible += count * support_size(entmax(logits.float(), alpha), labels).item()
        steps += count
    return possible / steps


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | None) -> str:
    return "" if tokens is None else str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)
