r"""The threshold of one row for alpha > 2, in float64.

There weights rise like a root at the threshold: a difference of 1e-16 in the shift ``c`` can be one of a half in a weight.
Newton's method in a bracket of c is tried first. Where a weight lies so close to the threshold that c cannot tell it, the
smallest candidate with a weight, ``x_last``, is found, and what is then unknown is that weight itself, ``p_last = exp(m)``:

    p_k = (u (x_k - x_last) + exp(u m)) ** (1/u),

which holds all digits of every weight, also when all candidates are equal (``p = 1/n``, where ``p**u`` may be no float).
"""

from __future__ import annotations

import math

import numpy as np

from .intrinsics import jit
from .simd import read_f32, write_f32, write_i32

_f = np.float32
# The bits of the float 1: candidates lie between 0 and -1/u > -1.
_BITS_OF_ONE = 0x3F800000
# From this ``1 + u (x - c)`` on, its rounding changes the weight by less than 1e-7 of it.
_SAFE = 1e-9


@jit
def _solve_for_shift(x, p, n, u):
    """Find c by Newton's method; return whether the weights written are right."""
    low, high = 0.0, -math.expm1(-u * math.log(float(n))) / u
    c = 0.5 * (low + high)
    for _ in range(40):
        total, slopes, least = 0.0, 0.0, 1.0
        for k in range(n):
            y = 1.0 + u * (float(read_f32(x + 4 * k)) - c)
            weight = 0.0
            if y > 0.0:
                weight = math.exp(math.log(y) / u)
                total += weight
                slopes += weight / y
                least = min(least, y)
            write_f32(p + 4 * k, _f(weight))
        if abs(total - 1.0) <= 1e-9:
            return least > _SAFE
        if total > 1.0:
            low = c
        else:
            high = c
        if high - low <= 1e-15:
            return False
        proposal = c + (total - 1.0) / slopes if slopes > 0.0 else low
        c = proposal if low < proposal < high else 0.5 * (low + high)
    return False


@jit
def _total_above(x, n, u, threshold):
    """Sum the weights that are 0 at ``threshold``."""
    total = 0.0
    for k in range(n):
        gap = u * (float(read_f32(x + 4 * k)) - threshold)
        if gap > 0.0:
            total += math.exp(math.log(gap) / u)
    return total


@jit
def _last_candidate(x, scratch, n, u):
    """Find the smallest candidate with a weight: with the threshold there, the weights of the greater ones sum to less than 1.

    The bits of floats of one sign are ordered as the floats are, so halving them 30 times ends at one float.
    """
    low, high = 0, _BITS_OF_ONE
    while high - low > 1:
        middle = (low + high) // 2
        write_i32(scratch, np.int32(middle))
        if _total_above(x, n, u, -float(read_f32(scratch))) < 1.0:
            low = middle
        else:
            high = middle
    write_i32(scratch, np.int32(low))
    bound, last = -read_f32(scratch), _f(0.0)
    for k in range(n):
        value = read_f32(x + 4 * k)
        if value >= bound:
            last = min(last, value)
    return float(last)


@jit
def _solve_for_last_weight(x, p, n, u, last):
    """Find the logarithm of the smallest weight by Newton's method in a bracket."""
    # (gap + d)**(1/u) <= gap**(1/u) + d**(1/u), so the smallest weight has at least this share of what is missing.
    missing = max(1.0 - _total_above(x, n, u, last), 1e-18)
    low, high = math.log(missing / n), 0.0
    m = 0.5 * (low + high)
    for _ in range(200):
        total, slope = 0.0, 0.0
        for k in range(n):
            gap = u * (float(read_f32(x + 4 * k)) - last)
            weight = 0.0
            if gap >= 0.0:
                exponent = m
                if gap > 0.0:
                    # The logarithm of gap + exp(u m), without the sum of a number and one that is no float.
                    large, small = max(math.log(gap), u * m), min(math.log(gap), u * m)
                    exponent = (large + math.log1p(math.exp(small - large))) / u
                weight = math.exp(exponent)
                total += weight
                slope += weight * math.exp(u * (m - exponent))
            write_f32(p + 4 * k, _f(weight))
        if abs(total - 1.0) <= 1e-12 or high - low <= 1e-15:
            return
        if total > 1.0:
            high = m
        else:
            low = m
        proposal = m - (total - 1.0) / slope if slope > 0.0 else low
        m = proposal if low < proposal < high else 0.5 * (low + high)


def solve_above_two(x, index, p, s, n, u):
    """Solve a row for any alpha above 2; the arguments are those of the solvers in `threshold`."""
    if not _solve_for_shift(x, p, n, u):
        _solve_for_last_weight(x, p, n, u, _last_candidate(x, s, n, u))
    return n
