r"""The threshold of one row and its weights, from the candidates alone.

With ``u = alpha - 1`` and candidates ``x_k = z_k - max z``, find ``c >= 0`` with ``sum_k p_k = 1`` where
``p_k = [1 + u (x_k - c)]_+ ** (1/u)``. Writing ``S(c) = sum p_k``, the function ``S**u`` is a norm (of order ``1/u >= 1``) of
the positive part of something affine in c, hence convex in c, so Newton's method on ``S**u = 1``,

    c += S**(1-u) (S**u - 1) / (u sum_k p_k**(1-u)),

started at ``c = 0``, where ``S >= 1``, climbs to the solution without ever passing it. It is exact after one step when all
candidates are equal, and for every row as u -> 0 (softmax). Since c only grows, candidates that fall to zero are dropped for good.
Long rows start where n equal candidates with the same mean (and, where it is small, the same variance) would end.
For ``u > 1`` the function is not convex: see `above_two`.

The solvers of this file and of `above_two` take the same arguments:

    x: address of the candidates, relative to the row's maximum (so all <= 0, one of them 0), padded; overwritten.
    index: address of their columns (int32), compacted along with ``x``; 0 if no candidate is to be dropped.
    p: address of the weights to write.
    s: address of as many floats of scratch.
    n: number of candidates, at least 2. All four buffers have room for ``n + 16`` elements.
    u: alpha - 1.

They return how many weights there are now (some may be 0).
"""

from __future__ import annotations

import math

import numpy as np

from .intrinsics import call_solver, jit, jit_inline
from .simd import (
    LANES, compress, compress_index, count, first_lanes, greater, load, load_index, maximum, muladd, select, splat,
    store, sum_lanes, write_f32,
)  # fmt: skip
from .vecmath import TINY, exp, log, rough_power

_f = np.float32
_ZERO, _ONE = _f(0.0), _f(1.0)
# Fills the lanes after the last candidate: so low that its weight is zero for every alpha.
PADDING = _f(-1e30)
#: Below this ``u = alpha - 1`` the mapping is softmax to float32.
SOFTMAX_U = 1e-8
#: Below this u the argument ``1 + u (x - c)`` is too close to 1 to hold the digits of ``u (x - c)``.
SMALL_U = 0.25
# Rough sums are off by a few 1e-4 of S; going back by this much keeps the accurate steps on the safe side.
_ROUGH_MARGIN = 5e-4
_ROUGH_FLOOR = _f(1e-6)
#: For these u a weight whose argument y is below this is 0 in float32 next to the largest; its inverse stays harmless.
LOWEST_Y = _f(1e-4)
#: A last step that changes S by this share of it is expanded to third order: the fourth is below 4e-8.
EXPAND_BELOW = _f(0.03)
# Rows of more candidates start from their mean and variance, and need no rough steps where these say nearly all.
_LONG = 64
_EVEN = 0.3
#: In the place of ``index``: no candidate is to be dropped.
NO_COLUMNS = np.int64(0)


def solver_name(u: float) -> str:
    """Return the name in `kernels.KERNELS` of the solver that takes a row by itself."""
    if u < SOFTMAX_U:
        return "softmax"
    return {0.5: "square", 1.0: "linear"}.get(u, "general" if u < 1.0 else "above_two")


def solved_as_short_rows(u):
    """Tell whether rows with few candidates are solved sixteen at a time: there is no closed form, and no delicate limit."""
    return SMALL_U <= u < 1.0 and u != 0.5


def solved_as_full_rows(u):
    """Tell whether rows of which nearly every score is a candidate are solved sixteen at a time, where they stand."""
    return SOFTMAX_U <= u < SMALL_U


@jit_inline
def _pad(x, n):
    store(x + 4 * n, splat(PADDING))


