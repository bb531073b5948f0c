"""From tensors to kernel launches: strides, buffers, grids. Imports Triton; nothing here is seen by autograd."""

# The type of a kernel is that of its Python function: launch options and constants are not in its signature.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hf_entmax.ops.solve import masked_below
from hf_entmax.ops.triton_gpu import backward, forward
from hf_entmax.ops.triton_gpu.blocks import (
    Arguments,
    Blocks,
    attention_blocks,
    backward_buffers,
    forward_buffers,
    padded,
)
from hf_entmax.ops.triton_gpu.tiles import Array, Gradients, Inputs, Options, Problem, ScoreTerms

# Far more than Halley's steps ever take for alpha <= 2 (at most 9 were seen); above 2 every other step is a bisection.
_MAX_PASSES = 64
# How far from 1 the sum S of a row's weights may be before the last step of its threshold, and after it. Outputs are divided by S,
# and what is left of an error is at most 2 |log S| of the largest value: along the way from the true threshold to c
# the divided weights q = p / S change by |dq| = (D / S) |s / D - q| dc, where s / D and q both sum to 1, and the integral of D / S
# is log S. The limits of half precision are half of what rounding does to a weight; that of float32, a few roundings of S, makes it
# 2e-6. What a tolerance leads to is seen
# afterwards, not trusted.
_TOLERANCES = {
    torch.float32: (1e-3, 2.0**-20),
    torch.float16: (0.05, 2.0**-12),
    torch.bfloat16: (0.2, 2.0**-9),
}


# Products and sums become one instruction: from Triton 3.10 on only where that is asked for.
FUSED = {"enable_fp_fusion": True}


def _array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else Array(tensor, *tensor.stride())


def _floor(tensor: Tensor | None) -> float:
    """The value at or below which an added term masks its entry."""
    return masked_below(tensor.dtype) if tensor is not None and tensor.is_floating_point() else -3e38


