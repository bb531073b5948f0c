"""Entmax over the rows of a matrix: the mapping of the attention kernels without the attention."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
# Some releases of Triton declare that a kernel called by a kernel never returns.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from hf_entmax.ops.triton_gpu.row_math import (
    MASKED,
    MASKED_BELOW,
    Mapping,
    alpha_gradient,
    alpha_terms,
    expq,
    largest_threshold,
    log_slope,
    make_mapping,
    threshold_step,
)


@triton.jit
def _load_scores(scores, mask, floor, rows, first_col, n_rows, n_cols, COLS: tl.constexpr):
    """Scores of a tile as float32, ``MASKED`` where they may receive no mass. ``scores``, ``mask``: (pointer, strides)."""
    cols = first_col + tl.arange(0, COLS)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    row_offsets, col_offsets = rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :]
    z = tl.load(scores[0] + row_offsets * scores[1] + col_offsets * scores[2], mask=inside, other=0.0).to(tl.float32)
    allowed = inside
    if mask is not None:
        allowed = allowed & (
            tl.load(mask[0] + row_offsets * mask[1] + col_offsets * mask[2], mask=inside, other=0) != 0
        )
    allowed = allowed & ((z > floor) | (z != z))
    return tl.where(allowed, z, MASKED), row_offsets, col_offsets, inside


@triton.jit
def _load_alpha(alpha, rows, n_rows):
    row_alpha = tl.load(alpha[0] + rows.to(tl.int64) * alpha[1], mask=rows < n_rows, other=2.0)
    mapping = make_mapping(row_alpha, tl.min(row_alpha, 0))
    # Row values stay one-dimensional until they meet a tile: a [ROWS, 1] tensor would drag tiles into its own layout.
    return mapping, Mapping(mapping.u[:, None], mapping.inv_u[:, None], mapping.small)


@triton.jit
def _entmax_rows_fwd_kernel(
    scores, mask, alpha, probs, stats, floor, n_rows, n_cols, max_passes,
    ALPHA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Entmax of ``ROWS`` rows. scores, mask, probs ``[n_rows, n_cols]``, alpha ``[n_rows]``, stats ``[n_rows, 5]``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mapping, tile_mapping = _load_alpha(alpha, rows, n_rows)

    row_max = tl.full([ROWS], MASKED, tl.float32)
    row_nan = tl.zeros([ROWS], tl.int32)
    for first_col in range(0, n_cols, COLS):
        z, _, _, _ = _load_scores(scores, mask, floor, rows, first_col, n_rows, n_cols, COLS)
        row_max = tl.maximum(row_max, tl.max(tl.where(z != z, MASKED, z), 1))
        row_nan = tl.maximum(row_nan, tl.max((z != z).to(tl.int32), 1))
    row_max = tl.where(row_max > MASKED_BELOW, row_max, 0.0)
    row_max = tl.where(row_nan != 0, float("nan"), row_max)

    c = tl.zeros([ROWS], tl.float32)
    low = tl.zeros([ROWS], tl.float32)
    high = tl.zeros([ROWS], tl.float32) + largest_threshold(n_cols, mapping.u)
    n_passes = 0
    unfinished = 1
    while (n_passes < max_passes) & (unfinished != 0):
        total = tl.zeros([ROWS], tl.float32)
        slope = tl.zeros([ROWS], tl.float32)
        curvature = tl.zeros([ROWS], tl.float32)
        for first_col in range(0, n_cols, COLS):
            z, _, _, _ = _load_scores(scores, mask, floor, rows, first_col, n_rows, n_cols, COLS)
            p, s, e, _ = expq(z - row_max[:, None] - c[:, None], tile_mapping, ALPHA)
            total += tl.sum(p, 1)
            slope += tl.sum(s, 1)
            curvature += tl.sum(e, 1)
        c, low, high, row_unfinished = threshold_step(c, low, high, total, slope, curvature, n_passes, mapping.u)
        unfinished = tl.max(row_unfinished.to(tl.int32), 0)
        n_passes += 1

    slope = tl.zeros([ROWS], tl.float32)
    entropy = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    for first_col in range(0, n_cols, COLS):
        z, row_offsets, col_offsets, inside = _load_scores(scores, mask, floor, rows, first_col, n_rows, n_cols, COLS)
        y = z - row_max[:, None] - c[:, None]
        p, s, _, log_p = expq(y, tile_mapping, ALPHA)
        tl.store(probs + row_offsets * n_cols + col_offsets, p.to(probs.dtype.element_ty), mask=inside)
        slope += tl.sum(s, 1)
        entropy -= tl.sum(p * log_p, 1)
        moment -= tl.sum(tl.where(s == 0.0, 0.0, s * y), 1)
    pointers = stats + rows.to(tl.int64) * 5
    inside = rows < n_rows
    tl.store(pointers, row_max, mask=inside)
    tl.store(pointers + 1, c, mask=inside)
    tl.store(pointers + 2, slope, mask=inside)
    tl.store(pointers + 3, entropy, mask=inside)
    tl.store(pointers + 4, moment, mask=inside)


@triton.jit
def _entmax_rows_bwd_kernel(
    scores, mask, alpha, grad, stats, grad_scores, grad_alpha, floor, n_rows, n_cols,
    ALPHA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dL/dscores ``[n_rows, n_cols]`` and dL/dalpha ``[n_rows]`` (or None) from ``grad = dL/dprobs``, (pointer, strides)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mapping, tile_mapping = _load_alpha(alpha, rows, n_rows)
    pointers = stats + rows.to(tl.int64) * 5
    inside_rows = rows < n_rows
    row_max = tl.load(pointers, mask=inside_rows, other=0.0)
    c = tl.load(pointers + 1, mask=inside_rows, other=0.0)
    slope = tl.load(pointers + 2, mask=inside_rows, other=0.0)
    row_log_slope = log_slope(tl.load(pointers + 4, mask=inside_rows, other=0.0), mapping)

    delta = tl.zeros([ROWS], tl.float32)
    for first_col in range(0, n_cols, COLS):
        z, row_offsets, col_offsets, inside = _load_scores(scores, mask, floor, rows, first_col, n_rows, n_cols, COLS)
        _, s, _, _ = expq(z - row_max[:, None] - c[:, None], tile_mapping, ALPHA)
        g = tl.load(grad[0] + row_offsets * grad[1] + col_offsets * grad[2], mask=inside, other=0.0).to(tl.float32)
        delta += tl.sum(s * g, 1)
    delta /= tl.where(slope == 0.0, 1.0, slope)

    sum_a = tl.zeros([ROWS], tl.float32)
    sum_b = tl.zeros([ROWS], tl.float32)
    sum_c = tl.zeros([ROWS], tl.float32)
    sum_d = tl.zeros([ROWS], tl.float32)
    for first_col in range(0, n_cols, COLS):
        z, row_offsets, col_offsets, inside = _load_scores(scores, mask, floor, rows, first_col, n_rows, n_cols, COLS)
        p, s, _, log_p = expq(z - row_max[:, None] - c[:, None], tile_mapping, ALPHA)
        g = tl.load(grad[0] + row_offsets * grad[1] + col_offsets * grad[2], mask=inside, other=0.0).to(tl.float32)
        g -= delta[:, None]
        grad_z = (s * g).to(grad_scores.dtype.element_ty)
        tl.store(grad_scores + row_offsets * n_cols + col_offsets, grad_z, mask=inside)
        if grad_alpha is not None:
            term_a, term_b, term_c, term_d = alpha_terms(p, s, log_p, g, row_log_slope[:, None], tile_mapping)
            sum_a += tl.sum(term_a, 1)
            sum_b += tl.sum(term_b, 1)
            sum_c += tl.sum(term_c, 1)
            sum_d += tl.sum(term_d, 1)
    if grad_alpha is not None:
        entropy = tl.load(pointers + 3, mask=inside_rows, other=0.0)
        row_alpha = alpha_gradient(sum_a, sum_b, sum_c, sum_d, slope, entropy, mapping)
        tl.store(grad_alpha + rows, row_alpha, mask=inside_rows)