@jit
def _newton_step(s, t, u):
    """Return the step in c from S and sum p**(1-u)."""
    e = math.log(s)
    if abs(u * e) < 1e-3:
        return s * e * (1.0 - 0.5 * u * e * (1.0 - u * e / 3.0)) / t
    return -s * math.expm1(-u * e) / (u * t)


@jit_inline
def _drop_zeros(x, index, n, lowest):
    """Keep the candidates above ``lowest``; return how many there are."""
    kept = 0
    for k in range(0, n, LANES):
        value = load(x + 4 * k)
        place = load_index(index + 4 * k)
        mask = greater(value, splat(lowest))
        compress(mask, value, x + 4 * kept)
        compress_index(mask, place, index + 4 * kept)
        kept += count(mask)
    _pad(x, kept)
    return kept


def solve_softmax(x, index, p, s, n, u):
    """Solve a row for alpha = 1."""
    total = splat(_ZERO)
    for k in range(0, n, LANES):
        value = exp(load(x + 4 * k))
        store(p + 4 * k, value)
        total = total + value
    factor = splat(_f(1.0 / sum_lanes(total)))
    for k in range(0, n, LANES):
        store(p + 4 * k, load(p + 4 * k) * factor)
    return n


@jit_inline
def _solve_power(x, index, p, n, u):
    """Solve a row for alpha = 2 or 1.5, with weights y or y**2 of y = 1 + u (x - c): neither logarithm nor exponential.

    For alpha = 2, S is piecewise linear, so Newton ends after finitely many steps.
    """
    linear, slope = u == 1.0, splat(_f(u))
    c = 0.0
    for iteration in range(64):
        base = splat(_f(1.0 - u * c))
        total, slopes = splat(_ZERO), splat(_ZERO)
        for k in range(0, n, LANES):
            y = muladd(load(x + 4 * k), slope, base)
            positive = greater(y, splat(_ZERO))
            y = select(positive, y, splat(_ZERO))
            total = total + y if linear else muladd(y, y, total)
            slopes = slopes + (select(positive, splat(_ONE), splat(_ZERO)) if linear else y)
        root = sum_lanes(total) if linear else math.sqrt(sum_lanes(total))
        step = (root - 1.0) * (1.0 if linear else root) / (u * sum_lanes(slopes))
        c += step
        if abs(step) <= 2e-7:
            break
        if index != 0 and iteration == 1 and n > 2 * LANES:
            n = _drop_zeros(x, index, n, _f(c - 1.0 / u - 1e-5))
    base = splat(_f(1.0 - u * c))
    for k in range(0, n, LANES):
        y = maximum(muladd(load(x + 4 * k), slope, base), splat(_ZERO))
        store(p + 4 * k, y if linear else y * y)
    return n


def solve_linear(x, index, p, s, n, u):
    """Solve a row for alpha = 2."""
    return _solve_power(x, index, p, n, 1.0)


def solve_square(x, index, p, s, n, u):
    """Solve a row for alpha = 1.5."""
    return _solve_power(x, index, p, n, 0.5)


@jit
def _rough_sums(x, n, u, c):
    """Return S and sum p**(1-u) at c, to about 2e-4."""
    slope, base = splat(_f(u)), splat(_f(1.0 - u * c))
    exponent, floor = splat(_f(1.0 / u)), splat(_ROUGH_FLOOR)
    total, slopes = splat(_ZERO), splat(_ZERO)
    for k in range(0, n, LANES):
        y = muladd(load(x + 4 * k), slope, base)
        positive = greater(y, floor)
        y = maximum(y, floor)
        weight = select(positive, rough_power(y, exponent), splat(_ZERO))
        total = total + weight
        slopes = slopes + weight / y
    return sum_lanes(total), sum_lanes(slopes)


