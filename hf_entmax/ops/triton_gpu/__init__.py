r"""Fused entmax attention for CUDA tensors, through Triton.

Scores are never stored: each block of queries passes over the keys for the row maxima, a few times more for the
threshold of every row (blocks of keys that cannot reach it are dropped on the way) and once for the output. The backward
pass visits only the tiles that carry weight. Memory is linear in the length but for one byte per tile. Alpha is one number
per head, read from memory, and has a gradient; 1 is softmax, with no case of its own.

Importing this package does not import Triton; the first call does. With ``TRITON_INTERPRET=1`` in the environment before
that, the kernels run on CPU tensors, interpreted: for tests, not for work.

Reference:
    Peters, Niculae and Martins 2019 (alpha-entmax); Correia, Niculae and Martins 2019 (alpha per head, learned); Dao et
    al. 2022 (tiling); Goncalves, Treviso and Martins 2025 (AdaSplash: thresholds by Halley steps in a fused kernel).
"""

from __future__ import annotations

import importlib.util
import math
import os
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import values_visible
from hf_entmax.ops.triton_gpu import operators as operators

if TYPE_CHECKING:
    from hf_entmax.ops.exact.sketch import KeySketch

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
READS_BLOCKS = False
_LARGEST_HEAD = 256
# Sizes reach the kernels as float32, see `tiles.whole_numbers`.
_LARGEST_SIZE = 1 << 24
_OLDEST = (8, 0)
# With these alphas by construction the kernels need no logarithm.
_EXACT = (1.0, 1.5, 2.0)
_DEFAULTS = AttentionOptions()
# Tied weights are 1/n at most n keys, and float32 thresholds tell them by 1 + u (z - c) = n**-u: beyond this many bits not.
_THRESHOLD_BITS = 18.0


def unsupported(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions = _DEFAULTS
) -> str | None:
    """Say why this backend cannot honour a call of `attention`, naming the argument, or None if it can."""
    if not _HAS_TRITON:
        return "triton is not installed (pip install 'hf_entmax[gpu]')"
    if (reason := _unfit_device(query)) is not None:
        return f"query: {reason}"
    lowered = _autocast_dtype(query)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if lowered is None and tensor.dtype not in _DTYPES:
            return f"{name}: {tensor.dtype} is not one of float16, bfloat16, float32"
        if lowered is None and tensor.dtype != query.dtype:
            return f"{name}: {tensor.dtype} differs from the {query.dtype} of query"
        if tensor.shape[-1] > _LARGEST_HEAD or tensor.shape[-1] == 0:
            return f"{name}: head dimension {tensor.shape[-1]} is not in 1 to {_LARGEST_HEAD}"
        if max(tensor.shape) > _LARGEST_SIZE:
            return f"{name}: a dimension of {max(tensor.shape)} is above {_LARGEST_SIZE}"
    for name, other in {"key": key, "value": value, "alpha": alpha, **options.tensors()}.items():
        if isinstance(other, Tensor):
            if other.device != query.device:
                return f"{name}: it is on {other.device}, query on {query.device}"
            if other.dtype == torch.float64:
                return f"{name}: float64 would be rounded to float32"
    largest, highest = largest_alpha(key.shape[-2]), alpha
    if isinstance(alpha, Tensor):
        # To look at it waits for a GPU, which a promise spares. Where nobody may look, what is too large is NaN, see `_alphas`.
        look = alpha.device.type == "cpu" or options.alpha_max == math.inf
        highest = 1.0 if options.alpha_max == math.inf else options.alpha_max
        if look and values_visible(alpha):
            highest = alpha.detach().max()
    if (given := float(highest)) > largest:
        return (
            f"alpha: {given:.4g} is above {largest:.4g}, up to which its float32 thresholds tell {key.shape[-2]} keys"
        )
    return None


def largest_alpha(keys: int) -> float:
    """Up to which alpha the kernels are right for so many keys: any up to 2, then less the more keys there are."""
    return max(2.0, 1.0 + _THRESHOLD_BITS / math.log2(max(2, keys)))


def attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """Entmax attention by the fused kernels, for calls that `unsupported` has nothing against.

    Arguments, results and differentiability are those of `hf_entmax.ops.entmax_attention`. The same inputs and the same
    state of the random number generator give the same bits, gradients included. ``need_weights`` writes the
    dense ``[B, H, T_q, T_k]`` weights and takes that memory. Gradients of gradients are not available: the torch backend has them.
    """
    lowered = _autocast_dtype(query)
    if lowered is not None:
        query, key, value = query.to(lowered), key.to(lowered), value.to(lowered)
    alphas, exact_alpha = _alphas(alpha, query.shape[1], key)
    seed = None
    if options.dropout > 0:
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=query.device)
    differentiable = (query, key, value, alphas, options.attention_mask, options.position_bias)
    need_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)
    call = torch.ops.hf_entmax.triton_attention
    if need_grad and not torch.compiler.is_compiling():
        call = operators.EntmaxAttentionFunction.apply
    given = _arguments(query, key, value, alphas, seed, exact_alpha, options)
    needs = (bool(options.need_weights), need_grad, need_grad and alphas.requires_grad)
    out, weights, *_ = call(*given, *needs)  # type: ignore[misc]
    return out, weights if options.need_weights else None


def exact_sparse_attention(
    query: Tensor, sketch: KeySketch, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """`hf_entmax.ops.exact_sparse_attention` by three kernels: the output, and its counts.

    Keys and values are read where they lie, in their dtype, also under autocast, and scores are computed in float32.
    Nothing waits for the device.
    """
    from hf_entmax.ops.triton_gpu import exact_host

    alphas, exact_alpha = _alphas(alpha, query.shape[1], key)
    inputs = _arguments(query, key, value, alphas, None, exact_alpha, options)
    out, read, nonzero = exact_host.attend(inputs, sketch, options.sink)
    visible = options.visible_keys(query.shape[2], key.shape[2], query.device).expand(query.shape[:3])
    return out, (visible.sum(-1), read.sum(-1), nonzero.sum(-1))


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alphas: Tensor,
    seed: Tensor | None,
    exact: float,
    options: AttentionOptions,
) -> operators.Arguments:
    tensors = (query, key, value, alphas, options.attention_mask, options.position_bias, options.key_padding_mask, seed)
    limits = (bool(options.is_causal), options.sliding_window or 0)
    numbers = (float(options.softcap or 0.0), options.scale(query.shape[3]), float(options.dropout))
    return operators.Arguments(*tensors, exact, *limits, *numbers)


def row_kernel(scores: Tensor) -> ModuleType | None:
    """Return the module `row_host` if it can take these scores ``[n, V]``, else None."""
    if not _HAS_TRITON or scores.dtype not in _DTYPES or _unfit_device(scores) is not None:
        return None
    from hf_entmax.ops.triton_gpu import row_host

    return row_host


def _alphas(alpha: float | Tensor, heads: int, key: Tensor) -> tuple[Tensor, float]:
    """Alpha by head, float32 ``[H]``, and the one that the kernels are compiled for, or 0."""
    if not isinstance(alpha, Tensor):
        number = float(alpha)
        alphas = torch.full((heads,), number, dtype=torch.float32, device=key.device)
        return alphas, number if number in _EXACT else 0.0
    alphas = alpha.to(torch.float32).expand(heads).contiguous()
    # What `unsupported` could not see, in a captured or compiled graph, shows as NaN instead of wrong weights.
    return torch.where(alphas > largest_alpha(key.shape[-2]), math.nan, alphas), 0.0


def _unfit_device(tensor: Tensor) -> str | None:
    """Why the kernels cannot run where this tensor is, or None."""
    device = tensor.device
    if device.type != "cuda":
        interpreted = _INTERPRETED and device.type == "cpu"
        return None if interpreted else f"it is on {device.type}, the kernels are for cuda"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs, and this PyTorch is built for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"its device has compute capability {capability[0]}.{capability[1]}, 8.0 is needed"
    return None


def _autocast_dtype(query: Tensor) -> torch.dtype | None:
    """The dtype that autocast lowers attention to, as it does torch's own, or None outside autocast."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind) or query.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
