r"""Autograd functions of the controllable mappings: closed-form Jacobian products, no sort and no iterate kept.

All of them take rows: the dimension to normalise is the last one, masked entries hold ``-inf`` (or ``finfo.min``), and
options are numbers or tensors of the same rank with a last dimension of 1. With ``S`` the support and
``P_S v = v - mean_S(v)`` on it (0 elsewhere), the Jacobian of sparsemax is ``P_S``, and for a projected point ``y`` the
support itself gives ``(P_S y)_i = p_i - 1/|S|``. So the derivative along any scaling of the scores, and with it that of
every option, needs nothing but the output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_entmax.ops.simplex import (
    centre_rows,
    compute_dtype,
    is_allowed,
    project_jacobian_product,
    project_rows,
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


def _centred_log(z: Tensor, allowed: Tensor) -> Tensor:
    return z.log() - row_max(z, allowed).log()


def _bounded(z: Tensor) -> Tensor:
    # A support of one entry multiplies the derivative by an exact zero, which must stay zero.
    return z.clamp(max=torch.finfo(z.dtype).max)


# sparsegen-lin is not among them: it needs neither the mask nor the scores once more.
TRANSFORMS = {
    "exp": Transform(_centred_exp, lambda z: _bounded(z.exp())),
    "sq": Transform(_centred_sq, lambda z: 2.0 * z),
    "log": Transform(_centred_log, lambda z: _bounded(1.0 / z)),
}
SPARSEGEN_KINDS = ("lin", *TRANSFORMS)


def _wide(option: Option, dtype: torch.dtype) -> Option:
    return option.to(dtype) if isinstance(option, Tensor) else option


def _keep(ctx: Any, option: Option, *tensors: Tensor) -> None:
    """Save tensors, and the option wherever it belongs."""
    ctx.number = None if isinstance(option, Tensor) else option
    ctx.save_for_backward(*tensors, *([option] if isinstance(option, Tensor) else []))


def _option_of(ctx: Any, saved: tuple[Tensor, ...]) -> Option:
    return saved[-1] if ctx.number is None else ctx.number


def _option_gradient(option: Option, rows: Tensor) -> Tensor | None:
    """Sum the gradients of the rows over those that share one option."""
    return rows.sum_to_size(option.shape).to(option.dtype) if isinstance(option, Tensor) else None


class _RowFunction(torch.autograd.Function):
    """A function of rows: a batch dimension is one more leading dimension."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], rows: Tensor, *options: Any) -> tuple[Tensor, int]:
        """Apply it with the batch dimension in front; options of one value for all stay as they are."""
        rows = rows.expand(info.batch_size, *rows.shape) if in_dims[0] is None else rows.movedim(in_dims[0], 0)
        options = tuple(x if d is None else x.movedim(d, 0) for x, d in zip(options, in_dims[1:], strict=True))
        return cls.apply(rows, *options), 0  # type: ignore[return-value]


class SparsegenFunction(_RowFunction):
    """``sparsemax(g(z) / (1 - lam))`` for a component-wise ``g``, one of ``SPARSEGEN_KINDS``."""

    @staticmethod
    def forward(rows: Tensor, lam: Option, kind: str) -> Tensor:
        """Take ``rows`` ``[..., n]`` and ``lam``, a number or ``[..., 1]``."""

        def centre(rows: Tensor, scale: Option) -> Tensor:
            if kind == "lin":
                return centre_rows(rows, scale)
            allowed = is_allowed(rows)
            centred = TRANSFORMS[kind].centred(rows.to(compute_dtype(rows.dtype)), allowed) * scale
            return centred.masked_fill_(~allowed, -math.inf)

        return project_rows(rows, centre, 1.0 / (1.0 - _wide(lam, compute_dtype(rows.dtype))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Option, str], output: Tensor) -> None:
        """Keep the output, and the scores only where ``g'`` needs them."""
        rows, lam, ctx.kind = inputs
        _keep(ctx, lam, output, *([] if ctx.kind == "lin" else [rows]))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        r"""Return ``dL/dz = g'(z) P_S v / (1 - lam)`` and ``dL/dlam = sum_S v_i (p_i - 1/|S|) / (1 - lam)``."""
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
        grad_lam = _option_gradient(lam, support_spread(vector, wide) * scale) if ctx.needs_input_grad[1] else None
        return grad.to(probs.dtype), grad_lam, None


