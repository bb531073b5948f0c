"""How many symbols a model's output holds possible, for the tables of the recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_entmax.generation import SamplingMetrics, support_size
from hf_entmax.ops import entmax


@torch.no_grad()
def output_support(members: Sequence[Any], batches: Iterable[dict[str, Any]]) -> float:
    """Mean number of symbols with a probability above 0 where the reference stands, on every process alike.

    Args:
        members: encoder-decoder models, not wrapped; the probabilities of several are averaged.
        batches: with ``labels`` ``[B, T]``, -100 for padding.

    Returns:
        The mean over all positions of all references; the size of the vocabulary for a softmax.

    Reference:
        Peters, Niculae, Martins 2019, table 3.
    """
    alphas = [SamplingMetrics.for_model(member).alpha for member in members]
    total = positions = 0.0
    for batch in batches:
        probs = sum(
            entmax(member(**batch).logits.float(), alpha) for member, alpha in zip(members, alphas, strict=True)
        )
        count = int((batch["labels"] != -100).sum())
        total += count * float(support_size(probs, batch["labels"]))
        positions += count
    return round(total / positions, 3)
