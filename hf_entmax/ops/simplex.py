r"""The one Euclidean projection onto the probability simplex, on which every sparse mapping of this package stands.

    p = argmin_{p in simplex} ||p - z||^2,     p_i = max(z_i - tau, 0),     tau such that sum_i p_i = 1

The threshold ``tau`` is found without sorting: with ``m = max z``, only the candidates ``z_i > m - 1`` can be in the
support, and Newton's method on ``f(tau) = sum_i max(z_i - tau, 0) - 1``, started left of the root, visits ever
smaller supports and stops at the exact one (Michelot 1986). ``f`` is convex and piecewise linear, so one step that
shrinks ``f`` to a share ``x`` leaves at most a share ``1 - x`` of the slope: the product of the two falls at least
fourfold a step, and the number of steps is at most ``log2(candidates)`` plus half the bits of the dtype. In practice
it is below ten, each a pass over the candidates: linear time expected, with no sort to keep for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a mapping computes in: float64 for float64 scores, float32 for everything narrower.

    Raises:
        TypeError: if ``dtype`` is not a real floating-point type.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"scores must be a floating-point tensor (float16, bfloat16, float32 or float64), not {dtype}.")
    return torch.float64 if dtype == torch.float64 else torch.float32


def allowed_entries(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Which entries may receive mass: True in ``mask`` and not masked by their value.

    Args:
        scores: ``[...]``, floating point. ``-inf`` and the ``finfo.min`` (or anything below half of it) of additive
            masks mark an entry as masked.
        mask: bool, broadcastable to ``scores``; True = may receive mass.

    Returns:
        bool tensor of the shape of ``scores``. NaN counts as allowed, so that a NaN is seen and not hidden.

    Raises:
        TypeError: if ``mask`` is not boolean.
        ValueError: if ``mask`` cannot be broadcast to ``scores``.
    """
    masked = scores < torch.finfo(scores.dtype).min / 2
    if mask is None:
        return ~masked
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = may receive mass), not {mask.dtype}.")
    try:
        return mask.expand(scores.shape) & ~masked
    except RuntimeError:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} cannot be broadcast to scores of shape {tuple(scores.shape)}."
        ) from None


