r"""Kernels for independent rows of scores, as a loss over a vocabulary has them: solve, write down, recompute.

Solving a row leaves its support in a slot of its own (columns, then weights), next to four numbers: the maximum ``m``,
the shift ``c`` of ``p_i = [1 + u (z_i - m - c)]_+ ** (1/u)``, the factor that makes the weights sum to 1, and the
conjugate ``max_p p.(z - m) + H(p)``. What the slots hold is then written to where it is needed, dense or sparse.
"""

from __future__ import annotations

import math

import numpy as np
from numba.np.numpy_support import carray

from .intrinsics import call_short_rows, jit, jit_inline
from .row_groups import belongs, collect, keep_lane, row_of_lane
from .scores import candidates, row_maximum
from .simd import (
    LANES, atomic_increment, first_lanes, greater, load, max_lanes, maximum, muladd, read_f32, read_f64, read_i32,
    read_i64, select, splat, store, sum_lanes, write_f32, write_f64, write_i32, write_i64,
)  # fmt: skip
from .threshold import LOWEST_Y, SMALL_U, SOFTMAX_U, keep_support, solve_row
from .tiles import zero_floats
from .vecmath import TINY, exp, log

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
_MINUS_INFINITY = _f(-np.inf)
# Lanes are summed in float32 over so many vectors, then in float64.
_STRETCH = 64 * LANES


@jit
def _copy_tail(s, whole, length, tail):
    """Copy the entries that fill no vector, and fill that up with -inf: a load past the last row might leave its memory page."""
    store(tail, splat(_MINUS_INFINITY))
    for j in range(whole, length):
        write_f32(tail + 4 * (j - whole), read_f32(s + 4 * j))


@jit
def _top(s, whole, length, tail):
    """Return the maximum of a row, as `scores.row_maximum` does."""
    top = row_maximum(s, 0, whole)
    if whole == length or math.isnan(top):
        return top
    other = row_maximum(tail - 4 * whole, whole, length)
    return top if other <= top else other


@jit
def _candidates(s, whole, length, tail, top, u, x, index):
    n = candidates(s, 0, whole, top, u, x, index)
    if whole < length:
        n += candidates(tail - 4 * whole, whole, length, top, u, x + 4 * n, index + 4 * n)
    return n


@jit
def _sums(weights, n, x, s, index, top):
    """Sum the weights and ``weight * (z - m)`` of a support; ``x`` (or 0: looked up in ``s``) are its ``z - m``."""
    total, expected = 0.0, 0.0
    if x == 0:
        for k in range(n):
            weight = float(read_f32(weights + 4 * k))
            total += weight
            expected += weight * float(read_f32(s + 4 * np.int64(read_i32(index + 4 * k))) - top)
        return total, expected
    for start in range(0, n, _STRETCH):
        a, b = splat(_ZERO), splat(_ZERO)
        for k in range(start, min(start + _STRETCH, n), LANES):
            there = first_lanes(n - k)
            weight = select(there, load(weights + 4 * k), splat(_ZERO))
            a = a + weight
            b = muladd(weight, select(there, load(x + 4 * k), splat(_ZERO)), b)
        total += sum_lanes(a)
        expected += sum_lanes(b)
    return total, expected


@jit
def _note(r, row, n, u, top, weight, score, total, expected):
    """Write down a row's numbers; the shift from one of its weights and the ``z - m`` of that.

    The conjugate is the objective at the weights divided by their sum S, so that an error of S enters squared:
    ``sum p^(1+u) = S (1 - u c) + u sum p (z - m)`` for the weights p before the division.
    """
    log_total = math.log(total)
    if u < SOFTMAX_U:
        shift = score - math.log(weight)
        entropy = log_total + shift - expected / total
    else:
        shift = score - math.expm1(u * math.log(weight)) / u
        shrunk = math.expm1(-u * log_total)
        entropy = ((1.0 + shrunk) * (shift - expected / total) - shrunk / u) / (1.0 + u)
    write_i64(r.counts + 8 * row, n)
    write_f32(r.maximum + 4 * row, top)
    write_f64(r.shift + 8 * row, shift)
    write_f32(r.scale + 4 * row, _f(1.0 / total))
    write_f64(r.conjugate + 8 * row, expected / total + entropy)


