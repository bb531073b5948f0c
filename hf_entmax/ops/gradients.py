r"""Gradients of alpha-entmax in a form that stays accurate down to ``alpha = 1``.

With ``u = alpha - 1``, ``l = log p``, ``r_i = expm1(-u l_i)`` (so that ``p_i^{1-u} = p_i (1 + r_i)``),
``R = sum_i p_i r_i``, ``H = -sum_i p_i l_i`` and the cotangent ``g`` centred under ``p``, ``g'_i = g_i - sum_j p_j
g_j``:

.. math::

    \nabla_{z_i} &= s_i \left(g'_i - \frac{\sum_j s_j g'_j}{1 + R}\right), \qquad s_i = p_i (1 + r_i)

    \nabla_\alpha &= -\frac{1}{u^2} \sum_i p_i g'_i \left[ e_2(x_i) + u H \operatorname{expm1}(x_i) \right],
    \qquad x_i = -u l_i - \log(1 + R), \quad e_2(x) = e^x - 1 - x

The second line is proposition 1 of Correia et al. (2019) rearranged: their ``(p - pt)/u^2 + (h - pt H)/u`` subtracts
numbers ``1/u^2`` times larger than the result. Here constants in the bracket drop out because ``sum_i p_i g'_i =
0``, and ``expm1(x_i) = (r_i - R)/(1 + R)`` needs no exponential of its own. For small ``u`` the bracket is a series
in ``x``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_entmax.ops.solve import SMALLEST_U, any_above_two, chunk_rows, compute_dtype, expm1, values_visible

# Below this `u` the bracket is summed as a series in x = O(u log p), above it directly: the direct form loses about eps/u,
# the series (eight terms) what large x leave out.
_SERIES_BELOW = {torch.float32: 0.08, torch.float64: 1e-3}
# Probabilities are raised to this before a logarithm whose every use is multiplied by the probability itself.
# Low enough to change nothing, high enough that powers of it stay finite.
_FLOOR = {torch.float32: 1e-30, torch.float64: 1e-250}
# For alpha > 2 the derivative of a probability p in its score is about p**(2 - alpha), which soon is no float: it ends here.
_LARGEST_LOG = {torch.float32: 80.0, torch.float64: 700.0}


def gradient_rows(
    probs: Tensor, grad: Tensor, u: float | Tensor, with_scores: bool, with_alpha: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Pull a cotangent of the probabilities back to the scores and to alpha, a chunk of rows at a time.

    ``probs`` and their cotangent ``grad`` are ``[R, d]`` of one dtype, ``u`` is a float or ``[R, 1]`` in the compute dtype.

    Returns:
        ``[R, d]`` in the dtype of ``probs`` and ``[R, 1]`` in the compute dtype, None where not wanted.
    """
    if not values_visible(probs):
        grad_scores, grad_alpha = gradient_formula(probs, grad, u, with_alpha)
        return grad_scores.to(probs.dtype) if with_scores else None, grad_alpha
    rows, length = probs.shape
    out = torch.empty_like(probs, memory_format=torch.contiguous_format) if with_scores else None
    row_values = probs.new_empty((rows, 1), dtype=compute_dtype(probs.dtype)) if with_alpha else None
    chunk = chunk_rows(rows, length, probs.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        u_part = u[part] if isinstance(u, Tensor) else u
        # For alpha > 2 the largest weight s may belong to the smallest probability, which asks for more care.
        chunk_gradient = gradient_formula if any_above_two(u_part) else _chunk_gradient
        grad_scores, grad_alpha = chunk_gradient(probs[part], grad[part], u_part, with_alpha)
        if out is not None:
            out[part] = grad_scores
        if row_values is not None and grad_alpha is not None:
            row_values[part] = grad_alpha
    return out, row_values


def gradient_formula(probs: Tensor, grad: Tensor, u: float | Tensor, with_alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Do what `gradient_rows` does by differentiable operations, for rows ``[..., d]`` and any ``u >= 0``, in the compute dtype."""
    probs, grad = _widened(probs, grad)
    support = probs > 0
    log_probs = torch.log(torch.where(support, probs, torch.ones_like(probs)))
    u = u.clamp(min=SMALLEST_U) if isinstance(u, Tensor) else max(u, SMALLEST_U)
    gentle_u = u.clamp(max=1) if isinstance(u, Tensor) else min(u, 1.0)
    excess = expm1(-gentle_u * log_probs)
    weight, scale = probs + probs * excess, torch.ones_like(probs[..., :1])
    if isinstance(u, Tensor) or u > 1:
        # p**(1 - u) has no bound there: it is taken relative to its largest, that of the smallest probability.
        log_weight = torch.where(support, (1 - u) * log_probs, -math.inf)
        largest = log_weight.amax(-1, keepdim=True).clamp(min=0)
        steep = u > 1
        weight = _choose(steep, torch.exp(log_weight - largest), weight)
        scale = _choose(steep, torch.exp(largest.clamp(max=_LARGEST_LOG[probs.dtype])), scale)
    # One entry can outweigh all others (alpha > 2); measured from its cotangent nothing cancels.
    reference = grad.gather(-1, weight.argmax(-1, keepdim=True))
    shifted = torch.where(support, grad - reference, torch.zeros_like(grad))
    total = weight.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, torch.ones_like(total))
    mean = (weight * shifted).sum(-1, keepdim=True) / total
    grad_scores = scale * (weight * (shifted - mean))
    if not with_alpha:
        return grad_scores, None
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    centred = shifted - (probs * shifted).sum(-1, keepdim=True)
    steep_alpha = gentle_alpha = torch.zeros_like(mean)
    if isinstance(u, Tensor) or u > 1:
        # The same with the weights that sum to 1; both brackets are 0 where all probabilities are equal.
        steep_u = u.clamp(min=1) if isinstance(u, Tensor) else u
        tilt = ((weight / total - probs) * centred).sum(-1, keepdim=True)
        spread = (probs * (log_probs + entropy) * centred).sum(-1, keepdim=True)
        steep_alpha = -((1 + steep_u * entropy) * tilt / steep_u + spread) / steep_u
    if isinstance(u, Tensor) or u <= 1:
        mean_excess = (probs * excess).sum(-1, keepdim=True)
        log_total = torch.log1p(mean_excess)
        seam = _SERIES_BELOW[probs.dtype]
        if isinstance(u, Tensor):
            # Each branch is evaluated where it is tame; `where` must not select between a number and a NaN.
            series = _series(u.clamp(max=seam), log_probs, log_total, entropy)
            direct = _direct(u.clamp(min=seam, max=1), log_probs, excess, mean_excess, log_total, entropy)
            bracket = torch.where(u < seam, series, direct)
        elif u < seam:
            bracket = _series(u, log_probs, log_total, entropy)
        else:
            bracket = _direct(u, log_probs, excess, mean_excess, log_total, entropy)
        gentle_alpha = -(probs * centred * bracket).sum(-1, keepdim=True)
    return grad_scores, _choose(u > 1, steep_alpha, gentle_alpha)


def _choose(condition: bool | Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no


def _direct(
    u: float | Tensor, log_probs: Tensor, excess: Tensor, mean_excess: Tensor, log_total: Tensor, entropy: Tensor
) -> Tensor:
    """Return ``[e_2(x) + u H expm1(x)] / u^2``."""
    expm1_x = (excess - mean_excess) / (1 + mean_excess)
    return (expm1_x * (1 + u * entropy) + u * log_probs + log_total) / (u * u)


def _series(u: float | Tensor, log_probs: Tensor, log_total: Tensor, entropy: Tensor) -> Tensor:
    """Return the same by its series in ``x``, which is small wherever ``p`` is not negligible."""
    ratio = -log_probs - log_total / u
    x = u * ratio
    # e_2(x) = x^2/2 (1 + x/3 (1 + x/4 (...))), and expm1(x) = x + e_2(x).
    tail = 1 + x / 8
    for divisor in (7, 6, 5, 4, 3):
        tail = 1 + x / divisor * tail
    second = ratio * ratio * tail / 2
    return second + entropy * (ratio + u * second)


def _chunk_gradient(probs: Tensor, grad: Tensor, u: float | Tensor, with_alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Evaluate the same for ``u <= 1`` without a graph, in place, by operations that are fast on CPUs."""
    half = probs.dtype != compute_dtype(probs.dtype)
    probs, grad = _widened(probs, grad)
    if not with_alpha:
        if not isinstance(u, Tensor) and u in (0.0, 0.5, 1.0):
            # Products with p, not selections by p > 0: bool tensors are slow on CPUs.
            weight = _power_of_probs(probs, u)
        else:
            weight = probs.clamp(min=_FLOOR[probs.dtype]).log_().mul_(-u).exp_().mul_(probs)
        total = weight.sum(-1, keepdim=True)
        mean = torch.linalg.vecdot(weight, grad).unsqueeze(-1) / torch.where(total > 0, total, torch.ones_like(total))
        return torch.sub(grad, mean, out=grad if half else None).mul_(weight), None
    u = u.clamp(min=SMALLEST_U) if isinstance(u, Tensor) else max(u, SMALLEST_U)
    log_probs = probs.clamp(min=_FLOOR[probs.dtype]).log_()
    excess = torch.expm1(log_probs * -u)
    centred = grad - torch.linalg.vecdot(probs, grad).unsqueeze(-1)
    entropy = -torch.linalg.vecdot(probs, log_probs).unsqueeze(-1)
    weighted = probs * excess
    mean_excess = weighted.sum(-1, keepdim=True)
    log_total = torch.log1p(mean_excess)
    mean = torch.linalg.vecdot(weighted, centred).unsqueeze(-1) / (1 + mean_excess)
    grad_scores = (centred - mean).mul_(weighted.add_(probs))
    seam = _SERIES_BELOW[probs.dtype]
    smallest, largest = (float(u.min()), float(u.max())) if isinstance(u, Tensor) else (u, u)
    centred.mul_(probs)
    if smallest >= seam:
        # `_direct`, in place. Its u^2 is divided out of the row sums, not out of every entry.
        factor = (1 + u * entropy) / (1 + mean_excess)
        bracket = excess.sub_(mean_excess).mul_(factor).add_(log_probs.mul_(u)).add_(log_total)
        return grad_scores, torch.linalg.vecdot(centred, bracket).unsqueeze(-1) / -(u * u)
    if largest < seam or not isinstance(u, Tensor):
        bracket = _series(u, log_probs, log_total, entropy)
    else:
        series = _series(u.clamp(max=seam), log_probs, log_total, entropy)
        direct = _direct(u.clamp(min=seam), log_probs, excess, mean_excess, log_total, entropy)
        bracket = torch.where(u < seam, series, direct)
    return grad_scores, -torch.linalg.vecdot(centred, bracket).unsqueeze(-1)


def _power_of_probs(probs: Tensor, u: float) -> Tensor:
    """Return ``p ** (1 - u)`` on the support and 0 elsewhere, for ``u`` in {0, 0.5, 1}."""
    if u == 0:
        return probs
    if u == 1:
        return probs.sign()
    return probs.clamp(min=_FLOOR[probs.dtype]).rsqrt_().mul_(probs)


def _widened(probs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the compute dtype; probabilities rounded to a half type are made to sum to 1 again."""
    dtype = compute_dtype(probs.dtype)
    if probs.dtype == dtype:
        return probs, grad
    probs = probs.to(dtype)
    total = probs.sum(-1, keepdim=True)
    return probs / torch.where(total > 0, total, torch.ones_like(total)), grad.to(dtype)