def as_rows(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The scores and their allowed entries with the dimension to normalise moved last.

    Raises:
        TypeError: if ``scores`` is not floating point, or ``mask`` is not boolean.
        ValueError: if ``scores`` has no entry along ``dim``, or ``mask`` cannot be broadcast to it.
    """
    compute_dtype(scores.dtype)
    if scores.ndim == 0 or scores.shape[dim] == 0:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} have no entry along dim={dim}: a distribution needs at least one."
        )
    return scores.movedim(dim, -1), allowed_entries(scores, mask).movedim(dim, -1)


def row_max(scores: Tensor, allowed: Tensor) -> Tensor:
    """The largest allowed entry along the last dimension, kept as a dimension of size 1; 0 in rows without any."""
    top = scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0.0)


def project_centred(centred: Tensor) -> Tensor:
    """Project rows whose largest entry is 0.

    Args:
        centred: ``[..., n]``, float32 or float64, ``z - max z``; ``-inf`` where an entry is masked.

    Returns:
        The projection, ``[..., n]``: rows sum to 1, rows that are ``-inf`` throughout are 0. No gradient.
    """
    values = centred
    compiling = torch.compiler.is_compiling()
    if not compiling and centred.shape[-1] >= 64 and centred.numel():
        # Sharp rows leave a handful of candidates; all further passes then cost next to nothing.
        most = int((centred > -1).sum(-1).max())
        if most * 4 <= centred.shape[-1]:
            values = centred.topk(max(most, 1), dim=-1, sorted=False).values
    threshold = torch.full_like(values[..., :1], -1.0)
    bits = 52 if values.dtype == torch.float64 else 23
    steps = bits // 2 + math.ceil(math.log2(max(values.shape[-1], 2))) + 2
    size = None
    for _ in range(steps):
        inside = values > threshold
        previous, size = size, inside.sum(-1, keepdim=True)
        if not compiling and previous is not None and torch.equal(size, previous):
            break
        total = torch.where(inside, values, 0.0).sum(-1, keepdim=True)
        threshold = torch.maximum(threshold, (total - 1.0) / size.clamp(min=1))
    probs = (centred - threshold).clamp(min=0.0)
    # Thousands of equal rounding errors in `centred - threshold` would otherwise add up in the sum.
    total = probs.sum(-1, keepdim=True)
    return probs / torch.where(total == 0, 1.0, total)


def project_jacobian_product(vector: Tensor, probs: Tensor) -> Tensor:
    """Multiply by the Jacobian of the projection: centre on the support, 0 elsewhere.

        J = diag(s) - s s^T / |S|,     s_i = 1 if p_i > 0 else 0

    Args:
        vector: ``[..., n]``.
        probs: the projection, ``[..., n]``.

    Returns:
        ``J v``, ``[..., n]`` (``J`` is symmetric: the same for vector-Jacobian and Jacobian-vector products).

    Reference:
        Martins and Astudillo 2016, eq. 9.
    """
    inside = probs > 0
    size = inside.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(inside, vector, 0.0).sum(-1, keepdim=True) / size
    return torch.where(inside, vector - mean, 0.0)


def support_spread(vector: Tensor, probs: Tensor) -> Tensor:
    """``sum_{i in S} v_i (p_i - 1/|S|)``, which is ``v^T J y`` for the projected point ``y``; ``[..., 1]``."""
    inside = probs > 0
    # In the dtype of the scores: the reciprocal of an integer tensor would be float32.
    size = inside.sum(-1, keepdim=True).clamp(min=1).to(probs.dtype)
    return (vector * torch.where(inside, probs - 1.0 / size, 0.0)).sum(-1, keepdim=True)


class SimplexProjectionFunction(torch.autograd.Function):
    """Sparsemax along the last dimension, see :func:`project_onto_simplex`."""

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor) -> Tensor:
        """``scores`` ``[..., n]`` in its own dtype, ``allowed`` bool ``[..., n]``."""
        z = scores.to(compute_dtype(scores.dtype))
        centred = (z - row_max(z, allowed)).masked_fill(~allowed, -math.inf)
        return project_centred(centred).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keep the output alone: it carries its support."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Closed form, O(n)."""
        (probs,) = ctx.saved_tensors
        wide = compute_dtype(probs.dtype)
        return project_jacobian_product(grad_outputs[0].to(wide), probs.to(wide)).to(probs.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], scores: Tensor, allowed: Tensor) -> tuple[Tensor, int]:
        """A batch dimension is one more leading dimension."""
        scores, allowed = (
            x.movedim(d, 0) if d is not None else x.expand(info.batch_size, *x.shape)
            for x, d in zip((scores, allowed), in_dims, strict=True)
        )
        return SimplexProjectionFunction.apply(scores, allowed), 0  # type: ignore[return-value]


def project_onto_simplex(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Euclidean projection onto the probability simplex (sparsemax).

        p = argmin_{p in simplex} ||p - z||^2

    Args:
        scores: any shape, float16, bfloat16, float32 or float64; computed in float32 at least.
        dim: the dimension to normalise.
        mask: bool, broadcastable to ``scores``; True = may receive mass. Entries of ``-inf`` or ``finfo.min`` are
            masked as well. Rows masked whole give 0 and pass no gradient.

    Returns:
        The projection, of the shape and dtype of ``scores``. Differentiable in ``scores`` (twice), usable under
        ``torch.func`` and ``torch.compile``; only the output is kept for the backward pass.

    Raises:
        TypeError: if ``scores`` is not floating point, or ``mask`` is not boolean.
        ValueError: if ``mask`` cannot be broadcast to ``scores``.

    Reference:
        Martins and Astudillo 2016, prop. 1; Michelot 1986 for the search of the threshold.
    """
    rows, allowed = as_rows(scores, dim, mask)
    return SimplexProjectionFunction.apply(rows, allowed).movedim(-1, dim)  # type: ignore[union-attr]