@jit
def _note_nothing(r, row, n, top):
    """Write down a row of -inf (``n = 0``) or one that holds NaN or +inf (all its weights are NaN)."""
    nothing = _ZERO if n == 0 else _f(np.nan)
    write_i64(r.counts + 8 * row, n)
    write_f32(r.maximum + 4 * row, top)
    write_f64(r.shift + 8 * row, nothing)
    write_f32(r.scale + 4 * row, nothing)
    write_f64(r.conjugate + 8 * row, nothing)
    slot = r.slots + r.slot_bytes * row
    for k in range(n):
        write_i32(slot + 4 * k, np.int32(k))
        write_f32(slot + 4 * (n + k), nothing)


@jit
def _largest(weights, n):
    """Return the largest weight, that of the largest score."""
    best = splat(_ZERO)
    for k in range(0, n, LANES):
        best = maximum(select(first_lanes(n - k), load(weights + 4 * k), splat(_ZERO)), best)
    return float(max_lanes(best))


@jit
def _smallest(weights, x, n):
    """Return the smallest weight above 0 and its score: for ``u > 1`` the shift is known best from there."""
    least, score = np.inf, 0.0
    for k in range(n):
        weight = float(read_f32(weights + 4 * k))
        if 0.0 < weight < least:
            least, score = weight, float(read_f32(x + 4 * k))
    return least, score


@jit
def _u(r, row):
    return read_f64(r.u + r.u_step * row)


@jit
def _solve_item(r, first, last, scratch):
    """Solve the rows ``first`` to ``last``."""
    x, index, p, other = scratch, scratch + r.row_bytes, scratch + 2 * r.row_bytes, scratch + 3 * r.row_bytes
    tail, batch = scratch + r.tail_at, scratch + r.batch_at
    whole = r.length // LANES * LANES
    waiting = 0
    for row in range(first, last):
        s = r.scores + r.score_step * row
        _copy_tail(s, whole, r.length, tail)
        top = _top(s, whole, r.length, tail)
        if math.isnan(top):
            _note_nothing(r, row, r.length, top)
        elif top == _MINUS_INFINITY:
            _note_nothing(r, row, 0, top)
        else:
            u, slot = _u(r, row), r.slots + r.slot_bytes * row
            n = _candidates(s, whole, r.length, tail, top, u, x, index)
            if belongs(n, u):
                collect(batch, waiting, x, index, n, u, row)
                write_f32(r.maximum + 4 * row, top)
                waiting += 1
            else:
                n = solve_row(read_i64(r.solvers + r.solver_step * row), x, index, p, other, n, u)
                total, expected = _sums(p, n, x, np.int64(0), np.int64(0), top)
                weight, score = (_largest(p, n), 0.0) if u <= 1.0 else _smallest(p, x, n)
                _note(r, row, keep_support(p, index, n, slot), u, top, weight, score, total, expected)
        if waiting == LANES or (waiting > 0 and row == last - 1):
            call_short_rows(r.solve_short_rows, batch, waiting)
            for lane in range(waiting):
                place = row_of_lane(batch, lane)
                slot = r.slots + r.slot_bytes * place
                n = keep_lane(batch, lane, slot)
                top = read_f32(r.maximum + 4 * place)
                total, expected = _sums(slot + 4 * n, n, np.int64(0), r.scores + r.score_step * place, slot, top)
                weight = _largest(slot + 4 * n, n)
                _note(r, place, n, _u(r, place), top, weight, 0.0, total, expected)
            waiting = 0


