"""How much of a result a circuit keeps, and how small it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_entmax.analysis.circuits.edges import EdgeScores, Gates

Unit = Literal["edges", "heads"]


@dataclass(frozen=True)
class FaithfulnessCurve:
    """What circuits of growing size keep of the metric.

    Attributes:
        unit: ``"edges"`` (of each prompt) or ``"heads"``.
        sizes: ascending.
        metric: with everything outside the circuit ablated, ``[sizes, B]``.
        faithfulness: ``(m(circuit) - m(nothing)) / (m(everything) - m(nothing))``, of the means over prompts, ``[sizes]``.
    """

    unit: str
    sizes: list[int]
    metric: Tensor
    faithfulness: Tensor


@dataclass(frozen=True)
class Needed:
    """The smallest circuit found to keep a share of the metric.

    Attributes:
        unit: ``"edges"`` or ``"heads"``.
        size: how many; of edges, in each prompt.
        edges: how many edges it has, mean over prompts.
        beyond_first: how many of them do not read the first position, mean over prompts.
        total: how many edges or heads there are.
        faithfulness: what it keeps.
    """

    unit: str
    size: int
    edges: float
    beyond_first: float
    total: float
    faithfulness: float


def faithfulness(scores: EdgeScores, sizes: Sequence[int] | None = None, unit: Unit = "edges") -> FaithfulnessCurve:
    """Keep the highest scores, ablate everything else, and measure.

    Args:
        scores: of `attribute`; what takes the place of an ablated edge is what it was there.
        sizes: of circuits, at least 0; by default powers of two up to all.
        unit: what is counted: edges of each prompt, or whole heads.

    Raises:
        ValueError: for an unknown ``unit`` or a size below 0.
    """
    _check(unit)
    total = _total(scores, unit)
    if sizes is None:
        sizes = [*(2**n for n in range(int(math.log2(max(1, total - 1))) + 1)), total]
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError(f"sizes={list(sizes)} is not allowed: give whole numbers of at least 0.")
    sizes = sorted(set(sizes))
    metric = torch.stack([scores.ablated.measure(_gates(scores, size, unit)).cpu() for size in sizes])
    return FaithfulnessCurve(unit, sizes, metric, _kept(scores, metric))


def needed(scores: EdgeScores, share: float = 0.9, unit: Unit = "edges") -> Needed:
    """Find the smallest circuit from which on all larger ones keep a share of the metric.

    Powers of two are tried, and sizes between the last that keeps less and the next, to within 2 %.

    Args:
        scores: of `attribute`.
        share: of ``m(everything) - m(nothing)``, in (0, 1].
        unit: what is counted: edges of each prompt, or whole heads.

    Raises:
        ValueError: if an argument is not allowed.
    """
    _check(unit)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share={share!r} is not allowed: give a number above 0, at most 1.")
    total = _total(scores, unit)
    curve = faithfulness(scores, None, unit)
    short = [place for place, kept in enumerate(curve.faithfulness.tolist()) if kept < share]
    place = min(short[-1] + 1 if short else 0, len(curve.sizes) - 1)
    low, high = curve.sizes[place - 1] if place else 0, curve.sizes[place]
    reached = float(curve.faithfulness[place])
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        kept = float(faithfulness(scores, [middle], unit).faithfulness[0])
        low, high, reached = (low, middle, kept) if kept >= share else (middle, high, reached)
    gates = _gates(scores, high, unit)
    count = len(scores.ablated.full)
    edges = sum(int(gate.sum()) for gate in gates.values()) / count
    first = sum(int(gate[..., 0].sum()) for gate in gates.values()) / count
    whole = total if unit == "heads" else scores.ablated.edges
    return Needed(unit, high, edges, edges - first, whole, reached)


def _kept(scores: EdgeScores, metric: Tensor) -> Tensor:
    full, empty = scores.ablated.full.mean().cpu(), scores.ablated.empty.mean().cpu()
    return (metric.mean(1) - empty) / (full - empty)


def _gates(scores: EdgeScores, size: int, unit: str) -> Gates:
    gates = scores.circuit(size) if unit == "edges" else scores.head_circuit(size)
    device = scores.ablated.full.device
    return {name: gate.to(device) for name, gate in gates.items()}


def _total(scores: EdgeScores, unit: str) -> int:
    if unit == "heads":
        return sum(len(values) for values in scores.heads.values())
    return int(torch.stack([mask.sum((1, 2, 3)) for mask in scores.ablated.present.values()]).sum(0).max())


def _check(unit: str) -> None:
    if unit not in get_args(Unit):
        raise ValueError(f"unit={unit!r} is not known; choose one of {list(get_args(Unit))}.")
