"""The score tile on the device: strided loads and stores, dot products, bias, masks and dropout.

Functions take ``rows`` and ``cols`` expanded to two dimensions, so that a tile may have its keys along either axis.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportRedeclaration=false
# Some releases of Triton declare that a kernel called by a kernel never returns.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_entmax.ops.triton_gpu.row_math import _INTERPRETED, MASKED, MASKED_BELOW


class Array(NamedTuple):
    """A strided tensor ``[B, H, rows, columns]`` on the device. Broadcast dimensions have stride 0."""

    pointer: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any
    stride_d: Any


class Problem(NamedTuple):
    """The numbers of one call that change from call to call: see `whole_numbers`.

    ``group``: query heads per key head. ``n_q``, ``n_k``: blocks of queries and keys. ``window``: keys visible to a
    query, itself included. ``mask_floor``, ``bias_floor``: added terms below it mask their entry.
    """

    B: Any
    H: Any
    group: Any
    T_q: Any
    T_k: Any
    n_q: Any
    n_k: Any
    scale: Any
    softcap: Any
    window: Any
    dropout: Any
    mask_floor: Any
    bias_floor: Any


class Options(NamedTuple):
    """What a kernel is compiled for.

    ``RAW``: scores are measured in their scale, see `masked_scores`. ``FOLD``: and their maximum is taken off where their weight is
    computed, see `tile_weights`.
    ``ALPHA``: 1.0, 1.5 or 2.0 when every head has that alpha by construction (no logarithm needed), 0.0 when it is read
    from memory. ``GRAD_ALPHA``: whether the gradient in alpha is wanted. ``PRECISION``: of float32 dot products, "ieee"
    or "tf32". ``TOLERANCE``: how far from 1 the sum of weights may be before the last step of the threshold; ``LIMIT``: how far
    it may be after it. ``ROWS``, ``COLS``: queries and keys of a tile. ``D``, ``D_V``: head dimensions of keys and values;
    ``BLOCK_D``, ``BLOCK_V``: the powers of two they are padded to.
    """

    CAUSAL: bool
    WINDOW: bool
    SOFTCAP: bool
    BOOL_MASK: bool
    DROPOUT: bool
    RAW: bool
    FOLD: bool
    ALPHA: float
    GRAD_ALPHA: bool
    PRECISION: str
    TOLERANCE: float
    LIMIT: float
    D: int
    D_V: int
    BLOCK_D: int
    BLOCK_V: int
    ROWS: int
    COLS: int


class Inputs(NamedTuple):
    """What the kernels of a call read: three `Array`s, alpha ``[H]``, and the seed of dropout or ``None``."""

    query: Any
    key: Any
    value: Any
    alpha: Any
    seed: Any


class Gradients(NamedTuple):
    """What the backward kernels start from: `Array`s of the output's gradient and, or ``None``, of the weights'."""

    out: Any
    weights: Any


class ScoreTerms(NamedTuple):
    """What is added to the scores of a call or of one head, ``None`` where absent: see ``masked_scores``."""

    mask: Any
    bias: Any
    key_mask: Any


@triton.jit
def whole_numbers(problem):
    """The ``Problem`` of a call, whose numbers are all floating point when they arrive, with its sizes as integers.

    Triton compiles a kernel once more for an integer that is 1 and one that is a multiple of 16. Batches of many lengths would
    compile for minutes; of numbers in a tuple only floating-point ones are spared that.
    """
    return Problem(
        tl.cast(problem.B, tl.int32),
        tl.cast(problem.H, tl.int32),
        tl.cast(problem.group, tl.int32),
        tl.cast(problem.T_q, tl.int32),
        tl.cast(problem.T_k, tl.int32),
        tl.cast(problem.n_q, tl.int32),
        tl.cast(problem.n_k, tl.int32),
        problem.scale,
        problem.softcap,
        tl.cast(problem.window, tl.int32),
        problem.dropout,
        problem.mask_floor,
        problem.bias_floor,
    )


@triton.jit
def tanh(x):
    """Hyperbolic tangent; a series near 0, where ``1 - exp(-2|x|)`` would lose the relative accuracy."""
    x2 = x * x
    series = x * (
        1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835 + x2 * (-1382.0 / 155925)))))
    )
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(x2 < 0.1225, series, tl.where(x < 0, -far, far))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in float32. The interpreter's numpy has no bfloat16: the operands are widened there (exact)."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def select(array, batch, head):
    """The ``Array`` of one head, ``[rows, columns]``: the pointer moved by 64-bit ``batch`` and ``head``."""
    pointer = array.pointer + batch * array.stride_b + head * array.stride_h
    return Array(pointer, array.stride_b, array.stride_h, array.stride_t, array.stride_d)


@triton.jit
def _row_offsets(array, index, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    # 64-bit: rows times their stride pass 2**31 for [batch, length, heads, dim] layouts of long sequences.
    offsets = index.to(tl.int64)[:, None] * array.stride_t + cols.to(tl.int64)[None, :] * array.stride_d
    inside = (index < limit)[:, None]
    if WIDTH != BLOCK:
        inside = inside & (cols < WIDTH)[None, :]
    return offsets, inside


@triton.jit
def load_rows(array, index, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``index`` of one head, ``[len(index), BLOCK]``; zero beyond ``limit`` rows and ``WIDTH`` columns."""
    offsets, inside = _row_offsets(array, index, limit, WIDTH, BLOCK)
    return tl.load(array.pointer + offsets, mask=inside, other=0.0)


