r"""Autograd functions of the controllable mappings: closed-form Jacobian products, no sort and no iterate kept.

All of them take rows: the dimension to normalise is the last one, options are numbers or tensors of the same rank with
a last dimension of 1. With ``S`` the support and ``P_S v = v - mean_S(v)`` on it (0 elsewhere), the Jacobian of
sparsemax is ``P_S``, and for a projected point ``y`` the support itself gives ``(P_S y)_i = p_i - 1/|S|``. So the
derivative along any scaling of the scores, and with it that of every option, needs nothing but the output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_entmax.ops.simplex import (
    compute_dtype,
    project_centred,
    project_jacobian_product,
    row_max,
    support_spread,
)

Option = float | Tensor


@dataclasses.dataclass(frozen=True)
class Transform:
    """One component-wise ``g`` of sparsegen.

    Args:
        centred: ``(z, allowed) -> g(z) - max g(z)`` over the allowed entries, without overflow or cancellation.
        derivative: ``z -> g'(z)``.
    """

    centred: Callable[[Tensor, Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _centred_exp(z: Tensor, allowed: Tensor) -> Tensor:
    top = row_max(z, allowed)
    # exp(z) - exp(m) = exp(m) * expm1(z - m); a clamped exp(m) only matters where every gap is far beyond 1 anyway.
    return top.clamp(max=math.log(torch.finfo(z.dtype).max) - 1.0).exp() * torch.expm1(z - top)


def _centred_sq(z: Tensor, allowed: Tensor) -> Tensor:
    size = z.abs()
    top = row_max(size, allowed)
    return (size - top) * (size + top)


def _bounded(z: Tensor) -> Tensor:
    # A support of one entry multiplies the derivative by an exact zero, which must stay zero.
    return z.clamp(max=torch.finfo(z.dtype).max)


TRANSFORMS = {
    "lin": Transform(lambda z, allowed: z - row_max(z, allowed), torch.ones_like),
    "exp": Transform(_centred_exp, lambda z: _bounded(z.exp())),
    "sq": Transform(_centred_sq, lambda z: 2.0 * z),
    "log": Transform(lambda z, allowed: z.log() - row_max(z, allowed).log(), lambda z: _bounded(1.0 / z)),
}


def _wide(option: Option, dtype: torch.dtype) -> Option:
    return option.to(dtype) if isinstance(option, Tensor) else option


def _keep(ctx: Any, option: Option, *tensors: Tensor) -> None:
    """Save tensors, and the option wherever it belongs."""
    ctx.number = None if isinstance(option, Tensor) else option
    ctx.save_for_backward(*tensors, *([option] if isinstance(option, Tensor) else []))


def _option_of(ctx: Any, saved: tuple[Tensor, ...]) -> Option:
    return saved[-1] if ctx.number is None else ctx.number


def _option_gradient(option: Option, rows: Tensor) -> Tensor | None:
    """The gradient of each row's own option, summed over the rows that share one."""
    return rows.sum_to_size(option.shape).to(option.dtype) if isinstance(option, Tensor) else None


def _batched_first(info: Any, in_dims: tuple[Any, ...], *args: Any) -> list[Any]:
    """Arguments of a vmap rule with the batch dimension in front; options of one value stay as they are."""
    moved = []
    for position, (value, dim) in enumerate(zip(args, in_dims, strict=True)):
        if dim is not None:
            value = value.movedim(dim, 0)
        elif isinstance(value, Tensor) and position < 2:
            value = value.expand(info.batch_size, *value.shape)
        moved.append(value)
    return moved


