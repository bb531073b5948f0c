"""From tensors to the two launches of exact sparse attention."""

# The type of a kernel is that of its Python function: launch options and constants are not in its signature.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from hf_entmax.ops.exact.bounds import score_rounding
from hf_entmax.ops.triton_gpu import exact_kernels
from hf_entmax.ops.triton_gpu.blocks import Arguments, padded
from hf_entmax.ops.triton_gpu.launch import _MAX_PASSES, FUSED, _array, _Launch, _on_device

if TYPE_CHECKING:
    from hf_entmax.ops.exact.sketch import KeySketch

# Bounds or listed scores that a program looks at together, and its warps: a row is one program, so that it takes many.
_CHUNK, _WARPS = 4096, 8


def attend(inputs: Arguments, sketch: KeySketch, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output, and int64 ``[2, B, H, T_q]``: read and nonzero keys. There is at least one key."""
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    page, depth, lead = sketch.page_size, sketch.low.shape[-1], (batch, heads, queries)
    all_pages = -(-keys // page)
    call = _Launch(inputs, grad_alpha=False)
    options = call.options._replace(RAW=tl.constexpr(False))

    def empty(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*lead, width), dtype=dtype, device=query.device)

    upper, scores, found = empty(keys), empty(keys + 1), empty(keys + 1, torch.int32)
    edges = torch.empty((3, *lead, all_pages), dtype=torch.float32, device=query.device)
    page_list = empty(all_pages, torch.int32)
    out = torch.empty((batch, queries, heads, value.shape[3]), dtype=value.dtype, device=query.device).transpose(1, 2)
    counts = torch.empty((2, *lead), dtype=torch.int64, device=query.device)
    sink = None if sink is None else sink.detach().contiguous()
    rows = heads // kv_heads * queries
    with _on_device(query):
        exact_kernels._score_bounds_kernel[(all_pages * batch * kv_heads * -(-rows // call.blocks.rows),)](
            call.inputs, call.terms, *map(_array, (sketch.codes, sketch.low, sketch.step, sketch.norm[..., None])),
            upper, edges, score_rounding(query.shape[3], torch.float32, torch.device("cpu")), sketch.pages, all_pages,
            call.problem, BITS=sketch.bits, PAGE=page, DEPTH=depth, CHANNELS=min(32, depth & -depth), COLS=padded(page),
            OPTIONS=options, num_warps=4, **FUSED,
        )  # fmt: skip
        exact_kernels._exact_rows_kernel[(batch * heads * queries,)](
            call.inputs, call.terms, sink, upper, edges, page_list, found, scores, _array(out), counts, all_pages, _MAX_PASSES,
            call.problem, PAGE=page, CHUNK=_CHUNK, OPTIONS=options, num_warps=_WARPS, **FUSED,
        )  # fmt: skip
    return out, counts
