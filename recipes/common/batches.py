"""Examples in batches: all over a sequence, collated, or asked for something on all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm.auto import tqdm

ItemT = TypeVar("ItemT")


def evenly(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """Take so many items, from all over a sequence; all of them if there are fewer."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


@torch.no_grad()
def answers_of(
    examples: Sequence[ItemT], answer: Callable[[list[ItemT]], Sequence[Any]], length: Callable[[ItemT], int], size: int
) -> list[Any]:
    """Collect what is answered to every example, in their order, on all processes, which share the work.

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
    """Put all examples in their order into batches on a device."""
    return [dict(collate(list(examples[i : i + size])).to(device)) for i in range(0, len(examples), size)]