@jit
def _accurate_sums(x, p, s, n, u, c):
    """Write p and p**(1-u) at c; return their sums."""
    slope, base, inverse = splat(_f(u)), splat(_f(1.0 - u * c)), splat(_f(1.0 / u))
    total, slopes = splat(_ZERO), splat(_ZERO)
    for k in range(0, n, LANES):
        y = maximum(muladd(load(x + 4 * k), slope, base), splat(TINY))
        weight = exp(log(y) * inverse)
        derivative = weight / y
        store(p + 4 * k, weight)
        store(s + 4 * k, derivative)
        total = total + weight
        slopes = slopes + derivative
    return sum_lanes(total), sum_lanes(slopes)


@jit
def _start(x, n, u):
    """Return a first c from mean and variance of the candidates, and the variance's part in log S.

    By Jensen's inequality (1/u >= 1) the solution lies at or above ``mean + (1 - n**-u) / u``.
    """
    total, squares = splat(_ZERO), splat(_ZERO)
    for k in range(0, n, LANES):
        value = select(first_lanes(n - k), load(x + 4 * k), splat(_ZERO))
        total = total + value
        squares = muladd(value, value, squares)
    mean = float(sum_lanes(total)) / n
    variance = max(float(sum_lanes(squares)) / n - mean * mean, 0.0)
    shrunk = math.expm1(-u * math.log(float(n)))
    share = 1.0 + shrunk
    c = mean - shrunk / u
    curvature = 0.5 * (1.0 - u) * variance / (share * share)
    if curvature < 1.0:
        # Beyond the solution perhaps: from there Newton's method on a convex function comes back to the safe side.
        c += curvature * share
    return max(c, 0.0), curvature


@jit
def _rough_start(x, index, n, u, c):
    """Step from ``c`` until what is left is below the roughness of the sums; return c and how many candidates are left."""
    for iteration in range(12):
        total, slopes = _rough_sums(x, n, u, c)
        step = _newton_step(total, slopes, u) if total > 1.0 + 1e-3 else 0.0
        c += step
        if step * slopes < 3e-2:
            # Newton squares the error: what is left is below the roughness of the sums themselves.
            return max(c - _ROUGH_MARGIN / slopes, 0.0), n
        if index != 0 and n > 2 * LANES and iteration < 4:
            n = _drop_zeros(x, index, n, _f(c - 1.0 / u - 1e-2))
    return c, n


@jit
def moments_near_softmax(x, p, inverses, columns, u, top, c):
    """Write p and 1/y at c, for small u; return sum p y**-j for j = 0 to 3, by lane.

    log1p(v) = log(1 + v) + (v - ((1 + v) - 1)) / (1 + v) restores the digits that y = 1 + v loses.
    """
    slope, peak, shift, inverse_u = splat(_f(u)), splat(top), splat(_f(c)), splat(_f(1.0 / u))
    one, floor = splat(_ONE), splat(LOWEST_Y)
    s0, s1, s2, s3 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
    for k in range(0, columns, LANES):
        v = ((load(x + 4 * k) - peak) - shift) * slope
        above = one + v
        positive = greater(above, floor)
        y = maximum(above, floor)
        inverse = one / y
        weight = exp(muladd(v - (y - one), inverse, log(y)) * inverse_u)
        weight = select(positive, weight, splat(_ZERO))
        store(p + 4 * k, weight)
        store(inverses + 4 * k, inverse)
        s0 = s0 + weight
        weight = weight * inverse
        s1 = s1 + weight
        weight = weight * inverse
        s2 = s2 + weight
        s3 = muladd(weight, inverse, s3)
    return s0, s1, s2, s3


@jit
def expand_last_step(p, inverses, n, u, step):
    """Turn weights at c into those at c + step.

    With r = step / y: ``p (1 - u r)**(1/u) = p (1 - r + (1-u) r**2 / 2 - (1-u)(1-2u) r**3 / 6 + ...)``.
    """
    d, limit = splat(_f(step)), splat(_f(1.0 / u))
    a, b = splat(_f(0.5 * (1.0 - u))), splat(_f((1.0 - u) * (2.0 * u - 1.0) / 6.0))
    for k in range(0, n, LANES):
        r = load(inverses + 4 * k) * d
        factor = muladd(muladd(muladd(b, r, a), r, splat(-_ONE)), r, splat(_ONE))
        factor = select(greater(limit, r), maximum(factor, splat(_ZERO)), splat(_ZERO))
        store(p + 4 * k, load(p + 4 * k) * factor)


