"""What the kernels are told: one record of addresses, byte strides and numbers, shared by forward and backward.

A kernel takes one pointer to one record. Nothing is specialised on shapes or dtypes, so each kernel is compiled once.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

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
    "solve_batch",  # its address; likewise solve_even_rows
    "solve_even_rows",
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
    # From here to scratch_bytes: how the scratch of a thread is divided, see `layout`.
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
)
_EXACT_SIZES = (
    "key_kind",  # 0 float32, 1 bfloat16, 2 float16
    "value_kind",
    "key_dim",  # head dimensions as they are
    "value_dim",
    "page_size",
    "pages",  # of the sketch
    "upper_bytes",  # of a row of upper bounds
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
            "solve_batch",
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
            "row_bytes",  # from here to scratch_bytes: see `layout`
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
    """A type of records of this dtype whose fields, and nothing else, are attributes: faster to set than numpy's."""
    kinds = {"i": ctypes.c_int64, "f": ctypes.c_double}
    fields = [(name, kinds[dtype[name].kind]) for name in dtype.names or ()]
    return type("Record", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


#: The value of ``progress`` for a finished item.
DONE = 1 << 40
