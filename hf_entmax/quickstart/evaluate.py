"""Accuracy on held-out verbs by group, and the batches that measurements run on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def labelled_batches(
    asked: Sequence[Question], tokenizer: PreTrainedTokenizerBase, batch_size: int = 128
) -> list[dict[str, Tensor]]:
    """Batches with the first right answer as labels, for ``hf_entmax.analysis.collect``."""
    return [{**inputs, "labels": labels_of(part, tokenizer)} for part, inputs in batches(asked, tokenizer, batch_size)]


def on_device(inputs: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The inputs where the model is."""
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def labels_of(part: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The first right answers as labels, padded with -100."""
    encoded: Any = tokenizer(text_target=[question.answers[0] for question in part], padding=True, return_tensors="pt")
    return encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
