"""From tensors to the record of exact sparse attention, and its two launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hf_entmax.ops.options import AttentionOptions

from . import layout, runtime
from .arguments import EXACT_RECORD, structure
from .function import in_rows_layout, limits_and_mask
from .host import as_rows, as_term, set_rows, storage
from .solvers import find_solvers

if TYPE_CHECKING:
    from hf_entmax.ops.exact.sketch import KeySketch

_Record = structure(EXACT_RECORD)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Below this ``u = alpha - 1`` so many keys have weight that reading all of them takes less time, by bits of the sketch.
_LEAST_U = {2: 0.3, 4: 0.1, 6: 0.05, 8: 0.05}
# Pieces of a key head's pages, for each thread and all key heads together.
_ITEMS_PER_THREAD = 4
# The rounding of a score and its bound over ``|q| |k|``: see `hf_entmax.ops.exact.bounds`.
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


def attend(
    query: Tensor,
    sketch: KeySketch,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    options: AttentionOptions,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output, and int64 ``[3, B, H]``: visible, read and nonzero keys. Mask and bias hide by ``-inf``; there is at least one key."""
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    shape, rows, pages = (batch, heads, queries, keys), batch * heads * queries, sketch.pages
    mask, limits = limits_and_mask(mask, options.key_padding_mask)
    query = as_rows(query)
    # Read as they are: a row is only asked to be contiguous.
    key, value = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (key, value))
    u = alpha.detach().double().expand(heads).numpy() - 1.0
    if not (np.isfinite(u) & (u >= 0)).all():
        raise ValueError(f"alpha is {(u + 1).tolist()}, but entmax is defined for finite alpha >= 1 (1 is softmax).")
    alphas = u + 1.0
    value_vectors = layout.vectors(value.shape[-1])
    out = torch.empty((batch, queries, heads, layout.LANES * value_vectors)).transpose(1, 2)
    counts = torch.empty((3, rows), dtype=torch.int64)

    r = _Record()
    for name, tensor in (("q", query), ("k", key), ("v", value), ("out", out)):
        set_rows(r, name, tensor)
    terms = [None if t is None else as_term(t, shape) for t in (mask, bias)]
    for name, term in zip(("mask", "bias"), terms, strict=True):
        if term is not None:
            set_rows(r, name, term)
    if terms[0] is not None:
        r.mask_kind = 1 if terms[0].dtype == torch.bool else 2
    if limits is not None:
        r.key_limits = limits.ctypes.data
    sinks = None if sink is None else sink.detach().double().contiguous()
    if sinks is not None:
        r.sinks = sinks.data_ptr()
    r.alpha = alphas.ctypes.data
    r.batch, r.heads, r.queries, r.keys, r.kv_heads, r.groups = *shape, kv_heads, heads // kv_heads
    r.depth_vectors, r.value_vectors = layout.vectors(query.shape[-1]), value_vectors
    r.key_kind, r.value_kind, r.key_dim, r.value_dim = (
        _KINDS[key.dtype],
        _KINDS[value.dtype],
        key.shape[-1],
        value.shape[-1],
    )
    r.causal, r.window = int(options.is_causal), options.sliding_window or 0
    r.softcap, r.scaling = options.softcap or 0.0, options.scale(key.shape[-1])
    r.total, r.read, r.nonzero = (counts[i].data_ptr() for i in range(3))
    r.rounding, r.least_u = _ROUNDING * (key.shape[-1] + 16), _LEAST_U[sketch.bits]
    threads = torch.get_num_threads()

    bounds = f"exact_bounds_{sketch.bits}"
    solve = find_solvers(u, "exact_rows", (bounds,))
    if pages and (u >= r.least_u).any():
        for name, tensor in (
            ("codes", sketch.codes),
            ("low", sketch.low),
            ("step", sketch.step),
            ("norm", sketch.norm),
        ):
            size, stride = tensor.element_size(), tensor.stride()
            setattr(r, name, tensor.data_ptr())
            setattr(r, f"{name}_b", size * stride[0])
            setattr(r, f"{name}_h", size * stride[1])
        r.page_size, r.pages = sketch.page_size, pages
        # A spare vector, because the last store of a row may run over its end.
        r.upper_bytes = 4 * sketch.length + layout.VECTOR
        held = storage(rows * (r.upper_bytes + 8 * pages))
        r.upper = held.data_ptr()
        r.tops = r.upper + rows * r.upper_bytes
        r.widths = r.tops + 4 * rows * pages
        pairs = batch * kv_heads
        r.chunks = 1 if threads == 1 else max(1, min(-(-_ITEMS_PER_THREAD * threads // pairs), pages // 8))
        _launch(bounds, r, layout.bounds_scratch(r.depth_vectors, rows // pairs), pairs * r.chunks, threads)
    r.solvers = solve.single.ctypes.data
    _launch("exact_rows", r, layout.exact_scratch(r.depth_vectors, value_vectors, keys + 1), rows, threads)
    return in_rows_layout(out, value), counts.view(3, batch, heads, queries).sum(-1)


def _launch(name: str, r: object, scratch: dict[str, int], items: int, threads: int) -> None:
    for field, size in scratch.items():
        setattr(r, field, size)
    threads = max(1, min(threads, items))
    memory, counters = storage(threads * scratch["scratch_bytes"]), np.zeros(2, np.int64)
    r.scratch, r.counters = memory.data_ptr(), counters.ctypes.data  # type: ignore[attr-defined]
    runtime.launch(name, r, items, threads)  # type: ignore[arg-type]
