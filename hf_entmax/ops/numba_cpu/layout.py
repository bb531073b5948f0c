"""How the memory that the kernels are given is divided: said once, for the host and for the kernels.

The host allocates by these functions and hands the offsets over in the record of a call. Sizes and offsets are in bytes.
Nothing here imports Numba; a kernel that must compute a size itself compiles the function that stands here.
"""

from __future__ import annotations

from hf_entmax.ops.sketch_format import LANES

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

#: The parts of a group of sixteen even rows: four sums by row and lane, then numbers by row; rows of 1/y follow.
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
    """How many vectors hold ``size`` floats."""
    return -(-size // LANES)


def _row_bytes(columns: int) -> int:
    """A row of numbers with room for the padding that a solver writes after them, in whole vectors."""
    return 4 * (columns + 4 * LANES)


def dense_row_bytes(width, store_gradient):
    """``width`` dense weights in whole vectors, and as much for the gradient of their scores if that is stored."""
    return (width + LANES - 1) // LANES * (2 * VECTOR if store_gradient != 0 else VECTOR)


def entry_bytes(store_gradient: bool) -> int:
    """One entry of a sparse row: its column, its weight, and the gradient of its score if that is stored."""
    return 12 if store_gradient else 8


def block_bytes(block_rows: int, keys: int, store_gradient: bool) -> int:
    """The most that a block of rows keeps: all entries of its rows, sparse or dense."""
    row = max(keys * entry_bytes(store_gradient), dense_row_bytes(keys, store_gradient))
    return block_rows * row + SPARE


def slot_bytes(length: int) -> int:
    """The support of one of the independent rows: columns, then weights."""
    return VECTOR * vectors(2 * length) + SPARE


def forward_scratch(depth_vectors: int, padded_keys: int, block_rows: int, span: int, direct: bool) -> dict[str, int]:
    """Scratch of a thread of the forward kernel, by field of the record: packed keys first, then what the offsets name."""
    pack = 0 if direct else VECTOR * depth_vectors * padded_keys
    limits = pack + VECTOR * depth_vectors * block_rows
    rows = limits + ROW_LIMITS * block_rows
    row = _row_bytes(padded_keys)
    # Four rows and a batch of small ones, or two rows and a group of even ones with sixteen.
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
    """Scratch of a thread of the backward kernel: packed values first; only touched where a block was dense."""
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
    """Scratch of a thread that computes bounds for ``rows`` rows: their queries, then what a few rows need for a page."""
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
    """Scratch of a thread that solves one row at a time: its query, sixteen keys or values, lists of all keys."""
    wide = VECTOR * depth_vectors
    rows = wide + VECTOR * LANES * max(depth_vectors, value_vectors)
    row = _row_bytes(keys)
    return {"wide_at": wide, "rows_at": rows, "row_bytes": row, "scratch_bytes": _whole(rows + 8 * row)}


def rows_scratch(length: int) -> dict[str, int]:
    """Scratch of a thread of the kernels for independent rows: four rows first."""
    row = _row_bytes(length)
    return {
        "row_bytes": row,
        "tail_at": 4 * row,
        "batch_at": 4 * row + VECTOR,
        "scratch_bytes": _whole(4 * row + VECTOR + BATCH_BYTES),
    }


def _whole(size: int) -> int:
    """With the spare vector, in whole vectors: threads' parts lie behind each other."""
    return VECTOR * vectors((size + SPARE + 3) // 4)
