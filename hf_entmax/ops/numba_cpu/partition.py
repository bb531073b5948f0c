"""How the rows of one (batch, key head) are cut into blocks, and where a row is stored."""

from __future__ import annotations

import numpy as np

from . import layout
from .jit import jit, jit_inline
from .simd import read_i32, read_i64

dense_row_bytes = jit(layout.dense_row_bytes)


@jit_inline
def stored_row(r, row):
    """Where a row's support lies, and its size (-1 - width where it is stored densely)."""
    return read_i64(r.row_address + 8 * row), np.int64(read_i32(r.row_size + 4 * row))


@jit
def block_rows(r, block):
    """First row and number of rows of a block; row = query head within the group * T_q + query."""
    if r.stacked != 0:
        first = block * r.block_rows
        return first, min(r.block_rows, r.groups * r.queries - first)
    per_head = (r.queries + r.block_rows - 1) // r.block_rows
    head, place = block // per_head, block % per_head
    first = place * r.block_rows
    return head * r.queries + first, min(r.block_rows, r.queries - first)


@jit
def item_blocks(r, item):
    """Batch, key head and block range of a work item."""
    chunk = item % r.chunks
    pair = item // r.chunks
    start = chunk * r.blocks // r.chunks
    stop = (chunk + 1) * r.blocks // r.chunks
    return pair // r.kv_heads, pair % r.kv_heads, start, stop
