"""Operations on the bytes of a key sketch, and loads of half-precision numbers as float32."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from hf_entmax.ops.sketch_format import PLANES

from .intrinsics import (
    F32, I16, I32, I64, I8, LANES, LLVM_FLOATS, LLVM_INTS, broadcast, call_llvm, floats, fused_multiply_add,
    int_constant, jit, operation, pointer, store_vector, target_features,
)  # fmt: skip
from .layout import WEIGHT_PLANES
from .simd import load, read_u8, splat, store, write_u8
from .tiles import _Loop

_HAS_VNNI, _HAS_F16C = ("+avx512vnni" in target_features(), "+f16c" in target_features())
_SHORTS, _BYTES = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES)


@operation(floats, types.int64)
def load_bfloat16(builder, address):
    bits = builder.zext(builder.load(pointer(builder, address, _SHORTS), align=2), LLVM_INTS)
    return builder.bitcast(builder.shl(bits, int_constant(16)), LLVM_FLOATS)


@operation(floats, types.int64)
def load_float16(builder, address):
    if _HAS_F16C:
        kind = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.load(pointer(builder, address, kind), align=2), LLVM_FLOATS)
    bits = builder.zext(builder.load(pointer(builder, address, _SHORTS), align=2), LLVM_INTS)
    size = builder.shl(builder.and_(bits, int_constant(0x7FFF)), int_constant(13))
    # The exponent of float16 in the place of that of float32: too small by 2**112, also for subnormal numbers.
    scaled = builder.fmul(builder.bitcast(size, LLVM_FLOATS), ir.Constant(LLVM_FLOATS, [2.0**112] * LANES))
    infinite = builder.icmp_unsigned(">=", size, int_constant(0x7C00 << 13))
    special = builder.or_(size, int_constant(0x7F800000))
    size = builder.select(infinite, special, builder.bitcast(scaled, LLVM_INTS))
    sign = builder.shl(builder.and_(bits, int_constant(0x8000)), int_constant(16))
    return builder.bitcast(builder.or_(size, sign), LLVM_FLOATS)


@operation(floats, floats)
def magnitude(builder, x):
    return builder.bitcast(builder.and_(builder.bitcast(x, LLVM_INTS), int_constant(0x7FFFFFFF)), LLVM_FLOATS)


@operation(types.void, types.int64, floats)
def store_as_bytes(builder, address, x):
    """Write sixteen integral floats from -128 to 127 as int8."""
    value = builder.trunc(builder.fptosi(x, LLVM_INTS), _BYTES)
    builder.store(value, pointer(builder, address, _BYTES), align=1)


#: Kinds of numbers of a cache, by bytes and format.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2


@jit
def _load_as(kind, address):
    if kind == BFLOAT16:
        return load_bfloat16(address)
    if kind == FLOAT16:
        return load_float16(address)
    return load(address)


@jit
def widen_row(kind, source, width, target):
    """Copy ``width`` numbers as float32, with zeros up to a whole vector; nothing behind them is read."""
    size = 4 if kind == FLOAT32 else 2
    whole = width // LANES * LANES
    for d in range(0, whole, LANES):
        store(target + 4 * d, _load_as(kind, source + size * d))
    if whole < width:
        # The rest goes through the target itself, where there is room for a whole vector.
        store(target + 4 * whole, splat(0.0))
        for byte in range(size * (width - whole)):
            write_u8(target + 4 * whole + byte, read_u8(source + size * whole + byte))
        store(target + 4 * whole, _load_as(kind, target + 4 * whole))


def _add_dots(builder, total, codes, weight):
    """Add to each lane the dot product of its four codes, unsigned bytes, with the four signed bytes of ``weight``."""
    if _HAS_VNNI:
        weights = broadcast(builder, weight, LLVM_INTS)
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", LLVM_INTS, total, codes, weights)
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, int_constant(8 * byte)), int_constant(255))
        number = builder.ashr(builder.shl(weight, I32(24 - 8 * byte)), I32(24))
        total = builder.add(total, builder.mul(code, broadcast(builder, number, LLVM_INTS)))
    return total


def make_page(bits: int, rows: int):
    """Make the operation that turns the codes of one page into upper bounds for ``rows`` rows."""
    parts = WEIGHT_PLANES[bits]

    @operation(types.void, *[types.int64] * 9)
    def page_bounds(builder, codes, blocks, quads, weights, weights_row, scalars, target, target_row, tops):
        """Write upper bounds of a page for every row, ``offset + sum_p scale_p (weights_p . codes)``, and the largest of each lane.

        Weights lie by row and part, ``weights_row`` bytes each; scalars by row: offset, then the scale of each part;
        ``quads`` is the head dimension over 4.
        """

        def number(row, place):
            address = builder.add(scalars, I64(16 * row + 4 * place))
            return broadcast(builder, builder.load(pointer(builder, address, F32), align=4))

        offsets = [number(row, 0) for row in range(rows)]
        scales = [number(row, 1 + part) for row in range(rows) for part in range(parts)]
        lines = [builder.add(weights, builder.mul(weights_row, I64(k))) for k in range(rows * parts)]
        lowest = ir.Constant(LLVM_FLOATS, [float("-inf")] * LANES)
        block = _Loop(builder, blocks, [lowest] * rows)
        totals = [int_constant(0)] * (rows * parts)
        plane = codes
        for place, (width, shift) in enumerate(PLANES[bits]):
            fields = 8 // width
            chunks = builder.lshr(quads, I64(fields.bit_length() - 1))
            size = builder.shl(chunks, I64(6))
            first = builder.add(plane, builder.mul(block.index, size))
            if place:
                totals = [builder.shl(total, int_constant(PLANES[bits][place - 1][1] - shift)) for total in totals]
            chunk = _Loop(builder, chunks, totals)
            packed_at = builder.add(first, builder.shl(chunk.index, I64(6)))
            packed = builder.load(pointer(builder, packed_at, LLVM_INTS), align=4)
            totals = list(chunk.carried)
            for field in range(fields):
                code = packed
                if width < 8:
                    mask = int.from_bytes(bytes([2**width - 1] * 4), "little")
                    code = builder.and_(builder.lshr(packed, int_constant(width * field)), int_constant(mask))
                column = builder.shl(builder.add(builder.mul(chunk.index, I64(fields)), I64(field)), I64(2))
                for k, line in enumerate(lines):
                    weight_at = pointer(builder, builder.add(line, column), I32)
                    totals[k] = _add_dots(builder, totals[k], code, builder.load(weight_at, align=4))
            totals = chunk.close(totals)
            plane = builder.add(plane, builder.mul(blocks, size))
        largest = []
        for row in range(rows):
            value = offsets[row]
            for k in range(row * parts, (row + 1) * parts):
                value = fused_multiply_add(builder, builder.sitofp(totals[k], LLVM_FLOATS), scales[k], value)
            line = builder.add(target, builder.mul(target_row, I64(row)))
            store_vector(builder, value, builder.add(line, builder.shl(block.index, I64(6))))
            before = block.carried[row]
            largest.append(builder.select(builder.fcmp_ordered(">", value, before), value, before))
        largest = block.close(largest)
        for row in range(rows):
            store_vector(builder, largest[row], builder.add(tops, I64(64 * row)))

    return page_bounds
