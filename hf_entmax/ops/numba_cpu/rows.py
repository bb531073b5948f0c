"""The rows of a call: how they are cut into blocks, dropout on their weights, and what is kept of each for the backward pass.

`run_support_rows` is the kernel that brings the kept rows, scattered over their slabs, into one piece.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from . import layout
from .intrinsics import jit, jit_inline
from .simd import (
    LANES, atomic_increment, both, count, either, first_lanes, greater, hashed_keep, indices, is_nan, load, load_index,
    read_f32, read_i32, read_i64, select, splat, store, write_f32, write_i32, write_i64,
)  # fmt: skip
from .tiles import copy_floats, write_row

_f = np.float32
_ZERO = _f(0.0)
# The increments of the splitmix64 generator: neighbouring rows get unrelated keys.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

dense_row_bytes = jit(layout.dense_row_bytes)


@jit_inline
def stored_row(r, row):
    """Return where a row's support lies, and its size (-1 - width where it is stored densely)."""
    return read_i64(r.row_address + 8 * row), np.int64(read_i32(r.row_size + 4 * row))


@jit
def block_rows(r, block):
    """Return the first row and the number of rows of a block; row = query head within the group * T_q + query."""
    if r.stacked != 0:
        first = block * r.block_rows
        return first, min(r.block_rows, r.groups * r.queries - first)
    per_head = (r.queries + r.block_rows - 1) // r.block_rows
    head, place = block // per_head, block % per_head
    first = place * r.block_rows
    return head * r.queries + first, min(r.block_rows, r.queries - first)


@jit
def item_blocks(r, item):
    """Return batch, key head and block range of a work item."""
    chunk = item % r.chunks
    pair = item // r.chunks
    start = chunk * r.blocks // r.chunks
    stop = (chunk + 1) * r.blocks // r.chunks
    return pair // r.kv_heads, pair % r.kv_heads, start, stop


@jit
def place_row(r, h_kv, row):
    """Return query head and query of a row."""
    return h_kv * r.groups + row // r.queries, row % r.queries


@jit
def dropout_key(seed, row):
    """Make a 64-bit key for one row of one call."""
    z = np.uint64(seed) + np.uint64(row + 1) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return np.int64(z ^ (z >> np.uint64(31)))


@jit
def drop_dense(line, low, width, key, limit, factor, target):
    """Apply dropout to a dense row."""
    for k in range(0, width, LANES):
        kept = hashed_keep(indices(low + k), key, limit)
        store(target + 4 * k, select(kept, load(line + 4 * k) * splat(_f(factor)), splat(_f(0.0))))


@jit
def drop_sparse(weights, index, n, key, limit, factor, target):
    """Apply dropout to a sparse row."""
    for k in range(0, n, LANES):
        kept = hashed_keep(load_index(index + 4 * k), key, limit)
        store(target + 4 * k, select(kept, load(weights + 4 * k) * splat(_f(factor)), splat(_f(0.0))))


@jit
def _count_row(r, row):
    """Count the weights of a row that are not zero."""
    line, size = stored_row(r, row)
    if size >= 0:
        return size
    width, total = -1 - size, 0
    for k in range(0, width, LANES):
        values = load(line + 4 * k)
        present = either(greater(values, splat(_ZERO)), is_nan(values))
        total += count(both(present, first_lanes(width - k)))
    return total


@jit
def _write_sparsely(r, row):
    """Write columns and weights of a row, from its place in the piece on."""
    source, size = stored_row(r, row)
    place = read_i64(r.row_offsets + 8 * row)
    columns, values = r.columns + 4 * place, r.values + 4 * place
    if size >= 0:
        for k in range(size):
            write_i32(columns + 4 * k, read_i32(source + 4 * k))
            write_f32(values + 4 * k, read_f32(source + 4 * (size + k)))
        return
    low, wanted = read_i32(r.row_start + 4 * row), read_i64(r.row_offsets + 8 * (row + 1)) - place
    k = kept = 0
    while kept < wanted:
        # A zero is written over by what comes next; the row ends before one could reach into the row after it.
        value = read_f32(source + 4 * k)
        write_i32(columns + 4 * kept, np.int32(low + k))
        write_f32(values + 4 * kept, value)
        kept += value != _ZERO
        k += 1


@jit
def _write_densely(r, row):
    """Write all weights of a row, zeros included."""
    source, size = stored_row(r, row)
    line = r.weights + 4 * r.keys * row
    write_row(line, 0, r.keys, source, source + 4 * size, max(size, 0))
    if size < 0:
        copy_floats(source, line + 4 * np.int64(read_i32(r.row_start + 4 * row)), -1 - size)


def run_support_rows(record):
    """Write dense weights where the record has room for them, else sparse ones, else the size of every row."""
    r = carray(record, 1)[0]
    while True:
        item = atomic_increment(r.counters)
        if item >= r.batch * r.heads:
            return
        for row in range(item * r.queries, (item + 1) * r.queries):
            if r.weights != 0:
                _write_densely(r, row)
            elif r.columns != 0:
                _write_sparsely(r, row)
            else:
                write_i64(r.row_offsets + 8 * row, _count_row(r, row))
