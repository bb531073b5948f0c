r"""alpha-entmax, sparsemax and 1.5-entmax: functions, autograd Functions and modules.

The layers of this file, from the inside out: `hf_entmax.ops.solve` finds probabilities, `hf_entmax.ops.gradients` pulls
gradients back, `EntmaxFunction` joins them, `entmax` is what to call, `Entmax` is its module. The few probabilities of
very long rows that are not zero, and what a loss needs beside them: `hf_entmax.ops.candidates.solve_rows`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_entmax.config import check_alpha
from hf_entmax.ops.gradients import gradient_formula, gradient_rows
from hf_entmax.ops.rows import as_operator, gradients_operator, probabilities_operator, row_probabilities
from hf_entmax.ops.solve import any_above_two, checked, compute_dtype, masked_below, recorded, traced, values_visible


class EntmaxFunction(torch.autograd.Function):
    """Entmax of the rows of a matrix, differentiable in the scores and in ``u = alpha - 1``. See `entmax`."""

    @staticmethod
    def forward(rows: Tensor, u: float | Tensor, kernels: bool, above_two: bool) -> Tensor:
        """Map ``rows [R, d]`` with ``u`` (a float or ``[R, 1]``) to probabilities; the flags as of `row_probabilities`."""
        if as_operator(rows):
            return probabilities_operator(rows, *((u, 0.0) if isinstance(u, Tensor) else (None, u)), kernels)
        return row_probabilities(rows, checked(u) if isinstance(u, Tensor) else u, kernels=kernels, above_two=above_two)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the probabilities; nothing else of the size of the scores is needed."""
        u = inputs[1]
        ctx.u = None if isinstance(u, Tensor) else u
        ctx.save_for_backward(*((output, u) if isinstance(u, Tensor) else (output,)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Pull the cotangent of the probabilities back to the scores and to ``u``."""
        # Read once: gradient checkpointing recomputes what is unpacked.
        saved = ctx.saved_tensors
        probs, u = saved[0], saved[1] if ctx.u is None else ctx.u
        grad = grad_outputs[0]
        with_scores, with_alpha = ctx.needs_input_grad[:2]
        if as_operator(probs):
            given = (u, 0.0) if isinstance(u, Tensor) else (None, u)
            grad_rows, grad_u = gradients_operator(probs, grad, *given, with_scores, with_alpha)
        elif torch.compiler.is_compiling():
            return *gradient_rows(probs, grad, u, with_scores, with_alpha), None, None
        else:
            grad_rows, grad_u = EntmaxGradientFunction.apply(probs, grad, u, with_scores, with_alpha)
        return (grad_rows if with_scores else None), (grad_u if with_alpha else None), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rows: Tensor, u: float | Tensor, kernels: bool, above_two: bool
    ) -> tuple[Tensor, int]:
        """Fold the mapped dimension into the rows."""
        rows, u = _fold(info.batch_size, in_dims[:2], (rows, u))
        return EntmaxFunction.apply(rows, u, kernels, above_two).unflatten(0, (info.batch_size, -1)), 0


class EntmaxGradientFunction(torch.autograd.Function):
    """The backward pass of `EntmaxFunction` as a Function, so that it works in chunks and is differentiable itself."""

    @staticmethod
    def forward(
        probs: Tensor, grad: Tensor, u: float | Tensor, with_scores: bool, with_alpha: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients ``[R, d]`` and ``[R, 1]``, or ``[R, 0]`` in the place of one that is not wanted."""
        grad_rows, grad_u = gradient_rows(probs, grad, u, with_scores, with_alpha)
        absent = probs.new_empty((probs.shape[0], 0))
        return absent if grad_rows is None else grad_rows, absent.clone() if grad_u is None else grad_u

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the inputs for a second differentiation."""
        probs, grad, u, ctx.with_scores, ctx.with_alpha = inputs
        ctx.u = None if isinstance(u, Tensor) else u
        ctx.save_for_backward(*((probs, grad, u) if isinstance(u, Tensor) else (probs, grad)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Differentiate the closed form of the gradient once more."""
        primals = ctx.saved_tensors

        def formula(probs: Tensor, grad: Tensor, *row_u: Tensor) -> tuple[Tensor, ...]:
            u = row_u[0] if row_u else ctx.u
            grad_rows, grad_u = gradient_formula(probs, grad, u, ctx.with_alpha)
            wanted = (grad_rows.to(probs.dtype),) if ctx.with_scores else ()
            return wanted if grad_u is None else (*wanted, grad_u)

        pull = torch.func.vjp(formula, *primals)[1]
        wanted = (ctx.with_scores, ctx.with_alpha)
        grads = pull(tuple(grad for grad, want in zip(grad_outputs, wanted, strict=True) if want))
        return grads[0], grads[1], (grads[2] if len(grads) == 3 else None), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        probs: Tensor,
        grad: Tensor,
        u: float | Tensor,
        with_scores: bool,
        with_alpha: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Fold the mapped dimension into the rows."""
        probs, grad, u = _fold(info.batch_size, in_dims[:3], (probs, grad, u))
        outputs = EntmaxGradientFunction.apply(probs, grad, u, with_scores, with_alpha)
        grad_rows, grad_u = (output.unflatten(0, (info.batch_size, -1)) for output in outputs)
        return (grad_rows, grad_u), (0, 0)


def _fold(batch: int, in_dims: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Flatten the mapped dimension of every tensor into its rows."""
    folded = []
    for value, dim in zip(values, in_dims, strict=True):
        if isinstance(value, Tensor):
            moved = value.unsqueeze(0).expand(batch, *value.shape) if dim is None else value.movedim(dim, 0)
            value = moved.reshape(-1, value.shape[-1] if dim is None else moved.shape[-1])
        folded.append(value)
    return tuple(folded)


def entmax(
    scores: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    mask: Tensor | None = None,
    *,
    backend: Literal["auto", "torch"] = "auto",
) -> Tensor:
    r"""Map scores to a sparse probability distribution by alpha-entmax.

    .. math::

        \operatorname{entmax}_\alpha(z) = \arg\max_{p \in \triangle} \; p \cdot z + H_\alpha(p)
        = \left[1 + (\alpha - 1)(z - c)\right]_+^{1/(\alpha - 1)}

    with the Tsallis entropy :math:`H_\alpha` and ``c`` such that the probabilities sum to 1. ``alpha = 1`` is
    exactly softmax, ``alpha = 2`` is sparsemax; in between the distribution has exact zeros, the more of them the
    larger ``alpha``.

    Args:
        scores: floating tensor of any shape. Entries at or below ``finfo(dtype).min / 2`` (so ``-inf`` and
            ``finfo.min``, with or without a bias) count as masked. NaN or ``+inf`` make their row NaN, as in softmax.
        alpha: ``>= 1``; a float or a tensor broadcastable to ``scores`` with size 1 along ``dim``, for example ``[H,
            1, 1]`` for scores ``[B, H, T_q, T_k]``.
        dim: the dimension along which the probabilities sum to 1.
        mask: optional bool tensor broadcastable to ``scores``; True marks entries that may receive mass.
        backend: "auto" solves long rows, where there are many, by the device's fused kernel (numba on CPUs, Triton on
            NVIDIA GPUs) for alpha up to 2; "torch" never does.

    Returns:
        Probabilities in the shape and dtype of ``scores``. Half types are computed in float32 and rounded at the
        end. Where every entry is masked the result (and its gradient) is 0.

    Raises:
        TypeError: if ``scores`` is not floating or ``mask`` not bool.
        ValueError: if ``alpha`` is below 1 or NaN, a shape does not fit, or ``backend`` is unknown. Whether an ``alpha``
            on an accelerator, or inside ``torch.compile``, is below 1 is not looked at: its rows become NaN.

    Differentiable in ``scores`` and ``alpha`` any number of times, including at ``alpha = 1``; works under
    ``torch.func``.

    Examples:
        >>> import torch
        >>> from hf_entmax.ops import entmax
        >>> entmax(torch.tensor([[2.0, 1.5, 0.0], [0.0, 0.0, 0.0]]), alpha=1.5)
        tensor([[0.6740, 0.3260, 0.0000],
                [0.3333, 0.3333, 0.3333]])

    Reference:
        Peters, Niculae, Martins (2019), Sparse Sequence-to-Sequence Models, eq. 9 and 13;
        Correia, Niculae, Martins (2019), Adaptively Sparse Transformers, proposition 1.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        given = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"scores must be a floating tensor, not {given}.")
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend is {backend!r}; the options are 'auto' and 'torch'.")
    if scores.dim() == 0:
        mask = None if mask is None else mask.reshape(1)
        return entmax(scores.unsqueeze(0), alpha, 0, mask, backend=backend).squeeze(0)
    if not -scores.dim() <= dim < scores.dim():
        raise ValueError(
            f"dim is {dim}, but scores of shape {tuple(scores.shape)} have dimensions up to {scores.dim() - 1}."
        )
    if mask is not None:
        scores = _apply_mask(scores, mask)
    return solve_along(scores, alpha, dim, kernels=backend == "auto")


def solve_along(
    scores: Tensor, alpha: float | Tensor, dim: int, *, kernels: bool = False, alpha_max: float = math.inf
) -> Tensor:
    """Map scores of any shape but a scalar's by `entmax`, without a mask; ``kernels`` says whether fused ones may be used.

    No alpha is above ``alpha_max``: up to 2, graphs hold no solver for larger ones and nothing waits for a GPU to say.
    """
    u = _row_u(alpha, scores, dim)
    moved = scores.movedim(dim, -1)
    if scores.numel() == 0:  # alpha stays in the graph: an optimiser step over an empty batch has a gradient of 0
        return scores + 0 * alpha.sum().to(scores.dtype) if isinstance(alpha, Tensor) else scores.clone()
    if recorded():
        # torch.jit.trace cannot save a Function, but it can save what that does. Rows of lengths that are unknown are not put
        # into one dimension: exporters take long over products of unknowns.
        solve = EntmaxFunction.forward if traced() else EntmaxFunction.apply
        return solve(moved, u, kernels, alpha_max > 2).movedim(-1, dim)
    u = u.reshape(-1, 1) if isinstance(u, Tensor) else u
    rows = moved.reshape(-1, moved.shape[-1])
    if alpha_max > 2 and _needs_wide_probabilities(rows, u):
        rows = rows.to(compute_dtype(rows.dtype)).masked_fill(rows <= masked_below(rows.dtype), -math.inf)
    probs = EntmaxFunction.apply(rows, u, kernels, alpha_max > 2).to(scores.dtype)
    return probs.reshape(moved.shape).movedim(-1, dim)


def _needs_wide_probabilities(rows: Tensor, u: float | Tensor) -> bool:
    """Tell whether the backward pass must see more digits than a half type has: it raises probabilities to ``2 - alpha``."""
    if rows.dtype == compute_dtype(rows.dtype) or not torch.is_grad_enabled():
        return False
    return any_above_two(u) if not isinstance(u, Tensor) or values_visible(u) else True


def _apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = may receive mass), not {mask.dtype}.")
    _check_broadcast("mask", mask, scores)
    return scores.masked_fill(~mask, -math.inf)


def _check_broadcast(name: str, tensor: Tensor, scores: Tensor) -> None:
    padding = scores.dim() - tensor.dim()
    fits = padding >= 0 and all(t in (1, s) for t, s in zip(tensor.shape, scores.shape[padding:], strict=True))
    if not fits:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} cannot be broadcast to scores of shape {tuple(scores.shape)}."
        )


def _row_u(alpha: float | Tensor, scores: Tensor, dim: int) -> float | Tensor:
    """Return ``alpha - 1`` as a float or as one number per row, ``[..., 1]`` in the compute dtype."""
    if not isinstance(alpha, Tensor):
        return check_alpha(alpha) - 1
    if not alpha.is_floating_point():
        alpha = alpha.to(torch.get_default_dtype())
    _check_broadcast("alpha", alpha, scores)
    padded = alpha.reshape((1,) * (scores.dim() - alpha.dim()) + tuple(alpha.shape)).movedim(dim, -1)
    if padded.shape[-1] != 1 and scores.shape[dim] != 1:
        raise ValueError(
            f"alpha of shape {tuple(alpha.shape)} varies along dim {dim} of scores {tuple(scores.shape)}; "
            "one distribution has one alpha: its size along dim must be 1."
        )
    row_shape = scores.movedim(dim, -1).shape[:-1]
    u = (padded - 1).to(device=scores.device, dtype=compute_dtype(scores.dtype))
    return u.expand(*row_shape, 1)


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the simplex, which is entmax at ``alpha = 2``.

    .. math:: \operatorname{sparsemax}(z) = \arg\min_{p \in \triangle} \|p - z\|_2

    Arguments, result and errors are those of `entmax`.

    Examples:
        >>> import torch
        >>> from hf_entmax.ops import sparsemax
        >>> sparsemax(torch.tensor([2.0, 1.5, 0.0]))
        tensor([0.7500, 0.2500, 0.0000])

    Reference:
        Martins, Astudillo (2016), From Softmax to Sparsemax, eq. 1.
    """
    return entmax(scores, 2.0, dim, mask)


def entmax15(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Map scores by entmax at ``alpha = 1.5``; arguments, result and errors are those of `entmax`.

    Examples:
        >>> import torch
        >>> from hf_entmax.ops import entmax15
        >>> entmax15(torch.tensor([2.0, 1.5, 0.0]))
        tensor([0.6740, 0.3260, 0.0000])

    Reference:
        Peters, Niculae, Martins (2019), algorithm 2.
    """
    return entmax(scores, 1.5, dim, mask)


class Entmax(nn.Module):
    """Module form of `entmax` with a fixed or a given alpha (it owns no parameter; pass one as ``alpha`` to learn it).

    Args:
        alpha: ``>= 1``; a float, or a tensor or parameter broadcastable to the scores (see `entmax`).
        dim: the dimension along which the probabilities sum to 1.

    Examples:
        >>> import torch
        >>> from hf_entmax.ops import Entmax
        >>> Entmax(alpha=1.3)(torch.tensor([2.0, 1.5, 0.0]))
        tensor([0.6427, 0.3436, 0.0137])
    """

    alpha: float | Tensor

    def __init__(self, alpha: float | Tensor = 1.5, dim: int = -1) -> None:
        super().__init__()
        if isinstance(alpha, nn.Parameter):
            self.alpha = alpha
        elif isinstance(alpha, Tensor):
            self.register_buffer("alpha", alpha)
        else:
            self.alpha = check_alpha(alpha)
        self.dim = dim

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the probabilities of ``scores``; ``mask`` as in `entmax`."""
        return entmax(scores, self.alpha, self.dim, mask)

    def extra_repr(self) -> str:
        """Show alpha and dim."""
        alpha = f"tensor{tuple(self.alpha.shape)}" if isinstance(self.alpha, Tensor) else self.alpha
        return f"alpha={alpha}, dim={self.dim}"


class Sparsemax(Entmax):
    """Module form of `sparsemax`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(2.0, dim)


class Entmax15(Entmax):
    """Module form of `entmax15`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(1.5, dim)