@jit
def _solve_near_softmax(x, p, inverses, n, u, c):
    """Take accurate steps for small u, where p is a smooth function of c down to its zeros: the last one is expanded."""
    second, third = 0.5 * (1.0 - u), (1.0 - u) * (1.0 - 2.0 * u) / 6.0
    for _ in range(24):
        sums = moments_near_softmax(x, p, inverses, n, u, _ZERO, c)
        s0, s1 = float(sum_lanes(sums[0])), float(sum_lanes(sums[1]))
        step = _newton_step(s0, s1, u)
        if abs(step) * s1 > EXPAND_BELOW * s0:
            c += step
            continue
        s2, s3 = float(sum_lanes(sums[2])), float(sum_lanes(sums[3]))
        for _ in range(2):
            excess = s0 - 1.0 - step * (s1 - step * (second * s2 - step * third * s3))
            step += excess / (s1 - step * (2.0 * second * s2 - 3.0 * step * third * s3))
        expand_last_step(p, inverses, n, u, step)
        return


def solve_general(x, index, p, s, n, u):
    """Solve a row for any alpha in (1, 2): rough steps while c is far, then accurate ones."""
    c, curvature = 0.0, np.inf
    if n > _LONG:
        c, curvature = _start(x, n, u)
    if curvature > _EVEN:
        c, n = _rough_start(x, index, n, u, c)
    if u < SMALL_U:
        _solve_near_softmax(x, p, s, n, u, c)
        return n
    # A last step that changes S by so little is applied to p by its first-order effect instead of evaluating again. Near
    # alpha = 2 its second-order effect on the weights next to the threshold is larger, hence the second limit.
    small = 1.0 if u <= 0.55 else 3e-5
    for _ in range(24):
        total, slopes = _accurate_sums(x, p, s, n, u, c)
        step = _newton_step(total, slopes, u)
        if abs(step) * slopes <= 1e-3 and abs(step) <= small:
            correction = splat(_f(-step))
            for k in range(0, n, LANES):
                store(p + 4 * k, maximum(muladd(load(s + 4 * k), correction, load(p + 4 * k)), splat(_ZERO)))
            return n
        c += step
    return n


@jit
def solve_row(solver, x, index, p, s, n, u):
    """Write the weights of the ``n >= 1`` candidates of a row by the solver at an address; return how many there are now."""
    if n == 1:
        write_f32(p, _ONE)
        return n
    store(x + 4 * n, splat(PADDING))
    return call_solver(solver, x, index, p, s, n, u)


@jit
def count_positive(p, n):
    """Count the weights above 0 among ``n``."""
    positive = 0
    for k in range(0, n, LANES):
        positive += count(greater(load(p + 4 * k), select(first_lanes(n - k), splat(_ZERO), splat(_f(np.inf)))))
    return positive


@jit
def keep_support(p, index, n, target):
    """Write the columns, then the weights, of the ``n`` entries with p > 0 to ``target``.

    Returns:
        The size of the support; ``target`` must have room for ``2 n + 16`` elements.
    """
    support = 0
    for k in range(0, n, LANES):
        mask = greater(load(p + 4 * k), select(first_lanes(n - k), splat(_ZERO), splat(_f(np.inf))))
        compress_index(mask, load_index(index + 4 * k), target + 4 * support)
        support += count(mask)
    weights = target + 4 * support
    kept = 0
    for k in range(0, n, LANES):
        value = load(p + 4 * k)
        mask = greater(value, select(first_lanes(n - k), splat(_ZERO), splat(_f(np.inf))))
        compress(mask, value, weights + 4 * kept)
        kept += count(mask)
    return support
