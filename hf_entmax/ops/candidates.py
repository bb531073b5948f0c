r"""Entmax of very long rows (vocabularies) from a handful of candidates, without sorting and without a dense output.

    p_i = [1 + u (z_i - m - c)]_+ ^ (1/u),     u = alpha - 1,     m = max z,     c such that sum_i p_i = 1

Entries ``z_i <= m + c - 1/u`` are exactly zero, so any lower bound on ``c`` names entries that cannot matter. Solving
on a *subset* of a row gives such a bound (fewer terms, a smaller ``c``), and the maxima of blocks of neighbouring
entries are a subset that comes free with the search for ``m``. One pass over the row therefore leaves a few blocks,
these leave a few candidates, and `hf_entmax.ops.solve` is given the candidates alone. Where that does not thin the row
out (alpha near 1, almost equal scores) it is given the row whole. Where the device has a fused kernel, that does all of
this: on CPUs through numba, on NVIDIA GPUs through Triton.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from hf_entmax.ops.backends import row_kernel
from hf_entmax.ops.rows import row_probabilities
from hf_entmax.ops.solve import (
    RowSolution,
    any_above_two,
    compute_dtype,
    conjugate_of,
    exact_dtype,
    shift_of,
    solve_centred,
    weights_at,
)

# Below this length a row is solved densely: the search for candidates would cost more than it saves.
DENSE_LENGTH = 1024
# More than this share of a row among the candidates, and gathering them no longer pays.
DENSE_SHARE = 0.2


def solve_rows(scores: Tensor, u: float | Tensor) -> RowSolution:
    """Map each row by entmax to the entries that are not zero, where these are few.

    Args:
        scores: ``[n, V]`` with ``V >= 1``, floating point; ``-inf`` marks impossible entries. Computed in float32,
            or in float64 for float64 scores.
        u: ``alpha - 1``, a float ``>= 0`` or a tensor ``[n, 1]`` of the computing dtype.

    Returns:
        The solution. Not differentiable. A row that holds NaN or ``+inf`` has NaN probabilities.
    """
    if (kernel := _kernel(scores, u)) is not None:
        return kernel.solve_rows(scores, u)
    wide = compute_dtype(scores.dtype)
    maximum = scores.amax(-1, keepdim=True).to(wide)
    impossible = maximum == -math.inf
    maximum.masked_fill_(impossible, 0.0)
    # 1/u is how far below the maximum an entry may lie: for alpha close to 1 there is nothing to rule out.
    selective = bool((u > 0.02).all()) if isinstance(u, Tensor) else u > 0.02
    found = None
    if scores.shape[1] >= DENSE_LENGTH and selective and len(scores):
        found = _find_candidates(scores, maximum, u, block=32 if scores.shape[1] < 16384 else 128)
    columns, centred = (None, scores.to(wide) - maximum) if found is None else found
    probs, total = solve_centred(centred.clone(), u)
    shift, exact = shift_of(probs, centred, u), exact_dtype(scores)
    # p.(z - m): 0 * -inf, an impossible candidate, counts 0.
    expected = torch.linalg.vecdot(probs, centred.clamp_(min=torch.finfo(wide).min / scores.shape[1]))[:, None]
    conjugate = conjugate_of(shift, total.to(exact), expected.to(exact), u)
    scale = (1.0 / total).masked_fill(impossible, 0.0)
    probs.mul_(scale)
    if bool(impossible.any()):
        probs.masked_fill_(impossible, 0.0)
        shift, conjugate = shift.masked_fill(impossible, 0.0), conjugate.masked_fill(impossible, 0.0)
    row = None
    if columns is not None:
        row, place = probs.nonzero(as_tuple=True)
        columns, probs = columns[row, place], probs[row, place]
    return RowSolution(maximum, shift, scale, conjugate.squeeze(-1), probs, row, columns, impossible.squeeze(-1))


def dense_probs(
    scores: Tensor, maximum: Tensor, shift: Tensor, scale: Tensor, u: float | Tensor, out: Tensor | None = None
) -> Tensor:
    """Return all probabilities ``[n, V]`` of rows that were solved before, in one pass.

    ``maximum``, ``shift`` and ``scale`` ``[n, 1]`` are the solution's; the scale may hold whatever else the probabilities are to
    be multiplied by. ``out`` is of the computing dtype, allocated by default.
    """
    wide = compute_dtype(scores.dtype)
    out = torch.empty(scores.shape, dtype=wide, device=scores.device) if out is None else out
    kernel = _kernel(scores, u)
    if any_above_two(u):
        # Where probabilities rise like a root, no floating-point shift says them all: they are searched again.
        if kernel is None:
            out.copy_(row_probabilities(scores.to(wide), u))
        else:
            kernel.solve_rows(scores, u, out=out)
        return out.mul_(scale)
    if kernel is not None and out.is_contiguous():
        kernel.recompute_rows(scores, maximum, shift, scale, u, out)
        return out
    return torch.mul(weights_at(scores.to(wide) - maximum.to(wide), shift.to(wide), u), scale, out=out)


def _kernel(scores: Tensor, u: float | Tensor) -> ModuleType | None:
    """Return the fused kernels that take these rows, or None."""
    if not isinstance(u, Tensor) and u == 0:
        return None  # nothing has to be searched
    kernel = row_kernel(scores)
    return None if kernel is None or (not kernel.ABOVE_TWO and any_above_two(u)) else kernel


def _bounds(scores: Tensor, maximum: Tensor, u: float | Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of the rows, their maxima, and a lower bound on the values with mass; all but the blocks are centred."""
    length = scores.shape[-1]
    blocks = scores[:, : length // block * block].unflatten(1, (-1, block))
    block_max = blocks.amax(-1).to(maximum.dtype) - maximum
    # The tail that fills no block counts too: the bound needs a subset of the row that holds its maximum.
    tail_max = scores[:, length // block * block :].amax(-1, keepdim=True) if length % block else maximum[:, :0]
    tail_max = tail_max.to(maximum.dtype) - maximum[:, : tail_max.shape[1]]
    heads = torch.cat((block_max, tail_max), dim=-1)
    bound = shift_of(solve_centred(heads.clone(), u)[0], heads, u).to(maximum.dtype)
    inverse = 1.0 / u
    margin = 64 * torch.finfo(maximum.dtype).eps * (1.0 + bound + inverse + maximum.abs())
    return blocks, block_max, bound - inverse - margin


def _find_candidates(scores: Tensor, maximum: Tensor, u: float | Tensor, block: int) -> tuple[Tensor, Tensor] | None:
    """Return columns and centred values ``[n, K]`` of all entries that may have mass; None where there are too many."""
    rows, length = scores.shape
    blocks, block_max, threshold = _bounds(scores, maximum, u, block)
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
    return _pack(found_row, found_column, found_value, rows, limit)


def _pack(row: Tensor, column: Tensor, value: Tensor, rows: int, limit: float) -> tuple[Tensor, Tensor] | None:
    """Lay entries sorted by row out as two rectangles ``[rows, K]``; None if these would hold more than ``limit`` entries."""
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
