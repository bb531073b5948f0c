"""Sixteen rows with few candidates at once, one row per lane.

A short row solved by itself spends its time waiting: every Newton step is a chain of a logarithm, an exponential and a
sum over lanes. With a row in each lane the sixteen chains run side by side, and nothing is summed over lanes.
The iteration is that of `threshold`, without its rough steps.
"""

from __future__ import annotations

import numpy as np

from .jit import jit, jit_inline
from .simd import (
    LANES,
    both,
    count,
    greater,
    load,
    load_index,
    maximum,
    muladd,
    read_i64,
    select,
    splat,
    store,
    store_index,
    write_f32,
    write_i64,
)
from .threshold import PADDING, SMALL_U, keep_support
from .tiles import transpose_block
from .vecmath import TINY, exp, expm1, log

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
#: Rows with at most so many candidates are collected here.
WIDTH = 32
_ROW = 4 * WIDTH
# The buffers of a batch, one behind the other: candidates and columns by row, the same by candidate, then per row u, n, t.
_INDEX = _ROW * LANES
_BY_CANDIDATE = 2 * _INDEX
_WEIGHTS = 3 * _INDEX
_SLOPES = 4 * _INDEX
_U = 5 * _INDEX
_SIZE = _U + 64
_PLACE = _SIZE + 8 * LANES
#: Bytes of scratch for one batch.
BATCH_BYTES = _PLACE + 8 * LANES


@jit_inline
def belongs(n, u):
    """Whether a row is solved here: few candidates, and an alpha without a closed form or a delicate limit."""
    return 1 < n <= WIDTH and SMALL_U <= u < 1.0 and u != 0.5


@jit
def collect(batch, lane, x, index, n, u, place):
    """Put a row into a lane; ``x`` and ``index`` have room for ``n + 32`` elements."""
    store(x + 4 * n, splat(PADDING))
    store(x + 4 * n + 64, splat(PADDING))
    for half in range(2):
        store(batch + _ROW * lane + 64 * half, load(x + 64 * half))
        store_index(batch + _INDEX + _ROW * lane + 64 * half, load_index(index + 64 * half))
    write_f32(batch + _U + 4 * lane, _f(u))
    write_i64(batch + _SIZE + 8 * lane, n)
    write_i64(batch + _PLACE + 8 * lane, place)


@jit
def _iterate(batch, width):
    """Newton's method in all lanes; leaves the weights by candidate."""
    u = load(batch + _U)
    inverse = splat(_ONE) / u
    # As in `threshold`: how small a last step must be to be applied by its first-order effect.
    small = select(greater(u, splat(_f(0.55))), splat(_f(3e-5)), splat(_ONE))
    c = step = splat(_ZERO)
    for _ in range(40):
        c = c + step
        base = splat(_ONE) - u * c
        total, slopes = splat(_ZERO), splat(_ZERO)
        for k in range(width):
            y = maximum(muladd(load(batch + _BY_CANDIDATE + 64 * k), u, base), splat(TINY))
            weight = exp(log(y) * inverse)
            slope = weight / y
            store(batch + _WEIGHTS + 64 * k, weight)
            store(batch + _SLOPES + 64 * k, slope)
            total = total + weight
            slopes = slopes + slope
        step = (splat(_ZERO) - expm1(splat(_ZERO) - u * log(total))) * total / (u * slopes)
        size = maximum(step, splat(_ZERO) - step)
        close = both(greater(splat(_f(1e-3)), size * slopes), greater(small, size))
        if count(close) == LANES:
            break
    for k in range(width):
        weight = load(batch + _WEIGHTS + 64 * k) - step * load(batch + _SLOPES + 64 * k)
        store(batch + _WEIGHTS + 64 * k, maximum(weight, splat(_ZERO)))


@jit
def solve_batch(batch, rows):
    """Solve the first ``rows`` lanes; the weights replace the candidates, row by row."""
    width = 0
    for lane in range(rows):
        width = max(width, read_i64(batch + _SIZE + 8 * lane))
    for lane in range(rows, LANES):
        # An empty lane holds one candidate, whose weight is 1 from the start.
        store(batch + _ROW * lane, splat(PADDING))
        store(batch + _ROW * lane + 64, splat(PADDING))
        write_f32(batch + _ROW * lane, _ZERO)
        write_f32(batch + _U + 4 * lane, _f(0.5))
    halves = 2 if width > LANES else 1
    for half in range(halves):
        transpose_block(batch + 64 * half, _ROW, LANES - 1, batch + _BY_CANDIDATE + 1024 * half, 64)
    _iterate(batch, width)
    for half in range(halves):
        # Rows of the transposed block past ``width`` are stale; `keep_support` does not look at them.
        transpose_block(batch + _WEIGHTS + 1024 * half, 64, LANES - 1, batch + 64 * half, _ROW)


@jit
def row_of_lane(batch, lane):
    """The place given to `collect`."""
    return read_i64(batch + _PLACE + 8 * lane)


@jit
def keep_lane(batch, lane, target):
    """Write the support of a solved lane to ``target``; returns its size."""
    n = read_i64(batch + _SIZE + 8 * lane)
    return keep_support(batch + _ROW * lane, batch + _INDEX + _ROW * lane, n, target)
