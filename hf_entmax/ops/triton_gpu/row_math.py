r"""The mapping on the device: weights, the step of the threshold, the derivative in alpha.

Notation, with ``u = alpha - 1`` and scores centred by the maximum ``m`` of their row:

    y = z - m - c,    w = 1 + u y,    p = [w]_+ ** (1/u)   (exp(y) at u = 0),    s = p / w = p ** (2 - alpha)

``c`` is the threshold of the row (``sum p = 1``) and lies in ``[0, (1 - n**-u)/u]`` for ``n`` allowed keys. Everything
is float32 and elementwise, for tiles and columns of row values alike: shared by the attention kernels and the row mapping.

Reference:
    Peters, Niculae and Martins 2019, eq. 13 (the mapping) and prop. 1 (its Jacobian); Correia, Niculae and Martins
    2019, prop. 1 (the derivative in alpha).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
# Ranges of constants are no iterables to pyright.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def _is_compiled() -> None:
    """Never launched: its type says whether this process compiles kernels or interprets them."""


INTERPRETED = not isinstance(_is_compiled, triton.runtime.JITFunction)
"""True when ``TRITON_INTERPRET=1`` was set before Triton was imported: the kernels then run in numpy on CPU tensors."""

_INTERPRETED = tl.constexpr(INTERPRETED)
# Finite, so that products with u = 0 stay finite; scores below half of finfo(float32).min count as masked.
MASKED = tl.constexpr(-3.0e38)
MASKED_BELOW = tl.constexpr(-1.7014117e38)
# Below this u the plain derivative in alpha, which divides differences by u**2, loses too many digits.
SMALL_U = tl.constexpr(0.125)
# Below this u the logarithm of 1 + x, divided by u, has to be more exact near x = 0 than the hardware's.
NEAR_U = tl.constexpr(0.25)
# Halley converges cubically: an error of 1e-3 before the step is, as a rule, below the rounding of float32 after it.
TOLERANCE = tl.constexpr(1e-3)
_LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Mapping(NamedTuple):
    """The mapping of one head: ``u`` = alpha - 1, ``inv_u`` = 1/u (1e30 at 0).

    ``small``: u < SMALL_U somewhere; ``near``: u < NEAR_U somewhere. ``log_unit``: what logarithms of weights are multiples of, 1/u
    but for ``near``, where they are computed another way.
    """

    u: Any
    inv_u: Any
    small: Any
    near: Any
    log_unit: Any


@triton.jit
def make_mapping(alpha, lowest_alpha):
    """``Mapping`` for ``alpha``, a scalar or a tensor (below 1 counts as 1), of which ``lowest_alpha`` is the least."""
    u = tl.maximum(alpha - 1.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inv_u = 1.0 / tl.maximum(u, 1e-30)
    near = lowest_alpha - 1.0 < NEAR_U
    return Mapping(u, inv_u, lowest_alpha - 1.0 < SMALL_U, near, tl.where(near, 1.0, inv_u))


@triton.jit
def fast_log2(x):
    """Base-2 logarithm of positive ``x`` by the hardware's instruction: absolute error 2**-22."""
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fast_exp2(x):
    """``2**x`` by the hardware's instruction, without the scaling by which ``tl.exp2`` saves results below 2**-126."""
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log1p_ratio(x):
    """``log(1 + x) / x`` for ``x > -1``; an arctanh series near 0 (relative error below 1e-8 there)."""
    t = x / (2.0 + x)
    t2 = t * t
    series = 2.0 / (2.0 + x) * (1.0 + t2 * (1.0 / 3 + t2 * (1.0 / 5 + t2 * (1.0 / 7 + t2 * (1.0 / 9)))))
    near = tl.abs(x) < 0.25
    far = tl.where(near, 1.0, x)
    return tl.where(near, series, tl.log(1.0 + far) / far)


@triton.jit
def expm1_ratio(x):
    """``(exp(x) - 1) / x``."""
    series = 1.0 + x * (
        1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * (1.0 / 5040 + x / 40320)))))
    )
    near = tl.abs(x) < 0.5
    far = tl.where(near, 1.0, x)
    return tl.where(near, series, (tl.exp(far) - 1.0) / far)


@triton.jit
def expq(y, mapping, ALPHA: tl.constexpr):
    """``p``, ``s = p / w``, ``s / w`` and ``log2 p`` in units of ``mapping.log_unit`` (finite where p = 0), for ``y <= 0``.

    ``ALPHA``: 1.0, 1.5 or 2.0 when alpha is that number by construction, else 0.0. It is an argument of its own, not a
    part of ``mapping``, because a constant that a device function returns in a tuple is a constant no longer.
    """
    return tile_weights(y, 0.0, 1.0, 0.0, mapping, ALPHA, True, False)


