"""The forward kernel: blocks of rows from scores to output, keeping the support of every row for the backward pass."""

from __future__ import annotations

import math

import numpy as np
from numba.np.numpy_support import carray

from .intrinsics import call_full_rows, call_short_rows, jit
from .layout import BATCH_WIDTH, DONE, ROW_LIMITS
from .row_groups import belongs, collect, keep_lane, row_of_lane
from .rows import block_rows, dense_row_bytes, drop_dense, drop_sparse, dropout_key, item_blocks, place_row, stored_row
from .scores import (
    MASKED_BELOW, add_terms, candidates, count_candidates, noted_limits, relative, row_limits, row_maximum,
)  # fmt: skip
from .simd import LANES, atomic_increment, read_f64, read_i64, store, write_f32, write_i32, write_i64
from .threshold import NO_COLUMNS, count_positive, keep_support, solve_row, solved_as_full_rows
from .tiles import (
    PANEL, TILE_VECTORS, copy_floats, copy_scaled, dots_of_rows, pack_panels, product, product_of_seen, sum_rows,
    write_row, zero_floats,
)  # fmt: skip

_f = np.float32
_takes_full_rows = jit(solved_as_full_rows)
# Share of candidates from which a row may turn out dense.
_NEARLY_ALL = 0.875


@jit
def column_range(r, b, h_kv, first, rows, limits):
    """Write the column limits of every row of a block; return the range that covers them all."""
    low, high = r.keys, 0
    for t in range(rows):
        h, i = place_row(r, h_kv, first + t)
        row_low, row_high = row_limits(r, b, h, i)
        write_i64(limits + ROW_LIMITS * t, row_low)
        write_i64(limits + ROW_LIMITS * t + 8, row_high)
        if row_high > row_low:
            low, high = min(low, row_low), max(high, row_high)
    return low, max(low, high)


@jit
def _pack_keys(r, b, h_kv, low, high, packed_low, packed_high, k_pack):
    """Pack the keys of a block that are not packed yet; return the range that is."""
    source = r.k + b * r.k_b + h_kv * r.k_h
    low = low // PANEL * PANEL
    if packed_high > packed_low:
        # Extend what is there: blocks move through the keys, so most panels are packed already.
        low, high = min(low, packed_low), max(high, packed_high)
        begin, end = packed_high // PANEL * PANEL, packed_low
    else:
        begin, end = low, low
    if low < end:
        pack_panels(source, r.k_t, low, end, r.depth_vectors, k_pack)
    if high > packed_high or packed_high <= packed_low:
        pack_panels(source, r.k_t, begin, high, r.depth_vectors, k_pack)
    return low, high


