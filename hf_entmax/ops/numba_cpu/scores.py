"""One row of scores before the mapping: its limits, the terms added to it, its maximum and its candidates.

``s`` is always the address that column 0 would have, so column j lies at ``s + 4 j`` although only a range is held.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import jit, jit_inline
from .layout import ROW_LIMITS
from .simd import (
    LANES, both, compress, compress_index, count, either, first_lanes, greater, indices, is_nan, load, load_bytes,
    max_lanes, maximum, no_lanes, read_f32, read_i32, read_i64, read_u8, select, splat, store, write_f32,
)  # fmt: skip
from .vecmath import tanh

_f = np.float32
_MINUS_INFINITY = _f(-np.inf)
#: A score or an additive term at or below half of finfo.min forbids the entry, as on the torch path.
MASKED_BELOW = _f(np.finfo(np.float32).min / 2)
# exp(-104) is 0 in float32, and no alpha above 1 gives more mass than softmax that far below the maximum.
_DEEPEST = 104.0


@jit_inline
def term_row(address, stride_b, stride_h, stride_t, b, h, i):
    """Return the address at which the row of an additive term or mask begins."""
    return address + b * stride_b + h * stride_h + i * stride_t


@jit_inline
def mask_allows(kind, row, j):
    """Tell whether a term allows column j; kind 1 is bool, 2 float."""
    if kind == 1:
        return read_u8(row + j) != 0
    return read_f32(row + 4 * j) > MASKED_BELOW


@jit_inline
def _mask_allows_any(kind, row, j):
    if kind == 1:
        return count(load_bytes(row + j)) > 0
    return count(greater(load(row + 4 * j), splat(MASKED_BELOW))) > 0


@jit
def row_limits(r, b, h, i):
    """Return the columns [low, high) outside of which row i may certainly not look."""
    low, high = 0, r.keys
    if r.key_limits != 0:
        low = np.int64(read_i32(r.key_limits + 8 * b))
        high = np.int64(read_i32(r.key_limits + 8 * b + 4))
    offset = r.keys - r.queries
    if r.causal != 0:
        high = min(high, i + offset + 1)
    if r.window != 0:
        low = max(low, i + offset - r.window + 1)
    if r.mask_kind != 0:
        # Padding and causal limits handed over as a dense mask: skip what it forbids at both ends.
        row = term_row(r.mask, r.mask_b, r.mask_h, r.mask_t, b, h, i)
        while high - LANES >= low and not _mask_allows_any(r.mask_kind, row, high - LANES):
            high -= LANES
        while high > low and not mask_allows(r.mask_kind, row, high - 1):
            high -= 1
        while low + LANES <= high and not _mask_allows_any(r.mask_kind, row, low):
            low += LANES
        while low < high and not mask_allows(r.mask_kind, row, low):
            low += 1
    return low, max(low, high)


@jit_inline
def noted_limits(limits, t):
    """Return the first column, one past the last, and the maximum of a row of a block."""
    place = limits + ROW_LIMITS * t
    return read_i64(place), read_i64(place + 8), read_f32(place + 16)


@jit
def cap(s, low, high, softcap):
    """Apply the softcap in place to the columns [low, high) and up to a vector more."""
    inverse, factor = splat(_f(1.0 / softcap)), splat(_f(softcap))
    for j in range(low, high, LANES):
        store(s + 4 * j, tanh(load(s + 4 * j) * inverse) * factor)


@jit
def _add(s, low, high, row):
    j = low
    while j + LANES <= high:
        term = load(row + 4 * j)
        allowed = greater(term, splat(MASKED_BELOW))
        store(s + 4 * j, select(allowed, load(s + 4 * j) + term, splat(_MINUS_INFINITY)))
        j += LANES
    while j < high:
        term = read_f32(row + 4 * j)
        write_f32(s + 4 * j, read_f32(s + 4 * j) + term if term > MASKED_BELOW else _MINUS_INFINITY)
        j += 1


@jit
def _forbid(s, low, high, row):
    j = low
    while j + LANES <= high:
        store(s + 4 * j, select(load_bytes(row + j), load(s + 4 * j), splat(_MINUS_INFINITY)))
        j += LANES
    while j < high:
        if read_u8(row + j) == 0:
            write_f32(s + 4 * j, _MINUS_INFINITY)
        j += 1


@jit
def add_terms(r, s, b, h, i, low, high):
    """Apply softcap, then position bias and mask, in place to the columns [low, high)."""
    if r.softcap != 0.0:
        cap(s, low, high, r.softcap)
    if r.bias != 0:
        _add(s, low, high, term_row(r.bias, r.bias_b, r.bias_h, r.bias_t, b, h, i))
    if r.mask_kind == 1:
        _forbid(s, low, high, term_row(r.mask, r.mask_b, r.mask_h, r.mask_t, b, h, i))
    elif r.mask_kind == 2:
        _add(s, low, high, term_row(r.mask, r.mask_b, r.mask_h, r.mask_t, b, h, i))


@jit
def row_maximum(s, low, high):
    """Return the largest score; NaN when a score is NaN or +inf, -inf when there is none."""
    m0 = m1 = m2 = m3 = splat(_MINUS_INFINITY)
    bad = no_lanes()
    j = low
    while j + 4 * LANES <= high:
        # Four running maxima: one would wait for itself at every step.
        v0, v1 = load(s + 4 * j), load(s + 4 * j + 64)
        v2, v3 = load(s + 4 * j + 128), load(s + 4 * j + 192)
        m0, m1, m2, m3 = maximum(v0, m0), maximum(v1, m1), maximum(v2, m2), maximum(v3, m3)
        bad = either(bad, either(either(is_nan(v0), is_nan(v1)), either(is_nan(v2), is_nan(v3))))
        j += 4 * LANES
    while j < high:
        v = select(first_lanes(high - j), load(s + 4 * j), splat(_MINUS_INFINITY))
        m0 = maximum(v, m0)
        bad = either(bad, is_nan(v))
        j += LANES
    top = max_lanes(maximum(maximum(m0, m1), maximum(m2, m3)))
    if count(bad) > 0 or top == _f(np.inf):
        return _f(np.nan)
    return top


@jit_inline
def _reach(u):
    return 1.0 / u if u * _DEEPEST > 1.0 else _DEEPEST


@jit
def count_candidates(s, low, high, top, u):
    """Count the scores above ``top - 1/u``."""
    floor = splat(_f(top - _reach(u)))
    n = 0
    j = low
    while j + LANES <= high:
        n += count(greater(load(s + 4 * j), floor))
        j += LANES
    if j < high:
        n += count(both(first_lanes(high - j), greater(load(s + 4 * j), floor)))
    return n


@jit
def relative(s, low, high, top, x):
    """Copy the scores of a row, relative to ``top``, to ``x``."""
    shift = splat(top)
    for j in range(low, high, LANES):
        store(x + 4 * (j - low), load(s + 4 * j) - shift)


@jit
def candidates(s, low, high, top, u, x, index):
    """Collect the scores above ``top - 1/u`` relative to ``top``, and their columns; return how many."""
    shift = splat(top)
    floor = splat(_f(-_reach(u)))
    n = 0
    j = low
    while j < high:
        value = load(s + 4 * j) - shift
        if high - j < LANES:
            value = select(first_lanes(high - j), value, splat(_MINUS_INFINITY))
        mask = greater(value, floor)
        compress(mask, value, x + 4 * n)
        compress_index(mask, indices(j), index + 4 * n)
        n += count(mask)
        j += LANES
    return n