@triton.jit
def store_rows(array, value, index, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write rows ``index`` of one head, the counterpart of ``load_rows``; casts to the type of the pointer."""
    offsets, inside = _row_offsets(array, index, limit, WIDTH, BLOCK)
    tl.store(array.pointer + offsets, value.to(array.pointer.dtype.element_ty), mask=inside)


@triton.jit
def without_nonfinite(tile):
    """A tile ``[n, width]`` with 0 for NaN and infinities, and which of its rows held any, ``[n]``."""
    wide = tile.to(tl.float32)
    wrong = wide - wide != 0.0
    return tl.where(wrong, 0.0, wide).to(tile.dtype), tl.max(wrong.to(tl.int32), 1) != 0


@triton.jit
def load_elements(array, rows, cols, inside):
    """Elements of one head at two-dimensional indices, in their own type; zero where not ``inside``."""
    offsets = rows.to(tl.int64) * array.stride_t + cols.to(tl.int64) * array.stride_d
    return tl.load(array.pointer + offsets, mask=inside, other=0)


@triton.jit
def score_unit(problem, OPTIONS: tl.constexpr):
    """What a score of 1 means: where nothing is added to dot products and nothing caps them, their scale is a factor for later."""
    return problem.scale if OPTIONS.RAW else 1.0


@triton.jit
def masked_scores(dots, rows, cols, first_row, first_col, terms, problem, OPTIONS: tl.constexpr):
    """Scores of a tile from its dot products, ``MASKED`` where query and key may not meet.

        score = softcap * tanh(scale * dot / softcap) + bias + mask

    ``rows``, ``cols``: indices expanded to two dimensions, queries along either axis; the tile starts at ``first_row``
    and ``first_col``. Returns the scores, as multiples of `score_unit`, and their derivative in ``scale * dot``.
    """
    z = dots if OPTIONS.RAW else dots * problem.scale
    slope = 1.0
    if OPTIONS.SOFTCAP:
        capped = tanh(z / problem.softcap)
        z = capped * problem.softcap
        slope = 1.0 - capped * capped
    offset = problem.T_k - problem.T_q
    inside = (rows < problem.T_q) & (cols < problem.T_k)
    if terms.bias is not None:
        bias = load_elements(terms.bias, rows, cols, inside).to(tl.float32)
        z = tl.where(bias <= problem.bias_floor, MASKED, z + bias)
    if terms.mask is not None:
        mask = load_elements(terms.mask, rows, cols, inside)
        if OPTIONS.BOOL_MASK:
            z = tl.where(mask != 0, z, MASKED)
        else:
            added = mask.to(tl.float32)
            z = tl.where(added <= problem.mask_floor, MASKED, z + added)
            z = tl.where(z <= MASKED_BELOW, MASKED, z)
    if terms.key_mask is not None:
        z = tl.where(load_elements(terms.key_mask, cols * 0, cols, cols < problem.T_k) != 0, z, MASKED)
    # Most tiles of a causal or windowed pattern lie wholly inside it: those need no comparison per element.
    partial = (first_row + OPTIONS.ROWS > problem.T_q) | (first_col + OPTIONS.COLS > problem.T_k)
    if OPTIONS.CAUSAL:
        partial = partial | (first_col + OPTIONS.COLS - 1 > first_row + offset)
    if OPTIONS.WINDOW:
        partial = partial | (first_col <= first_row + OPTIONS.ROWS - 1 + offset - problem.window)
    if partial:
        allowed = inside
        if OPTIONS.CAUSAL:
            allowed = allowed & (cols <= rows + offset)
        if OPTIONS.WINDOW:
            allowed = allowed & (cols > rows + offset - problem.window)
        z = tl.where(allowed, z, MASKED)
    return z, slope


@triton.jit
def score_tile(queries, key, rows, first_row, first_col, terms, problem, OPTIONS: tl.constexpr):
    """One block of keys against ``queries`` ``[ROWS, BLOCK_D]``: the keys, their indices, the scores and their slope."""
    ROWS: tl.constexpr = OPTIONS.ROWS
    COLS: tl.constexpr = OPTIONS.COLS
    cols = first_col + tl.arange(0, COLS)
    keys = load_rows(key, cols, problem.T_k, OPTIONS.D, OPTIONS.BLOCK_D)
    dots = dot(queries, tl.trans(keys), tl.zeros([ROWS, COLS], tl.float32), OPTIONS.PRECISION)
    z, slope = masked_scores(dots, rows[:, None], cols[None, :], first_row, first_col, terms, problem, OPTIONS)
    return keys, cols, z, slope


@triton.jit
def key_block_range(first_row, extent, batch, problem, OPTIONS: tl.constexpr):
    """The key blocks that some query of the block from ``first_row`` may see: ``[first, last)``.

    ``extent``: for each sequence its first real key and one past the last, or None.
    """
    first = 0
    last = problem.T_k
    offset = problem.T_k - problem.T_q
    if OPTIONS.CAUSAL:
        last = tl.minimum(last, tl.minimum(first_row + OPTIONS.ROWS, problem.T_q) + offset)
    if OPTIONS.WINDOW:
        first = tl.maximum(first, first_row + offset - problem.window + 1)
    if extent is not None:
        first = tl.maximum(first, tl.load(extent + batch * 2))
        last = tl.minimum(last, tl.load(extent + batch * 2 + 1))
    return first // OPTIONS.COLS, tl.cdiv(tl.maximum(last, 0), OPTIONS.COLS)


@triton.jit
def key_block_in_turn(step, first, last, first_row, problem, OPTIONS: tl.constexpr):
    """The ``step``-th of the key blocks ``[first, last)`` to read: those with the largest scores early, as a rule.

    That on the diagonal (the keys that are as far as the last query of the block), the first block, where attention sinks are, and
    the others leftwards from the diagonal, on from the right end.
    """
    diagonal = (first_row + OPTIONS.ROWS - 1 + problem.T_k - problem.T_q) // OPTIONS.COLS
    diagonal = tl.minimum(tl.maximum(diagonal, first), last - 1)
    to_left = diagonal - first
    index = tl.where(step <= to_left, diagonal + 1 - step, last + to_left - step)
    index = tl.where((step == 1) & (to_left > 0), first, index)
    return tl.where(step == 0, diagonal, index)


@triton.jit
def dropout_factor(seed, plane, rows, cols, dropout):
    """0 with probability ``dropout``, else ``1 / (1 - dropout)``; a function of seed, plane (head), row and column.

    Philox takes the three indices as its counter, so no product of lengths can overflow and wrap around.
    """
    zero = rows * 0 + cols * 0
    bits, _, _, _ = tl.philox(
        seed,
        (cols + zero).to(tl.uint32),
        (rows + zero).to(tl.uint32),
        (plane + zero).to(tl.uint32),
        zero.to(tl.uint32),
        7,
    )
    uniform = (bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(uniform < dropout, 0.0, 1.0 / (1.0 - dropout))