@triton.jit
def centred(z, top, unit, c, FOLD: tl.constexpr):
    """``unit * (z - top) - c``; ``FOLD``: what belongs to a row is taken off at once."""
    return z * unit - (top * unit + c) if FOLD else (z - top) * unit - c


@triton.jit
def tile_weights(z, top, unit, c, mapping, ALPHA: tl.constexpr, CURVED: tl.constexpr, FOLD: tl.constexpr):
    """What `expq` gives for ``y = unit * (z - top) - c``: scores and their maximum in multiples of ``unit``, thresholds of rows.

    ``w`` takes one multiply-add. Its constant ``1 - u c`` is rounded by less than ``c`` is. ``FOLD``: the maximum is in that constant as
    well, which is then rounded by ``2**-24 u`` of it: as if the row's threshold were, by less than products of half precision
    round the scores. ``CURVED``: whether ``s / w`` is wanted. What is not used costs nothing.

    ``log2 p = log2(1 + x) / u`` with ``x = u y``. Near ``x = 0``, where a small u magnifies the rounding of ``1 + x``, it is
    ``y`` times a polynomial in ``x`` (Chebyshev, relative error 1.4e-8), which at u = 0 is ``y log2(e)``; elsewhere the
    errors of the logarithm and of ``w`` cost ``p`` at most 1e-6, whatever u is. NaN passes: only ``w <= 0`` is off the support.
    """
    if FOLD:
        w = z * (mapping.u * unit) + (1.0 - mapping.u * (top * unit + c))
    else:
        w = (z - top) * (mapping.u * unit) + (1.0 - mapping.u * c)
    positive = tl.maximum(w, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # Far below the rounding of w; its powers, down to the minus second, are finite.
    safe = tl.maximum(w, 2.0**-60, propagate_nan=tl.PropagateNan.ALL)
    if ALPHA == 1.0:
        y = centred(z, top, unit, c, FOLD)
        p = fast_exp2(y * _LOG2_E)
        s = p
        curvature = p
        log2_p = tl.where(p == 0.0, 0.0, y * _LOG2_E)
    elif ALPHA == 1.5:
        s = positive
        p = s * s
        curvature = tl.where(w <= 0.0, 0.0, 1.0)
        log2_p = fast_log2(safe)
    elif ALPHA == 2.0:
        p = positive
        s = tl.where(w <= 0.0, 0.0, 1.0)
        curvature = s / safe
        log2_p = fast_log2(safe)
    else:
        log2_p = fast_log2(safe)
        if mapping.near:
            y = centred(z, top, unit, c, FOLD)
            x = mapping.u * y
            polynomial = 1.4426950604177182 + x * (
                -0.7213398038110538 + x * (0.4813833053954653 + x * (-0.3501329871914707 + x * 0.3792868564137324))
            )
            # Not minus infinity: its product with p = 0 is asked for.
            near = tl.maximum(y * polynomial, -300.0, propagate_nan=tl.PropagateNan.ALL)
            log2_p = tl.where(x > -0.125, near, log2_p * mapping.inv_u)
        # One power serves all three: the unit that makes powers takes eight times as long as one that multiplies.
        curvature = fast_exp2(log2_p * ((1.0 - 2.0 * mapping.u) * mapping.log_unit))
        if CURVED:
            curvature = tl.where(w <= 0.0, 0.0, curvature)
            s = curvature * safe
        else:
            s = curvature * positive
        p = s * safe
    return p, s, curvature, log2_p


@triton.jit
def largest_threshold(n_keys, u):
    """The centred threshold of ``n`` equal scores, above that of any others: ``(1 - n**-u) / u``; ``log n`` at ``u = 0``."""
    log_n = tl.log(n_keys)
    return log_n * expm1_ratio(-u * log_n)


@triton.jit
def first_threshold(total, count, u):
    """A centred threshold to start from, at most the true one for ``u <= 1``: from ``count`` centred scores, their ``total``.

    Weights are convex in the score: ``count`` of them have at least the mass of as many at the mean, whose threshold is
    known. It is close where scores are close together, and spares flat rows a pass or two over the keys.
    """
    some = tl.maximum(count, 1.0)
    return tl.maximum(total / some + largest_threshold(some, u), 0.0)


@triton.jit
def _binned_mass(c, counts, distance, mapping, ALPHA: tl.constexpr):
    """``sum p``, ``sum s`` and ``sum s / w`` of ``counts`` scores at a ``distance`` from the maximum, see `histogram_bracket`."""
    p, s, e, _ = expq(-(distance + c[:, None]), mapping, ALPHA)
    return tl.sum(counts * p, 1), tl.sum(counts * s, 1), tl.sum(counts * e, 1)


@triton.jit
def bin_width(least, mapping):
    """Width of the bins of a row whose threshold is ``least`` or above: 6 7/8 of them hold all scores that may have weight."""
    return (mapping.inv_u - least) * (1.0 / 6.875)


@triton.jit
def bin_bits(y, width):
    """``1 << 4 i`` for scores ``y = z - m`` in bin ``i < 7``; seven bins of four bits are a word, and the rest is scores without weight.

    Bin ``i`` has the scores that are ``i - 1/8`` to ``i + 7/8`` widths below the maximum, so that one which rounding leaves just
    above it is in bin 0. Adding 1.5 * 2**23 rounds to a whole number of quarters of a width, in the last bits of a float32.
    """
    quarters = tl.minimum(y * (-4.0 / width) + 12582912.0, 12582940.0)
    return 1 << (quarters.to(tl.int32, bitcast=True) & 28)


@triton.jit
def histogram_bracket(counts, width, least, largest, mapping, ALPHA: tl.constexpr):
    r"""A threshold to start from and proved bounds of the true one, from counts of scores: for any ``u > 0``.

    Let ``B(c)`` be the mass at ``c`` if one score were the maximum and each other in the middle of its bin, ``h / 2`` from it at
    most. Weights fall with the distance ``d`` from the maximum, and depend on ``d + c`` alone; hence, of the true mass ``S``,

        B(c + h/2) <= S(c) <= B(c - h/2)

    (the maximum itself is where ``B`` has it, and weighs less at ``c + h/2`` and more at ``c - h/2``). So the true threshold is at
    least ``b - h/2`` where ``B(b) >= 1``, and at most ``b + h/2`` where ``B(b) < 1``. Four Halley steps come close to ``B = 1``, and ``B``
    on either side of where they end proves the bracket: what is not proved stays ``least`` and ``largest``. Nothing here asks for
    ``F`` to be convex, so that this holds above alpha = 2, where bins begin at ``least = 0``.

    ``counts``: seven numbers of scores by bin, the maximum among them; ``width``: h. Gives the start, ``low`` and ``high``.
    """
    # The maximum alone, and seven bins without it.
    place = tl.arange(0, 8)[None, :]
    numbers = tl.where(place == 1, tl.maximum(counts[0] - 1.0, 0.0)[:, None], 1.0)
    for i in tl.static_range(1, 7):
        numbers = tl.where(place == i + 1, counts[i][:, None], numbers)
    distance = tl.where(place == 0, 0.0, width[:, None] * (place - 0.625))
    c, below, above, low, high = least, least, largest, least, largest
    # This margin is far above what rounding does to B.
    margin = width * 0.03125
    for n_steps in range(0, 6):
        at = c + tl.where(n_steps == 4, -margin, tl.where(n_steps == 5, margin, 0.0))
        total, slope, curvature = _binned_mass(at, numbers, distance, mapping, ALPHA)
        low = tl.where(total >= 1.0, tl.maximum(low, at - 0.5 * width), low)
        high = tl.where(total < 1.0, tl.minimum(high, at + 0.5 * width), high)
        step, below, above, _ = threshold_step(at, below, above, total, slope, curvature, n_steps, mapping.u, 0.0)
        c = tl.where(n_steps < 4, step, c)
    return tl.minimum(tl.maximum(c, low), high), low, high


@triton.jit
def threshold_resolution(c, slope):
    """What one rounding of ``c``, and of a score less ``c``, may do to a sum of weights whose ``D = sum s`` is ``slope``."""
    return slope * (1.0 + c) * 2.0**-23


@triton.jit
def threshold_step(c, low, high, total, slope, curvature, n_passes, u, tolerance):
    r"""One bracketed Halley step for ``sum p = 1`` on ``F(c) = (sum p)**u - 1``, row by row.

    ``F`` is a p-norm of ``[w]_+`` less 1, hence convex and decreasing for ``u <= 1``; it is linear when all entries on
    the support are equal, and its limit at ``u = 0`` is ``u log sum p``, linear again. The Newton step is
    ``log(S) * phi(-u log S) * S / D`` with ``phi(x) = expm1(x)/x``; Halley divides it by ``1 - k``, ``k`` clamped to
    ``|k| <= 1/2`` as entries next to the threshold make the third sum noisy. Steps out of the bracket, and
    every other step for ``u > 1`` where ``F`` is not convex, are bisections.

    ``c`` and its bracket ``low``, ``high``; ``total``, ``slope``, ``curvature``: ``S = sum p``, ``D = sum s`` and
    ``E = sum s / w`` at ``c``; ``n_passes`` made so far; ``tolerance``: of ``S`` before this step, beside what rounding does to it
    (1e-6 at most for ``u > 1``). Gives the next ``c, low, high``, and whether each row should have another pass (never for NaN or
    empty rows).
    """
    log_total = tl.log(tl.maximum(total, 1e-30))
    relative = log_total * expm1_ratio(tl.minimum(-u * log_total, 80.0))
    inv_slope = 1.0 / tl.where(slope > 0.0, slope, 1.0)
    k = 0.5 * relative * (1.0 - u) * (total * curvature * inv_slope * inv_slope - 1.0)
    k = tl.minimum(tl.maximum(k, -0.5), 0.5)
    step = tl.where(slope > 0.0, relative * total * inv_slope / (1.0 - k), 0.0)
    low = tl.where(total >= 1.0, tl.maximum(low, c), low)
    high = tl.where(total < 1.0, tl.minimum(high, c), high)
    proposal = c + step
    wide = high - low > 1e-7 * (1.0 + high)
    allowed = tl.where(u > 1.0, 1e-6, tolerance + threshold_resolution(c, slope))
    unfinished = (tl.abs(total - 1.0) > allowed) & wide
    outside = (proposal < low) | (proposal > high) | (slope <= 0.0) | (tl.where(u > 1.0, n_passes % 2, 0) == 1)
    inside = tl.minimum(tl.maximum(proposal, low), high)
    following = tl.where(outside & unfinished, 0.5 * (low + high), inside)
    # NaN stays NaN, so that a NaN score shows in the output instead of being masked away.
    following = tl.where(total == total, following, total)
    return following, low, high, unfinished


@triton.jit
def log_slope(moment, mapping):
    """``log(sum s) / u`` of a row from ``moment = -sum s y``; ``sum s = 1 + u moment``, so u = 0 is no special case."""
    return moment * log1p_ratio(mapping.u * moment)


@triton.jit
def alpha_sums(p, s, log2_p, g, row_log_slope, mapping):
    """Four sums of the rows of a tile that give the derivative in alpha, see ``alpha_gradient``.

    ``log2_p``: as `expq` gives it. ``g``: dL/dp, any row constant taken off. ``row_log_slope``: see ``log_slope``.
    """
    # One return: a device function that returns from within a branch on a run-time value is not inlined.
    if mapping.small:
        scaled = tl.where(p > 0.0, log2_p * -LN_2 - row_log_slope, 0.0)  # log_unit is 1
        x = mapping.u * scaled
        series = 1.0 / 2 + x * (
            1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * (1.0 / 5040 + x * (1.0 / 40320)))))
        )
        far = tl.where(tl.abs(x) < 0.5, 1.0, x)
        # (exp(x) - 1 - x) / x**2, and from it (exp(x) - 1) / x.
        second = tl.where(tl.abs(x) < 0.5, series, ((tl.exp(x) - 1.0) / far - 1.0) / far)
        first = 1.0 + x * second
        b = p * scaled * scaled * second
        gp = g * p
        sum_a, sum_b = tl.sum(g * b, 1), tl.sum(b, 1)
        sum_c, sum_d = tl.sum(gp * scaled * first, 1), tl.sum(gp, 1)
    else:
        gp = g * p
        sum_a, sum_b = tl.sum(gp, 1), tl.sum(g * s, 1)
        sum_c = tl.sum(gp * log2_p, 1) * (-LN_2 * mapping.log_unit)
        sum_d = tl.zeros_like(sum_a)
    return sum_a, sum_b, sum_c, sum_d


@triton.jit
def alpha_gradient(a, b, c, d, slope, entropy, mapping):
    r"""dL/dalpha of a row from the sums of ``alpha_sums``.

    For ``u >= SMALL_U``, with ``pt = s / sum s``, ``h = -p log p``, ``H = sum h``:

        dL/dalpha = (sum g p - sum g pt) / u**2 + (sum g h - H sum g pt) / u

    Below, where that cancels, the same value through ``x_i = -u log p_i - log sum s`` and ``e2(x) = exp(x) - 1 - x``,
    with sums divided by their powers of u so that u = 0 needs no case of its own:

        dp_i/dalpha = -p_i [ e2(x_i)/u**2 - K + H expm1(x_i)/u ],     K = sum_j p_j e2(x_j)/u**2

    Reference:
        Correia, Niculae and Martins 2019, prop. 1.
    """
    tilted = b / tl.where(slope > 0.0, slope, 1.0)
    plain = (a - tilted) * mapping.inv_u * mapping.inv_u + (c - entropy * tilted) * mapping.inv_u
    return tl.where(mapping.small, -(a - b * d + entropy * c), plain)