def _expanded(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach().expand(shape)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its arguments live on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _float32_precision() -> str:
    """TF32 only where the user allowed it for matrix products; both of torch's ways of saying so are heard."""
    matmul = torch.backends.cuda.matmul
    try:
        allowed = matmul.fp32_precision == "tf32"
    except AttributeError:
        allowed = matmul.allow_tf32
    return "tf32" if allowed else "ieee"


class _Launch:
    """What all kernels of one attention call share."""

    def __init__(self, inputs: Arguments, grad_alpha: bool) -> None:
        query, key, value = inputs.query, inputs.key, inputs.value
        batch, heads, queries, head_dim = query.shape
        keys, value_dim = key.shape[2], value.shape[3]
        self.blocks: Blocks = attention_blocks(queries, head_dim, value_dim, query.dtype)
        n_q, n_k = -(-queries // self.blocks.rows), -(-keys // self.blocks.cols)
        full = (batch, heads, queries, keys)
        mask, bias = _expanded(inputs.mask, full), _expanded(inputs.bias, full)
        key_mask = None
        if inputs.key_mask is not None:
            key_mask = _expanded(inputs.key_mask[:, None, None, :], (batch, heads, 1, keys))
        self.key_mask = key_mask
        self.n_q, self.n_k = n_q, n_k
        problem = Problem(
            B=batch,
            H=heads,
            group=heads // key.shape[1],
            T_q=queries,
            T_k=keys,
            n_q=n_q,
            n_k=n_k,
            scale=inputs.scale,
            softcap=inputs.softcap,
            window=inputs.window,
            dropout=inputs.dropout,
            mask_floor=_floor(mask),
            bias_floor=_floor(bias),
        )
        self.problem = Problem(*map(float, problem))
        tolerance, limit = _TOLERANCES[query.dtype]
        # Not above 1, where the product of the scale and what stands for "masked" would overflow.
        raw = mask is None and bias is None and inputs.softcap == 0 and 2.0**-20 <= inputs.scale <= 1
        options = Options(
            CAUSAL=inputs.is_causal,
            WINDOW=inputs.window > 0,
            SOFTCAP=inputs.softcap > 0,
            BOOL_MASK=mask is not None and not mask.is_floating_point(),
            DROPOUT=inputs.dropout > 0,
            RAW=raw,
            FOLD=raw and query.dtype.itemsize == 2,
            ALPHA=inputs.exact_alpha,
            GRAD_ALPHA=grad_alpha,
            PRECISION=_float32_precision(),
            TOLERANCE=tolerance,
            LIMIT=limit,
            D=head_dim,
            D_V=value_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_V=padded(value_dim),
            ROWS=self.blocks.rows,
            COLS=self.blocks.cols,
        )
        # Wrapped one by one: Triton 3.4 and 3.6 take a plain tuple apart into values that are constants no longer.
        self.options = Options(*map(tl.constexpr, options))
        self.inputs = Inputs(_array(query), _array(key), _array(value), inputs.alpha, inputs.seed)
        self.terms = ScoreTerms(_array(mask), _array(bias), _array(key_mask))
        self.planes = batch * heads


def attention_forward(inputs: Arguments, need_weights: bool, need_grad: bool, need_alpha: bool) -> tuple[Tensor, ...]:
    """Run the forward kernel: ``out, weights, stats, slope_mean, flags`` as `forward_buffers` describes them."""
    query, key = inputs.query, inputs.key
    buffers = forward_buffers(query, key, inputs.value, need_weights, need_grad)
    out, weights, stats, slope_mean, flags = buffers
    # Tiles that are skipped are never written: their weights are 0 and their flags are not set.
    weights.zero_()
    flags.zero_()
    if _is_empty(inputs):
        return tuple(buffer.zero_() for buffer in buffers)
    call = _Launch(inputs, need_alpha)
    n_q, n_k = call.n_q, call.n_k
    lists = torch.empty((call.planes, n_q, n_k), dtype=_list_dtype(n_k), device=query.device)
    with _on_device(query):
        extent = None
        if call.key_mask is not None:
            extent = torch.empty((query.shape[0], 2), dtype=torch.int32, device=query.device)
            block = min(1024, padded(key.shape[2]))
            forward._key_extent_kernel[(query.shape[0],)](
                _array(call.key_mask), extent, key.shape[2], BLOCK=block, **FUSED
            )
        forward._entmax_attention_fwd_kernel[(n_q * call.planes,)](
            call.inputs, call.terms, extent, _array(out), weights if need_weights else None,
            *((stats, _array(slope_mean), lists, flags) if need_grad else (None, None, lists, None)),
            1 if inputs.exact_alpha == 1.0 else _MAX_PASSES,
            call.problem, OPTIONS=call.options, num_warps=call.blocks.warps, num_stages=call.blocks.stages, **FUSED,
        )  # fmt: skip
    return buffers


def _is_empty(inputs: Arguments) -> bool:
    return not (inputs.query.numel() and inputs.key.numel() and inputs.value.numel())


def attention_backward(
    inputs: Arguments,
    grad_out: Tensor,
    grad_weights: Tensor | None,
    stats: Tensor,
    slope_mean: Tensor,
    flags: Tensor,
    need_alpha: bool,
    need_bias: bool,
    need_mask: bool,
) -> tuple[Tensor, ...]:
    """Run the backward kernels: gradients of query, key, value, alpha, bias and mask as `backward_buffers` has them."""
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    if _is_empty(inputs):
        buffers = backward_buffers(inputs, need_alpha, need_bias, need_mask)
        return tuple(buffer.zero_() for buffer in buffers)
    call = _Launch(inputs, need_alpha)
    n_q, n_k = call.n_q, call.n_k
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    grad_alpha = torch.empty_like(delta) if need_alpha else None
    launch = {"num_warps": call.blocks.backward_warps, "num_stages": call.blocks.backward_stages, **FUSED}
    shared = (call.inputs, call.terms, Gradients(_array(grad_out), _array(grad_weights)), stats)
    with _on_device(query):
        lists, counts = _compact(flags, n_q, n_k, by_query=True)
        backward._entmax_attention_bwd_query_kernel[(n_q * call.planes,)](
            *shared, _array(slope_mean), lists, counts, _array(grad_query), grad_alpha, delta,
            call.problem, OPTIONS=call.options, **launch,
        )  # fmt: skip
        lists, counts = _compact(flags, n_q, n_k, by_query=False)
        backward._entmax_attention_bwd_key_kernel[(n_k * batch * key.shape[1],)](
            *shared, delta, lists, counts, _array(grad_key), _array(grad_value),
            call.problem, OPTIONS=call.options, **launch,
        )  # fmt: skip
        added = []
        for tensor, needed in ((inputs.bias, need_bias), (inputs.mask, need_mask)):
            if not needed or tensor is None:
                added.append(query.new_empty(0))
                continue
            lead = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
            planes = lead[:2]
            grad = torch.empty((*planes, queries, keys), dtype=torch.float32, device=query.device)
            backward._entmax_attention_bwd_bias_kernel[(planes[0] * planes[1] * n_q * n_k,)](
                *shared, delta, flags, grad, *planes, call.problem, OPTIONS=call.options, **launch
            )
            added.append(grad.sum_to_size(tensor.shape).to(tensor.dtype))
    alphas = grad_alpha.sum((0, 2)) if grad_alpha is not None else query.new_empty(0)
    return grad_query, grad_key, grad_value, alphas, added[0], added[1]


def _compact(flags: Tensor, n_q: int, n_k: int, *, by_query: bool) -> tuple[Tensor, Tensor]:
    """The flagged blocks of each block of queries (or keys) as a list and its length."""
    batch, heads = flags.shape[:2]
    outer, inner = (n_q, n_k) if by_query else (n_k, n_q)
    lists = torch.empty((batch, heads, outer, inner), dtype=_list_dtype(inner), device=flags.device)
    counts = torch.empty((batch, heads, outer), dtype=torch.int32, device=flags.device)
    backward._compact_flags_kernel[(batch * heads * outer,)](
        flags, n_q, n_k, int(by_query), lists, counts, BLOCK=min(1024, padded(inner)), **FUSED
    )
    return lists, counts


def _list_dtype(blocks: int) -> torch.dtype:
    """That of a list of so many blocks at most, which for long sequences is large."""
    return torch.int16 if blocks <= 2**15 else torch.int32
