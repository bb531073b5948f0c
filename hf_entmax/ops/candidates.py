r"""Entmax of very long rows (vocabularies) from a handful of candidates, without sorting and without a dense output.

    p_i = [1 + u (z_i - m - c)]_+ ^ (1/u),     u = alpha - 1,     m = max z,     c such that sum_i p_i = 1

Entries ``z_i <= m + c - 1/u`` are exactly zero, so any lower bound on ``c`` names entries that cannot matter. Solving
on a *subset* of a row gives such a bound (fewer terms, a smaller ``c``), and the maxima of blocks of neighbouring
entries are a subset that comes free with the search for ``m``. One pass over the row therefore leaves a few blocks,
these leave a few candidates, and Newton's method runs on the candidates alone. Where that does not thin the row out
(alpha near 1, almost equal scores) the row is solved densely, in a few passes. On a CPU all of this is one fused kernel
where numba is installed.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import torch
from torch import Tensor

from hf_entmax.ops.backends import row_kernel

# Below this length a row is solved densely: the search for candidates would cost more than it saves.
DENSE_LENGTH = 1024
# More than this share of a row among the candidates, and gathering them no longer pays.
DENSE_SHARE = 0.2
MAX_STEPS = 100


@dataclasses.dataclass
class RowSolution:
    """The entmax of ``n`` rows of length ``V``: all probabilities, or the ones that are not zero where these are few.

    Attributes:
        maximum: ``m``, ``[n, 1]``, float32 or float64; 0 for rows that are ``-inf`` throughout.
        shift: ``c``, ``[n, 1]``, at least 0: the threshold, in the form that stays finite as alpha -> 1; in float64
            where it is known so well.
        scale: what the ``p_i`` of that shift are multiplied by to sum to 1 to the last bit, ``[n, 1]``; 0 where
            ``impossible``.
        conjugate: ``max_p p.(z - m) + H(p)`` with the Tsallis entropy ``H`` of the same alpha, ``[n]``,
            in float64 where the device has it.
        probs: probabilities, ``[entries]`` or, where ``rows`` is None, ``[n, V]``; they sum to 1 in each row, or to 0
            where ``impossible``.
        rows: int64 ``[entries]``, ascending: the rows of the probabilities that are not zero, or None.
        columns: int64 ``[entries]``: their positions in the row, or None.
        impossible: bool ``[n]``, True for rows that are ``-inf`` throughout.
    """

    maximum: Tensor
    shift: Tensor
    scale: Tensor
    conjugate: Tensor
    probs: Tensor
    rows: Tensor | None
    columns: Tensor | None
    impossible: Tensor


def expq(y: Tensor, u: float | Tensor) -> Tensor:
    """``[1 + u y]_+ ^ (1/u)``, and ``exp(y)`` at ``u = 0``; ``u`` is a float or broadcastable to ``y``."""
    if isinstance(u, Tensor):
        at_zero = u == 0
        safe = torch.where(at_zero, 1.0, u)
        return torch.where(at_zero, y.exp(), (safe * y).clamp_(min=-1.0).log1p_().div_(safe).exp_())
    return expq_(y.clone(), u)


def expq_(y: Tensor, u: float) -> Tensor:
    """:func:`expq` in place, for one ``u`` for all rows."""
    if u == 0:
        return y.exp_()
    if u == 1:
        return y.add_(1.0).clamp_(min=0.0)
    if u == 0.5:
        return y.mul_(0.5).add_(1.0).clamp_(min=0.0).square_()
    return y.mul_(u).clamp_(min=-1.0).log1p_().div_(u).exp_()


def _upper_shift(length: int, u: float | Tensor) -> float | Tensor:
    """The shift of a row of equal entries, the largest there is: ``(1 - length**-u) / u``."""
    if isinstance(u, Tensor):
        safe = torch.where(u == 0, 1.0, u)
        return torch.where(u == 0, math.log(length), -torch.expm1(-safe * math.log(length)) / safe)
    return math.log(length) if u == 0 else -math.expm1(-u * math.log(length)) / u


def _total_and_slope(y: Tensor, u: float | Tensor) -> tuple[Tensor, Tensor]:
    """``sum p`` and minus its derivative in the shift, ``sum p**(1 - u)``, ``[n, 1]``; overwrites ``y``."""
    if not isinstance(u, Tensor):
        if u == 0:
            total = y.exp_().sum(-1, keepdim=True)
            return total, total
        if u == 1:
            y.add_(1.0).clamp_(min=0.0)
            return y.sum(-1, keepdim=True), y.count_nonzero(-1)[:, None].to(y.dtype)
        if u == 0.5:
            y.mul_(0.5).add_(1.0).clamp_(min=0.0)
            return torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_(), y.sum(-1, keepdim=True)
    probs = expq(y, u)
    if isinstance(u, Tensor):
        # 0 times -inf is no number: a row at alpha = 1 that has an impossible entry.
        y.clamp_(min=torch.finfo(y.dtype).min)
    base = y.mul_(u).add_(1.0).clamp_(min=torch.finfo(y.dtype).tiny)
    return probs.sum(-1, keepdim=True), probs.div_(base).sum(-1, keepdim=True)


def _newton_gap(ratio: Tensor, u: float | Tensor) -> Tensor:
    """``(1 - ratio^-u) / u``, with its limit ``log ratio`` at ``u = 0`` and, where that is no norm, for ``u > 1``."""
    log = ratio.log()
    if isinstance(u, Tensor):
        norm = (u > 0) & (u <= 1)
        safe = torch.where(norm, u, 1.0)
        return torch.where(norm, torch.expm1(-safe * log) / -safe, log)
    return torch.expm1(-u * log) / -u if 0 < u <= 1 else log


def solve_shift(
    centred: Tensor,
    u: float | Tensor,
    *,
    at_least: Tensor | None = None,
    guess: Tensor | None = None,
    length: int | None = None,
    mass: float = 1.0,
) -> Tensor:
    """Find the shift ``c`` of rows whose largest entry is 0: ``sum_i [1 + u (z_i - c)]_+ ^ (1/u) = mass``.

    Newton on the norm ``(sum p)^u`` of ``[1 + u (z - c)]_+``, which is convex in ``c`` for ``u <= 1`` and a straight line
    where all entries are equal: from a lower bound it never overshoots. Its limit at ``u = 0`` is ``log sum p``, with which
    ``u > 1`` is solved too, inside a bracket, bisecting whenever a step would leave it.

    Args:
        centred: ``[n, K]``, float32 or float64, ``-inf`` where there is no entry.
        u: ``alpha - 1 >= 0``, a float or ``[n, 1]``.
        at_least: a lower bound on the result, ``[n, 1]``; 0 by default, which needs ``mass = 1``.
        guess: where to start, ``[n, 1]``; the lower bound by default.
        length: how many entries a row can have at most, if more than ``K``.
        mass: what the probabilities are to sum to.

    Returns:
        ``c``, ``[n, 1]``; NaN for rows without a finite entry.
    """
    low = torch.zeros_like(centred[:, :1]) if at_least is None else at_least
    high = torch.maximum(torch.zeros_like(low) + _upper_shift(length or centred.shape[-1], u), low)
    shift = low if guess is None else torch.minimum(torch.maximum(guess, low), high)
    eps = torch.finfo(centred.dtype).eps
    # Where sum p is smooth enough, the error after a step is far below the step squared: no need to look once more.
    smooth = not isinstance(u, Tensor) and u <= 0.5
    enough = 0.01 * math.sqrt(eps) if smooth else 2 * eps
    if not isinstance(u, Tensor) and u <= 0.1:
        # The error after a step is about its square times sum p^(1 - 2u), which is at most K^(2u), a few units here.
        enough = 0.1 * math.sqrt(eps)
    for _ in range(MAX_STEPS):
        total, slope = _total_and_slope(centred - shift, u)
        step = _newton_gap(total / mass, u) * total / slope
        proposal = shift + step
        # NaN (a row that holds one) must not keep the other rows waiting.
        lost = step != step
        if bool(((step.abs() <= enough * (1.0 + shift.abs())) | lost).all()):
            return proposal
        above = total >= mass
        low, high = torch.where(above, shift, low), torch.where(above, high, shift)
        inside = (proposal >= low) & (proposal <= high)
        proposal = torch.where(inside | lost, proposal, 0.5 * (low + high))
        if torch.equal(proposal, shift):
            break
        shift = proposal
    return shift


def _bounded_below(scores: Tensor, maximum: Tensor, u: float | Tensor, block: int) -> tuple[Tensor, ...]:
    """Maxima of blocks, and from them a lower bound on the shift and on the values with mass (both centred)."""
    length = scores.shape[-1]
    blocks = scores[:, : length // block * block].unflatten(1, (-1, block))
    block_max = blocks.amax(-1).to(maximum.dtype) - maximum
    # The tail that fills no block counts too: the bound needs a subset of the row that holds its maximum.
    tail_max = scores[:, length // block * block :].amax(-1, keepdim=True) if length % block else maximum[:, :0]
    tail_max = tail_max.to(maximum.dtype) - maximum[:, : tail_max.shape[1]]
    bound = solve_shift(torch.cat((block_max, tail_max), dim=-1), u, length=length)
    inverse = 1.0 / u
    margin = 64 * torch.finfo(maximum.dtype).eps * (1.0 + bound + inverse + maximum.abs())
    return blocks, block_max, (bound - margin).clamp(min=0.0), bound - inverse - margin


def _find_candidates(
    scores: Tensor, maximum: Tensor, u: float | Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Columns and centred values ``[n, K]`` of all entries that may have mass, and a lower bound on the shift.

    None where they are too many to be worth it.
    """
    rows, length = scores.shape
    blocks, block_max, bound, threshold = _bounded_below(scores, maximum, u, block)
    limit = DENSE_SHARE * rows * length
    active = block_max > threshold
    if int(active.sum()) * block <= limit:
        row, index = active.nonzero(as_tuple=True)
        values = blocks[row, index].to(maximum.dtype) - maximum[row]
        member, inner = (values > threshold[row]).nonzero(as_tuple=True)
        found_row, found_column = row[member], index[member] * block + inner
        found_value = values[member, inner]
        whole = length // block * block
        if whole < length:
            tail = scores[:, whole:].to(maximum.dtype) - maximum
            tail_row, tail_column = (tail > threshold).nonzero(as_tuple=True)
            found_row, order = torch.cat((found_row, tail_row)).sort(stable=True)
            found_column = torch.cat((found_column, tail_column + whole))[order]
            found_value = torch.cat((found_value, tail[tail_row, tail_column]))[order]
    else:
        chosen = scores > threshold + maximum
        if int(chosen.sum()) > limit:
            return None
        found_row, found_column = chosen.nonzero(as_tuple=True)
        found_value = scores[found_row, found_column].to(maximum.dtype) - maximum.squeeze(-1)[found_row]
    packed = _pack(found_row, found_column, found_value, rows, limit)
    return None if packed is None else (*packed, bound)


