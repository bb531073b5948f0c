r"""Gradients of alpha-entmax in a form that stays accurate down to ``alpha = 1``.

With ``u = alpha - 1``, ``l = log p``, ``r_i = expm1(-u l_i)`` (so that ``p_i^{1-u} = p_i (1 + r_i)``), ``R = sum_i p_i r_i``,
``H = -sum_i p_i l_i`` and the cotangent ``g`` centred under ``p`` (``g'_i = g_i - sum_j p_j g_j``):

.. math::

    \nabla_z   &= s_i (g_i - \tfrac{s \cdot g}{\sum_j s_j}), \qquad s_i = p_i (1 + r_i) \text{ on the support}

    \nabla_\alpha &= -\tfrac{1}{u^2} \sum_i p_i g'_i \left[ e_2(x_i) + u H \operatorname{expm1}(x_i) \right],
    \qquad x_i = -u l_i - \log(1 + R), \quad e_2(x) = e^x - 1 - x

The second line is proposition 1 of Correia et al. (2019) rearranged: their ``(p - pt)/u^2 + (h - pt H)/u`` subtracts numbers
``1/u^2`` times larger than the result. Here constants inside the bracket drop out because ``sum_i p_i g'_i = 0``, and
``expm1(x_i) = (r_i - R)/(1 + R)`` needs no further exponential. Below ``u = 0.02`` the bracket is evaluated by its series in ``x``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.ops.solve import _SMALLEST_U, chunk_rows, compute_dtype

# Below this the bracket is summed as a series in x = O(u log p), above it directly; both are accurate around the seam.
_SERIES_BELOW = 0.02


def gradient_rows(probs: Tensor, grad: Tensor, u: float | Tensor, with_alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Pull a cotangent of the probabilities back to the scores and, if wanted, to alpha.

    Args:
        probs: ``[R, d]`` probabilities.
        grad: ``[R, d]`` cotangent, same dtype.
        u: ``alpha - 1``, a float or ``[R, 1]``.
        with_alpha: whether the gradient in alpha is wanted.

    Returns:
        ``[R, d]`` in the dtype of ``probs`` and ``[R, 1]`` in the compute dtype (or None).
    """
    rows, length = probs.shape
    if torch.compiler.is_compiling() or rows * length == 0:
        grad_scores, grad_alpha = gradient_formula(probs, grad, u, with_alpha)
        return grad_scores.to(probs.dtype), grad_alpha
    out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    row_values = probs.new_empty((rows, 1), dtype=compute_dtype(probs.dtype)) if with_alpha else None
    chunk = chunk_rows(rows, length, probs.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        u_part = u if isinstance(u, float) else u[part]
        grad_scores, grad_alpha = gradient_formula(probs[part], grad[part], u_part, with_alpha)
        out[part] = grad_scores
        if row_values is not None and grad_alpha is not None:
            row_values[part] = grad_alpha
    return out, row_values


def gradient_formula(probs: Tensor, grad: Tensor, u: float | Tensor, with_alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Evaluate the formulas of this module by differentiable operations (so that they can be differentiated again).

    Args:
        probs: ``[..., d]`` probabilities.
        grad: ``[..., d]`` cotangent.
        u: ``alpha - 1``, a float or a tensor ``[..., 1]``.
        with_alpha: whether the gradient in alpha is wanted.

    Returns:
        ``[..., d]`` and ``[..., 1]`` (or None) in the compute dtype.
    """
    dtype = compute_dtype(probs.dtype)
    probs, grad = probs.to(dtype), grad.to(dtype)
    zero = torch.zeros((), dtype=dtype, device=probs.device)
    support = probs > 0
    log_probs = torch.log(torch.where(support, probs, torch.ones_like(probs)))
    if not isinstance(u, float):
        u = u.clamp(min=_SMALLEST_U)
    excess = torch.expm1(-u * log_probs)
    weight = probs + probs * excess
    # The entry with the largest weight can outweigh all others (alpha > 2); measured from it, nothing cancels.
    reference = grad.gather(-1, weight.argmax(-1, keepdim=True)) if grad.shape[-1] else grad
    shifted = torch.where(support, grad - reference, zero)
    total = weight.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, torch.ones_like(total))
    grad_scores = weight * (shifted - (weight * shifted).sum(-1, keepdim=True) / total)
    if not with_alpha:
        return grad_scores, None
    centred = shifted - (probs * shifted).sum(-1, keepdim=True)
    entropy = -(probs * log_probs).sum(-1, keepdim=True)
    mean_excess = (probs * excess).sum(-1, keepdim=True)
    log_total = torch.log1p(mean_excess)
    if isinstance(u, float):
        u_value = max(u, _SMALLEST_U)
        bracket = (_series if u_value < _SERIES_BELOW else _direct)(
            u_value, log_probs, excess, mean_excess, log_total, entropy
        )
    else:
        series = _series(u.clamp(max=_SERIES_BELOW), log_probs, excess, mean_excess, log_total, entropy)
        direct = _direct(u.clamp(min=_SERIES_BELOW), log_probs, excess, mean_excess, log_total, entropy)
        bracket = torch.where(u < _SERIES_BELOW, series, direct)
    grad_alpha = -(probs * centred * bracket).sum(-1, keepdim=True)
    return grad_scores, grad_alpha


def _direct(u, log_probs, excess, mean_excess, log_total, entropy):
    """Return ``[e_2(x) + u H expm1(x)] / u^2``."""
    expm1_x = (excess - mean_excess) / (1 + mean_excess)
    return (expm1_x + u * log_probs + log_total + u * entropy * expm1_x) / (u * u)


def _series(u, log_probs, excess, mean_excess, log_total, entropy):
    """Return the same by its series in ``x``, which is small where ``p`` is not negligible."""
    ratio = -log_probs - log_total / u
    x = u * ratio
    second = ratio * ratio * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))) / 2
    first = ratio * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return second + entropy * first
