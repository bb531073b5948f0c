"""Autograd for the kernels: a Function that keeps the support for eager mode, and custom operators for tracing.

Under `torch.compile` an object of data-dependent size cannot pass between the forward and the backward graph, so there the
backward operator finds the support again before it runs on it. The results are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_entmax.ops.sparse_rows import SparseRows

from .host import Call, Inputs, Options, empty_rows
from .support import Support


def _is_empty(inputs: Inputs) -> bool:
    return 0 in (inputs.query.numel(), inputs.key.numel(), inputs.value.numel())


def in_rows_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Cut off the padding of the head dimension, return to the caller's dtype, and lie in memory as [B, T, H, D]."""
    if tensor.dtype == like.dtype and tensor.shape[-1] == like.shape[-1] and tensor.transpose(1, 2).is_contiguous():
        return tensor
    return tensor[..., : like.shape[-1]].transpose(1, 2).to(like.dtype).contiguous().transpose(1, 2)


def _like(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Cut off the padding of the head dimension and return to the caller's dtype."""
    if gradient is None or (gradient.dtype == tensor.dtype and gradient.shape[-1] == tensor.shape[-1]):
        return gradient
    return gradient[..., : tensor.shape[-1]].to(tensor.dtype)


def run_forward(
    inputs: Inputs, seed: int, options: Options, keep: bool
) -> tuple[Tensor, Tensor | None, Support | None]:
    """Return output and weights in the dtype of ``value``, and the support if ``keep``."""
    query, key, value = inputs[:3]
    if _is_empty(inputs):
        out = empty_rows(query, value.shape[-1], value.dtype).zero_()
        shape = (*query.shape[:3], key.shape[2])
        return out, value.new_zeros(shape) if options.need_weights else None, None
    terms = (inputs.mask, inputs.bias)
    store_gradient = keep and any(t is not None and t.requires_grad for t in terms)
    out, weights, support = Call(inputs, seed, options).forward(keep, store_gradient)
    return in_rows_layout(out, value), None if weights is None else weights.to(value.dtype), support


def run_sparse(inputs: Inputs, options: Options) -> tuple[Tensor, SparseRows | Tensor]:
    """Return the output, and the weights as sparse rows where few are nonzero (see `Call.weights_of`), in the dtype of ``value``.

    ``options`` are without dropout and ``need_weights``. The rows are those that a backward pass would have run on.
    """
    query, key, value = inputs[:3]
    if _is_empty(inputs):
        batch, heads, queries, _ = query.shape
        offsets = torch.zeros(batch * heads * queries + 1, dtype=torch.int64)
        rows = SparseRows(
            offsets, torch.empty(0, dtype=torch.int32), value.new_empty(0), (batch, heads, queries, key.shape[2])
        )
        return run_forward(inputs, 0, options, keep=False)[0], rows
    call = Call(inputs, 0, options)
    out, _, support = call.forward(keep=True, store_gradient=False)
    assert support is not None
    weights = call.weights_of(support)
    if isinstance(weights, Tensor):
        return in_rows_layout(out, value), weights.to(value.dtype)
    return in_rows_layout(out, value), weights._replace(weights=weights.weights.to(value.dtype))


def run_backward(
    inputs: Inputs,
    support: Support | None,
    dout: Tensor | None,
    dweights: Tensor | None,
    seed: int,
    options: Options,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, alpha, mask and bias; None where not wanted."""
    if _is_empty(inputs) or (dout is None and dweights is None):
        return tuple(torch.zeros_like(t) if t is not None and w else None for t, w in zip(inputs, wanted, strict=False))
    assert support is not None
    if dout is None:
        dout = inputs.value.new_zeros((*inputs.query.shape[:3], inputs.value.shape[-1]))
    call = Call(inputs, seed, options)
    gradients = call.backward(support, dout, dweights, wanted)
    results = [_like(gradient, tensor) for gradient, tensor in zip(gradients[:3], inputs[:3], strict=True)]
    alpha = inputs.alpha
    results.append(None if gradients[3] is None else gradients[3].sum_to_size(alpha.shape).to(alpha.dtype))
    for term, want in zip((inputs.mask, inputs.bias), wanted[4:6], strict=True):
        results.append(call.bias_gradient(support, term.shape).to(term.dtype) if want and term is not None else None)
    return tuple(results)


def _hooks_for_saved_tensors() -> bool:
    """Tell whether saved tensors go through hooks, as for checkpointing or offloading; True where that is not known."""
    known = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return known is None or known(True) is not None


class EntmaxAttentionFunction(torch.autograd.Function):
    """Entmax attention that keeps the sparse rows of the forward pass for the backward pass."""

    @staticmethod
    def forward(ctx: Any, seed: int, options: Options, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run the kernel and keep its support."""
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        out, weights, support = run_forward(inputs, seed, options, keep=True)
        ctx.seed, ctx.options = seed, options
        if support is None:
            ctx.support = None
            ctx.save_for_backward(*inputs)
        else:
            if _hooks_for_saved_tensors():
                support = support.in_one_piece()
            ctx.save_for_backward(*inputs, *support.tensors())
            ctx.support = support.without_tensors()
        ctx.set_materialize_grads(False)
        return out, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward kernels on the kept support."""
        saved = ctx.saved_tensors
        count = len(Inputs._fields)
        inputs = Inputs(*saved[:count])
        support = None if ctx.support is None else ctx.support.restore(saved[count:])
        wanted = ctx.needs_input_grad[2:]
        gradients = run_backward(inputs, support, dout, dweights, ctx.seed, ctx.options, wanted)
        return (None, None, *gradients, None)


_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor alpha, Tensor? mask, Tensor? bias, Tensor? real_keys"
_OPTIONS = "Tensor? seed, bool is_causal, int window, float softcap, float scaling, float dropout, bool need_weights"


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed.item())


@torch.library.custom_op(
    "hf_entmax::numba_attention",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def attention_operator(query, key, value, alpha, mask, bias, real_keys, seed, *options):
    """Attend, as an operator; without ``need_weights`` the second result is empty."""
    inputs = Inputs(query, key, value, alpha, mask, bias, real_keys)
    out, weights, _ = run_forward(inputs, _number(seed), Options(*options), keep=False)
    return out, value.new_empty(0) if weights is None else weights


@attention_operator.register_fake
def _(query, key, value, alpha, mask, bias, real_keys, seed, *options):
    out = empty_rows(query, value.shape[-1], value.dtype)
    need_weights = options[-1]
    return out, value.new_empty((*query.shape[:3], key.shape[2]) if need_weights else (0,))


@torch.library.custom_op(
    "hf_entmax::numba_attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor dout, Tensor? dweights, {_TENSORS}, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
def attention_backward_operator(
    dout, dweights, query, key, value, alpha, mask, bias, real_keys, seed, *options_and_wanted
):
    """Return the gradients of query, key, value, alpha, mask and bias; empty where not wanted."""
    inputs = Inputs(query, key, value, alpha, mask, bias, real_keys)
    *options, wanted = options_and_wanted
    options, number = Options(*options), _number(seed)
    support = None
    if not _is_empty(inputs):
        support = Call(inputs, number, options).forward(keep=True, store_gradient=any(wanted[4:6]))[2]
    gradients = run_backward(inputs, support, dout, dweights, number, options, tuple(wanted))
    results = []
    for position, (gradient, tensor) in enumerate(zip(gradients, inputs, strict=False)):
        if gradient is None or tensor is None:
            results.append(query.new_empty(0))
        else:
            results.append(in_rows_layout(gradient, tensor) if position < 3 else gradient.contiguous())
    return results


@attention_backward_operator.register_fake
def _(dout, dweights, query, key, value, alpha, mask, bias, real_keys, seed, *options_and_wanted):
    wanted = options_and_wanted[-1]
    results = []
    for position, (want, tensor) in enumerate(zip(wanted, (query, key, value, alpha, mask, bias), strict=True)):
        if not want or tensor is None:
            results.append(query.new_empty(0))
        else:
            results.append(
                empty_rows(tensor, tensor.shape[-1], tensor.dtype) if position < 3 else tensor.new_empty(tensor.shape)
            )
    return results


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, rest = inputs[: len(Inputs._fields) + 1], inputs[len(Inputs._fields) + 1 :]
    ctx.save_for_backward(*tensors)
    ctx.options = rest
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    inputs = Inputs(*tensors)
    wanted = [bool(need) for need in ctx.needs_input_grad[:6]]
    need_weights = ctx.options[-1]
    if dout is None:
        dout = inputs.value.new_zeros((*inputs.query.shape[:3], inputs.value.shape[-1]))
    gradients = attention_backward_operator(
        dout, dweights if need_weights else None, *inputs, seed, *ctx.options, wanted
    )
    results = [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]
    return (*results, None, None, *(None,) * len(ctx.options))


attention_operator.register_autograd(_operator_backward, setup_context=_setup_context)
