"""How the rows of one (batch, key head) are cut into blocks, and the dropout key of a row."""

from __future__ import annotations

import numpy as np
from numba import njit

# The increments of the splitmix64 generator: neighbouring rows get unrelated keys.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

#: Bytes noted for every row of a block: first column, one past the last, maximum.
ROW_LIMITS = 24


@njit(error_model="numpy")
def dense_row_bytes(r, width):
    """Bytes of ``width`` dense weights in whole vectors, and of the gradient of their scores if that is stored."""
    return (width + 15) // 16 * (128 if r.store_gradient != 0 else 64)


@njit(error_model="numpy")
def block_rows(r, block):
    """First row and number of rows of a block; row = query head within the group * T_q + query."""
    if r.stacked != 0:
        first = block * r.block_rows
        return first, min(r.block_rows, r.groups * r.queries - first)
    per_head = (r.queries + r.block_rows - 1) // r.block_rows
    head, place = block // per_head, block % per_head
    first = place * r.block_rows
    return head * r.queries + first, min(r.block_rows, r.queries - first)


@njit(error_model="numpy")
def item_blocks(r, item):
    """Batch, key head and block range of a work item."""
    chunk = item % r.chunks
    pair = item // r.chunks
    start = chunk * r.blocks // r.chunks
    stop = (chunk + 1) * r.blocks // r.chunks
    return pair // r.kv_heads, pair % r.kv_heads, start, stop


@njit(error_model="numpy")
def dropout_key(seed, row):
    """A 64-bit key for one row of one call."""
    z = np.uint64(seed) + np.uint64(row + 1) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return np.int64(z ^ (z >> np.uint64(31)))
