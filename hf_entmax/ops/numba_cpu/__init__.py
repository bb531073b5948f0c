"""The CPU kernel: entmax attention whose work after the scores is proportional to the nonzero weights.

Importing this package imports neither numba nor the kernels; the first call of `attention` does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import masked_below, transformed
from hf_entmax.ops.sparse_rows import SparseRows

if TYPE_CHECKING:
    from hf_entmax.ops.exact.blocks import BlockTable
    from hf_entmax.ops.exact.sketch import KeySketch

#: The dtypes of query, key and value; arithmetic is float32 throughout.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Whether `exact_sparse_attention` reads keys from the blocks of one buffer.
READS_BLOCKS = True
_DEFAULTS = AttentionOptions()


def unsupported(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions = _DEFAULTS
) -> str | None:
    """Say why the kernel cannot take these arguments of `attention`, naming one, or None if it can."""
    tensors = {"query": query, "key": key, "value": value, "alpha": alpha, **options.tensors()}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not tensor.is_cpu:
            return f"{name} is on {tensor.device}, and the numba kernel runs on CPU tensors"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in _DTYPES:
            return f"{name} is {tensor.dtype}, and the numba kernel computes in float32 (float32, bfloat16 or float16 inputs)"
    if not torch.compiler.is_compiling() and transformed():
        return "query, key or value is inside a torch.func transform (vmap, grad, jvp), which the numba kernel has no rules for"
    return None


def compile_kernels(report: Callable[[str], None]) -> str | None:
    """Compile all kernels ahead of their first use, and report the name of each that is ready.

    Returns:
        The folder of the machine code, or None where it cannot be kept.
    """
    from .compiler import cache_folder
    from .kernels import compile_all

    compile_all(report)
    folder = cache_folder()
    return None if folder is None else str(folder)


def row_kernel(scores: Tensor) -> ModuleType | None:
    """Return the module `row_host` if it can take these scores ``[n, V]``, else None."""
    if scores.device.type != "cpu" or scores.dtype not in _DTYPES:
        return None
    from . import row_host

    return row_host


def attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor | SparseRows | None]:
    """Attend on the CPU; arguments and results are those of `hf_entmax.ops.entmax_attention`.

    Scores are computed block by block and only the nonzero weights are kept, so time and memory after the scores, and the whole
    backward pass, grow with their number. Differentiable (once) in query, key, value, alpha, position_bias and a
    float attention_mask. The output lies in memory as ``[B, T_q, H, D_v]``. With ``need_weights="sparse"`` the rows that
    the kernel works on are handed out, except under dropout, tracing and autograd.
    """
    heads = query.shape[1]
    if not isinstance(alpha, Tensor):
        alpha = torch.full((heads,), float(alpha), dtype=torch.float64)
    mask, bias = _with_infinities(options.attention_mask), _with_infinities(options.position_bias)
    padding, need_weights = options.key_padding_mask, options.need_weights
    seed = torch.randint(0, 2**62, (), dtype=torch.int64) if options.dropout > 0 else None
    # For the operator 0 stands for "none".
    flat = (
        bool(options.is_causal),
        int(options.sliding_window or 0),
        float(options.softcap or 0.0),
        options.scale(query.shape[-1]),
        float(options.dropout),
        bool(need_weights),
    )

    if torch.compiler.is_compiling() or type(query) not in (Tensor, torch.nn.Parameter) or _len_torch_dispatch_stack():
        from .function import attention_operator

        out, weights = attention_operator(query, key, value, alpha, mask, bias, padding, seed, *flat)
        return out, weights if need_weights else None

    from .function import EntmaxAttentionFunction, Inputs, run_forward, run_sparse
    from .host import Options

    inputs = Inputs(query, key, value, alpha, mask, bias, padding)
    number = 0 if seed is None else int(seed)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return EntmaxAttentionFunction.apply(number, Options(*flat), *inputs)
    if need_weights == "sparse" and options.dropout == 0:
        return run_sparse(inputs, Options(*flat[:-1], need_weights=False))
    out, weights, _ = run_forward(inputs, number, Options(*flat), keep=False)
    return out, weights


def exact_sparse_attention(
    query: Tensor,
    sketch: KeySketch,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    options: AttentionOptions,
    blocks: BlockTable | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `hf_entmax.ops.exact_sparse_attention` on the CPU; return the output, and its counts as one int64 tensor ``[3, B, H]``.

    Keys and values are read where they lie, in their dtype; the sketch of a key head is read once for all its query heads. With
    ``blocks`` they are those of `hf_entmax.ops.exact.paged_attention`.
    """
    from .exact_host import attend

    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(float(alpha), dtype=torch.float64)
    mask, bias = _with_infinities(options.attention_mask), _with_infinities(options.position_bias)
    return attend(query, sketch, key, value, alpha, mask, bias, options, blocks)


def _with_infinities(term: Tensor | None) -> Tensor | None:
    """Write -inf where a mask of another dtype than float32 holds half of its finfo.min or less, and convert it."""
    if term is None or term.dtype in (torch.bool, torch.float32):
        return term
    return term.float().masked_fill(term <= masked_below(term.dtype), -torch.inf)
