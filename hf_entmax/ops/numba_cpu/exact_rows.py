"""The second kernel of exact sparse attention: row by row from bounds on all scores to the output.

Lower bounds give a threshold below the row's own; keys whose lower bound lies above it are read first, and the threshold of
these exact scores is closer still. What can lie above it is read as well, and solved as in dense attention.
"""

from __future__ import annotations

import math

import numpy as np
from numba.np.numpy_support import carray

from hf_entmax.ops.sketch_format import THRESHOLD_ROUNDINGS

from .codes import FLOAT32, widen_row
from .exact_bounds import copy_query, held_row, last_sketched, row_place
from .intrinsics import jit, jit_inline
from .layout import VECTOR
from .scores import MASKED_BELOW, add_terms, candidates, cap, mask_allows, row_limits, row_maximum, term_row
from .simd import (
    LANES, atomic_increment, both, compress, compress_index, count, first_lanes, greater, indices, load, load_bytes,
    load_index, max_lanes, maximum, muladd, read_f32, read_f64, read_i32, read_i64, read_u8, select, splat, store,
    store_index, sum_lanes, write_f32, write_i32, write_i64,
)  # fmt: skip
from .threshold import PADDING, keep_support, solve_row
from .tiles import dots_of_gathered_rows, dots_of_rows, product, sum_rows, zero_floats
from .vecmath import TINY, exp, log

_f = np.float32
_ZERO, _INFINITY = _f(0.0), _f(np.inf)
_MARGIN = THRESHOLD_ROUNDINGS * 2.0**-23
# The sum of weights that proves that a threshold lies below: above 1 by more than its rounding for any alpha with bounds.
_PROOF, _CLOSE = 1.0 + 1e-4, 1.01


@jit
def _sums_at(x, n, u, c):
    """Return S and sum p**(1-u) at c."""
    slope, base, inverse = splat(_f(u)), splat(_f(1.0 - u * c)), splat(_f(1.0 / u))
    total, slopes = splat(_ZERO), splat(_ZERO)
    for k in range(0, n, LANES):
        y = muladd(load(x + 4 * k), slope, base)
        positive = greater(y, splat(TINY))
        y = maximum(y, splat(TINY))
        weight = select(positive, exp(log(y) * inverse), splat(_ZERO))
        total = total + weight
        slopes = slopes + weight / y
    return sum_lanes(total), sum_lanes(slopes)


@jit
def _shift_below(x, n, u):
    """Find a c at or below that of ``n`` scores relative to their maximum: the weights there sum to more than 1."""
    store(x + 4 * n, splat(PADDING))
    low, high = 0.0, -math.expm1(-u * math.log(float(n))) / u
    c = 0.0
    for _ in range(40):
        total, slopes = _sums_at(x, n, u, c)
        if total >= _PROOF:
            low = c
            if total <= _CLOSE:
                break
            c -= total * math.expm1(-u * math.log(total)) / (u * slopes)
            if not c < high:
                c = 0.5 * (low + high)
        else:
            high = c
            c = 0.5 * (low + high)
        if high - low < 1e-6:
            break
    return low


@jit
def _exact_scores(r, b, q, keys, index, n, target, wide):
    """Compute the scores of the keys ``index`` before any term, as dense attention does."""
    row_bytes = VECTOR * r.depth_vectors
    direct = r.key_kind == FLOAT32 and r.key_dim % LANES == 0
    for k in range(0, n, LANES):
        last = min(LANES, n - k) - 1
        if direct:
            rows = index + 4 * k
            if r.tables != 0:
                rows = wide
                for lane in range(last + 1):
                    write_i32(rows + 4 * lane, np.int32(held_row(r, b, np.int64(read_i32(index + 4 * (k + lane))))))
            store(target + 4 * k, dots_of_gathered_rows(q, rows, last, keys, r.k_t, r.depth_vectors))
        else:
            for lane in range(last + 1):
                key = keys + held_row(r, b, np.int64(read_i32(index + 4 * (k + lane)))) * r.k_t
                widen_row(r.key_kind, key, r.key_dim, wide + row_bytes * lane)
            store(target + 4 * k, dots_of_rows(q, 0, last, wide, row_bytes, r.depth_vectors))


