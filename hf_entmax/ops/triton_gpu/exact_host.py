"""From tensors to the three launches of exact sparse attention."""

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

# Bounds or listed scores that a program looks at together, and its warps: registers leave room for two on a multiprocessor.
_CHUNK, _WARPS = 2048, 8
# Programs for each multiprocessor, where rows alone do not give as many; at least so many keys to each; at most so many to a row, all of
# which read the scores of the others.
_PROGRAMS, _LEAST_KEYS, _MOST_SPLITS = 2, 512, 64


def row_splits(rows: int, keys: int, device: torch.device) -> int:
    """Over how many programs to split a row: as many as the device has room for, if each gets keys enough to be worth it."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(_PROGRAMS * processors // rows, keys // _LEAST_KEYS, _MOST_SPLITS))


def attend(inputs: Arguments, sketch: KeySketch, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and numbers of keys that were read and that have weight, ``[B, H, n]`` each. There is at least one key."""
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    page, depth, lead = sketch.page_size, sketch.low.shape[-1], (batch, heads, queries)
    all_pages = -(-keys // page)
    splits = min(row_splits(batch * heads * queries, keys, query.device), all_pages)
    call = _Launch(inputs, grad_alpha=False)
    options = call.options._replace(RAW=tl.constexpr(False))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    gaps, edges = empty(*lead, all_pages, page, dtype=torch.float16), empty(3, *lead, all_pages)
    # A list holds all keys of a split's pages, one more for each page of the others, and the sink.
    own_pages = -(-all_pages // splits)
    size = own_pages * page + (all_pages if splits > 1 else 0) + 1
    page_list = empty(*lead, splits, own_pages, dtype=torch.int32)
    scores, found = empty(*lead, splits, size), empty(*lead, splits, size, dtype=torch.int32)
    lengths, nonzero = empty(2, *lead, splits, dtype=torch.int32)
    out = empty(batch, queries, heads, value.shape[3], dtype=value.dtype).transpose(1, 2)
    parts = out if splits == 1 else empty(batch, heads, queries * splits, value.shape[3])
    sink = None if sink is None else sink.detach().contiguous()
    rows = heads // kv_heads * queries
    with _on_device(query):
        exact_kernels._score_bounds_kernel[(all_pages * batch * kv_heads * -(-rows // call.blocks.rows),)](
            call.inputs, call.terms, *map(_array, (sketch.codes, sketch.low, sketch.step, sketch.norm[..., None])),
            gaps, edges, score_rounding(query.shape[3], torch.float32, torch.device("cpu")), sketch.pages, all_pages,
            call.problem, BITS=sketch.bits, PAGE=page, DEPTH=depth, CHANNELS=min(32, depth & -depth), COLS=padded(page),
            OPTIONS=options, num_warps=4, **FUSED,
        )  # fmt: skip
        programs = (batch * heads * queries * splits,)
        exact_kernels._candidate_scores_kernel[programs](
            call.inputs, call.terms, sink, gaps, edges, page_list, found, scores, lengths, splits, all_pages, size, _MAX_PASSES,
            call.problem, PAGE=page, CHUNK=_CHUNK, OPTIONS=options, num_warps=_WARPS, **FUSED,
        )  # fmt: skip
        padded_splits = 1 << (splits - 1).bit_length()
        exact_kernels._candidate_output_kernel[programs](
            call.inputs, found, scores, lengths, _array(parts), nonzero, splits, size, _MAX_PASSES, call.problem,
            WIDTH=max(1, _CHUNK // padded_splits), SPLITS=padded_splits, OPTIONS=options, num_warps=_WARPS, **FUSED,
        )  # fmt: skip
    if splits > 1:
        out.copy_(parts.unflatten(2, (queries, splits)).sum(3))
    return out, (lengths - 1).flatten(2), nonzero.flatten(2)