@jit
def _block_scores(r, b, h_kv, first, rows, low, high, q_pack, k_pack, scores):
    """Compute the scores of a block, column ``low // PANEL * PANEL`` first."""
    q_row = 64 * r.depth_vectors
    for t in range(rows):
        h, i = place_row(r, h_kv, first + t)
        source = r.q + b * r.q_b + h * r.q_h + i * r.q_t
        copy_scaled(source, q_pack + q_row * t, r.depth_vectors, _f(r.scaling))
    origin = low // PANEL * PANEL
    if r.direct != 0:
        k = r.k + b * r.k_b + h_kv * r.k_h
        for j in range(low // LANES * LANES, high, LANES):
            for t in range(rows):
                values = dots_of_rows(q_pack + q_row * t, j, high - 1 - j, k, r.k_t, r.depth_vectors)
                store(scores + 4 * (r.span * t + j - origin), values)
        return
    depth = LANES * r.depth_vectors
    for j in range(origin, high, PANEL):
        vectors = min(TILE_VECTORS, (high - j + LANES - 1) // LANES)
        panel = k_pack + j * q_row
        product(q_pack, q_row, 4, rows, panel, 4 * PANEL, vectors, scores + 4 * (j - origin), 4 * r.span, depth, 0)


@jit
def _spread_nan(low, high, target):
    """Write NaN in all columns of a row with a NaN or +inf score, as dense arithmetic does."""
    n = high - low
    for k in range(n):
        write_i32(target + 4 * k, np.int32(low + k))
        write_f32(target + 4 * (n + k), _f(np.nan))
    return n


@jit
def _note_row(r, row, position, n):
    """Note where a row's support lies; return the address after it."""
    write_i64(r.row_address + 8 * row, position)
    write_i32(r.row_size + 4 * row, np.int32(n))
    return position + 4 * n * (3 if r.store_gradient != 0 else 2)


@jit
def _finish_scores(r, b, h_kv, first, rows, limits, scores, origin):
    """Add the terms of every row and note its maximum: NaN for NaN, -inf where nothing is allowed."""
    for t in range(rows):
        h, i = place_row(r, h_kv, first + t)
        low, high, _ = noted_limits(limits, t)
        s = scores + 4 * (r.span * t - origin)
        top = _f(-np.inf)
        if high > low:
            add_terms(r, s, b, h, i, low, high)
            top = row_maximum(s, low, high)
            if top <= MASKED_BELOW:
                top = _f(-np.inf)
        write_f32(limits + ROW_LIMITS * t + 16, top)


@jit
def _looks_dense(r, h_kv, first, rows, limits, scores, origin):
    """Tell whether nearly all entries of every row are candidates."""
    for t in range(rows):
        h, _ = place_row(r, h_kv, first + t)
        low, high, top = noted_limits(limits, t)
        if math.isnan(top) or top == _f(-np.inf):
            return False
        s = scores + 4 * (r.span * t - origin)
        if count_candidates(s, low, high, top, read_f64(r.alpha + 8 * h) - 1.0) < _NEARLY_ALL * (high - low):
            return False
    return True


@jit
def _solve_densely(r, h, rows, low, high, limits, scores, origin, buffers, target):
    """Write the weights of a block, columns ``low`` to ``high``, to ``target``; return how many are not zero.

    Returns -1 where the rows cannot be solved like this. The scores of the rows' own columns stay.
    """
    u = read_f64(r.alpha + 8 * h) - 1.0
    p_row = dense_row_bytes(high - low, r.store_gradient)
    full = _takes_full_rows(u)
    total = 0
    if full:
        for t in range(0, rows, LANES):
            line, place = scores + 4 * (r.span * t - origin), limits + ROW_LIMITS * t
            weights, group, scratch = target + p_row * t, min(LANES, rows - t), buffers + 2 * r.row_bytes
            if not call_full_rows(
                r.solve_full_rows, place, line, 4 * r.span, group, low, u, weights, p_row, scratch, r.row_bytes
            ):
                return -1
    for t in range(rows):
        row_low, row_high, top = noted_limits(limits, t)
        line = target + p_row * t
        p, n = line + 4 * (row_low - low), row_high - row_low
        if not full:
            s = scores + 4 * (r.span * t - origin)
            relative(s, row_low, row_high, top, buffers)
            solve_row(read_i64(r.solvers + 8 * h), buffers, NO_COLUMNS, p, buffers + r.row_bytes, n, u)
        total += count_positive(p, n)
        zero_floats(line, row_low - low)
        zero_floats(p + 4 * n, high - row_high)
    return total


@jit
def _solve_rows(r, h_kv, first, rows, first_row, limits, scores, origin, buffers, position):
    """Solve the rows of a block and keep their support; return the address after it and the number of entries."""
    x, index, p, other = buffers, buffers + r.row_bytes, buffers + 2 * r.row_bytes, buffers + 3 * r.row_bytes
    batch = buffers + 4 * r.row_bytes
    total, waiting = 0, 0
    for t in range(rows):
        h, _ = place_row(r, h_kv, first + t)
        low, high, top = noted_limits(limits, t)
        n = 0
        if math.isnan(top):
            n = _spread_nan(low, high, position)
        elif top > _f(-np.inf):
            u = read_f64(r.alpha + 8 * h) - 1.0
            n = candidates(scores + 4 * (r.span * t - origin), low, high, top, u, x, index)
            if belongs(n, u):
                collect(batch, waiting, x, index, n, u, first_row + t)
                waiting += 1
                n = -1
            else:
                n = solve_row(read_i64(r.solvers + 8 * h), x, index, p, other, n, u)
                n = keep_support(p, index, n, position)
        if n >= 0:
            position = _note_row(r, first_row + t, position, n)
            total += n
        if waiting == LANES or (waiting > 0 and t == rows - 1):
            call_short_rows(r.solve_short_rows, batch, waiting)
            for lane in range(waiting):
                n = keep_lane(batch, lane, position)
                position = _note_row(r, row_of_lane(batch, lane), position, n)
                total += n
            waiting = 0
    return position, total


@jit
def _make_dense(r, rows, first_row, low, high, scores, target):
    """Turn the sparse rows of a block into dense ones at ``target``, by way of ``scores`` (column ``low`` first)."""
    width = high - low
    for t in range(rows):
        line = scores + 4 * r.span * t
        index, n = stored_row(r, first_row + t)
        write_row(line - 4 * low, low, high, index, index + 4 * n, n)
    for t in range(rows):
        copy_floats(scores + 4 * r.span * t, target + dense_row_bytes(width, r.store_gradient) * t, width)


@jit
def _note_dense_rows(r, rows, first_row, low, width, target):
    """Note that a block's rows lie densely at ``target``; return the address after them."""
    row_bytes = dense_row_bytes(width, r.store_gradient)
    for t in range(rows):
        write_i64(r.row_address + 8 * (first_row + t), target + row_bytes * t)
        write_i32(r.row_size + 4 * (first_row + t), np.int32(-1 - width))
        write_i32(r.row_start + 4 * (first_row + t), np.int32(low))
    return target + row_bytes * rows


@jit
def _finish_dense(r, b, h_kv, first, rows, first_row, low, high, stored, dropped):
    """Apply dropout to a dense block stored at ``stored``; write its output and the weights asked for."""
    h, i = place_row(r, h_kv, first)
    weights, row_bytes = stored, dense_row_bytes(high - low, r.store_gradient)
    if r.dropout_limit != 0:
        for t in range(rows):
            key, line = dropout_key(r.seed, first_row + t), stored + row_bytes * t
            drop_dense(line, low, high - low, key, r.dropout_limit, r.dropout_scale, dropped + 4 * r.span * t)
        weights, row_bytes = dropped, 4 * r.span
    values = r.v + b * r.v_b + h_kv * r.v_h + low * r.v_t
    out = r.out + b * r.out_b + h * r.out_h + i * r.out_t
    product_of_seen(weights, row_bytes, rows, values, r.v_t, r.value_vectors, out, r.out_t, high - low)
    if r.weights != 0:
        for t in range(rows):
            line = r.weights + 4 * r.keys * (first_row + t)
            zero_floats(line, r.keys)
            copy_floats(weights + row_bytes * t, line + 4 * low, high - low)


@jit
def _finish_sparse(r, b, h_kv, first, rows, first_row, dropped):
    """Apply dropout to the sparse rows of a block; write their output and the weights asked for."""
    values = r.v + b * r.v_b + h_kv * r.v_h
    for t in range(rows):
        h, i = place_row(r, h_kv, first + t)
        index, n = stored_row(r, first_row + t)
        weights = index + 4 * n
        if r.dropout_limit != 0:
            key = dropout_key(r.seed, first_row + t)
            drop_sparse(weights, index, n, key, r.dropout_limit, r.dropout_scale, dropped)
            weights = dropped
        sum_rows(r.out + b * r.out_b + h * r.out_h + i * r.out_t, weights, index, n, values, r.v_t, r.value_vectors)
        if r.weights != 0:
            write_row(r.weights + 4 * r.keys * (first_row + t), 0, r.keys, index, weights, n)


def run_forward(record):
    """Take items until none is left, or until this thread needs storage that is not there."""
    r = carray(record, 1)[0]
    k_pack = r.scratch + atomic_increment(r.counters + 8) * r.scratch_bytes
    q_pack, limits = k_pack + r.pack_at, k_pack + r.limits_at
    buffers, scores = k_pack + r.rows_at, k_pack + r.scores_at
    position, slab_end = np.int64(0), np.int64(0)
    while True:
        item = atomic_increment(r.counters)
        if item >= r.batch * r.kv_heads * r.chunks:
            return
        b, h_kv, start, stop = item_blocks(r, item)
        progress = read_i64(r.progress + 8 * item)
        start = max(start, progress // 2)
        packed_low, packed_high = np.int64(0), np.int64(0)
        # Rows of one head resemble each other: solving in place is tried where the block before was dense.
        dense = progress % 2 == 0
        for block in range(start, stop):
            if slab_end - position < r.block_bytes:
                slab = atomic_increment(r.counters + 16)
                if slab >= r.n_slabs:
                    # Gone on with as if nothing had been between.
                    write_i64(r.progress + 8 * item, 2 * block + (0 if dense else 1))
                    write_i64(r.counters + 24, 1)
                    return
                position = read_i64(r.slabs + 8 * slab)
                slab_end = position + r.slab_bytes
            first, rows = block_rows(r, block)
            # The rows of the heads that share a key head follow each other in [B, H, T_q].
            first_row = (b * r.kv_heads + h_kv) * r.groups * r.queries + first
            low, high = column_range(r, b, h_kv, first, rows, limits)
            if r.direct == 0 and high > low and not (packed_low <= low and high <= packed_high):
                packed_low, packed_high = _pack_keys(r, b, h_kv, low, high, packed_low, packed_high, k_pack)
            _block_scores(r, b, h_kv, first, rows, low, high, q_pack, k_pack, scores)
            origin = low // PANEL * PANEL
            _finish_scores(r, b, h_kv, first, rows, limits, scores, origin)
            columns = scores + 4 * (low - origin)
            may_be_dense = r.stacked == 0 and r.softcap == 0.0 and high - low > BATCH_WIDTH
            enough = r.dense_above * rows * (high - low)
            try_dense, dense, end = dense, False, position
            if may_be_dense and try_dense and _looks_dense(r, h_kv, first, rows, limits, scores, origin):
                h, _ = place_row(r, h_kv, first)
                dense = _solve_densely(r, h, rows, low, high, limits, scores, origin, buffers, position) > enough
            if not dense:
                end, total = _solve_rows(r, h_kv, first, rows, first_row, limits, scores, origin, buffers, position)
                dense = may_be_dense and total > enough
                if dense:
                    _make_dense(r, rows, first_row, low, high, columns, position)
            if dense:
                end = _note_dense_rows(r, rows, first_row, low, high - low, position)
                _finish_dense(r, b, h_kv, first, rows, first_row, low, high, position, columns)
            else:
                _finish_sparse(r, b, h_kv, first, rows, first_row, buffers)
            if r.keep != 0:
                position = end
        write_i64(r.progress + 8 * item, DONE)
