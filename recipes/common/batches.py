"""Batches of examples of similar length, the same whatever the number of processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, send_to_device
from tqdm.auto import tqdm

#: So many batches are drawn at random and then sorted by length, before their own order is drawn.
POOL = 50

ItemT = TypeVar("ItemT")
Collate = Callable[[list[Any]], dict[str, Any]]


def evenly(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """So many items, from all over a sequence; all of them if there are fewer."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


@torch.no_grad()
def answers_of(
    examples: Sequence[ItemT], answer: Callable[[list[ItemT]], Sequence[Any]], length: Callable[[ItemT], int], size: int
) -> list[Any]:
    """What is answered to every example, in their order, on all processes, which share the work.

    Args:
        examples: what is asked.
        answer: the answers to some of them that are similarly long.
        length: of an example.
        size: examples asked for at a time.
    """
    state = PartialState()
    order = sorted(range(len(examples)), key=lambda place: length(examples[place]))
    own = order[state.process_index :: state.num_processes]
    found: list[tuple[int, Any]] = []
    for start in tqdm(range(0, len(own), size), disable=not state.is_main_process, mininterval=5, unit="batch"):
        part = own[start : start + size]
        found += zip(part, answer([examples[place] for place in part]), strict=True)
    return [own for _, own in sorted(gather_object(found), key=itemgetter(0))]


def collated(
    examples: Sequence[Any], collate: Callable[[list[Any]], Any], size: int, device: Any
) -> list[dict[str, Any]]:
    """All examples in their order, in batches on a device."""
    return [dict(collate(list(examples[i : i + size])).to(device)) for i in range(0, len(examples), size)]


class Batches:
    """Collated batches; training batches are a function of seed, epoch and place alone, so that a run can be resumed.

    A step has ``batch_size`` examples over all processes and accumulation steps: one process with batches of 8, two with
    4, or 4 twice accumulated see the same examples in every step.

    Args:
        examples: anything with a length; each is a dict of token ids.
        collate: makes a dict of tensors from a list of examples.
        length: of an example, for the sorting; only the order counts.
        accelerator: says which process this is, and where tensors go.
        batch_size: examples per step, over all processes and parts.
        parts: accumulation steps.
        seed: of the order.

    Raises:
        ValueError: by `epoch` and ``len()``, if there are fewer examples than processes times parts; `in_order` needs none.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        collate: Collate,
        length: Callable[[Any], int],
        accelerator: Accelerator,
        batch_size: int,
        parts: int = 1,
        seed: int = 0,
    ) -> None:
        self.shares = accelerator.num_processes * parts
        self.examples, self.collate, self.length = examples, collate, length
        self.accelerator, self.batch_size, self.parts, self.seed = accelerator, batch_size, parts, seed

    @classmethod
    def for_training(cls, run: Any, examples: Sequence[Any], collate: Collate, length: Callable[[Any], int]) -> Batches:
        """As the settings of a `common.run.Run` say."""
        settings, steps = run.settings, run.settings.gradient_accumulation
        return cls(examples, collate, length, run.accelerator, settings.batch_size, steps, settings.seed)

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self._split(list(range(len(self.examples)))))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[dict[str, Any]]]:
        """This process's parts of every step of an epoch, in random order, from step ``start`` on."""
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.examples)))
        rng.shuffle(order)
        pool = POOL * self.batch_size
        by_length = lambda i: self.length(self.examples[i])  # noqa: E731 - a key, used once
        order = [i for begin in range(0, len(order), pool) for i in sorted(order[begin : begin + pool], key=by_length)]
        steps = self._split(order)
        rng.shuffle(steps)
        for step in steps[start:]:
            yield [self._batch(part) for part in self._own(step)]

    def in_order(self) -> Iterator[dict[str, Any]]:
        """This process's share of the examples once, sorted by length: for evaluation. No example comes twice."""
        order = sorted(range(len(self.examples)), key=lambda i: self.length(self.examples[i]))
        own = order[self.accelerator.process_index :: self.accelerator.num_processes]
        for begin in range(0, len(own), self.batch_size):
            yield self._batch(own[begin : begin + self.batch_size])

    def _split(self, order: list[int]) -> list[list[int]]:
        if len(order) < self.shares:
            raise ValueError(
                f"{len(order)} example(s) cannot be shared by {self.accelerator.num_processes} process(es) with {self.parts} "
                "accumulation step(s)."
            )
        steps = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        if len(steps) > 1 and len(steps[-1]) < self.shares:
            last = steps.pop()
            steps[-1] += last  # every process needs an example in every part
        return steps

    def _own(self, step: list[int]) -> list[list[int]]:
        """Dealt like cards: the shares differ by one example at most, and are alike in length."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        return [step[part * processes + rank :: self.shares] for part in range(self.parts)]

    def _batch(self, places: list[int]) -> dict[str, Any]:
        return send_to_device(self.collate([self.examples[i] for i in places]), self.accelerator.device)