@jit
def _add_at(s, index, n, row):
    for k in range(n):
        term = read_f32(row + 4 * np.int64(read_i32(index + 4 * k)))
        write_f32(s + 4 * k, read_f32(s + 4 * k) + term if term > MASKED_BELOW else -_INFINITY)


@jit
def _add_terms_at(r, s, index, n, b, h, i):
    """Apply softcap, position bias and mask to the scores of the keys ``index``."""
    if r.softcap != 0.0:
        cap(s, 0, n, r.softcap)
    if r.bias != 0:
        _add_at(s, index, n, term_row(r.bias, r.bias_b, r.bias_h, r.bias_t, b, h, i))
    if r.mask_kind == 2:
        _add_at(s, index, n, term_row(r.mask, r.mask_b, r.mask_h, r.mask_t, b, h, i))
    elif r.mask_kind == 1:
        row = term_row(r.mask, r.mask_b, r.mask_h, r.mask_t, b, h, i)
        for k in range(n):
            if read_u8(row + np.int64(read_i32(index + 4 * k))) == 0:
                write_f32(s + 4 * k, -_INFINITY)


@jit_inline
def _has_terms(r):
    return r.softcap != 0.0 or r.bias != 0 or r.mask_kind != 0


@jit_inline
def _within(s, j, low, high):
    """Load sixteen scores from column ``j`` on, ``-inf`` outside of the columns [low, high)."""
    value = select(first_lanes(high - j), load(s + 4 * j), splat(-_INFINITY))
    return select(first_lanes(low - j), splat(-_INFINITY), value)


@jit
def _top(exact, n, sink):
    """Return the largest of the exact scores and the sink; NaN where one of them is NaN or infinite."""
    top = row_maximum(exact, 0, n)
    if math.isnan(top) or top > sink:
        return top
    return sink if sink < _INFINITY else _f(np.nan)


@jit
def _top_page(r, s, page, low, high, unknown):
    """Return the largest bound of a page; note in ``unknown`` that there is none."""
    top = splat(-_INFINITY)
    for j in range(page * r.page_size, (page + 1) * r.page_size, LANES):
        value = _within(s, j, low, high)
        if unknown:
            value = select(greater(value, splat(MASKED_BELOW)), splat(_INFINITY), splat(-_INFINITY))
            store(s + 4 * j, value)
        top = maximum(value, top)
    return max_lanes(top)


@jit_inline
def _allowed(kind, row, j):
    """Tell which of sixteen columns a term allows; kind 0: there is none, 1: bool, 2: float."""
    if kind == 0:
        return first_lanes(LANES)
    if kind == 1:
        return load_bytes(row + j)
    return greater(load(row + 4 * j), splat(MASKED_BELOW))


@jit
def _count_visible(r, b, h, i, low, high):
    """Count the columns [low, high) that mask and bias allow, whatever their scores are."""
    bias_kind = 2 if r.bias != 0 else 0
    bias = term_row(r.bias, r.bias_b, r.bias_h, r.bias_t, b, h, i)
    mask = term_row(r.mask, r.mask_b, r.mask_h, r.mask_t, b, h, i)
    if bias_kind == 0 and r.mask_kind == 0:
        return high - low
    visible, j = 0, low
    while j + LANES <= high:
        visible += count(both(_allowed(bias_kind, bias, j), _allowed(r.mask_kind, mask, j)))
        j += LANES
    while j < high:
        if (bias_kind == 0 or mask_allows(2, bias, j)) and (r.mask_kind == 0 or mask_allows(r.mask_kind, mask, j)):
            visible += 1
        j += 1
    return visible


