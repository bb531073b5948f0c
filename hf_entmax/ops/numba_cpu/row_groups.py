r"""Rows solved sixteen at a time: short ones, one per lane, and full ones, side by side.

One row by itself is a chain: a sum over its scores, a logarithm, an exponential, the next sum. Here sixteen chains run at once.

Short rows have few candidates. With a row in each lane nothing is summed over lanes; the iteration is that of `threshold`,
without its rough steps.

Of full rows nearly every score is a candidate, as for small u. Each phase runs over sixteen rows where they stand, and their
sums are finished side by side. The iteration is that of `threshold._solve_near_softmax`, started from mean and variance.
Nothing is compacted: a row that ends up sparse is solved again by the other way.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import jit, jit_inline
from .layout import (
    BATCH_BY_CANDIDATE, BATCH_INDEX, BATCH_PLACE, BATCH_ROW, BATCH_SIZE, BATCH_SLOPES, BATCH_U, BATCH_WEIGHTS,
    BATCH_WIDTH, GROUP_BYTES, GROUP_COUNT, GROUP_SHIFT, GROUP_STEP, GROUP_SUMS, ROW_LIMITS,
)  # fmt: skip
from .scores import noted_limits
from .simd import (
    LANES, both, count, first_lanes, greater, load, load_index, maximum, muladd, read_f32, read_i64, select, splat,
    store, store_index, write_f32, write_i64,
)  # fmt: skip
from .threshold import EXPAND_BELOW, PADDING, expand_last_step, keep_support, moments_near_softmax, solved_as_short_rows
from .tiles import row_sums, transpose_block
from .vecmath import TINY, exp, expm1, log

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
_MINUS_INFINITY = _f(-np.inf)
# Relative scores below this are forbidden entries.
_FORBIDDEN = _f(-1e30)
_takes_short_rows = jit(solved_as_short_rows)


@jit_inline
def belongs(n, u):
    """Tell whether a row is a short one."""
    return 1 < n <= BATCH_WIDTH and _takes_short_rows(u)


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
    """Run Newton's method in all lanes; leave the weights by candidate."""
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


def solve_short_rows(batch, rows):
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
    """Return the place given to `collect`."""
    return read_i64(batch + BATCH_PLACE + 8 * lane)


@jit
def keep_lane(batch, lane, target):
    """Write the support of a solved lane to ``target``; return its size."""
    n = read_i64(batch + BATCH_SIZE + 8 * lane)
    return keep_support(batch + BATCH_ROW * lane, batch + BATCH_INDEX + BATCH_ROW * lane, n, target)


@jit
def _sum_scores(s, columns, top, place):
    """Write sum and sum of squares of the allowed scores relative to ``top``, by lane; return how many there are."""
    shift, lowest = splat(top), splat(_FORBIDDEN)
    total, squares, n = splat(_ZERO), splat(_ZERO), 0
    for j in range(0, columns, LANES):
        value = load(s + 4 * j) - shift
        allowed = greater(value, lowest)
        value = select(allowed, value, splat(_ZERO))
        total = total + value
        squares = muladd(value, value, squares)
        n += count(allowed)
    store(place, total)
    store(place + GROUP_SUMS, squares)
    return n


@jit
def _start(group, u):
    """Write the first c of every row, as `threshold._start` does."""
    n = load(group + GROUP_COUNT)
    slope = splat(_f(u))
    mean = row_sums(group) / n
    variance = maximum(row_sums(group + GROUP_SUMS) / n - mean * mean, splat(_ZERO))
    shrunk = expm1(splat(_ZERO) - slope * log(n))
    share = splat(_ONE) + shrunk
    curvature = splat(_f(0.5 * (1.0 - u))) * variance / (share * share)
    second = select(greater(splat(_ONE), curvature), curvature * share, splat(_ZERO))
    store(group + GROUP_SHIFT, maximum(mean - shrunk / slope + second, splat(_ZERO)))


