"""Entmax over the rows of a matrix: the mapping of the attention kernels without the attention."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
# Some releases of Triton declare that a kernel called by a kernel never returns.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from hf_entmax.ops.triton_gpu.row_math import TOLERANCE, Mapping, expq, largest_threshold, make_mapping, threshold_step

# Stands for minus infinity in centred scores: finite, so that products with u = 0 or with a weight of 0 stay 0.
_FAR = tl.constexpr(-1.0e30)


@triton.jit
def _load_centred(scores, row_max, floor, rows, first_col, n_rows, n_cols, COLS: tl.constexpr):
    """Scores of a tile less the maxima of their rows, ``_FAR`` where they may receive no mass; and where the tile lies."""
    cols = first_col + tl.arange(0, COLS)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    row_offsets, col_offsets = rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :]
    z = tl.load(scores[0] + row_offsets * scores[1] + col_offsets * scores[2], mask=inside, other=0.0).to(tl.float32)
    y = tl.maximum(z - row_max[:, None], _FAR, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(inside & ((z > floor) | (z != z)), y, _FAR), row_offsets * n_cols + col_offsets, inside


@triton.jit
def _load_rows(alpha, row_max, rows, n_rows):
    """The maxima of some rows, and their mapping for row values and for tiles. ``alpha``: (pointer, stride)."""
    row_alpha = tl.load(alpha[0] + rows.to(tl.int64) * alpha[1], mask=rows < n_rows, other=2.0)
    mapping = make_mapping(row_alpha, tl.min(row_alpha, 0))
    # Row values stay one-dimensional until they meet a tile: a [ROWS, 1] tensor would drag tiles into its own layout.
    unit = mapping.log_unit[:, None]
    tile_mapping = Mapping(mapping.u[:, None], mapping.inv_u[:, None], mapping.small, mapping.near, unit)
    return tl.load(row_max + rows, mask=rows < n_rows, other=0.0), mapping, tile_mapping


@triton.jit(do_not_specialize=["n_rows"])
def _solve_rows_kernel(
    scores, row_max, alpha, floor, n_rows, n_cols, solved, max_passes,
    ALPHA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Shift, ``sum p`` and ``sum p (z - max)`` of ``ROWS`` rows. scores ``[n_rows, n_cols]``, solved ``[3, n_rows]``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_max, mapping, tile_mapping = _load_rows(alpha, row_max, rows, n_rows)
    c = tl.zeros([ROWS], tl.float32)
    low = tl.zeros([ROWS], tl.float32)
    high = largest_threshold(tl.zeros([ROWS], tl.float32) + n_cols, mapping.u)
    n_passes = 0
    unfinished = 1
    while (n_passes < max_passes) & (unfinished != 0):
        total = tl.zeros([ROWS], tl.float32)
        slope = tl.zeros([ROWS], tl.float32)
        curvature = tl.zeros([ROWS], tl.float32)
        for first_col in range(0, n_cols, COLS):
            y, _, _ = _load_centred(scores, row_max, floor, rows, first_col, n_rows, n_cols, COLS)
            p, s, e, _ = expq(y - c[:, None], tile_mapping, ALPHA)
            total += tl.sum(p, 1)
            slope += tl.sum(s, 1)
            curvature += tl.sum(e, 1)
        c, low, high, row_unfinished = threshold_step(
            c, low, high, total, slope, curvature, n_passes, mapping.u, TOLERANCE
        )
        unfinished = tl.max(row_unfinished.to(tl.int32), 0)
        n_passes += 1

    total = tl.zeros([ROWS], tl.float32)
    expected = tl.zeros([ROWS], tl.float32)
    for first_col in range(0, n_cols, COLS):
        y, _, _ = _load_centred(scores, row_max, floor, rows, first_col, n_rows, n_cols, COLS)
        p, _, _, _ = expq(y - c[:, None], tile_mapping, ALPHA)
        total += tl.sum(p, 1)
        expected += tl.sum(p * y, 1)
    inside = rows < n_rows
    tl.store(solved + rows, c, mask=inside)
    tl.store(solved + n_rows + rows, total, mask=inside)
    tl.store(solved + 2 * n_rows + rows, expected, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _write_rows_kernel(
    scores, row_max, alpha, floor, n_rows, n_cols, shift, scale, out,
    ALPHA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``scale p`` of a tile of solved rows: out ``[n_rows, n_cols]``, contiguous."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_max, _, tile_mapping = _load_rows(alpha, row_max, rows, n_rows)
    c = tl.load(shift + rows, mask=rows < n_rows, other=0.0)
    factor = tl.load(scale + rows, mask=rows < n_rows, other=0.0)
    y, places, inside = _load_centred(scores, row_max, floor, rows, tl.program_id(1) * COLS, n_rows, n_cols, COLS)
    p, _, _, _ = expq(y - c[:, None], tile_mapping, ALPHA)
    tl.store(out + places, (p * factor[:, None]).to(out.dtype.element_ty), mask=inside)