@jit
def _lower_bounds(r, upper, tops, widths, low, high, floor, top, x, index, n):
    """Append all lower bounds above ``floor``, relative to ``top``, and their keys; return how many there are now."""
    shift = splat(top)
    for page in range(low // r.page_size, (high + r.page_size - 1) // r.page_size):
        width = read_f32(widths + 4 * page)
        if read_f32(tops + 4 * page) - width > floor:
            for j in range(page * r.page_size, (page + 1) * r.page_size, LANES):
                value = _within(upper, j, low, high) - splat(width)
                mask = greater(value, splat(floor))
                compress(mask, value - shift, x + 4 * n)
                compress_index(mask, indices(j), index + 4 * n)
                n += count(mask)
    return n


@jit
def _above(r, upper, tops, low, high, floor, found, n):
    """Append the keys whose upper bound lies above ``floor``; return how many there are now."""
    for page in range(low // r.page_size, (high + r.page_size - 1) // r.page_size):
        if read_f32(tops + 4 * page) > floor:
            for j in range(page * r.page_size, (page + 1) * r.page_size, LANES):
                mask = greater(_within(upper, j, low, high), splat(floor))
                compress_index(mask, indices(j), found + 4 * n)
                n += count(mask)
    return n


@jit
def _relative_above(s, n, floor, top, x, m):
    """Append the scores above ``floor``, relative to ``top``; return how many there are now."""
    for k in range(0, n, LANES):
        value = load(s + 4 * k)
        mask = both(greater(value, splat(floor)), first_lanes(n - k))
        compress(mask, value - splat(top), x + 4 * m)
        m += count(mask)
    return m


@jit
def _with_sink(sink, floor, top, x, m):
    if sink > floor:
        write_f32(x + 4 * m, sink - top)
        m += 1
    return m


@jit
def _choose(r, row, u, sink, low, high, q, keys, wide, upper, tops, widths, found, exact, n, x, index):
    """Append to the ``n`` keys found and their scores those of the bounded columns [low, high) that may have weight."""
    b, h, i = row_place(r, row)
    top = _top(exact, n, sink)
    if math.isnan(top):
        return n
    for page in range(low // r.page_size, (high + r.page_size - 1) // r.page_size):
        lower = read_f32(tops + 4 * page) - read_f32(widths + 4 * page)
        top = lower if lower > top else top
    floor = -_INFINITY
    # Above an infinite score nothing is proved: all is read, as in dense attention, and comes out as NaN.
    if MASKED_BELOW < top < _INFINITY:
        reach, margin = 1.0 / u, _MARGIN * (1.0 + abs(top) + 1.0 / u + r.softcap)
        least = _f(top - reach)
        own = _with_sink(sink, least, top, x, _relative_above(exact, n, least, top, x, 0))
        m = _lower_bounds(r, upper, tops, widths, low, high, least, top, x, index, own)
        shift = _shift_below(x, m, u)
        floor = _f(top + shift - reach - margin)
        # Read first what certainly lies above the threshold: its exact scores say more than its lower bounds.
        first = n
        bar = splat(_f(shift - reach))
        for k in range(own, m, LANES):
            mask = both(greater(load(x + 4 * k), bar), first_lanes(m - k))
            compress_index(mask, load_index(index + 4 * k), found + 4 * n)
            n += count(mask)
        if n > first:
            _exact_scores(r, b, q, keys, found + 4 * first, n - first, exact + 4 * first, wide)
            _add_terms_at(r, exact + 4 * first, found + 4 * first, n - first, b, h, i)
            for k in range(first, n):
                write_f32(upper + 4 * np.int64(read_i32(found + 4 * k)), -_INFINITY)
            top = _top(exact, n, sink)
            if math.isnan(top):
                return n
            least = _f(top - reach)
            m = _with_sink(sink, least, top, x, _relative_above(exact, n, least, top, x, 0))
            floor = max(floor, _f(top + _shift_below(x, m, u) - reach - margin))
    first = n
    n = _above(r, upper, tops, low, high, floor, found, n)
    _exact_scores(r, b, q, keys, found + 4 * first, n - first, exact + 4 * first, wide)
    _add_terms_at(r, exact + 4 * first, found + 4 * first, n - first, b, h, i)
    return n


@jit
def _sum_values(r, out, values, index, weights, n, wide):
    """Write the output, the weighted sum of the values of the support."""
    if r.value_kind == FLOAT32 and r.value_dim % LANES == 0:
        sum_rows(out, weights, index, n, values, r.v_t, r.value_vectors)
        return
    row_bytes = VECTOR * r.value_vectors
    zero_floats(out, LANES * r.value_vectors)
    for k in range(0, n, LANES):
        some = min(LANES, n - k)
        for t in range(some):
            value = values + np.int64(read_i32(index + 4 * (k + t))) * r.v_t
            widen_row(r.value_kind, value, r.value_dim, wide + row_bytes * t)
        product(weights + 4 * k, 0, 4, 1, wide, row_bytes, r.value_vectors, out, 0, some, 1)


@jit
def _fill(out, vectors, value):
    for v in range(vectors):
        store(out + VECTOR * v, splat(value))


@jit
def _finish(r, row, u, sink, found, exact, n, x, index, p, other, kept, out, values, wide):
    """Solve the row from the exact scores of ``n`` keys and write its output; return the size of its support."""
    top = _top(exact, n, sink)
    if math.isnan(top):
        _fill(out, r.value_vectors, _f(np.nan))
        return n
    if top <= MASKED_BELOW:
        _fill(out, r.value_vectors, _ZERO)
        return 0
    write_f32(exact + 4 * n, sink)
    write_i32(found + 4 * n, np.int32(-1))
    m = candidates(exact, 0, n + 1, top, u, x, index)
    b, h, _ = row_place(r, row)
    m = solve_row(read_i64(r.solvers + 8 * h), x, index, p, other, m, u)
    size = keep_support(p, index, m, kept)
    support = 0
    for k in range(size):
        key = read_i32(found + 4 * np.int64(read_i32(kept + 4 * k)))
        if key >= 0:
            write_i32(index + 4 * support, np.int32(held_row(r, b, np.int64(key))))
            write_f32(p + 4 * support, read_f32(kept + 4 * (size + k)))
            support += 1
    _sum_values(r, out, values, index, p, support, wide)
    return support


@jit
def _run_row(r, row, scratch):
    b, h, i = row_place(r, row)
    q, wide, lists = scratch, scratch + r.wide_at, scratch + r.rows_at
    x, index, p, other = lists, lists + r.row_bytes, lists + 2 * r.row_bytes, lists + 3 * r.row_bytes
    found, exact, kept = lists + 4 * r.row_bytes, lists + 5 * r.row_bytes, lists + 6 * r.row_bytes
    u = read_f64(r.alpha + 8 * h) - 1.0
    sink = -_INFINITY
    if r.sinks != 0:
        sink = _f(read_f64(r.sinks + 8 * h))
    keys = r.k + b * r.k_b + (h // r.groups) * r.k_h
    copy_query(r, row, q)
    low, high = row_limits(r, b, h, i)
    bounded = low
    if u >= r.least_u:
        bounded = max(low, last_sketched(r, b, high))
    n = high - bounded
    for k in range(0, n, LANES):
        store_index(found + 4 * k, indices(bounded + k))
    _exact_scores(r, b, q, keys, found, n, exact, wide)
    _add_terms_at(r, exact, found, n, b, h, i)
    visible, terms = _count_visible(r, b, h, i, bounded, high), _has_terms(r)
    read, total = visible - n, visible
    if bounded > low:
        total += _count_visible(r, b, h, i, low, bounded)
        upper = r.upper + r.upper_bytes * row
        tops, widths = r.tops + 4 * r.pages * row, r.widths + 4 * r.pages * row
        if terms:
            add_terms(r, upper, b, h, i, low, bounded)
        for page in range(low // r.page_size, (bounded + r.page_size - 1) // r.page_size):
            if terms or page * r.page_size < low or (page + 1) * r.page_size > bounded:
                unknown = read_f32(widths + 4 * page) == _INFINITY
                write_f32(tops + 4 * page, _top_page(r, upper, page, low, bounded, unknown))
        n = _choose(r, row, u, sink, low, bounded, q, keys, wide, upper, tops, widths, found, exact, n, x, index)
    values, out = r.v + b * r.v_b + (h // r.groups) * r.v_h, r.out + b * r.out_b + h * r.out_h + i * r.out_t
    read += n  # of what was found by bounds, all is visible
    write_i64(r.total + 8 * row, total)
    write_i64(r.read + 8 * row, read)
    nonzero = _finish(r, row, u, sink, found, exact, n, x, index, p, other, kept, out, values, wide)
    write_i64(r.nonzero + 8 * row, min(read, nonzero))


def run_exact_rows(record):
    """Take rows until none is left."""
    r = carray(record, 1)[0]
    scratch = r.scratch + atomic_increment(r.counters + 8) * r.scratch_bytes
    while True:
        row = atomic_increment(r.counters)
        if row >= r.batch * r.heads * r.queries:
            return
        _run_row(r, row, scratch)