@jit
def _steps(group, rows, u):
    """Take the Newton step of every row, refined where it is the last one; return whether it is that for all rows."""
    s0, s1 = row_sums(group), row_sums(group + GROUP_SUMS)
    s2, s3 = row_sums(group + 2 * GROUP_SUMS), row_sums(group + 3 * GROUP_SUMS)
    slope = splat(_f(u))
    step = (splat(_ZERO) - expm1(splat(_ZERO) - slope * log(s0))) * s0 / (slope * s1)
    size = maximum(step, splat(_ZERO) - step) * s1
    last = count(both(greater(splat(EXPAND_BELOW) * s0, size), first_lanes(rows))) == rows
    if last:
        second, third = splat(_f(0.5 * (1.0 - u))) * s2, splat(_f((1.0 - u) * (1.0 - 2.0 * u) / 6.0)) * s3
        for _ in range(2):
            excess = s0 - splat(_ONE) - step * (s1 - step * (second - step * third))
            step = step + excess / (s1 - step * (second + second - splat(_f(3.0)) * step * third))
    store(group + GROUP_STEP, step)
    if not last:
        store(group + GROUP_SHIFT, load(group + GROUP_SHIFT) + step)
    return last


@jit
def _columns(limits, low, t):
    """Return the first column (whole vectors after ``low``) and one past the last of a row."""
    row_low, high, _ = noted_limits(limits, t)
    return low + (row_low - low) // LANES * LANES, high


def solve_full_rows(limits, scores, span, rows, low, u, p, p_row, group, row_bytes):
    """Solve up to sixteen full rows.

    Args:
        limits: address of the rows' first column, one past the last, and maximum (`layout.ROW_LIMITS` bytes a row).
        scores: address that column 0 of the first row would have; the next rows follow every ``span`` bytes. Columns that
            share a vector with a row's own are overwritten.
        span: see ``scores``.
        rows: how many rows.
        low: the column of ``p``, at or before all first columns.
        u: alpha - 1, in (1e-8, 0.25).
        p: address of the weights to write; the next rows follow every ``p_row`` bytes.
        p_row: see ``p``.
        group: address of ``GROUP_BYTES`` of scratch and ``row_bytes`` for each row.
        row_bytes: room for the columns of a row in whole vectors.

    Returns:
        Whether the rows were solved; if not, ``p`` holds nothing of use.
    """
    for t in range(rows):
        begin, high = _columns(limits, low, t)
        line = scores + span * t
        for j in range(begin, read_i64(limits + ROW_LIMITS * t)):
            write_f32(line + 4 * j, _MINUS_INFINITY)
        store(line + 4 * high, splat(_MINUS_INFINITY))
        top = read_f32(limits + ROW_LIMITS * t + 16)
        n = _sum_scores(line + 4 * begin, high - begin, top, group + 64 * t)
        write_f32(group + GROUP_COUNT + 4 * t, _f(n))
    _start(group, u)
    for _ in range(12):
        for t in range(rows):
            begin, high = _columns(limits, low, t)
            top, c = read_f32(limits + ROW_LIMITS * t + 16), read_f32(group + GROUP_SHIFT + 4 * t)
            place, inverses = p + p_row * t + 4 * (begin - low), group + GROUP_BYTES + row_bytes * t
            line, sums = scores + span * t + 4 * begin, group + 64 * t
            s0, s1, s2, s3 = moments_near_softmax(line, place, inverses, high - begin, u, top, c)
            store(sums, s0)
            store(sums + GROUP_SUMS, s1)
            store(sums + 2 * GROUP_SUMS, s2)
            store(sums + 3 * GROUP_SUMS, s3)
        if _steps(group, rows, u):
            for t in range(rows):
                begin, high = _columns(limits, low, t)
                place, inverses = p + p_row * t + 4 * (begin - low), group + GROUP_BYTES + row_bytes * t
                step = float(read_f32(group + GROUP_STEP + 4 * t))
                expand_last_step(place, inverses, high - begin, u, step)
            return 1
    return 0
