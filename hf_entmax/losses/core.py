"""The Fenchel-Young loss of a block of rows, with its residual ``p - q``: what all losses of this package share."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_entmax.ops.candidates import dense_probs, solve_rows
from hf_entmax.ops.solve import RowSolution, compute_dtype

_support_sizes: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("support_sizes", default=None)


@contextlib.contextmanager
def record_support_sizes() -> Iterator[list[Tensor]]:
    """Collect the support sizes of the rows whose losses are computed inside: int64 ``[n]`` for each block, in order.

    They come from the solutions that the losses need anyway. Compiled losses record nothing.
    """
    sizes: list[Tensor] = []
    token = _support_sizes.set(sizes)
    try:
        yield sizes
    finally:
        _support_sizes.reset(token)


@dataclasses.dataclass
class RowLosses:
    """Losses of ``n`` rows.

    Attributes:
        losses: ``[n]``, in float64 where the device has it.
        solution: the entmax of the rows.
        dead: bool ``[n]``, rows without a gradient: ignored, or without a possible class.
        alpha_slopes: the derivative of each loss in alpha, ``[n]``, or None where it was not asked for.
    """

    losses: Tensor
    solution: RowSolution
    dead: Tensor
    alpha_slopes: Tensor | None


def tsallis_entropy(probs: Tensor, u: float | Tensor) -> Tensor:
    r"""Return the Tsallis entropy along the last dimension, Shannon's (in nats) at ``alpha = 1``.

        H(p) = sum_j (p_j - p_j^alpha) / (alpha (alpha - 1)) = -sum_j p_j expm1(u log p_j) / (u (1 + u))

    ``u`` is ``alpha - 1 >= 0``, a float or broadcastable to ``[..., 1]``.

    Reference:
        Peters, Niculae, Martins 2019, sec. 3.
    """
    log_probs = _log_or_zero(probs)
    return -(probs * _expm1_ratio(log_probs, u)).sum(-1) / (1.0 + _squeeze(u))


def tsallis_entropy_slope(probs: Tensor, u: float | Tensor) -> Tensor:
    """Return the derivative of :func:`tsallis_entropy` in ``alpha`` at fixed ``probs``, ``[...]``, stable at ``u = 0``."""
    return _entropy_slope_terms(probs, u).sum(-1)


def _entropy_slope_terms(probs: Tensor, u: float | Tensor) -> Tensor:
    """Return what each probability adds to :func:`tsallis_entropy_slope`."""
    log_probs = _log_or_zero(probs)
    x = u * log_probs
    near = x.abs() < 0.5
    # (x exp(x) - expm1(x)) / x^2 cancels for small x; its series is sum_j x^j (j + 1) / (j + 2)!
    series = torch.zeros_like(x)
    for j in range(12, -1, -1):
        series = series * x + (j + 1) / math.factorial(j + 2)
    far = torch.where(near, 1.0, x)
    ratio = torch.where(near, series, (far * far.exp() - far.expm1()) / far.square())
    size = 1.0 + u
    return probs * (_expm1_ratio(log_probs, u) / (size * size) - log_probs.square() * ratio / size)


def _entropy_slopes(solution: RowSolution, u: float | Tensor) -> Tensor:
    """Return the :func:`tsallis_entropy_slope` of solved rows, ``[n]``."""
    if solution.rows is None:
        return tsallis_entropy_slope(solution.probs, u)
    each = u[solution.rows, 0] if isinstance(u, Tensor) else u
    terms = _entropy_slope_terms(solution.probs, each)
    return terms.new_zeros(solution.maximum.shape[0]).index_add_(0, solution.rows, terms)


def row_losses(
    scores: Tensor,
    target: Tensor,
    u: float | Tensor,
    *,
    keep: Tensor | None,
    smoothing: float = 0.0,
    need_alpha_slope: bool = False,
) -> RowLosses:
    """Compute the Fenchel-Young losses ``(p - q).z + H(p) - H(q)`` of the rows ``scores`` ``[n, V]``.

    ``target`` are class indices int64 ``[n]`` (anything where ``keep``, bool ``[n]``, is False) or distributions ``[n, V]``, of
    whose mass the share ``smoothing`` is spread evenly over all classes; ``u`` is a float or ``[n, 1]``.
    """
    solution = solve_rows(scores, u)
    if (sizes := _support_sizes.get()) is not None:
        sizes.append(solution.support_sizes())
    n, length = scores.shape
    wide = solution.maximum.dtype
    exact = solution.conjugate.dtype
    if target.dim() == 1:
        labels = target if keep is None else torch.where(keep, target, 0)
        expected = (scores.gather(1, labels[:, None]).to(exact) - solution.maximum.to(exact)).squeeze(-1)
        if smoothing:
            mean = (scores.to(wide) - solution.maximum).mean(-1)
            expected = (1.0 - smoothing) * expected + smoothing * mean
        target_entropy, target_slope = _smoothed_entropy(n, length, smoothing, u, solution.maximum, need_alpha_slope)
    else:
        labels = None
        q = target.to(wide)
        if smoothing:
            q = torch.lerp(q, torch.full_like(q, 1.0 / length), smoothing)
        expected = torch.where(q > 0, q * (scores.to(wide) - solution.maximum), 0.0).sum(-1)
        target_entropy = tsallis_entropy(q, u)
        target_slope = tsallis_entropy_slope(q, u) if need_alpha_slope else None

    losses = solution.conjugate - expected - target_entropy
    # A loss of this family is never negative; rounding may say otherwise where it is zero.
    losses = losses.clamp(min=0.0).masked_fill(solution.impossible, math.inf)
    ignored = None if keep is None else ~keep
    if ignored is not None:
        losses = losses.masked_fill(ignored, 0.0)

    dead = solution.impossible if ignored is None else solution.impossible | ignored
    slopes = None
    if need_alpha_slope:
        slopes = _entropy_slopes(solution, u)
        if target_slope is not None:
            slopes = slopes - target_slope
        slopes = slopes.masked_fill(dead, 0.0)
    return RowLosses(losses, solution, dead, slopes)


def sparse_residual(result: RowLosses, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``p - q`` of class indices int64 ``[n]``, away from the columns where it is ``-smoothing / V``.

    The solution must be sparse (``solution.rows``). Returns row, column and value of the entries, ``[nnz]`` each, in no
    particular order.
    """
    solution = result.solution
    if solution.rows is None or solution.columns is None:
        raise ValueError("the rows were not solved on candidates: they have no sparse residual.")
    at_label = solution.columns == labels[solution.rows]
    values = solution.probs - (1.0 - smoothing) * at_label.to(solution.probs.dtype)
    # A label outside the support gets an entry of its own.
    missing = torch.ones_like(result.dead)
    missing[solution.rows[at_label]] = False
    extra = (missing & ~result.dead).nonzero().squeeze(-1)
    row = torch.cat((solution.rows, extra))
    column = torch.cat((solution.columns, labels[extra]))
    value = torch.cat((values, values.new_full((extra.numel(),), smoothing - 1.0)))
    if bool(result.dead.any()):
        alive = ~result.dead[row]
        row, column, value = row[alive], column[alive], value[alive]
    return row, column, value


