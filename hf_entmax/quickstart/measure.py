"""What is measured on held-out verbs: accuracy by group, attention, and what a sparse output proves."""

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

from hf_entmax.generation import SearchResult, beam_search, support_size
from hf_entmax.ops import entmax
from hf_entmax.quickstart.data import GROUPS, Question, batches

NUM_BEAMS = 5


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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question], console: Console
) -> list[tuple[Question, str]]:
    """The greedy answer to every question."""
    model.eval()
    given = []
    for part, inputs in track(list(batches(asked, tokenizer)), "answering held-out questions", console=console):
        tokens = model.generate(**on_device(inputs, model), num_beams=1, do_sample=False)  # type: ignore[operator]
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        given += [(question, text.strip()) for question, text in zip(part, texts, strict=True)]
    return given


def accuracy(given: Iterable[tuple[Question, str]]) -> dict[str, Score]:
    """Right answers per group; any variant that the table lists is right."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for question, answer in given:
        total.update(question.groups)
        right.update(question.groups if answer in question.answers else ())
    return {group: Score(right[group], total[group]) for group in GROUPS}


def labelled_batches(
    asked: Sequence[Question], tokenizer: PreTrainedTokenizerBase, batch_size: int = 128
) -> list[dict[str, Tensor]]:
    """Batches with the first right answers as labels, padded with -100."""
    found = []
    for part, inputs in batches(asked, tokenizer, batch_size):
        firsts = [question.answers[0] for question in part]
        encoded: Any = tokenizer(text_target=firsts, padding=True, return_tensors="pt")
        found.append({**inputs, "labels": encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)})
    return found


def on_device(inputs: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The inputs where the model is."""
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


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
    known = [len(result) for _, result in found if result.exhaustive]
    share = lambda flags: sum(flags) / len(found)  # noqa: E731
    return Certificates(
        total=len(found),
        optimal=share(result.optimal for _, result in found),
        exhaustive=len(known) / len(found),
        single=known.count(1) / len(found),
        right=share(_text(tokenizer, result.best) in question.answers for question, result in found),
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
    for batch in labelled_batches(asked, tokenizer, 512):
        batch = on_device(batch, model)
        count = int((batch["labels"] != -100).sum())
        probs = entmax(model(**batch).logits.float(), alpha)
        possible += count * support_size(probs, batch["labels"]).item()
        steps += count
    return possible / steps


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | None) -> str:
    return "" if tokens is None else str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
