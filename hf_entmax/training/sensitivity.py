"""What a higher alpha would cost and gain in each head, estimated for all heads and several alphas from one backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_entmax.integration.attach import heads_of
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.ops import entmax
from hf_entmax.training.alpha_vector import HIGHEST, LOWEST, AlphaVector
from hf_entmax.training.distillation import attention_pairs, record_attention

#: Places in the range of alpha (0 its lower end, 1 its upper) at which every head is tried; the first stands for softmax.
SHARES = (LOWEST, 0.01, 0.02, 0.035, 0.05, 0.065, 0.08, 0.1, 0.12, 0.15, 0.19, 0.25, 0.35, 0.5, 0.7, 0.9, HIGHEST)
#: Where a head has a temperature, its scores are multiplied by ``1 / (1 + r (alpha - 1))``: at the same scores entmax is sharper
#: than softmax, the more so the higher alpha. One ``r`` of these is chosen for each head; 3 suits most.
SOFTENINGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
#: Queries of a sequence whose rows are tried at every alpha, and weights in them where rows are long, but of no fewer queries than
#: the last: more would take longer and only smooth the estimate.
ROWS, WEIGHTS, FEWEST = 64, 64 * 256, 16

Loss = Callable[[PreTrainedModel, dict[str, Any]], Tensor]


@dataclasses.dataclass
class Sensitivity:
    """What each alpha of a grid would do to a head, all others left near softmax.

    Attributes:
        density: ``[N, K]`` share of nonzero weights.
        cost: ``[N, K]`` estimated rise of the loss, nats per token.
        heads: ``[N]`` how many heads use each of the N alphas.
        softening: ``[N]`` the ``r`` that suits them; 0 where there is no temperature.
    """

    density: Tensor
    cost: Tensor
    heads: Tensor
    softening: Tensor

    def choose(self, budget: float) -> tuple[Tensor, float]:
        """Choose the fewest nonzero weights whose estimated costs add up to ``budget`` at most, by a common price.

        Returns:
            ``a`` ``[N]``, and the price: nats per token paid for a mean density of 1.
        """
        gain = (1.0 - self.density) * (self.heads / self.heads.sum())[:, None]
        low, high = -30.0, 30.0  # logarithm of the price
        for _ in range(60):
            middle = (low + high) / 2
            picked = (math.exp(middle) * gain - self.cost).argmax(1, keepdim=True)
            low, high = (low, middle) if float(self.cost.gather(1, picked).sum()) > budget else (middle, high)
        picked = (math.exp(low) * gain - self.cost).argmax(1)
        return _GRID[picked], math.exp(low)


_GRID = torch.tensor(SHARES, dtype=torch.float64).logit()


def measure_sensitivity(
    model: PreTrainedModel, batches: Sequence[dict[str, Any]], counts: Sequence[int], loss: Loss, vector: AlphaVector
) -> Sensitivity:
    r"""Estimate density and cost of every head at every alpha of the grid.

    With the weights ``p`` near softmax, those ``q`` at an alpha, and ``G`` the gradient of the summed loss in the weights,
    ``s_i = sum_j G_ij (q_ij - p_ij)`` is what changing row ``i`` does to the loss, to first order. Its second moment is the
    Gauss-Newton estimate of the curvature,

        cost = 1/2 sum_i s_i^2 / #tokens

    The sum of the ``s_i`` themselves is left out: over a few thousand tokens it is noise, and choosing heads by it would
    choose those that it flatters. From the weights of alpha = 1 + u the scores follow as ``(p^u - 1) / u``, up to a constant
    in each row, so that no alpha of the grid needs a pass of its own.

    Where heads have a temperature, each takes the one of `SOFTENINGS` with the lowest cost, as a geometric mean over the grid.

    The model must be in evaluation mode, with gradients for its alphas alone; the values of ``vector`` are changed.
    ``counts`` are the labels of each batch, ``loss`` is the mean over them.
    """
    total, places_of = vector.count, vector.places
    lo, hi = vector.range
    grid = [lo + (hi - lo) * share for share in SHARES]
    softenings = SOFTENINGS if vector.scaled.any() else SOFTENINGS[:1]
    kept, second = (torch.zeros(total, len(SHARES), len(softenings), dtype=torch.float64) for _ in range(2))
    possible, heads = (torch.zeros(total, dtype=torch.float64) for _ in range(2))
    for places in places_of.values():
        heads.index_add_(0, places, torch.ones(len(places), dtype=torch.float64))
    vector.set_(vector.even(SHARES[0]))
    for batch, count in zip(batches, counts, strict=True):
        with in_the_graph(model), record_attention(model) as seen:
            value = loss(model, batch) * count
        calls = {name: call for name, call in seen.calls.items() if call.site.name in places_of}
        gradients = torch.autograd.grad(value, [call.weights for call in calls.values()], allow_unused=True)
        pairs = attention_pairs(model, batch, seen)
        seen.calls.clear()
        for name, gradient in zip(list(calls), gradients, strict=True):
            call = calls.pop(name)  # weights of a layer are let go as soon as they have been looked at
            weights, places = call.weights.detach(), places_of[call.site.name]
            step = _stride(*weights.shape[2:])
            allowed = pairs[name][:, None, ::step]
            slope = gradient if gradient is None else gradient[:, :, ::step]
            tried = _try_rows(weights[:, :, ::step], slope, allowed, grid, softenings)
            possible.index_add_(0, places, allowed.sum().double().cpu().expand(len(places)))
            kept.index_add_(0, places, tried[0].cpu())
            second.index_add_(0, places, tried[1].cpu() * step)
    # A module that never ran, or rows without a key: nothing to gain there.
    density = torch.where(possible[:, None, None] > 0, kept / possible.clamp(min=1)[:, None, None], 1.0)
    second = second.cummax(1).values  # what sharpens a row more does not matter less
    # Relative to the costliest, so that heads without any cost, and grid places without a difference, decide nothing.
    relative = second / second.amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    best = (relative + 1e-6).log().mean(1).argmin(1)
    best = best * vector.scaled
    chosen = best[:, None, None].expand(-1, len(SHARES), 1)
    density, second = (values.gather(2, chosen)[..., 0] for values in (density, second))
    softening = torch.tensor(SOFTENINGS, dtype=torch.float64)[best]
    return Sensitivity(density, 0.5 * second / sum(counts), heads, softening)


@contextlib.contextmanager
def in_the_graph(model: PreTrainedModel) -> Iterator[None]:
    """Compute attention from weights that the loss depends on: fused kernels form them for whoever looks, and for nobody else."""
    heads = [own for site in attention_sites(model) if (own := heads_of(site)) is not None]
    backends = [own.backend for own in heads]
    try:
        for own in heads:
            own.backend = "torch"  # type: ignore[assignment]
        yield
    finally:
        for own, backend in zip(heads, backends, strict=True):
            own.backend = backend


def _stride(queries: int, keys: int) -> int:
    """Return the distance from one query that is tried to the next."""
    return max(1, queries // ROWS, min(queries // FEWEST, queries * keys // WEIGHTS))


@torch.no_grad()
def _try_rows(
    weights: Tensor, gradient: Tensor | None, allowed: Tensor, grid: Sequence[float], softenings: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return nonzero weights and sums of ``s_i^2`` at every alpha of the grid and every softening, ``[H, K, R]`` each."""
    p = weights.float()
    inside = p > 0
    u = grid[0] - 1.0
    powers = torch.where(inside, p, 1.0).log()
    scores = torch.where(inside, torch.expm1(u * powers) / u if u else powers, -math.inf)
    blind = ~inside.any(-1, keepdim=True)  # a query without a key
    scores = scores.masked_fill(blind, 0.0)
    kept, second = [], []
    for alpha, r in itertools.product(grid, softenings):
        q = p if alpha == grid[0] else entmax(scores / (1 + r * (alpha - 1)), alpha, -1).masked_fill(blind, 0.0)
        kept.append(((q > 0) & allowed).sum((0, 2, 3)).double())
        change = (q - p) * gradient.float() if gradient is not None else torch.zeros_like(p)
        second.append(change.sum(-1).double().square().sum((0, 2)))
    shape = (len(grid), len(softenings))
    return torch.stack(kept, -1).unflatten(-1, shape), torch.stack(second, -1).unflatten(-1, shape)