class SparsegenFunction(torch.autograd.Function):
    """``sparsemax(g(z) / (1 - lam))`` for a component-wise ``g`` of ``TRANSFORMS``."""

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor, lam: Option, kind: str) -> Tensor:
        """``scores`` ``[..., n]``, ``allowed`` bool ``[..., n]``, ``lam`` a number or ``[..., 1]``."""
        z = scores.to(compute_dtype(scores.dtype))
        centred = TRANSFORMS[kind].centred(z, allowed) / (1.0 - _wide(lam, z.dtype))
        return project_centred(centred.masked_fill(~allowed, -math.inf)).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Option, str], output: Tensor) -> None:
        """The scores are kept only where ``g'`` needs them."""
        scores, _, lam, ctx.kind = inputs
        _keep(ctx, lam, output, *([] if ctx.kind == "lin" else [scores]))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        r"""``dL/dz = g'(z) P_S v / (1 - lam)``, ``dL/dlam = sum_S v_i (p_i - 1/|S|) / (1 - lam)``."""
        saved = ctx.saved_tensors
        probs, lam = saved[0], _option_of(ctx, saved)
        dtype = compute_dtype(probs.dtype)
        wide, vector = probs.to(dtype), grad_outputs[0].to(dtype)
        scale = 1.0 / (1.0 - _wide(lam, dtype))
        grad = project_jacobian_product(vector, wide) * scale
        if ctx.kind != "lin":
            # 1 off the support: entries outside the domain there are masked, and must not produce NaN here.
            z = torch.where(wide > 0, saved[1].to(dtype), 1.0)
            grad = grad * TRANSFORMS[ctx.kind].derivative(z)
        grad_lam = _option_gradient(lam, support_spread(vector, wide) * scale) if ctx.needs_input_grad[2] else None
        return grad.to(probs.dtype), None, grad_lam, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """A batch dimension is one more leading dimension."""
        return SparsegenFunction.apply(*_batched_first(info, in_dims, *args)), 0  # type: ignore[return-value]


