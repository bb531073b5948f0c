"""The first kernel of exact sparse attention: upper bounds of all scores from the sketch of the keys.

Of a page, ``s_i = base + w . code_i`` up to ``|w| / 2`` in every channel, with ``w = q step``. The weights are split into
int8 parts, so that their products with the codes are sums of integers, sixty-four at a time; what the parts do not hold is taken
for that of the middle code, and half the range of the codes is added to the width. See `hf_entmax.ops.exact.bounds`.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from hf_entmax.ops.sketch_format import HALF_STEP

from .codes import load_float16, magnitude, make_page, store_as_bytes
from .intrinsics import jit, jit_as, jit_inline
from .layout import BOUND_ROWS, LANES, VECTOR, WEIGHT_PLANES
from .scores import row_limits
from .simd import (
    atomic_increment, load, max_lanes, maximum, muladd, prefetch, read_f32, read_f64, read_i32, round_nearest, splat, store,
    sum_lanes,
    write_f32,
)  # fmt: skip
from .tiles import copy_scaled

_f = np.float32
_ZERO, _INFINITY = _f(0.0), _f(np.inf)
# Weights below this are not divided by: what they contribute is in the width.
_LEAST_WEIGHT = _f(1e-30)


@jit
def row_place(r, row):
    """Return batch, query head and query of one of the rows [B, H, T_q]."""
    return row // r.queries // r.heads, row // r.queries % r.heads, row % r.queries


@jit_inline
def _block(r, b, number):
    return np.int64(read_i32(r.tables + b * r.table_bytes + 4 * number))


@jit_inline
def held_row(r, b, j):
    """The row of the buffer where key j of a sequence lies."""
    if r.tables == 0:
        return j
    return _block(r, b, j >> r.block_shift) * r.block_stride + (j & ((1 << r.block_shift) - 1))


@jit_inline
def _held_page(r, b, page):
    """The place of a page in the sketch: that of its block, and in it its own."""
    if r.tables == 0:
        return page
    shift = r.block_shift - r.page_shift
    return (_block(r, b, page >> shift) << shift) + (page & ((1 << shift) - 1))


@jit_inline
def last_sketched(r, b, high):
    """One past the last key before ``high`` that has a sketch."""
    if r.sketched != 0:
        return min(high, np.int64(read_i32(r.sketched + 4 * b)))
    return min(high, r.pages * r.page_size)


@jit
def copy_query(r, row, target):
    """Copy the query of a row and scale it."""
    b, h, i = row_place(r, row)
    copy_scaled(r.q + b * r.q_b + h * r.q_h + i * r.q_t, target, r.depth_vectors, _f(r.scaling))


@jit
def _query_norm(q, vectors):
    total = splat(_f(1e-38))
    for v in range(vectors):
        value = load(q + VECTOR * v)
        total = muladd(value, value, total)
    return _f(np.sqrt(sum_lanes(total)))


def _make_row(parts, levels):
    middle = _f(0.5 * levels)

    @jit_as(f"prepare_row_{parts}_{levels}")
    def prepare_row(q, low, step, slack, weights, line, scalars, products, vectors):
        """Write weights and scalars of a row for a page; return the distance of the lower bounds from the upper ones."""
        base, width, largest = splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for v in range(vectors):
            query = load(q + VECTOR * v)
            product = query * load_float16(step + 32 * v)
            store(products + VECTOR * v, product)
            base = muladd(query, load_float16(low + 32 * v), base)
            size = magnitude(product)
            width = width + size
            largest = maximum(size, largest)
        top = max_lanes(largest)
        inverse, scale = _ZERO, _ZERO
        if top > _LEAST_WEIGHT:
            inverse, scale = _f(127.0) / top, top / _f(127.0)
        rest, error = splat(_ZERO), splat(_ZERO)
        for v in range(vectors):
            product = load(products + VECTOR * v)
            whole = round_nearest(product * splat(inverse))
            left = product - whole * splat(scale)
            store_as_bytes(weights + LANES * v, whole)
            if parts == 2:
                whole = round_nearest(left * splat(inverse * _f(254.0)))
                left = left - whole * splat(scale / _f(254.0))
                store_as_bytes(weights + line + LANES * v, whole)
            rest = rest + left
            error = error + magnitude(left)
        half = sum_lanes(muladd(width, splat(_f(HALF_STEP)), error * splat(middle))) + slack
        offset = sum_lanes(muladd(rest, splat(middle), base)) + half
        write_f32(scalars, offset)
        write_f32(scalars + 4, scale)
        write_f32(scalars + 8, scale / _f(254.0))
        # NaN too means that nothing is known.
        if not (half + abs(offset) < _INFINITY):
            return _INFINITY
        return half + half

    return prepare_row


def _make_bounds(bits):
    parts, prepare_row = WEIGHT_PLANES[bits], _make_row(WEIGHT_PLANES[bits], 2**bits - 1)
    page_1, page_2, page_3, page_4 = (make_page(bits, rows) for rows in range(1, BOUND_ROWS + 1))

    @jit_as(f"bound_page_{bits}")
    def bound_page(r, b, h_kv, page, first_row, rows, q, norms, scratch):
        """Write the bounds of a page for at most BOUND_ROWS rows."""
        line = LANES * r.depth_vectors
        weights, scalars, tops = scratch + r.weights_at, scratch + r.scalars_at, scratch + r.tops_at
        products = scratch + r.weights_at - VECTOR * r.depth_vectors
        held = _held_page(r, b, page)
        place = b * r.low_b + h_kv * r.low_h + 2 * line * held
        norm = read_f32(r.norm + b * r.norm_b + h_kv * r.norm_h + 4 * held)
        for t in range(rows):
            slack = norm * read_f32(norms + 4 * t)
            width = prepare_row(
                q + VECTOR * r.depth_vectors * t,
                r.low + place,
                r.step + place,
                slack,
                weights + parts * line * t,
                line,
                scalars + 16 * t,
                products,
                r.depth_vectors,
            )
            write_f32(r.widths + 4 * ((first_row + t) * r.pages + page), width)
        codes = r.codes + b * r.codes_b + h_kv * r.codes_h + held * r.page_size * line * bits // 8
        target, blocks, quads = (
            r.upper + r.upper_bytes * first_row + 4 * r.page_size * page,
            r.page_size // LANES,
            line // 4,
        )
        if rows == 1:
            page_1(codes, blocks, quads, weights, line, scalars, target, r.upper_bytes, tops)
        elif rows == 2:
            page_2(codes, blocks, quads, weights, line, scalars, target, r.upper_bytes, tops)
        elif rows == 3:
            page_3(codes, blocks, quads, weights, line, scalars, target, r.upper_bytes, tops)
        else:
            page_4(codes, blocks, quads, weights, line, scalars, target, r.upper_bytes, tops)
        for t in range(rows):
            place = 4 * ((first_row + t) * r.pages + page)
            top = max_lanes(load(tops + VECTOR * t))
            if read_f32(r.widths + place) == _INFINITY:
                top = _INFINITY
                for j in range(0, r.page_size, LANES):
                    store(target + r.upper_bytes * t + 4 * j, splat(_INFINITY))
            write_f32(r.tops + place, top)

    return bound_page


#: Pages before its turn that a page is asked for, and bytes that come at a time. Sketches of many sequences lie in main memory.
_AHEAD, _LINE = 2, 64


@jit
def _ask_for_page(r, b, h_kv, page, code_bytes):
    """Have the sketch of a page on its way before its turn comes: in blocks the next page often lies elsewhere."""
    held, row_bytes = _held_page(r, b, page), 2 * LANES * r.depth_vectors
    codes = r.codes + b * r.codes_b + h_kv * r.codes_h + held * code_bytes
    for place in range(0, code_bytes, _LINE):
        prefetch(codes + place)
    place = b * r.low_b + h_kv * r.low_h + held * row_bytes
    for byte in range(0, row_bytes, _LINE):
        prefetch(r.low + place + byte)
        prefetch(r.step + place + byte)
    prefetch(r.norm + b * r.norm_b + h_kv * r.norm_h + 4 * held)


@jit
def _visible_pages(r, b, h_kv, first_row, rows):
    """Return the range of the sketched pages that any of the rows may look at."""
    low, high = r.pages * r.page_size, 0
    for t in range(rows):
        _, h, i = row_place(r, first_row + t)
        if read_f64(r.alpha + 8 * h) - 1.0 < r.least_u:
            continue
        row_low, row_high = row_limits(r, b, h, i)
        if row_high > row_low:
            low, high = min(low, row_low), max(high, row_high)
    return low // r.page_size, (last_sketched(r, b, high) + r.page_size - 1) // r.page_size


def _make_run(bits):
    bound_page = _make_bounds(bits)

    @jit_as(f"run_{bits}")
    def run(r):
        scratch = r.scratch + atomic_increment(r.counters + 8) * r.scratch_bytes
        norms, rows = scratch + r.norms_at, r.groups * r.queries
        while True:
            item = atomic_increment(r.counters)
            if item >= r.batch * r.kv_heads * r.chunks:
                return
            pair, chunk = item // r.chunks, item % r.chunks
            b, h_kv, first_row = pair // r.kv_heads, pair % r.kv_heads, pair * rows
            first, last = _visible_pages(r, b, h_kv, first_row, rows)
            first, last = max(first, chunk * r.pages // r.chunks), min(last, (chunk + 1) * r.pages // r.chunks)
            for t in range(rows):
                q = scratch + VECTOR * r.depth_vectors * t
                copy_query(r, first_row + t, q)
                write_f32(norms + 4 * t, _query_norm(q, r.depth_vectors) * _f(r.rounding))
            code_bytes = r.page_size * LANES * r.depth_vectors * bits // 8
            for page in range(first, last):
                if page + _AHEAD < last:
                    _ask_for_page(r, b, h_kv, page + _AHEAD, code_bytes)
                for t in range(0, rows, BOUND_ROWS):
                    q = scratch + VECTOR * r.depth_vectors * t
                    some = min(BOUND_ROWS, rows - t)
                    bound_page(r, b, h_kv, page, first_row + t, some, q, norms + 4 * t, scratch)

    return run


_run_2, _run_4, _run_6, _run_8 = (_make_run(bits) for bits in (2, 4, 6, 8))


def run_bounds_2(record):
    _run_2(carray(record, 1)[0])


def run_bounds_4(record):
    _run_4(carray(record, 1)[0])


def run_bounds_6(record):
    _run_6(carray(record, 1)[0])


def run_bounds_8(record):
    _run_8(carray(record, 1)[0])
