"""Elementary functions on sixteen floats at once, by polynomials: no library call, no branch.

The polynomials are minimax fits (Remez) on the reduced range; relative errors of the float32 results are about 1.2e-7 for
the accurate functions and 2e-4 for the rough power, which only starts the threshold search.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import jit_inline
from .simd import (
    binary_exponent, binary_mantissa, greater, maximum, muladd, round_nearest, scale_by_power_of_two, select, splat,
)  # fmt: skip

_f = np.float32
_LOG2E = _f(1.4426950408889634)
# ln 2 in two parts: the first has few bits, so that n * LN2_HIGH is exact for every exponent n.
_LN2_HIGH = _f(0.693359375)
_LN2_LOW = _f(-2.12194440e-4)
# Below this exp is returned as exactly 0: the float32 result would be subnormal.
EXP_FLOOR = _f(-87.0)
_EXP_CEILING = _f(88.0)
#: The smallest argument of ``log``; its logarithm over any alpha - 1 <= 1 lies below EXP_FLOOR.
TINY = _f(1.1754944e-38)


@jit_inline
def _exp_parts(x):
    n = round_nearest(x * splat(_LOG2E))
    f = muladd(n, splat(-_LN2_HIGH), x)
    f = muladd(n, splat(-_LN2_LOW), f)
    p = splat(_f(0.001395052563))
    p = muladd(p, f, splat(_f(0.008368911102)))
    p = muladd(p, f, splat(_f(0.04166620537)))
    p = muladd(p, f, splat(_f(0.1666651868)))
    p = muladd(p, f, splat(_f(0.5000000095)))
    return n, muladd(p, f * f, f)


@jit_inline
def exp(x):
    """Return the exponential, exactly 0 below EXP_FLOOR; x is at most 88."""
    n, r = _exp_parts(maximum(x, splat(_f(-87.5))))
    result = scale_by_power_of_two(r + splat(_f(1.0)), n)
    return select(greater(x, splat(EXP_FLOOR)), result, splat(_f(0.0)))


@jit_inline
def expm1(x):
    """Return the exponential minus 1 without cancellation near 0; it saturates beyond x = 88."""
    x = select(greater(splat(_EXP_CEILING), x), x, splat(_EXP_CEILING))
    n, r = _exp_parts(maximum(x, splat(EXP_FLOOR)))
    power = scale_by_power_of_two(splat(_f(1.0)), n)
    return muladd(power, r, power - splat(_f(1.0)))


@jit_inline
def remainder_ratio(x):
    """Return ``(exp(x) - 1 - x) / x**2`` by its series, for abs(x) up to 0.5."""
    series = splat(_f(1 / 362880))
    series = muladd(series, x, splat(_f(1 / 40320)))
    series = muladd(series, x, splat(_f(1 / 5040)))
    series = muladd(series, x, splat(_f(1 / 720)))
    series = muladd(series, x, splat(_f(1 / 120)))
    series = muladd(series, x, splat(_f(1 / 24)))
    series = muladd(series, x, splat(_f(1 / 6)))
    return muladd(series, x, splat(_f(0.5)))


@jit_inline
def exp_remainder(x):
    """Return the exponential minus 1 minus x, accurate to a few units in the last place; x is at most 88."""
    square = x * x
    small = greater(splat(_f(0.25)), square)
    return select(small, remainder_ratio(x) * square, expm1(x) - x)


@jit_inline
def log(x):
    """Return the natural logarithm; x is at least TINY."""
    e = binary_exponent(x)
    f = binary_mantissa(x) - splat(_f(1.0))
    p = splat(_f(-0.07865483241))
    p = muladd(p, f, splat(_f(0.1287921762)))
    p = muladd(p, f, splat(_f(-0.1312529016)))
    p = muladd(p, f, splat(_f(0.1418141722)))
    p = muladd(p, f, splat(_f(-0.1662497012)))
    p = muladd(p, f, splat(_f(0.2000228266)))
    p = muladd(p, f, splat(_f(-0.2500079656)))
    p = muladd(p, f, splat(_f(0.3333331678)))
    square = f * f
    tail = muladd(e, splat(_LN2_LOW), square * muladd(p, f, splat(_f(-0.5))))
    return muladd(e, splat(_LN2_HIGH), f + tail)


@jit_inline
def rough_power(y, exponent):
    """Return ``y ** exponent`` to about 2e-4 for y in [1e-6, 1] and exponent >= 1."""
    f = binary_mantissa(y) - splat(_f(1.0))
    p = splat(_f(-0.3296432654))
    p = muladd(p, f, splat(_f(0.5174921713)))
    p = muladd(p, f, splat(_f(-0.7249003768)))
    p = muladd(p, f, splat(_f(1.441762403)))
    t = maximum(muladd(p, f, binary_exponent(y)) * exponent, splat(_f(-126.0)))
    n = round_nearest(t)
    f = t - n
    p = splat(_f(0.0551716748))
    p = muladd(p, f, splat(_f(0.2426111243)))
    p = muladd(p, f, splat(_f(0.6932609842)))
    p = muladd(p, f, splat(_f(0.9999280732)))
    return scale_by_power_of_two(p, n)


@jit_inline
def tanh(x):
    """Return the hyperbolic tangent, accurate near 0."""
    t = expm1(x + x)
    return t / (t + splat(_f(2.0)))
