"""The statistics of attention once more, as plain loops over Python numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def random_weights(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    seed: int = 0,
    causal: bool = False,
    self_attention: bool = False,
    left: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse random rows with random padding: ``(weights, key_mask, query_mask)``; padded entries hold garbage."""
    generator = torch.Generator().manual_seed(seed)

    def mask(length: int) -> Tensor:
        lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
        lengths[0] = length
        steps = torch.arange(length).expand(batch, -1)
        return steps >= length - lengths if left else steps < lengths

    key_mask = mask(keys)
    query_mask = key_mask if self_attention else mask(queries)
    scores = torch.rand(batch, heads, queries, keys, generator=generator, dtype=torch.float64)
    scores = scores * (torch.rand(scores.shape, generator=generator) < 0.5)
    pairs = query_mask[:, :, None] & key_mask[:, None, :]
    if causal:
        pairs = pairs & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = scores * pairs[:, None]
    total = scores.sum(-1, keepdim=True)
    weights = torch.where(total > 0, scores / total.clamp(min=1e-9), scores)
    garbage = torch.rand(weights.shape, generator=generator, dtype=torch.float64)
    return torch.where(pairs[:, None], weights, garbage), key_mask, query_mask


def possible(b: int, i: int, j: int, weights: Tensor, key_mask: Tensor, query_mask: Tensor, causal: bool) -> bool:
    """Whether query i may look at key j in sentence b."""
    inside = bool(query_mask[b, i]) and bool(key_mask[b, j])
    return inside and (not causal or j <= i + weights.shape[3] - weights.shape[2])


def rows(weights: Tensor, key_mask: Tensor, query_mask: Tensor, causal: bool):
    """Yields ``(b, h, i, {j: weight})`` over every query with a possible key."""
    batch, heads, queries, keys = weights.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                row = {
                    j: float(weights[b, h, i, j])
                    for j in range(keys)
                    if possible(b, i, j, weights, key_mask, query_mask, causal)
                }
                if row:
                    yield b, h, i, row


def density(weights, key_mask, query_mask, causal) -> list[float]:
    """Nonzero over possible, per head."""
    nonzero, count = [0] * weights.shape[1], [0] * weights.shape[1]
    for _, h, _, row in rows(weights, key_mask, query_mask, causal):
        nonzero[h] += sum(value != 0 for value in row.values())
        count[h] += len(row)
    return [a / b for a, b in zip(nonzero, count, strict=True)]


def row_means(weights, key_mask, query_mask, causal, function) -> list[float]:
    """Mean of a function of the row, per head."""
    total, count = [0.0] * weights.shape[1], [0] * weights.shape[1]
    for _, h, _, row in rows(weights, key_mask, query_mask, causal):
        total[h] += function(row)
        count[h] += 1
    return [a / b for a, b in zip(total, count, strict=True)]


def entropy_of(values) -> float:
    """Shannon entropy in nats."""
    return -sum(value * math.log(value) for value in values if value > 0)


def diversity(weights, key_mask, query_mask, causal) -> float:
    """Jensen-Shannon divergence between heads in nats, averaged over queries."""
    heads = weights.shape[1]
    per_query: dict[tuple[int, int], dict[int, dict[int, float]]] = {}
    for b, h, i, row in rows(weights, key_mask, query_mask, causal):
        per_query.setdefault((b, i), {})[h] = row
    total = 0.0
    for by_head in per_query.values():
        keys = by_head[0].keys()
        mean = [sum(by_head[h][j] for h in range(heads)) / heads for j in keys]
        total += entropy_of(mean) - sum(entropy_of(by_head[h].values()) for h in range(heads)) / heads
    return total / len(per_query)


def confidence(weights, key_mask, query_mask, causal, offset) -> list[float]:
    """Mean weight at a fixed offset, per head."""
    total, count = [0.0] * weights.shape[1], [0] * weights.shape[1]
    for _, h, i, row in rows(weights, key_mask, query_mask, causal):
        if i + offset in row:
            total[h] += row[i + offset]
            count[h] += 1
    return [a / b if b else math.nan for a, b in zip(total, count, strict=True)]
