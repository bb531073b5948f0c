"""From tensors to the record of exact sparse attention, and its two launches."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_entmax.config import check_alphas
from hf_entmax.ops.exact.bounds import score_rounding
from hf_entmax.ops.options import AttentionOptions

from . import layout
from .function import in_rows_layout
from .host import as_rows, as_term, describe, empty_rows, limits_and_mask, set_rows
from .kernels import find_solvers, kernel
from .layout import EXACT_RECORD, structure
from .runtime import launch, storage

if TYPE_CHECKING:
    from hf_entmax.ops.exact.blocks import BlockTable
    from hf_entmax.ops.exact.sketch import KeySketch

_Record = structure(EXACT_RECORD)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Below this ``u = alpha - 1`` so many keys have weight that reading all of them takes less time, by bits of the sketch.
_LEAST_U = {2: 0.3, 4: 0.09, 6: 0.08, 8: 0.08}
# Pieces of a key head's pages, for each thread and all key heads together.
_ITEMS_PER_THREAD = 4
# Products of a query and keys below which no further thread is asked for.
_PRODUCTS_PER_THREAD = 1 << 22


def attend(
    query: Tensor,
    sketch: KeySketch,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    options: AttentionOptions,
    blocks: BlockTable | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to at least one key; return the output, and visible, read and nonzero keys, int64 ``[3, B, H]``.

    With ``blocks`` there is one query for each sequence, and key and value are the buffer ``[1, H_kv, rows, D]``.
    """
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    if blocks is not None:
        keys = blocks.longest
    shape, rows = (batch, heads, queries, keys), batch * heads * queries
    pages = sketch.pages if blocks is None else int(blocks.sketched.max()) // sketch.page_size
    mask, limits = limits_and_mask(mask, options.key_padding_mask)
    if blocks is not None:
        limits = blocks.limits
    query = as_rows(query)
    # Read as they are: a row is only asked to be contiguous.
    key, value = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (key, value))
    # Everything the record points to must live as long as the launches.
    alphas = alpha.detach().double().expand(heads).contiguous()
    bounds = f"exact_bounds_{sketch.bits}"
    most, solvers = _known(alphas.numpy().tobytes(), bounds)
    value_vectors = layout.vectors(value.shape[-1])
    out = empty_rows(query, layout.LANES * value_vectors)
    counts = torch.empty((3, batch, heads, queries), dtype=torch.int64)

    r = _Record()
    terms = [None if t is None else as_term(t, shape) for t in (mask, bias)]
    describe(r, (query, key, value), terms, limits)
    set_rows(r, "out", out)
    if blocks is not None:
        _describe_blocks(r, blocks, sketch, keys)
    sinks = None if options.sink is None else options.sink.detach().double().contiguous()
    if sinks is not None:
        r.sinks = sinks.data_ptr()
    r.alpha, r.solvers = alphas.data_ptr(), solvers.ctypes.data
    r.key_kind, r.value_kind = _KINDS[key.dtype], _KINDS[value.dtype]
    r.key_dim, r.value_dim = key.shape[-1], value.shape[-1]
    r.causal, r.window = int(options.is_causal), options.sliding_window or 0
    r.softcap, r.scaling = options.softcap or 0.0, options.scale(key.shape[-1])
    r.total = counts.data_ptr()
    r.read, r.nonzero = r.total + 8 * rows, r.total + 16 * rows
    r.rounding = score_rounding(key.shape[-1], torch.float32, query.device)
    r.least_u = _LEAST_U[sketch.bits]
    # A thread that is woken costs as much time as some millions of products.
    threads = min(torch.get_num_threads(), 1 + rows * keys * key.shape[-1] // _PRODUCTS_PER_THREAD)

    pairs = batch * kv_heads
    if pages and most >= r.least_u:
        for name in ("codes", "low", "step", "norm"):
            set_rows(r, name, getattr(sketch, name), "bh")
        if blocks is not None:
            r.codes_b = r.low_b = r.step_b = r.norm_b = 0
        r.page_size, r.pages = sketch.page_size, pages
        # A spare vector, because the last store of a row may run over its end.
        r.upper_bytes = 4 * pages * sketch.page_size + layout.VECTOR
        held = _kept_storage(rows * (r.upper_bytes + 8 * pages))
        r.upper = held.data_ptr()
        r.tops = r.upper + rows * r.upper_bytes
        r.widths = r.tops + 4 * rows * pages
        r.chunks = 1 if threads == 1 else max(1, min(-(-_ITEMS_PER_THREAD * threads // pairs), pages // 8))
        launch(kernel(bounds), r, pairs * r.chunks, threads, layout.bounds_scratch(r.depth_vectors, rows // pairs))
    launch(kernel("exact_rows"), r, rows, threads, layout.exact_scratch(r.depth_vectors, value_vectors, keys + 1))
    return in_rows_layout(out, value), counts[..., 0] if queries == 1 else counts.sum(-1)


def _describe_blocks(r: Any, blocks: BlockTable, sketch: KeySketch, keys: int) -> None:
    """Tell a record that keys lie in blocks, one sequence of them for each query; the buffer and the sketch are all sequences'."""
    r.keys, r.k_b, r.v_b = keys, 0, 0
    r.tables, r.table_bytes = blocks.tables.data_ptr(), 4 * blocks.tables.stride(0)
    r.sketched = blocks.sketched.data_ptr()
    r.block_shift, r.page_shift = blocks.size.bit_length() - 1, sketch.page_size.bit_length() - 1
    r.block_stride = blocks.stride


# By thread, because several may decode at once.
_kept = threading.local()


def _kept_storage(size: int) -> Tensor:
    """Keep memory from call to call: to be given fresh pages for every step of every layer costs more than the arithmetic."""
    held: Tensor | None = getattr(_kept, "storage", None)
    if held is None or held.numel() < size:
        held = _kept.storage = storage(size + size // 4)
    return held


@functools.lru_cache(maxsize=256)
def _known(alphas: bytes, bounds: str) -> tuple[float, np.ndarray]:
    """Return the largest ``alpha - 1`` and the addresses of the solvers, remembered while a text is generated."""
    check_alphas(np.frombuffer(alphas))
    u = np.frombuffer(alphas) - 1.0
    return float(u.max()), find_solvers(u, "exact_rows", (bounds,)).single
