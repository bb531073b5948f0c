r"""The one Euclidean projection onto the probability simplex, on which every sparse mapping of this package stands.

    p = argmin_{p in simplex} ||p - z||^2,     p_i = max(z_i - tau, 0),     tau such that sum_i p_i = 1

The threshold ``tau`` is found without sorting: with ``m = max z``, only the candidates ``z_i > m - 1`` can be in the
support, and Newton's method on ``f(tau) = sum_i max(z_i - tau, 0) - 1``, started at ``m - 1``, visits ever smaller
supports and stops at the exact one (Michelot 1986). ``f`` is convex and piecewise linear, so a step that shrinks ``f``
to a share ``x`` leaves at most a share ``1 - x`` of its slope: the product of the two falls at least fourfold a step,
and the number of steps is at most ``log2(n)`` plus half the bits of the dtype. In practice it is well below ten, each a
pass over rows that fit a cache: linear time expected, with no sort to keep for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Elements per block of rows on a CPU: the few temporaries of a block then stay in its caches.
BLOCK_ELEMENTS = 1 << 16


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a mapping computes in: float64 for float64 scores, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_allowed(scores: Tensor) -> Tensor:
    """Which entries may receive mass: those above half of ``finfo.min``, so neither ``-inf`` nor an additive mask.

    NaN counts as allowed, so that it is seen and not hidden.
    """
    return ~(scores <= torch.finfo(scores.dtype).min / 2)


def as_rows(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The scores with the dimension to normalise moved last and ``-inf`` where ``mask`` is False.

    Raises:
        TypeError: if ``scores`` is not a floating-point tensor, or ``mask`` not a bool one.
        ValueError: if ``scores`` has no entry along ``dim``, or ``mask`` cannot be broadcast to it.
    """
    if not isinstance(scores, Tensor) or not scores.dtype.is_floating_point:
        given = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"scores must be a floating-point tensor (float16, bfloat16, float32 or float64), not {given}.")
    if scores.ndim == 0 or scores.shape[dim] == 0:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} have no entry along dim={dim}: a distribution needs at least one."
        )
    if mask is None:
        return scores.movedim(dim, -1)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = may receive mass), not {given}.")
    try:
        blocked = ~mask.expand(scores.shape)
    except RuntimeError:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} cannot be broadcast to scores of shape {tuple(scores.shape)}."
        ) from None
    return scores.masked_fill(blocked, -math.inf).movedim(dim, -1)


def row_max(scores: Tensor, allowed: Tensor) -> Tensor:
    """The largest allowed entry along the last dimension, kept as a dimension of size 1; 0 in rows without any."""
    top = scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0.0)


def project_rows(rows: Tensor, centre: Callable[..., Tensor], *per_row: float | Tensor) -> Tensor:
    """Transform rows, shift each to a maximum of 0, and project them; no gradient.

    Args:
        rows: ``[..., n]``.
        centre: ``(rows, *per_row) -> y - max y``, float32 or float64 of the shape of the rows it was given, with
            ``-inf`` where an entry is masked; called on blocks of rows.
        *per_row: numbers, or tensors broadcastable to ``[..., 1]``, for ``centre``.

    Returns:
        The projection of ``y``, shape and dtype of ``rows``: rows sum to 1, or are 0 where masked whole.
    """
    if torch.compiler.is_compiling() or rows.device.type != "cpu" or rows.numel() <= BLOCK_ELEMENTS:
        return _project_centred(centre(rows, *per_row)).to(rows.dtype)
    shape, length = rows.shape, rows.shape[-1]
    per_row = tuple(x.expand(*shape[:-1], 1).reshape(-1, 1) if isinstance(x, Tensor) else x for x in per_row)
    flat = rows.reshape(-1, length)
    probs = torch.empty_like(flat)
    size = max(1, BLOCK_ELEMENTS // length)
    for start in range(0, flat.shape[0], size):
        block = slice(start, start + size)
        given = (x[block] if isinstance(x, Tensor) else x for x in per_row)
        probs[block] = _project_centred(centre(flat[block], *given))
    return probs.reshape(shape)


def _project_centred(values: Tensor) -> Tensor:
    compiling = torch.compiler.is_compiling()
    # The first step starts at the lowest threshold there can be, so that only candidates count.
    threshold = torch.full_like(values[..., :1], -1.0)
    bits = 52 if values.dtype == torch.float64 else 23
    steps = bits // 2 + math.ceil(math.log2(max(values.shape[-1], 2))) + 2
    size = None
    for _ in range(steps):
        above = (values - threshold).clamp_(min=0.0)
        total = above.sum(-1, keepdim=True)
        previous, size = size, above.sign_().sum(-1, keepdim=True)
        # Rows that hold NaN never compare equal; they cost the steps that are left, no more.
        if not compiling and previous is not None and torch.equal(size, previous):
            break
        threshold = threshold + ((total - 1.0) / size.clamp(min=1.0)).clamp(min=0.0)
    probs = (values - threshold).clamp_(min=0.0)
    # Thousands of equal rounding errors in `values - threshold` would otherwise add up in the sum.
    total = probs.sum(-1, keepdim=True)
    return probs.div_(torch.where(total == 0, 1.0, total))


def centre_rows(rows: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """``scale * (z - max z)`` in the compute dtype, ``-inf`` throughout rows that are masked whole; ``scale > 0``."""
    top = rows.amax(-1, keepdim=True)
    # Entries masked by their value lie far below any other and need no care; a row of nothing else does.
    masked_whole = ~is_allowed(top)
    dtype = compute_dtype(rows.dtype)
    centred = rows.to(dtype) - top.masked_fill(masked_whole, 0.0).to(dtype)
    if isinstance(scale, Tensor) or scale != 1.0:
        # A scale near 0 would bring masked entries close, or make NaN of them.
        return centred.mul_(scale).masked_fill_(~is_allowed(rows), -math.inf)
    return centred.masked_fill_(masked_whole, -math.inf)


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
    def forward(rows: Tensor) -> Tensor:
        """``rows`` ``[..., n]``, with ``-inf`` or ``finfo.min`` where masked."""
        return project_rows(rows, centre_rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the output alone: it carries its support."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Closed form, O(n)."""
        (probs,) = ctx.saved_tensors
        wide = compute_dtype(probs.dtype)
        return project_jacobian_product(grad_outputs[0].to(wide), probs).to(probs.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], rows: Tensor) -> tuple[Tensor, int]:
        """A batch dimension is one more leading dimension."""
        return SimplexProjectionFunction.apply(rows.movedim(in_dims[0], 0)), 0  # type: ignore[return-value]


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
    return SimplexProjectionFunction.apply(as_rows(scores, dim, mask)).movedim(-1, dim)  # type: ignore[union-attr]
