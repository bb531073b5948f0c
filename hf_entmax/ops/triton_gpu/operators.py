"""The kernels as PyTorch operators: schemas, shapes for tracing, derivatives. Triton is imported when one first runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_entmax.ops.triton_gpu.blocks import Arguments, backward_buffers, forward_buffers

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor alpha, Tensor? mask, Tensor? bias, Tensor? key_mask, Tensor? seed, "
    "float exact_alpha, bool is_causal, SymInt window, float softcap, float scale, float dropout"
)


@torch.library.custom_op(
    "hf_entmax::triton_attention",
    mutates_args=(),
    schema=f"({_INPUTS}, bool need_weights, bool need_grad, bool need_alpha) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Forward pass: ``out, weights, stats, slope_mean, flags``, see `forward_buffers`."""
    from hf_entmax.ops.triton_gpu import launch

    *inputs, need_weights, need_grad, need_alpha = arguments
    return launch.attention_forward(Arguments(*inputs), need_weights, need_grad, need_alpha)


@attention_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, need_weights, need_grad, _ = arguments
    given = Arguments(*inputs)
    return forward_buffers(given.query, given.key, given.value, need_weights, need_grad)


@torch.library.custom_op(
    "hf_entmax::triton_attention_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor grad_out, Tensor? grad_weights, Tensor stats, Tensor slope_mean, Tensor flags, "
    "bool need_alpha, bool need_bias, bool need_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Backward pass: gradients of query, key, value, alpha, bias and mask, see `backward_buffers`."""
    from hf_entmax.ops.triton_gpu import launch

    count = len(Arguments._fields)
    return launch.attention_backward(Arguments(*arguments[:count]), *arguments[count:])


@attention_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return backward_buffers(Arguments(*arguments[: len(Arguments._fields)]), *arguments[-3:])


class EntmaxAttentionGradient(torch.autograd.Function):
    """The backward operator where autograd records it: for torch.func, and to refuse gradients of gradients in words."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """Call the operator."""
        return torch.ops.hf_entmax.triton_attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there is no further derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Raise."""
        raise RuntimeError("the triton backend has no gradients of gradients; use backend='torch' for them.")


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, _, need_grad, need_alpha = inputs
    if not need_grad or (ctx.needs_input_grad[3] and not need_alpha):
        raise RuntimeError("triton_attention was called without need_grad (or need_alpha), and a gradient is wanted.")
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*given[:8], *output[2:])
    ctx.settings = given[8:]
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *tensors, stats, slope_mean, flags = ctx.saved_tensors
    unused = (None,) * (len(ctx.settings) + 3)
    if grad_out is None and grad_weights is None:
        return (*(None,) * 8, *unused)
    if grad_out is None:
        query, value = tensors[0], tensors[2]
        grad_out = query.new_zeros(()).expand(*query.shape[:3], value.shape[-1])
    needs = ctx.needs_input_grad
    query, key, value, alpha, bias, mask = EntmaxAttentionGradient.apply(  # type: ignore[misc]
        *tensors, *ctx.settings, grad_out, grad_weights, stats, slope_mean, flags, needs[3], needs[5], needs[4]
    )
    return (
        query,
        key,
        value,
        alpha if needs[3] else None,
        mask if needs[4] else None,
        bias if needs[5] else None,
        None,
        None,
        *unused,
    )


attention_op.register_autograd(_attention_gradients, setup_context=_save_attention)


class EntmaxAttentionFunction(torch.autograd.Function):
    """The operator with its derivative once more, as torch.func, which cannot differentiate operators, asks for it."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """Call the operator."""
        return torch.ops.hf_entmax.triton_attention(*arguments)

    setup_context = staticmethod(_save_attention)  # type: ignore[assignment]
    backward = staticmethod(_attention_gradients)  # type: ignore[assignment]
