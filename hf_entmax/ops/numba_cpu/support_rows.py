"""The kernel that brings the support of a forward pass, scattered over its slabs, into one piece."""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from .jit import jit
from .partition import stored_row
from .simd import (
    LANES,
    atomic_increment,
    both,
    count,
    either,
    first_lanes,
    greater,
    is_nan,
    load,
    read_f32,
    read_i32,
    read_i64,
    splat,
    write_f32,
    write_i32,
    write_i64,
)
from .tiles import copy_floats, write_row

_ZERO = np.float32(0.0)


@jit
def _count_row(r, row):
    """How many weights of a row are not zero."""
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
    """Columns and weights of a row, from its place in the piece on."""
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
    """All weights of a row, zeros included."""
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