def hourglass_scale(z: Tensor, allowed: Tensor, q: Option, mirrored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``a(z) = (1 + K q) / (|sum z| + K q)`` of each row, with ``K`` its number of allowed entries.

    The cone, not ``mirrored``, has ``sum z`` in place of its absolute value. Returns ``a``, the row sums and the
    denominators, each ``[..., 1]``; all finite even where ``a`` is not defined. ``q`` is in [0, inf].
    """
    total = torch.where(allowed, z, 0.0).sum(-1, keepdim=True)
    count = allowed.sum(-1, keepdim=True).to(z.dtype)
    # Rows masked whole have K = 0; 0 * inf must not become NaN there.
    weight = count.clamp(min=1.0) * q
    denominator = ((total.abs() if mirrored else total) + weight).clamp(min=torch.finfo(z.dtype).tiny)
    scale = torch.where(weight == math.inf, 1.0, (1.0 + weight) / denominator)
    return scale, total, denominator


class HourglassFunction(_RowFunction):
    """``sparsemax(a(z) z)``: sparsehourglass, and sparsecone where not mirrored."""

    @staticmethod
    def forward(rows: Tensor, q: Option, mirrored: bool) -> Tensor:
        """Take ``rows`` ``[..., n]`` and ``q``, a number or ``[..., 1]``."""

        def centre(rows: Tensor, q: Option) -> Tensor:
            z = rows.to(compute_dtype(rows.dtype))
            return centre_rows(rows, hourglass_scale(z, is_allowed(rows), q, mirrored)[0])

        return project_rows(rows, centre, _wide(q, compute_dtype(rows.dtype)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Option, bool], output: Tensor) -> None:
        """Keep output and scores; row sums are computed again, so that the backward pass can itself be differentiated."""
        rows, q, ctx.mirrored = inputs
        _keep(ctx, q, output, rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        r"""Return the gradients, with ``w = sum_S v_i (p_i - 1/|S|)`` and ``D`` the denominator of ``a``.

        ``dL/dz_j = a (P_S v)_j - sign(sum z) w / D`` for every allowed j,
        ``dL/dq = w K (|sum z| - 1) / ((1 + K q) D)``.
        """
        saved = ctx.saved_tensors
        probs, rows, q = saved[0], saved[1], _option_of(ctx, saved)
        dtype = compute_dtype(probs.dtype)
        wide, vector, z, allowed = probs.to(dtype), grad_outputs[0].to(dtype), rows.to(dtype), is_allowed(rows)
        scale, total, denominator = hourglass_scale(z, allowed, _wide(q, dtype), ctx.mirrored)
        spread = support_spread(vector, wide)
        slope = torch.sign(total) if ctx.mirrored else 1.0
        grad = scale * project_jacobian_product(vector, wide)
        grad = grad - torch.where(allowed, slope * spread / denominator, 0.0)
        grad_q = None
        if ctx.needs_input_grad[1]:
            count = allowed.sum(-1, keepdim=True).to(dtype)
            size = total.abs() if ctx.mirrored else total
            per_row = spread * (count * (size - 1.0) / denominator) / (1.0 + count * _wide(q, dtype))
            grad_q = _option_gradient(q, per_row)
        return grad.to(probs.dtype), grad_q, None


def power_share(rows: Tensor, power: int) -> Tensor:
    """Return ``p_i = z_i**k / sum_j z_j**k``: sum normalization (k = 1) and spherical softmax (k = 2), by autograd."""
    allowed = is_allowed(rows)
    z = torch.where(allowed, rows.to(compute_dtype(rows.dtype)), 0.0)
    # Divided by the largest magnitude, squares neither overflow nor vanish. A constant to autograd: the scaling cancels.
    top = row_max(z.abs(), allowed).detach()
    share = (z / torch.where(top == 0, 1.0, top)) ** power
    total = share.sum(-1, keepdim=True)
    return (share / torch.where(total == 0, 1.0, total)).to(rows.dtype)


class TemperedSoftmaxFunction(_RowFunction):
    """``softmax(z / temperature)``."""

    @staticmethod
    def forward(rows: Tensor, temperature: Option) -> Tensor:
        """Take ``rows`` ``[..., n]`` and ``temperature``, a number or ``[..., 1]``."""
        share = centre_rows(rows, 1.0 / _wide(temperature, compute_dtype(rows.dtype))).exp_()
        total = share.sum(-1, keepdim=True)
        return share.div_(torch.where(total == 0, 1.0, total)).to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Option], output: Tensor) -> None:
        """Keep the output alone."""
        _keep(ctx, inputs[1], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``dL/dz = p (v - p.v) / T`` and ``dL/dT = -sum_i p_i (v_i - p.v) log p_i / T``."""
        saved = ctx.saved_tensors
        probs, temperature = saved[0], _option_of(ctx, saved)
        dtype = compute_dtype(probs.dtype)
        wide, vector = probs.to(dtype), grad_outputs[0].to(dtype)
        grad = wide * (vector - (vector * wide).sum(-1, keepdim=True)) / _wide(temperature, dtype)
        grad_temperature = None
        if ctx.needs_input_grad[1]:
            log_probs = torch.where(wide > 0, wide, 1.0).log()
            grad_temperature = _option_gradient(temperature, -(grad * log_probs).sum(-1, keepdim=True))
        return grad.to(probs.dtype), grad_temperature
