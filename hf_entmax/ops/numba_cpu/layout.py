"""What host and kernels share: the record of a call, and how the memory that it points to is divided.

A kernel takes one pointer to one record of addresses, byte strides and numbers. Nothing is specialised on shapes or dtypes, so
each kernel is compiled once. The host allocates by the functions that stand here and hands the offsets over in the record.
Sizes and offsets are in bytes. Nothing here imports Numba; a kernel that must compute a size itself compiles the function.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hf_entmax.ops.sketch_format import LANES

_ADDRESSES = (
    # Strided float32 tensors [B, heads, T, D]; every address is followed by its byte strides over B, heads and T.
    *(
        f"{name}{suffix}"
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        for suffix in ("", "_b", "_h", "_t")
    ),
    # Additive terms [B, H, T_q, T_k] broadcast by zero strides; a mask is bytes (1 = may attend) or float32.
    *(f"{name}{suffix}" for name in ("bias", "mask") for suffix in ("", "_b", "_h", "_t")),
    "weights",  # float32 [B, H, T_q, T_k] contiguous, or 0
    "dweights",  # its gradient, or 0
    "alpha",  # float64 [H]
    "solvers",  # int64 [H]: addresses of the solvers, see `kernels`
    "solve_short_rows",  # its address; likewise solve_full_rows
    "solve_full_rows",
    "dalpha",  # float64 [chunks, B, H]
    "key_limits",  # int32 [B, 2]: first real key and one past the last, or 0
    "row_address",  # int64 [B, H, T_q]: where the row's support is stored
    "row_size",  # int32 [B, H, T_q]: size of the support; -1 - width for a row stored densely
    "row_start",  # int32 [B, H, T_q]: first column of a row stored densely
    "row_offsets",  # int64 [B * H * T_q (+ 1)]: size of every row, or where it begins in the two below
    "columns",  # int32 [nnz]: the support in one piece, or 0
    "values",  # float32 [nnz]
    "counters",  # int64: next item, next thread, next slab, out of slabs
    "progress",  # int64 [items]: first block not done yet
    "slabs",  # int64 [n_slabs]: addresses of the support storage
    "scratch",
    "dbias",  # float32 contiguous [dbias_b, dbias_h, dbias_q, dbias_k], each the full size or 1
)
_SIZES = (
    "batch",
    "heads",
    "kv_heads",
    "groups",  # query heads per key head
    "queries",
    "keys",
    "depth_vectors",  # head dimension of queries and keys over 16
    "value_vectors",  # head dimension of values over 16
    "mask_kind",  # 0 none, 1 bytes, 2 float32
    "causal",
    "window",  # 0: none
    "chunks",  # items per (batch, key head)
    "block_rows",
    "blocks",  # blocks per (batch, key head)
    "stacked",  # whether a block may hold rows of several heads
    "direct",  # few rows: read K in place instead of packing it
    "span",  # floats per row of scores held at a time, a multiple of the panel
    "padded_keys",  # keys rounded up to whole panels
    "n_slabs",
    "slab_bytes",
    "keep",  # whether the support is kept for a backward pass
    "store_gradient",  # whether each row also has room for the gradient of its scores
    "block_bytes",  # the most that a block can keep
    # From here to scratch_bytes: how the scratch of a thread is divided, see `forward_scratch`.
    "pack_at",
    "limits_at",
    "rows_at",
    "row_bytes",
    "scores_at",
    "dropped_at",
    "scratch_bytes",
    "seed",
    "dropout_limit",  # a hash below this drops its weight
    "dbias_b",
    "dbias_h",
    "dbias_q",
    "dbias_k",
)
_NUMBERS = ("scaling", "softcap", "dropout_scale", "dense_above")

RECORD = np.dtype(
    [(name, np.int64) for name in (*_ADDRESSES, *_SIZES)] + [(name, np.float64) for name in _NUMBERS], align=True
)

_EXACT_ADDRESSES = (
    # The sketch, by page: codes uint8, low and step float16, norm float32; all are contiguous within a (batch, key head).
    *(f"{name}{suffix}" for name in ("codes", "low", "step", "norm") for suffix in ("", "_b", "_h")),
    "upper",  # float32: upper bounds of the scores of the sketched keys, one row after the other
    "tops",  # float32 [rows, pages]: the largest of each page
    "widths",  # float32 [rows, pages]: how far below them the lower bounds lie
    "sinks",  # float64 [H]: one more score without a value, or 0
    "total",  # int64 [B * H * T_q]: keys that are visible, read, and with weight
    "read",
    "nonzero",
    # Of keys that lie in blocks of one buffer, else 0: the numbers of each sequence's blocks, and how many keys have a sketch.
    "tables",  # int32 [B, blocks]
    "sketched",  # int32 [B]
)
_EXACT_SIZES = (
    "key_kind",  # 0 float32, 1 bfloat16, 2 float16
    "value_kind",
    "key_dim",  # head dimensions as they are
    "value_dim",
    "page_size",
    "pages",  # of the sketch
    "upper_bytes",  # of a row of upper bounds
    "table_bytes",  # of a row of tables
    "block_shift",  # log2 of the keys of a block
    "page_shift",  # log2 of the keys of a page
    "block_stride",  # rows of the buffer from one block to the next
    "weights_at",
    "scalars_at",
    "tops_at",
    "norms_at",
    "wide_at",
)
_EXACT_NUMBERS = ("rounding", "least_u")

#: What the kernels of exact sparse attention are told.
EXACT_RECORD = np.dtype(
    [(name, np.int64) for name in (*_ADDRESSES, *_SIZES, *_EXACT_ADDRESSES, *_EXACT_SIZES)]
    + [(name, np.float64) for name in (*_NUMBERS, *_EXACT_NUMBERS)],
    align=True,
)

#: What the kernels for independent rows are told.
ROWS_RECORD = np.dtype(
    [
        (name, np.int64)
        for name in (
            "scores",  # float32 [rows, length], contiguous along the length
            "score_step",  # its bytes per row
            "u",  # float64: alpha - 1 of each row
            "u_step",  # its bytes per row, 0 where all rows share one
            "solvers",  # int64: address of the solver of each row, see `kernels`
            "solver_step",  # like u_step
            "solve_short_rows",
            "maximum",  # float32 [rows], like scale
            "scale",
            "shift",  # float64 [rows], like conjugate
            "conjugate",
            "counts",  # int64 [rows]: size of the support
            "slots",  # slot_bytes per row: columns int32, then weights float32
            "slot_bytes",
            "offsets",  # int64 [rows]: where the entries of a row go, or 0 for dense rows
            "row_index",  # int64 [entries], like columns
            "columns",
            "out",  # float32 [entries] or [rows, length]
            "scratch",
            "row_bytes",  # from here to scratch_bytes: see `rows_scratch`
            "tail_at",
            "batch_at",
            "scratch_bytes",
            "counters",  # int64: next group, next thread
            "group",  # rows taken at a time
            "rows",
            "length",
        )
    ],
    align=True,
)


def structure(dtype: np.dtype) -> type[Any]:
    """Make a type of records of this dtype whose fields, and nothing else, are attributes: faster to set than NumPy's."""
    kinds = {"i": ctypes.c_int64, "f": ctypes.c_double}
    fields = [(name, kinds[dtype[name].kind]) for name in dtype.names or ()]
    return type("Record", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


#: The value of ``progress`` for a finished item.
DONE = 1 << 40

#: Bytes of a vector of LANES floats; a store always writes a whole one.
VECTOR = 4 * LANES
#: What a block may write behind its last row: the last store of a row writes a whole vector.
SPARE = VECTOR
#: Bytes noted for every row of a block: first column, one past the last, maximum.
ROW_LIMITS = 24

#: Rows with at most so many candidates are solved sixteen at a time, one per lane.
BATCH_WIDTH = 32
BATCH_ROW = 4 * BATCH_WIDTH
#: The parts of such a batch: candidates by row, columns by row, candidates by candidate, weights, slopes; then per row
#: alpha - 1, number of candidates and place.
BATCH_INDEX = BATCH_ROW * LANES
BATCH_BY_CANDIDATE = 2 * BATCH_INDEX
BATCH_WEIGHTS = 3 * BATCH_INDEX
BATCH_SLOPES = 4 * BATCH_INDEX
BATCH_U = 5 * BATCH_INDEX
BATCH_SIZE = BATCH_U + VECTOR
BATCH_PLACE = BATCH_SIZE + 8 * LANES
BATCH_BYTES = BATCH_PLACE + 8 * LANES

#: The parts of a group of sixteen full rows: four sums by row and lane, then numbers by row; rows of 1/y follow.
GROUP_SUMS = VECTOR * LANES
GROUP_COUNT = 4 * GROUP_SUMS
GROUP_SHIFT = GROUP_COUNT + VECTOR
GROUP_STEP = GROUP_SHIFT + VECTOR
GROUP_BYTES = GROUP_STEP + VECTOR

#: Bits per channel of a key sketch -> the int8 parts that the kernel splits a weight of the codes into.
WEIGHT_PLANES = {2: 1, 4: 1, 6: 2, 8: 2}
#: Rows whose bounds are computed at a time.
BOUND_ROWS = 4


def vectors(size: int) -> int:
    """Return how many vectors hold ``size`` floats."""
    return -(-size // LANES)


def _row_bytes(columns: int) -> int:
    """Return the bytes of a row of numbers and of the padding that a solver writes after them, in whole vectors."""
    return 4 * (columns + 4 * LANES)


def dense_row_bytes(width, store_gradient):
    """Return the bytes of ``width`` dense weights in whole vectors, and of the gradient of their scores if that is stored."""
    return (width + LANES - 1) // LANES * (2 * VECTOR if store_gradient != 0 else VECTOR)


def entry_bytes(store_gradient: bool) -> int:
    """Return the bytes of an entry of a sparse row: its column, its weight, and the gradient of its score if that is stored."""
    return 12 if store_gradient else 8


def block_bytes(block_rows: int, keys: int, store_gradient: bool) -> int:
    """Return the most bytes that a block of rows keeps: all entries of its rows, sparse or dense."""
    row = max(keys * entry_bytes(store_gradient), dense_row_bytes(keys, store_gradient))
    return block_rows * row + SPARE


def slot_bytes(length: int) -> int:
    """Return the bytes of the support of one of the independent rows: columns, then weights."""
    return VECTOR * vectors(2 * length) + SPARE


def forward_scratch(depth_vectors: int, padded_keys: int, block_rows: int, span: int, direct: bool) -> dict[str, int]:
    """Divide the scratch of a thread of the forward kernel, by field of the record: packed keys first, then what the offsets name."""
    pack = 0 if direct else VECTOR * depth_vectors * padded_keys
    limits = pack + VECTOR * depth_vectors * block_rows
    rows = limits + ROW_LIMITS * block_rows
    row = _row_bytes(padded_keys)
    # Four rows and a batch of small ones, or two rows and a group of full ones with sixteen.
    scores = rows + max(4 * row + BATCH_BYTES, (2 + LANES) * row + GROUP_BYTES)
    return {
        "pack_at": pack,
        "limits_at": limits,
        "rows_at": rows,
        "row_bytes": row,
        "scores_at": scores,
        "scratch_bytes": _whole(scores + 4 * block_rows * span),
    }


def backward_scratch(value_vectors: int, padded_keys: int, block_rows: int, span: int) -> dict[str, int]:
    """Divide the scratch of a thread of the backward kernel: packed values first, touched only where a block was dense."""
    pack = VECTOR * value_vectors * padded_keys
    rows = pack + VECTOR * value_vectors * block_rows
    row = _row_bytes(padded_keys)
    scores = rows + 3 * row
    dropped = scores + 4 * block_rows * span + SPARE
    return {
        "pack_at": pack,
        "rows_at": rows,
        "row_bytes": row,
        "scores_at": scores,
        "dropped_at": dropped,
        "scratch_bytes": _whole(dropped + 4 * block_rows * span),
    }


def bounds_scratch(depth_vectors: int, rows: int) -> dict[str, int]:
    """Divide the scratch of a thread that computes bounds for ``rows`` rows: their queries, then what a few rows need for a page."""
    weights = VECTOR * depth_vectors * (rows + 1)
    scalars = weights + 2 * LANES * depth_vectors * BOUND_ROWS
    tops = scalars + 16 * BOUND_ROWS
    return {
        "weights_at": weights,
        "scalars_at": scalars,
        "tops_at": tops,
        "norms_at": tops + VECTOR * BOUND_ROWS,
        "scratch_bytes": _whole(tops + VECTOR * BOUND_ROWS + 8 * rows),
    }


def exact_scratch(depth_vectors: int, value_vectors: int, keys: int) -> dict[str, int]:
    """Divide the scratch of a thread that solves one row at a time: its query, sixteen keys or values, lists of all keys."""
    wide = VECTOR * depth_vectors
    rows = wide + VECTOR * LANES * max(depth_vectors, value_vectors)
    row = _row_bytes(keys)
    return {"wide_at": wide, "rows_at": rows, "row_bytes": row, "scratch_bytes": _whole(rows + 8 * row)}


def rows_scratch(length: int) -> dict[str, int]:
    """Divide the scratch of a thread of the kernels for independent rows: four rows first."""
    row = _row_bytes(length)
    return {
        "row_bytes": row,
        "tail_at": 4 * row,
        "batch_at": 4 * row + VECTOR,
        "scratch_bytes": _whole(4 * row + VECTOR + BATCH_BYTES),
    }


def _whole(size: int) -> int:
    """Add the spare vector and round up to whole vectors: the parts of threads lie behind each other."""
    return VECTOR * vectors((size + SPARE + 3) // 4)
