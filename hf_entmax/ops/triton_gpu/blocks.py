"""Tile shapes, arguments and buffers, apart from the kernels so that shapes can be told without importing Triton."""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

#: Names a JSON file of tiles that were found to be fastest on this machine, see `tuned_blocks`.
VARIABLE = "HF_ENTMAX_TRITON_BLOCKS"
_CASES = tuple(f"{kind}-{width}" for kind in ("half", "float32") for width in (64, 128, 256))
logger = logging.getLogger(__name__)


class Arguments(NamedTuple):
    """The inputs of one attention call, as `hf_entmax.ops.triton_gpu.operators` passes them: 0 stands for "none"."""

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor
    mask: Tensor | None
    bias: Tensor | None
    key_mask: Tensor | None
    seed: Tensor | None
    exact_alpha: float
    is_causal: bool
    window: int
    softcap: float
    scale: float
    dropout: float


class Blocks(NamedTuple):
    """How attention of one head dimension is cut up.

    ``rows`` queries by ``cols`` keys are a tile, in every kernel: a tile is also the unit that is skipped.
    ``warps`` of 32 threads work on one, ``stages`` loads ahead (forward; the backward kernels hold more tiles at once).
    """

    rows: int
    cols: int
    warps: int
    stages: int
    backward_warps: int
    backward_stages: int


def padded(width: int) -> int:
    """The power of two, at least 16, that a head dimension is padded to (a tensor-core operand is no smaller)."""
    return max(16, 1 << max(width - 1, 0).bit_length())


@functools.cache
def tuned_blocks(device: str | None = None) -> dict[str, Blocks]:
    """The tiles of the file that the environment variable ``HF_ENTMAX_TRITON_BLOCKS`` names, by the name of their case.

    ``{"device": "NVIDIA H100 80GB HBM3", "blocks": {"half-64": {"rows": 128, "cols": 64, "warps": 8, ...}}}``, as
    ``python -m recipes.lab.gpu --parts tuning`` writes it, from a checkout. A case is "half" or "float32" and 64, 128 or
    256, the padded head dimension. A file that cannot be used is named in a warning, once a device; the built-in tiles take
    its place.

    Args:
        device: name of the GPU that works; None takes whatever the file was measured on.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return {}
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        if table["device"] != (table["device"] if device is None else device):
            raise ValueError(f"it was measured on {table['device']}, this is {device}")
        found = {case: Blocks(**numbers) for case, numbers in table["blocks"].items()}
        for case, blocks in found.items():
            if case not in _CASES:
                raise ValueError(f"{case!r} is no case; the cases are {', '.join(_CASES)}")
            whole = all(type(number) is int and number > 0 for number in blocks)
            if not whole or any(n & (n - 1) for n in (*blocks[:3], blocks.backward_warps)) or min(blocks[:2]) < 16:
                raise ValueError(f"{case} has {blocks}: rows and cols are powers of two from 16, warps powers of two")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s=%s is not used: %s. The built-in tiles take its place.", VARIABLE, path, error)
        return {}
    return found


def attention_blocks(queries: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> Blocks:
    """Choose the tile of attention, for head dimensions of at most 256.

    Up to 16 queries (decoding) take the smallest tile a tensor core multiplies; float32 tiles take twice the shared memory
    and are half as wide.

    Returns:
        The tile and launch parameters: those of `tuned_blocks` where there are any, else chosen so that compilation for
        compute capability 9.0 spills few registers.
    """
    widest = padded(max(head_dim, value_dim))
    device = torch.cuda.get_device_name() if os.environ.get(VARIABLE) and torch.cuda.is_available() else None
    tuned = tuned_blocks(device).get(f"{'half' if dtype.itemsize == 2 else 'float32'}-{max(widest, 64)}")
    if tuned is not None:
        blocks = tuned
    elif dtype.itemsize == 2:
        if widest <= 64:
            blocks = Blocks(64, 64, 4, 3, 4, 2)
        else:
            blocks = Blocks(64, 64, 8, 2, 8, 2) if widest <= 128 else Blocks(64, 32, 8, 2, 8, 1)
    elif widest <= 64:
        blocks = Blocks(32, 32, 8, 2, 8, 1)
    else:
        blocks = Blocks(32, 16, 8, 2, 8, 1) if widest <= 128 else Blocks(16, 16, 8, 1, 8, 1)
    return blocks._replace(rows=16, warps=4, backward_warps=4) if queries <= 16 else blocks


def forward_buffers(
    query: Tensor, key: Tensor, value: Tensor, need_weights: bool, need_grad: bool
) -> tuple[Tensor, ...]:
    """Uninitialised results of the forward kernel, without entries where not needed.

    Returns:
        out ``[B, H, T_q, D_v]``, stored as ``[B, T_q, H, D_v]`` so that merging the heads copies nothing; weights
        ``[B, H, T_q, T_k]``; and for the backward pass stats ``[B, H, T_q, 5]`` in float32, slope_mean ``[B, H, T_q, D_v]``
        in the dtype of the values, whose rounding the gradients of half precision have anyway, and flags
        ``[B, H, n_q, n_k / 32]`` in int32, a bit for each tile (see `on_support`).
    """
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = value.shape[2:]
    blocks = attention_blocks(queries, head_dim, value_dim, query.dtype)
    n_q, n_k = -(-queries // blocks.rows), -(-keys // blocks.cols)
    lead = (batch, heads)
    return (
        query.new_empty((batch, queries, heads, value_dim)).transpose(1, 2),
        query.new_empty((*lead, queries, keys) if need_weights else 0),
        query.new_empty((*lead, queries, 5) if need_grad else 0, dtype=torch.float32),
        value.new_empty((*lead, queries, value_dim) if need_grad else 0),
        query.new_empty((*lead, n_q, -(-n_k // 32)) if need_grad else 0, dtype=torch.int32),
    )


def on_support(flags: Tensor, n_k: int) -> Tensor:
    """Which tiles carry weight, bool ``[B, H, n_q, n_k]``, from the bits of `forward_buffers`."""
    block = torch.arange(n_k, device=flags.device)
    return (flags[..., block // 32] >> (block % 32)) & 1 != 0


def backward_buffers(inputs: Arguments, need_alpha: bool, need_bias: bool, need_mask: bool) -> tuple[Tensor, ...]:
    """Uninitialised gradients of query, key, value, alpha, bias and mask, without entries where not needed."""
    nothing = inputs.query.new_empty(0)
    return (
        torch.empty_like(inputs.query),
        torch.empty_like(inputs.key),
        torch.empty_like(inputs.value),
        torch.empty_like(inputs.alpha, memory_format=torch.contiguous_format) if need_alpha else nothing,
        _contiguous_like(inputs.bias) if need_bias and inputs.bias is not None else nothing.clone(),
        _contiguous_like(inputs.mask) if need_mask and inputs.mask is not None else nothing.clone(),
    )


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
