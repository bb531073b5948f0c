"""Exact sparse attention over keys that lie in blocks of one buffer, as servers of many sequences keep them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_entmax.ops import backends
from hf_entmax.ops.attention import attend, head_alpha
from hf_entmax.ops.backends import Backend
from hf_entmax.ops.exact.attention import SparseCounts, exact_attend
from hf_entmax.ops.exact.blocks import BlockTable
from hf_entmax.ops.exact.sketch import KeySketch
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import values_visible


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    blocks: BlockTable,
    sketch: KeySketch | None,
    options: AttentionOptions,
    backend: Backend = "auto",
) -> tuple[Tensor, SparseCounts]:
    """Entmax attention of the last query of several sequences, which reads in full only keys that may have weight.

    The output is that of `hf_entmax.ops.entmax_attention` over the keys of each sequence. The kernel for the CPU reads keys where
    they lie; for every other backend they are gathered, sequence by sequence.

    Args:
        query: ``[B, H, 1, D]``, one for each sequence, which sees all its keys.
        key: the buffer ``[1, H_kv, rows, D]``, any strides.
        value: likewise ``[1, H_kv, rows, D_v]``.
        alpha: ``>= 1``; a float for all heads or a tensor ``[H]``.
        blocks: where the keys of each sequence lie, on the CPU.
        sketch: of the pages of all blocks: of block ``b`` from place ``b * size / P`` on; None reads all keys.
        options: scaling, softcap and sink; there are no masks.
        backend: as of `hf_entmax.ops.exact_sparse_attention`.

    Returns:
        ``[B, H, 1, D_v]`` in the dtype of ``value``, and what was read.

    Raises:
        ValueError: if the size of a block is no power of 2 or no multiple of the sketch's pages, or options ask for more.
    """
    page = 16 if sketch is None else sketch.page_size
    if blocks.size & (blocks.size - 1) or (sketch is not None and blocks.size % page):
        raise ValueError(
            f"Blocks of {blocks.size} keys are not allowed: a power of 2, and a multiple of pages of {page}."
        )
    if options.tensors() or options.is_causal or options.sliding_window or options.dropout or options.need_weights:
        raise ValueError(
            "paged_attention takes scaling, softcap and sink alone: every query sees all keys of its sequence."
        )
    if sketch is None:
        blocks = dataclasses.replace(blocks, sketched=torch.zeros_like(blocks.lengths))
    alpha = head_alpha(alpha, query.shape[1])
    module = backends.kernel_module(backend, query, key, value, alpha, options)
    plain = backends.plain(query) and values_visible(query) and key.shape[2] < 2**31
    if module is not None and module.READS_BLOCKS and plain:
        like = {"page_size": page, "dtype": key.dtype}
        empty = KeySketch.allocate(1, key.shape[1], key.shape[3], 0, **like) if sketch is None else sketch
        out, counts = module.exact_sparse_attention(query, empty, key, value, alpha, options, blocks)
        return out, SparseCounts(*counts)
    parts = [_one(b, query[b : b + 1], key, value, alpha, blocks, sketch, options, backend) for b in range(len(query))]
    outs, counts = zip(*parts, strict=True)
    return torch.cat(outs), SparseCounts(*(torch.cat(own) for own in zip(*counts, strict=True)))


def _one(
    sequence: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    blocks: BlockTable,
    sketch: KeySketch | None,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Tensor, SparseCounts]:
    """Attend to the keys of one sequence, gathered."""
    rows = blocks.rows(sequence).to(key.device)
    key, value = key.index_select(2, rows), value.index_select(2, rows)
    if sketch is not None:
        own = sketch.select(blocks.pages(sequence, sketch.page_size).to(key.device))
        return exact_attend(query, own, key, value, alpha, options, backend)
    out, weights = attend(query, key, value, alpha, dataclasses.replace(options, need_weights=True), backend)
    total = torch.full((1, query.shape[1]), key.shape[2], device=query.device)
    return out, SparseCounts(total, total, (weights != 0).sum((-1, -2)))  # type: ignore[operator,union-attr]
