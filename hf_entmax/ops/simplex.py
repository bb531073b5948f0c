r"""The Euclidean projection onto the probability simplex, on which the controllable mappings stand as sparsemax does.

    p = argmin_{p in simplex} ||p - z||^2,     p_i = max(z_i - tau, 0),     tau such that sum_i p_i = 1

The threshold ``tau`` is found without sorting, by the solver of entmax at ``alpha = 2``: with ``m = max z``, only the
candidates ``z_i > m - 1`` can be in the support, and Newton's method on ``f(tau) = sum_i max(z_i - tau, 0) - 1``, started
at ``m - 1``, visits ever smaller supports and stops at the exact one (Michelot 1986). ``f`` is convex and piecewise
linear, so a step that shrinks ``f`` to a share ``x`` leaves at most a share ``1 - x`` of its slope: the product of the two
falls at least fourfold a step, which bounds the number of steps by ``log2(n)`` plus half the bits of the dtype. In
practice it is well below ten, each a pass over rows that fit a cache: linear time expected, with no sort to keep for the
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_entmax.ops.solve import compute_dtype, masked_below, project_centred

# Elements per block of rows on a CPU: the few temporaries of a block then stay in its caches.
BLOCK_ELEMENTS = 1 << 16


def is_allowed(scores: Tensor) -> Tensor:
    """Tell which entries may receive mass: those above half of ``finfo.min``, so neither ``-inf`` nor an additive mask.

    NaN counts as allowed, so that it is seen and not hidden.
    """
    return ~(scores <= masked_below(scores.dtype))


def as_rows(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return the scores with the dimension to normalise moved last and ``-inf`` where ``mask`` is False."""
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
    """Return the largest allowed entry along the last dimension, ``[..., 1]``; 0 in rows without any."""
    top = scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0.0)


def project_rows(rows: Tensor, centre: Callable[..., Tensor], *per_row: float | Tensor) -> Tensor:
    """Transform rows, shift each to a maximum of 0, and project them; no gradient.

    ``centre`` is called on blocks of rows ``[..., n]`` and of ``per_row`` (numbers, or tensors broadcastable to ``[..., 1]``): it
    gives ``y - max y`` of the same shape in float32 or float64, with ``-inf`` where an entry is masked. Rows of the projection
    sum to 1, or are 0 where masked whole.
    """
    if torch.compiler.is_compiling() or rows.device.type != "cpu" or rows.numel() <= BLOCK_ELEMENTS:
        return project_centred(centre(rows, *per_row)).to(rows.dtype)
    shape, length = rows.shape, rows.shape[-1]
    per_row = tuple(x.expand(*shape[:-1], 1).reshape(-1, 1) if isinstance(x, Tensor) else x for x in per_row)
    flat = rows.reshape(-1, length)
    probs = torch.empty_like(flat)
    size = max(1, BLOCK_ELEMENTS // length)
    for start in range(0, flat.shape[0], size):
        block = slice(start, start + size)
        given = (x[block] if isinstance(x, Tensor) else x for x in per_row)
        probs[block] = project_centred(centre(flat[block], *given))
    return probs.reshape(shape)


def centre_rows(rows: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return ``scale * (z - max z)`` in the compute dtype, ``-inf`` throughout rows that are masked whole; ``scale > 0``."""
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
    """Multiply ``[..., n]`` by the Jacobian of the projection, which is symmetric: centre on the support, 0 elsewhere.

        J = diag(s) - s s^T / |S|,     s_i = 1 if p_i > 0 else 0

    Reference:
        Martins and Astudillo 2016, eq. 9.
    """
    # Products with 0 and 1, not selections: bool tensors are slow on CPUs.
    inside = probs.sign().to(vector.dtype)
    size = inside.sum(-1, keepdim=True).clamp(min=1.0)
    mean = torch.linalg.vecdot(inside, vector).unsqueeze(-1) / size
    return (vector - mean) * inside


def support_spread(vector: Tensor, probs: Tensor) -> Tensor:
    """Return ``sum_{i in S} v_i (p_i - 1/|S|)``, which is ``v^T J y`` for the projected point ``y``; ``[..., 1]``."""
    inside = probs > 0
    # In the dtype of the scores: the reciprocal of an integer tensor would be float32.
    size = inside.sum(-1, keepdim=True).clamp(min=1).to(probs.dtype)
    return (vector * torch.where(inside, probs - 1.0 / size, 0.0)).sum(-1, keepdim=True)