def dense_residual(
    scores: Tensor,
    solution: tuple[Tensor, Tensor, Tensor],
    u: float | Tensor,
    target: Tensor,
    weight: Tensor,
    dead: Tensor,
    smoothing: float,
    out: Tensor,
) -> None:
    """Write ``weight (p - q)`` of rows that were solved before to ``out`` ``[n, V]``, of any floating dtype.

    ``solution`` is their ``maximum``, ``shift`` and ``scale``, ``[n, 1]`` each, ``weight`` ``[n, 1]`` of the computing dtype.
    Rows that are ``dead`` get zeros. The others are as for :func:`row_losses`.
    """
    maximum, shift, scale = solution
    reuse = out if out.dtype == compute_dtype(scores.dtype) else None
    wide = dense_probs(scores, maximum, shift, (scale * weight).to(weight.dtype), u, reuse)
    subtract_target_(wide, target, weight, dead, smoothing)
    if wide is not out:
        out.copy_(wide)


def subtract_target_(probs: Tensor, target: Tensor, weight: Tensor, dead: Tensor, smoothing: float) -> Tensor:
    """Turn ``weight p`` into ``weight (p - q)`` in place; arguments are those of :func:`dense_residual`."""
    if smoothing:
        probs.sub_(weight * (smoothing / probs.shape[-1]))
    if target.dim() == 1:
        labels = torch.where(dead, 0, target)[:, None]
        probs.scatter_add_(1, labels, -(1.0 - smoothing) * weight)
    else:
        probs.addcmul_(target.to(probs.dtype), weight, value=smoothing - 1.0)
    # To look first spares a CPU a pass, and would make another device wait.
    look = dead.device.type == "cpu"
    return probs.masked_fill_(dead[:, None], 0.0) if not look or bool(dead.any()) else probs


def _smoothed_entropy(
    rows: int, length: int, smoothing: float, u: float | Tensor, like: Tensor, need_slope: bool
) -> tuple[Tensor | float, Tensor | None]:
    """Return the entropy of a smoothed label and its slope in alpha: one large probability, ``length - 1`` equal small ones."""
    if not smoothing:
        return 0.0, None
    small = smoothing / length
    pair = like.new_tensor([1.0 - smoothing + small, small]).unsqueeze(-1).expand(2, rows).unsqueeze(-1)
    count = like.new_tensor([1.0, length - 1.0])[:, None]
    per_class = (tsallis_entropy(pair, u) * count).sum(0)
    return per_class, (tsallis_entropy_slope(pair, u) * count).sum(0) if need_slope else None


def _log_or_zero(probs: Tensor) -> Tensor:
    return torch.where(probs > 0, probs, 1.0).log()


def _expm1_ratio(log_probs: Tensor, u: float | Tensor) -> Tensor:
    """Return ``expm1(u l) / u``, which is ``l`` at ``u = 0``."""
    if isinstance(u, Tensor):
        safe = torch.where(u == 0, 1.0, u)
        return torch.where(u == 0, log_probs, torch.expm1(safe * log_probs) / safe)
    return log_probs if u == 0 else torch.expm1(u * log_probs) / u


def _squeeze(u: float | Tensor) -> float | Tensor:
    return u.squeeze(-1) if isinstance(u, Tensor) else u
