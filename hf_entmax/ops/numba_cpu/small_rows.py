"""Sixteen rows with few candidates at once, one row per lane.

A short row solved by itself spends its time waiting: every Newton step is a chain of a logarithm, an exponential and a
sum over lanes. With a row in each lane the sixteen chains run side by side, and nothing is summed over lanes.
The iteration is that of `threshold`, without its rough steps.
"""

from __future__ import annotations

import numpy as np

from . import solvers
from .jit import jit, jit_inline
from .layout import (
    BATCH_BY_CANDIDATE,
    BATCH_INDEX,
    BATCH_PLACE,
    BATCH_ROW,
    BATCH_SIZE,
    BATCH_SLOPES,
    BATCH_U,
    BATCH_WEIGHTS,
    BATCH_WIDTH,
)
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
from .threshold import PADDING, keep_support
from .tiles import transpose_block
from .vecmath import TINY, exp, expm1, log

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
_solved_in_batches = jit(solvers.solved_in_batches)


@jit_inline
def belongs(n, u):
    """Whether a row is solved here."""
    return 1 < n <= BATCH_WIDTH and _solved_in_batches(u)


@jit
def collect(batch, lane, x, index, n, u, place):
    """Put a row into a lane; ``x`` and ``index`` have room for ``n + 32`` elements."""
    store(x + 4 * n, splat(PADDING))
    store(x + 4 * n + 64, splat(PADDING))
    for half in range(2):
        store(batch + BATCH_ROW * lane + 64 * half, load(x + 64 * half))
        store_index(batch + BATCH_INDEX + BATCH_ROW * lane + 64 * half, load_index(index + 64 * half))
    write_f32(batch + BATCH_U + 4 * lane, _f(u))
    write_i64(batch + BATCH_SIZE + 8 * lane, n)
    write_i64(batch + BATCH_PLACE + 8 * lane, place)


@jit
def _iterate(batch, width):
    """Newton's method in all lanes; leaves the weights by candidate."""
    u = load(batch + BATCH_U)
    inverse = splat(_ONE) / u
    # As in `threshold`: how small a last step must be to be applied by its first-order effect.
    small = select(greater(u, splat(_f(0.55))), splat(_f(3e-5)), splat(_ONE))
    c = step = splat(_ZERO)
    for _ in range(40):
        c = c + step
        base = splat(_ONE) - u * c
        total, slopes = splat(_ZERO), splat(_ZERO)
        for k in range(width):
            y = maximum(muladd(load(batch + BATCH_BY_CANDIDATE + 64 * k), u, base), splat(TINY))
            weight = exp(log(y) * inverse)
            slope = weight / y
            store(batch + BATCH_WEIGHTS + 64 * k, weight)
            store(batch + BATCH_SLOPES + 64 * k, slope)
            total = total + weight
            slopes = slopes + slope
        step = (splat(_ZERO) - expm1(splat(_ZERO) - u * log(total))) * total / (u * slopes)
        size = maximum(step, splat(_ZERO) - step)
        close = both(greater(splat(_f(1e-3)), size * slopes), greater(small, size))
        if count(close) == LANES:
            break
    for k in range(width):
        weight = load(batch + BATCH_WEIGHTS + 64 * k) - step * load(batch + BATCH_SLOPES + 64 * k)
        store(batch + BATCH_WEIGHTS + 64 * k, maximum(weight, splat(_ZERO)))


def solve_batch(batch, rows):
    """Solve the first ``rows`` lanes; the weights replace the candidates, row by row."""
    width = 0
    for lane in range(rows):
        width = max(width, read_i64(batch + BATCH_SIZE + 8 * lane))
    for lane in range(rows, LANES):
        # An empty lane holds one candidate, whose weight is 1 from the start.
        store(batch + BATCH_ROW * lane, splat(PADDING))
        store(batch + BATCH_ROW * lane + 64, splat(PADDING))
        write_f32(batch + BATCH_ROW * lane, _ZERO)
        write_f32(batch + BATCH_U + 4 * lane, _f(0.5))
    halves = 2 if width > LANES else 1
    for half in range(halves):
        transpose_block(batch + 64 * half, BATCH_ROW, LANES - 1, batch + BATCH_BY_CANDIDATE + 1024 * half, 64)
    _iterate(batch, width)
    for half in range(halves):
        # Rows of the transposed block past ``width`` are stale; `keep_support` does not look at them.
        transpose_block(batch + BATCH_WEIGHTS + 1024 * half, 64, LANES - 1, batch + 64 * half, BATCH_ROW)


@jit
def row_of_lane(batch, lane):
    """The place given to `collect`."""
    return read_i64(batch + BATCH_PLACE + 8 * lane)


@jit
def keep_lane(batch, lane, target):
    """Write the support of a solved lane to ``target``; returns its size."""
    n = read_i64(batch + BATCH_SIZE + 8 * lane)
    return keep_support(batch + BATCH_ROW * lane, batch + BATCH_INDEX + BATCH_ROW * lane, n, target)