def hourglass_scale(scores: Tensor, allowed: Tensor, q: Option, mirrored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``a(z) = (1 + K q) / (|sum z| + K q)`` of each row, with ``K`` its number of allowed entries.

    Args:
        scores: ``[..., n]``, float32 or float64.
        allowed: bool ``[..., n]``.
        q: number or ``[..., 1]``, in [0, inf].
        mirrored: False for the cone, which has ``sum z`` in place of its absolute value.

    Returns:
        ``a``, the row sums and the denominators, each ``[..., 1]``; all finite even where ``a`` is not defined.
    """
    total = torch.where(allowed, scores, 0.0).sum(-1, keepdim=True)
    count = allowed.sum(-1, keepdim=True).to(scores.dtype)
    # Rows masked whole have K = 0; 0 * inf must not become NaN there.
    weight = count.clamp(min=1.0) * q
    denominator = ((total.abs() if mirrored else total) + weight).clamp(min=torch.finfo(scores.dtype).tiny)
    scale = torch.where(weight == math.inf, 1.0, (1.0 + weight) / denominator)
    return scale, total, denominator


class HourglassFunction(torch.autograd.Function):
    """``sparsemax(a(z) z)``: sparsehourglass, and sparsecone where not mirrored."""

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor, q: Option, mirrored: bool) -> Tensor:
        """``scores`` ``[..., n]``, ``allowed`` bool ``[..., n]``, ``q`` a number or ``[..., 1]``."""
        z = scores.to(compute_dtype(scores.dtype))
        scale, _, _ = hourglass_scale(z, allowed, _wide(q, z.dtype), mirrored)
        centred = (z - row_max(z, allowed)) * scale
        return project_centred(centred.masked_fill(~allowed, -math.inf)).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Option, bool], output: Tensor) -> None:
        """Row sums are recomputed rather than kept, so that the backward pass can itself be differentiated."""
        scores, allowed, q, ctx.mirrored = inputs
        _keep(ctx, q, output, scores, allowed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        r"""With ``w = sum_S v_i (p_i - 1/|S|)`` and ``D`` the denominator of ``a``.

        ``dL/dz_j = a (P_S v)_j - sign(sum z) w / D`` for every allowed j,
        ``dL/dq = w K (|sum z| - 1) / ((1 + K q) D)``.
        """
        saved = ctx.saved_tensors
        probs, scores, allowed = saved[:3]
        q = _option_of(ctx, saved)
        dtype = compute_dtype(probs.dtype)
        wide, vector, z = probs.to(dtype), grad_outputs[0].to(dtype), scores.to(dtype)
        scale, total, denominator = hourglass_scale(z, allowed, _wide(q, dtype), ctx.mirrored)
        spread = support_spread(vector, wide)
        slope = torch.sign(total) if ctx.mirrored else 1.0
        grad = scale * project_jacobian_product(vector, wide)
        grad = grad - torch.where(allowed, slope * spread / denominator, 0.0)
        grad_q = None
        if ctx.needs_input_grad[2]:
            count = allowed.sum(-1, keepdim=True).to(dtype)
            size = total.abs() if ctx.mirrored else total
            rows = spread * (count * (size - 1.0) / denominator) / (1.0 + count * _wide(q, dtype))
            grad_q = _option_gradient(q, rows)
        return grad.to(probs.dtype), None, grad_q, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """A batch dimension is one more leading dimension."""
        return HourglassFunction.apply(*_batched_first(info, in_dims, *args)), 0  # type: ignore[return-value]


class PowerShareFunction(torch.autograd.Function):
    """``p_i = z_i**k / sum_j z_j**k``: sum normalization (k = 1) and spherical softmax (k = 2)."""

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor, power: int) -> Tensor:
        """``scores`` ``[..., n]``, ``allowed`` bool ``[..., n]``."""
        unit, _ = _unit_rows(scores.to(compute_dtype(scores.dtype)), allowed)
        share = unit**power
        total = share.sum(-1, keepdim=True)
        return (share / torch.where(total == 0, 1.0, total)).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        """Keep input and output."""
        scores, allowed, ctx.power = inputs
        ctx.save_for_backward(output, scores, allowed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """``dL/dz_j = k z_j**(k-1) (v_j - p.v) / sum_i z_i**k``."""
        probs, scores, allowed = ctx.saved_tensors
        dtype = compute_dtype(probs.dtype)
        wide, vector = probs.to(dtype), grad_outputs[0].to(dtype)
        unit, top = _unit_rows(scores.to(dtype), allowed)
        total = (unit**ctx.power).sum(-1, keepdim=True) * top
        slope = unit if ctx.power == 2 else torch.ones_like(unit)
        gap = vector - (vector * wide).sum(-1, keepdim=True)
        grad = ctx.power * slope * gap / torch.where(total == 0, 1.0, total)
        return torch.where(allowed, grad, 0.0).to(probs.dtype), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """A batch dimension is one more leading dimension."""
        return PowerShareFunction.apply(*_batched_first(info, in_dims, *args)), 0  # type: ignore[return-value]


def _unit_rows(z: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by their largest magnitude, which is returned too: squares neither overflow nor vanish."""
    z = torch.where(allowed, z, 0.0)
    # A constant to autograd: the scaling cancels, and its own derivative with it.
    top = row_max(z.abs(), allowed).detach()
    return z / torch.where(top == 0, 1.0, top), top


class TemperedSoftmaxFunction(torch.autograd.Function):
    """``softmax(z / temperature)``."""

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor, temperature: Option) -> Tensor:
        """``scores`` ``[..., n]``, ``allowed`` bool ``[..., n]``, ``temperature`` a number or ``[..., 1]``."""
        z = scores.to(compute_dtype(scores.dtype))
        centred = (z - row_max(z, allowed)) / _wide(temperature, z.dtype)
        share = centred.masked_fill(~allowed, -math.inf).exp()
        total = share.sum(-1, keepdim=True)
        return (share / torch.where(total == 0, 1.0, total)).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Option], output: Tensor) -> None:
        """Keep the output alone."""
        _keep(ctx, inputs[2], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, Tensor | None]:
        """``dL/dz = p (v - p.v) / T``, ``dL/dT = -sum_i p_i (v_i - p.v) log p_i / T``."""
        saved = ctx.saved_tensors
        probs, temperature = saved[0], _option_of(ctx, saved)
        dtype = compute_dtype(probs.dtype)
        wide, vector = probs.to(dtype), grad_outputs[0].to(dtype)
        grad = wide * (vector - (vector * wide).sum(-1, keepdim=True)) / _wide(temperature, dtype)
        grad_temperature = None
        if ctx.needs_input_grad[2]:
            log_probs = torch.where(wide > 0, wide, 1.0).log()
            grad_temperature = _option_gradient(temperature, -(grad * log_probs).sum(-1, keepdim=True))
        return grad.to(probs.dtype), None, grad_temperature

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """A batch dimension is one more leading dimension."""
        return TemperedSoftmaxFunction.apply(*_batched_first(info, in_dims, *args)), 0  # type: ignore[return-value]