def run_solve(record):
    """Take groups of rows until none is left."""
    r = carray(record, 1)[0]
    scratch = r.scratch + r.scratch_bytes * atomic_increment(r.counters + 8)
    while True:
        first = atomic_increment(r.counters) * r.group
        if first >= r.rows:
            return
        _solve_item(r, first, min(first + r.group, r.rows), scratch)


@jit
def _write_sparsely(r, row, slot, n, scale):
    start = read_i64(r.offsets + 8 * row)
    for k in range(n):
        write_i64(r.row_index + 8 * (start + k), row)
        write_i64(r.columns + 8 * (start + k), np.int64(read_i32(slot + 4 * k)))
        write_f32(r.out + 4 * (start + k), read_f32(slot + 4 * (n + k)) * scale)


@jit
def _write_densely(line, length, slot, n, scale):
    zero_floats(line, length)
    for k in range(n):
        write_f32(line + 4 * np.int64(read_i32(slot + 4 * k)), read_f32(slot + 4 * (n + k)) * scale)


def run_write(record):
    """Write what the slots hold: as (row, column, weight) where there are offsets, else as dense rows."""
    r = carray(record, 1)[0]
    while True:
        first = atomic_increment(r.counters) * r.group
        if first >= r.rows:
            return
        for row in range(first, min(first + r.group, r.rows)):
            slot, n = r.slots + r.slot_bytes * row, read_i64(r.counts + 8 * row)
            scale = read_f32(r.scale + 4 * row)
            if r.offsets != 0:
                _write_sparsely(r, row, slot, n, scale)
            else:
                _write_densely(r.out + 4 * r.length * row, r.length, slot, n, scale)


@jit_inline
def _weights(x, u, c):
    """Return the weights at shift ``c`` of sixteen scores relative to their maximum, for ``u <= 1``."""
    one, zero = splat(_ONE), splat(_ZERO)
    if u < SOFTMAX_U:
        return exp(x - splat(_f(c)))
    if u == 0.5:
        y = maximum(muladd(x, splat(_f(0.5)), splat(_f(1.0 - 0.5 * c))), zero)
        return y * y
    if u == 1.0:
        return maximum(x + splat(_f(1.0 - c)), zero)
    inverse = splat(_f(1.0 / u))
    if u < SMALL_U:
        # As in `threshold`: log1p restores the digits of u (x - c) that 1 + u (x - c) loses.
        v = (x - splat(_f(c))) * splat(_f(u))
        y = maximum(one + v, splat(LOWEST_Y))
        weight = exp(muladd(v - (y - one), one / y, log(y)) * inverse)
        return select(greater(one + v, splat(LOWEST_Y)), weight, zero)
    y = muladd(x, splat(_f(u)), splat(_f(1.0 - u * c)))
    return select(greater(y, zero), exp(log(maximum(y, splat(TINY))) * inverse), zero)


def run_recompute(record):
    """Write dense weights of rows that were solved before, for ``u <= 1``, times the scale of each row."""
    r = carray(record, 1)[0]
    tail = r.scratch + r.scratch_bytes * atomic_increment(r.counters + 8)
    whole = r.length // LANES * LANES
    while True:
        first = atomic_increment(r.counters) * r.group
        if first >= r.rows:
            return
        for row in range(first, min(first + r.group, r.rows)):
            s, line = r.scores + r.score_step * row, r.out + 4 * r.length * row
            top, scale = splat(read_f32(r.maximum + 4 * row)), splat(read_f32(r.scale + 4 * row))
            u, c = _u(r, row), read_f64(r.shift + 8 * row)
            for j in range(0, whole, LANES):
                store(line + 4 * j, _weights(load(s + 4 * j) - top, u, c) * scale)
            if whole < r.length:
                _copy_tail(s, whole, r.length, tail)
                store(tail, _weights(load(tail) - top, u, c) * scale)
                for j in range(whole, r.length):
                    write_f32(line + 4 * j, read_f32(tail + 4 * (j - whole)))
