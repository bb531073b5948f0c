"""The inner loops over rows of floats, as register-tiled LLVM: products of tiles, gathered dots, gathered sums.

Widths are counted in vectors of sixteen floats; every head dimension is a multiple of sixteen by the time it gets here.
How many accumulators a loop keeps is fixed by the number of registers, so each loop is generated once per width and the
widest that fits is taken.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from . import intrinsics
from .intrinsics import HAS_AVX512, LANES, LLVM_FLOATS, LLVM_INTS, jit, load_vector, operation, pointer, store_vector
from .simd import count, either, is_nan, load, no_lanes, read_f32, read_i32, splat, store, write_f32

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_F = np.float32
_ZERO = ir.Constant(LLVM_FLOATS, [0.0] * LANES)

# 4 x 4 accumulators of 16 lanes out of 32 AVX-512 registers; on 16 AVX registers of 8 lanes 4 x 1 (that is 4 x 2 of 8).
TILE_ROWS = 4
TILE_VECTORS = 4 if HAS_AVX512 else 1
PANEL = LANES * TILE_VECTORS
# Vectors of one row that a gathering loop holds in registers.
_CHUNK = 4 if HAS_AVX512 else 2


class _Loop:
    """A counted loop ``for i in range(trips)`` with carried values, built by hand; ``trips`` may be zero."""

    def __init__(self, builder, trips, carried) -> None:
        self.builder = builder
        function = builder.function
        before = builder.block
        self._body = function.append_basic_block("loop")
        self._after = function.append_basic_block("after")
        self._before, self._trips, self._start = before, trips, list(carried)
        builder.cbranch(builder.icmp_signed(">", trips, _I64(0)), self._body, self._after)
        builder.position_at_end(self._body)
        self.index = builder.phi(_I64)
        self.index.add_incoming(_I64(0), before)
        self.carried = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)

    def close(self, updated) -> list:
        """End the body; return the values that the loop leaves behind."""
        builder, latch = self.builder, self.builder.block
        following = builder.add(self.index, _I64(1))
        self.index.add_incoming(following, latch)
        for phi, value in zip(self.carried, updated, strict=True):
            phi.add_incoming(value, latch)
        builder.cbranch(builder.icmp_signed("<", following, self._trips), self._body, self._after)
        builder.position_at_end(self._after)
        results = []
        for start, value in zip(self._start, updated, strict=True):
            phi = builder.phi(value.type)
            phi.add_incoming(start, self._before)
            phi.add_incoming(value, latch)
            results.append(phi)
        return results


def _load_scalar(builder, address):
    return intrinsics.broadcast(builder, builder.load(pointer(builder, address, _F32), align=4))


def _make_product_tile(rows: int, vectors: int):
    @operation(types.void, *[types.int64] * 9)
    def product_tile(builder, a, a_row, a_step, b, b_step, c, c_row, depth, accumulate):
        """Compute C[rows, 16 * vectors] (+)= A[rows, depth] B[depth, 16 * vectors]; A by scalars, B and C by vectors."""
        offsets = [builder.mul(a_row, _I64(r)) for r in range(rows)]
        loop = _Loop(builder, depth, [_ZERO] * (rows * vectors))
        step_a = builder.add(a, builder.mul(loop.index, a_step))
        step_b = builder.add(b, builder.mul(loop.index, b_step))
        columns = [load_vector(builder, builder.add(step_b, _I64(64 * v))) for v in range(vectors)]
        updated = []
        for r in range(rows):
            scalar = _load_scalar(builder, builder.add(step_a, offsets[r]))
            for v in range(vectors):
                updated.append(
                    intrinsics.fused_multiply_add(builder, scalar, columns[v], loop.carried[r * vectors + v])
                )
        totals = loop.close(updated)
        targets = [
            builder.add(builder.add(c, builder.mul(c_row, _I64(r))), _I64(64 * v))
            for r in range(rows)
            for v in range(vectors)
        ]
        with builder.if_else(builder.icmp_signed("!=", accumulate, _I64(0))) as (add, overwrite):
            with add:
                for total, target in zip(totals, targets, strict=True):
                    store_vector(builder, builder.fadd(total, load_vector(builder, target)), target)
            with overwrite:
                for total, target in zip(totals, targets, strict=True):
                    store_vector(builder, total, target)

    return product_tile


_tile_4x1 = _make_product_tile(TILE_ROWS, 1)
_tile_1x1 = _make_product_tile(1, 1)
_tile_4xn = _make_product_tile(TILE_ROWS, TILE_VECTORS)
_tile_1xn = _make_product_tile(1, TILE_VECTORS)


@jit
def product(a, a_row, a_step, rows, b, b_step, vectors, c, c_row, depth, accumulate):
    """Compute C[rows, 16 * vectors] (+)= A[rows, depth] @ B[depth, 16 * vectors].

    ``a_row``, ``a_step``, ``b_step`` and ``c_row`` are byte strides; B and C are contiguous along their columns. A is
    read by element, so it may be a transposed view.
    """
    v = 0
    while v < vectors:
        wide = vectors - v >= TILE_VECTORS
        b_v = b + 64 * v
        c_v = c + 64 * v
        r = 0
        while r + TILE_ROWS <= rows:
            if wide:
                _tile_4xn(a + r * a_row, a_row, a_step, b_v, b_step, c_v + r * c_row, c_row, depth, accumulate)
            else:
                _tile_4x1(a + r * a_row, a_row, a_step, b_v, b_step, c_v + r * c_row, c_row, depth, accumulate)
            r += TILE_ROWS
        while r < rows:
            if wide:
                _tile_1xn(a + r * a_row, a_row, a_step, b_v, b_step, c_v + r * c_row, c_row, depth, accumulate)
            else:
                _tile_1x1(a + r * a_row, a_row, a_step, b_v, b_step, c_v + r * c_row, c_row, depth, accumulate)
            r += 1
        v += TILE_VECTORS if wide else 1


def _transpose_stages(builder, vectors):
    """Transpose a 16 x 16 block held in sixteen vectors: four rounds of two-operand shuffles."""
    step = 1
    while step < LANES:
        low = [j if not j & step else (j - step) + LANES for j in range(LANES)]
        high = [j + step if not j & step else j + LANES for j in range(LANES)]
        # Lane j of the low output keeps lane j of the first vector, or takes the first vector's partner lane of the second.
        following = list(vectors)
        for i in range(LANES):
            if not i & step:
                x, y = vectors[i], vectors[i + step]
                following[i] = builder.shuffle_vector(x, y, ir.Constant(LLVM_INTS, low))
                following[i + step] = builder.shuffle_vector(x, y, ir.Constant(LLVM_INTS, high))
        vectors = following
        step *= 2
    return vectors


@operation(types.void, *[types.int64] * 5)
def transpose_block(builder, source, source_row, last_row, target, target_row):
    """Copy the 16 x 16 block at ``source`` transposed to ``target``; rows beyond ``last_row`` repeat it."""
    rows = []
    for i in range(LANES):
        row = builder.select(builder.icmp_signed("<", _I64(i), last_row), _I64(i), last_row)
        rows.append(load_vector(builder, builder.add(source, builder.mul(row, source_row))))
    for i, column in enumerate(_transpose_stages(builder, rows)):
        store_vector(builder, column, builder.add(target, builder.mul(target_row, _I64(i))))


@jit
def pack_panels(source, source_row, start, stop, depth_vectors, target):
    """Copy rows ``start`` to ``stop`` of ``source`` [T, D], transposed, into panels of ``PANEL`` columns.

    Panel p holds rows ``p * PANEL`` and following as [D, PANEL], so the product loop reads it in order. ``start`` is a
    multiple of ``PANEL``; the columns past ``stop`` of the last panel repeat its last row.
    """
    panel_bytes = 64 * depth_vectors * PANEL
    for row in range(start, stop, LANES):
        base = target + (row // PANEL) * panel_bytes + 4 * (row % PANEL)
        last = min(LANES, stop - row) - 1
        for d in range(depth_vectors):
            transpose_block(source + row * source_row + 64 * d, source_row, last, base + 64 * d * PANEL, 4 * PANEL)


def _horizontal_sums(builder, vectors):
    """Return the sums over lanes of sixteen vectors, as the lanes of one."""
    half = LANES // 2
    while half:
        keep = [(j // half) % 2 == 0 for j in range(LANES)]
        # Add the two halves of each vector while interleaving two vectors: one shuffle pair and one addition per merge.
        first = [j if keep[j] else (j - half) + LANES for j in range(LANES)]
        second = [j + half if keep[j] else j + LANES for j in range(LANES)]
        vectors = [
            builder.fadd(
                builder.shuffle_vector(vectors[i], vectors[i + half], ir.Constant(LLVM_INTS, first)),
                builder.shuffle_vector(vectors[i], vectors[i + half], ir.Constant(LLVM_INTS, second)),
            )
            for i in range(half)
        ]
        half //= 2
    return vectors[0]


@operation(intrinsics.floats, types.int64)
def row_sums(builder, address):
    """Return the sums over lanes of sixteen consecutive vectors."""
    return _horizontal_sums(builder, [load_vector(builder, builder.add(address, _I64(64 * i))) for i in range(LANES)])


def _gathered_row(builder, index, k, base, row_bytes):
    """Return the address of row ``index[k]``."""
    place = builder.add(index, builder.shl(k, _I64(2)))
    row = builder.sext(builder.load(pointer(builder, place, _I32), align=4), _I64)
    return builder.add(base, builder.mul(row, row_bytes))


def _make_dots(gathered: bool):
    @operation(intrinsics.floats, *[types.int64] * 6)
    def dots(builder, x, index, last, base, row_bytes, vectors):
        """Return the dot products of ``x`` with sixteen rows; rows past ``last`` repeat it."""
        rows = []
        for i in range(LANES):
            lane = builder.select(builder.icmp_signed("<", _I64(i), last), _I64(i), last)
            if gathered:
                rows.append(_gathered_row(builder, index, lane, base, row_bytes))
            else:
                rows.append(builder.add(base, builder.mul(builder.add(index, lane), row_bytes)))
        loop = _Loop(builder, vectors, [_ZERO] * LANES)
        offset = builder.shl(loop.index, _I64(6))
        shared = load_vector(builder, builder.add(x, offset))
        totals = loop.close(
            [
                intrinsics.fused_multiply_add(builder, shared, load_vector(builder, builder.add(row, offset)), total)
                for row, total in zip(rows, loop.carried, strict=True)
            ]
        )
        return _horizontal_sums(builder, totals)

    return dots


dots_of_rows = _make_dots(gathered=False)
dots_of_gathered_rows = _make_dots(gathered=True)


def _make_weighted_sum(vectors: int):
    @operation(types.void, *[types.int64] * 6)
    def weighted_sum(builder, target, weight, index, n, base, row_bytes):
        """Write sum_k weight[k] * row[index[k]] over ``vectors`` vectors; two terms at a time hide latency."""

        def term(k, totals):
            scalar = _load_scalar(builder, builder.add(weight, builder.shl(k, _I64(2))))
            row = _gathered_row(builder, index, k, base, row_bytes)
            return [
                intrinsics.fused_multiply_add(
                    builder, scalar, load_vector(builder, builder.add(row, _I64(64 * v))), total
                )
                for v, total in enumerate(totals)
            ]

        pairs = _Loop(builder, builder.ashr(n, _I64(1)), [_ZERO] * (2 * vectors))
        first = builder.shl(pairs.index, _I64(1))
        even = term(first, pairs.carried[:vectors])
        odd = term(builder.add(first, _I64(1)), pairs.carried[vectors:])
        totals = pairs.close(even + odd)
        rest = _Loop(builder, builder.and_(n, _I64(1)), totals[:vectors])
        totals[:vectors] = rest.close(term(builder.sub(n, _I64(1)), rest.carried))
        for v in range(vectors):
            total = builder.fadd(totals[v], totals[v + vectors])
            store_vector(builder, total, builder.add(target, _I64(64 * v)))

    return weighted_sum


def _make_scatter(vectors: int):
    @operation(types.void, *[types.int64] * 6)
    def scatter(builder, source, weight, index, n, base, row_bytes):
        """Add weight[k] * source to row[index[k]] for all k, over ``vectors`` vectors."""
        held = [load_vector(builder, builder.add(source, _I64(64 * v))) for v in range(vectors)]
        loop = _Loop(builder, n, [])
        scalar = _load_scalar(builder, builder.add(weight, builder.shl(loop.index, _I64(2))))
        row = _gathered_row(builder, index, loop.index, base, row_bytes)
        for v in range(vectors):
            place = builder.add(row, _I64(64 * v))
            store_vector(
                builder,
                intrinsics.fused_multiply_add(builder, scalar, held[v], load_vector(builder, place)),
                place,
            )
        loop.close([])

    return scatter


_weighted_sum_wide, _weighted_sum_one = _make_weighted_sum(_CHUNK), _make_weighted_sum(1)
_scatter_wide, _scatter_one = _make_scatter(_CHUNK), _make_scatter(1)


@jit
def sum_rows(target, weight, index, n, base, row_bytes, vectors):
    """Write the sum over k < n of weight[k] * rows[index[k]] to target[D], rows of D floats at ``base``."""
    v = 0
    while v + _CHUNK <= vectors:
        _weighted_sum_wide(target + 64 * v, weight, index, n, base + 64 * v, row_bytes)
        v += _CHUNK
    while v < vectors:
        _weighted_sum_one(target + 64 * v, weight, index, n, base + 64 * v, row_bytes)
        v += 1


@jit
def add_to_rows(source, weight, index, n, base, row_bytes, vectors):
    """Add weight[k] * source[D] to rows[index[k]] for k < n."""
    v = 0
    while v + _CHUNK <= vectors:
        _scatter_wide(source + 64 * v, weight, index, n, base + 64 * v, row_bytes)
        v += _CHUNK
    while v < vectors:
        _scatter_one(source + 64 * v, weight, index, n, base + 64 * v, row_bytes)
        v += 1


@jit
def copy_scaled(source, target, vectors, factor):
    """Write factor * source, over whole vectors."""
    for v in range(vectors):
        store(target + 64 * v, load(source + 64 * v) * splat(factor))


@jit
def zero_floats(target, n):
    k = 0
    while k + LANES <= n:
        store(target + 4 * k, splat(_F(0.0)))
        k += LANES
    while k < n:
        write_f32(target + 4 * k, _F(0.0))
        k += 1


@jit
def copy_floats(source, target, n):
    k = 0
    while k + LANES <= n:
        store(target + 4 * k, load(source + 4 * k))
        k += LANES
    while k < n:
        write_f32(target + 4 * k, read_f32(source + 4 * k))
        k += 1


@jit
def write_row(line, low, high, index, weights, n):
    """Write the columns ``low`` to ``high`` of a row: the weights of its support, else 0."""
    zero_floats(line + 4 * low, high - low)
    for k in range(n):
        write_f32(line + 4 * np.int64(read_i32(index + 4 * k)), read_f32(weights + 4 * k))


@jit
def _has_nan(target, vectors):
    found = no_lanes()
    for v in range(vectors):
        found = either(found, is_nan(load(target + 64 * v)))
    return count(found) > 0


@jit
def product_of_seen(a, a_row, rows, b, b_step, vectors, c, c_row, depth):
    """Multiply A [rows, depth] and B as `product` does, without reading a row of B where A is 0, whatever it holds.

    A 0 times NaN or infinity is NaN, so only rows of C that hold NaN are summed again, entry by entry.
    """
    product(a, a_row, 4, rows, b, b_step, vectors, c, c_row, depth, 0)
    for t in range(rows):
        if _has_nan(c + c_row * t, vectors):
            zero_floats(c + c_row * t, LANES * vectors)
            for j in range(depth):
                if read_f32(a + a_row * t + 4 * j) != _F(0.0):
                    product(a + a_row * t + 4 * j, 0, 0, 1, b + b_step * j, 0, vectors, c + c_row * t, 0, 1, 1)