def _pack(row: Tensor, column: Tensor, value: Tensor, rows: int, limit: float) -> tuple[Tensor, Tensor] | None:
    """Entries sorted by row, as two rectangles ``[rows, K]``; None if these would hold more than ``limit`` entries."""
    count = torch.bincount(row, minlength=rows)
    widest = max(int(count.max()), 1)
    if widest * rows > limit:
        return None
    place = torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row]
    columns = column.new_zeros(rows, widest)
    values = value.new_full((rows, widest), -math.inf)
    columns[row, place] = column
    values[row, place] = value
    return columns, values


def _dense_guess(centred: Tensor, u: float | Tensor) -> Tensor | None:
    """The shift estimated from the maxima of blocks and every eighth of the other entries, which stands for all eight.

    The maxima count one by one, because a few of them may hold most of the mass, which a sample alone would miss.
    """
    rows, length = centred.shape
    if length < DENSE_LENGTH * 8:
        return None
    block = 128
    blocks = centred[:, : length // block * block].view(rows, -1, block)
    heads = blocks.amax(-1)
    others = blocks[..., ::8]
    others = torch.where(others < heads[..., None], others, -math.inf).flatten(1)
    shift = torch.zeros_like(centred[:, :1])
    for _ in range(8):
        total, slope = _total_and_slope(heads - shift, u)
        more, steeper = _total_and_slope(others - shift, u)
        total, slope = total + 8.0 * more, slope + 8.0 * steeper
        step = total.log() * total / slope
        shift = shift + step
        if bool((step.abs() < 0.01).all()):
            break
    # Rows without a finite entry have no shift, here as there.
    return torch.where(shift.isfinite(), shift, 0.0)


def _solve_softmax(scores: Tensor, maximum: Tensor, impossible: Tensor) -> RowSolution:
    """:func:`solve_rows` at ``u = 0``: the shift is the logarithm of one sum, nothing has to be searched."""
    probs = torch.sub(scores.to(maximum.dtype), maximum).exp_()
    total = probs.sum(-1, keepdim=True)
    exact = maximum.dtype if scores.device.type == "mps" else torch.float64
    conjugate = total.to(exact).log()
    # What float32 loses of the logarithm, the scale makes good: exp(z - m - shift) scale = exp(z - m) / total.
    shift = conjugate.to(maximum.dtype)
    scale = (shift.to(exact) - conjugate).exp().to(maximum.dtype)
    probs.div_(total)
    if bool(impossible.any()):
        shift, scale = shift.masked_fill(impossible, 0.0), scale.masked_fill(impossible, 0.0)
        probs, conjugate = probs.masked_fill_(impossible, 0.0), conjugate.masked_fill(impossible, 0.0)
    return RowSolution(maximum, shift, scale, conjugate.squeeze(-1), probs, None, None, impossible.squeeze(-1))


def solve_rows(scores: Tensor, u: float | Tensor) -> RowSolution:
    """Entmax of each row, as the few entries that are not zero where there are few.

    Args:
        scores: ``[n, V]`` with ``V >= 1``, floating point; ``-inf`` marks impossible entries. Computed in float32,
            or in float64 for float64 scores.
        u: ``alpha - 1``, a float ``>= 0`` or a tensor ``[n, 1]`` of the computing dtype.

    Returns:
        The solution. Not differentiable. A row that holds NaN or ``+inf`` has NaN probabilities.
    """
    if (isinstance(u, Tensor) or u > 0) and (kernel := row_kernel(scores)) is not None:
        return _solve_by_kernel(kernel, scores, u)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    rows, length = scores.shape
    maximum = scores.amax(-1, keepdim=True).to(wide)
    impossible = maximum == -math.inf
    any_impossible = bool(impossible.any())
    if any_impossible:
        maximum = maximum.masked_fill(impossible, 0.0)
    if not isinstance(u, Tensor) and u == 0:
        return _solve_softmax(scores, maximum, impossible)
    # 1/u is how far below the maximum an entry may lie: for alpha close to 1 there is nothing to rule out.
    selective = bool((u > 0.02).all()) if isinstance(u, Tensor) else u > 0.02
    found = None
    if length >= DENSE_LENGTH and selective and rows:
        found = _find_candidates(scores, maximum, u, block=32 if length < 16384 else 128)
    if found is not None:
        columns, centred, bound = found
        shift = solve_shift(centred, u, at_least=bound, length=length)
    else:
        columns, centred = None, scores.to(wide) - maximum
        shift = solve_shift(centred, u, guess=_dense_guess(centred, u))
    probs = expq(centred - shift, u)
    total = probs.sum(-1, keepdim=True)
    scale = 1.0 / total
    if any_impossible:
        shift, scale = shift.masked_fill(impossible, 0.0), scale.masked_fill(impossible, 0.0)
        probs = probs.masked_fill_(impossible, 0.0)
    probs.mul_(scale)
    # Rows are many and long, their sums are few: float64 costs nothing there, where there is float64.
    exact = wide if scores.device.type == "mps" else torch.float64
    # p.(z - m): 0 * -inf, an impossible candidate, counts 0.
    mean = torch.linalg.vecdot(probs, centred.clamp_(min=torch.finfo(wide).min / length))[:, None]
    conjugate = ((shift.to(exact) + u * mean.to(exact)) / (1.0 + u)).squeeze(-1)
    conjugate = conjugate.masked_fill(impossible.squeeze(-1), 0.0) if any_impossible else conjugate
    row = None
    if columns is not None:
        row, place = probs.nonzero(as_tuple=True)
        columns, probs = columns[row, place], probs[row, place]
    return RowSolution(maximum, shift, scale, conjugate, probs, row, columns, impossible.squeeze(-1))


def _solve_by_kernel(kernel: ModuleType, scores: Tensor, u: float | Tensor) -> RowSolution:
    solved = kernel.solve_rows(scores, u)
    impossible = solved.maximum == -math.inf
    maximum = solved.maximum.masked_fill_(impossible, 0.0)
    return RowSolution(
        maximum,
        solved.shift,
        solved.scale,
        solved.conjugate,
        solved.probs,
        solved.rows,
        solved.columns,
        impossible.squeeze(-1),
    )


def dense_probs(
    scores: Tensor, maximum: Tensor, shift: Tensor, scale: Tensor, u: float | Tensor, out: Tensor | None = None
) -> Tensor:
    """All probabilities of rows that were solved before, in one pass.

    Args:
        scores: ``[n, V]``.
        maximum: ``[n, 1]``, from the solution.
        shift: ``[n, 1]``, from the solution.
        scale: ``[n, 1]``; may hold whatever else the probabilities are to be multiplied by.
        u: ``alpha - 1``, a float or ``[n, 1]``.
        out: ``[n, V]`` of the computing dtype, overwritten; allocated by default.
    """
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    out = torch.empty(scores.shape, dtype=wide, device=scores.device) if out is None else out
    if (kernel := row_kernel(scores)) is not None and out.is_contiguous():
        kernel.recompute_rows(scores, maximum, shift, scale, u, out)
        return out
    torch.sub(scores, maximum.to(out.dtype), out=out).sub_(shift.to(out.dtype))
    out = out.copy_(expq(out, u)) if isinstance(u, Tensor) else expq_(out, u)
    return out.mul_(scale)
