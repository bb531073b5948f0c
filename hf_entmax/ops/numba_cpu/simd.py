"""Operations on vectors of sixteen lanes (see `vector_types`): memory, arithmetic, comparison, compaction, bits."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vector_types import (
    F32,
    HAS_AVX512,
    I8,
    I16,
    I32,
    I64,
    LANES,
    LLVM_FLOATS,
    LLVM_INTS,
    LLVM_MASK,
    broadcast,
    call_llvm,
    floats,
    fused_multiply_add,
    int_constant,
    intrinsic,
    ints,
    lanes,
    load_vector,
    pointer,
    store_vector,
)


@intrinsic
def splat(typingctx, x):
    """A vector of sixteen times the same number."""

    def codegen(context, builder, sig, args):
        return broadcast(builder, context.cast(builder, args[0], sig.args[0], types.float32))

    return floats(x), codegen


@intrinsic
def load(typingctx, address):
    """Sixteen consecutive float32 at ``address``."""

    def codegen(context, builder, sig, args):
        return load_vector(builder, args[0])

    return floats(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    """Write sixteen float32 at ``address``."""

    def codegen(context, builder, sig, args):
        store_vector(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, floats), codegen


@intrinsic
def load_index(typingctx, address):
    """Sixteen consecutive int32 at ``address``."""

    def codegen(context, builder, sig, args):
        return builder.load(pointer(builder, args[0], LLVM_INTS), align=4)

    return ints(types.int64), codegen


@intrinsic
def store_index(typingctx, address, value):
    """Write sixteen int32 at ``address``."""

    def codegen(context, builder, sig, args):
        builder.store(args[1], pointer(builder, args[0], LLVM_INTS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, ints), codegen


@intrinsic
def load_bytes(typingctx, address):
    """Which of the sixteen bytes at ``address`` are not zero."""

    def codegen(context, builder, sig, args):
        llvm_type = ir.VectorType(I8, LANES)
        value = builder.load(pointer(builder, args[0], llvm_type), align=1)
        return builder.icmp_unsigned("!=", value, ir.Constant(llvm_type, [0] * LANES))

    return lanes(types.int64), codegen


def _scalar_access(llvm_type, numba_type):
    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.load(pointer(builder, args[0], llvm_type), align=1)

        return numba_type(types.int64), codegen

    @intrinsic
    def write(typingctx, address, value):
        def codegen(context, builder, sig, args):
            builder.store(args[1], pointer(builder, args[0], llvm_type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return read, write


read_f32, write_f32 = _scalar_access(F32, types.float32)
read_f64, write_f64 = _scalar_access(ir.DoubleType(), types.float64)
read_i32, write_i32 = _scalar_access(I32, types.int32)
read_i64, write_i64 = _scalar_access(I64, types.int64)
read_u8, write_u8 = _scalar_access(I8, types.uint8)


@intrinsic
def atomic_increment(typingctx, address):
    """Add one to the int64 at ``address`` and return what it was."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), I64(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def muladd(typingctx, x, y, z):
    """``x * y + z``."""

    def codegen(context, builder, sig, args):
        return fused_multiply_add(builder, *args)

    return floats(floats, floats, floats), codegen


@intrinsic
def maximum(typingctx, x, y):
    """The larger of two vectors, lane by lane (``y`` where either is NaN)."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return floats(floats, floats), codegen


@intrinsic
def greater(typingctx, x, y):
    """Lanes where ``x > y``."""

    def codegen(context, builder, sig, args):
        return builder.fcmp_ordered(">", args[0], args[1])

    return lanes(floats, floats), codegen


@intrinsic
def is_nan(typingctx, x):
    """Lanes that hold NaN."""

    def codegen(context, builder, sig, args):
        return builder.fcmp_unordered("uno", args[0], args[0])

    return lanes(floats), codegen


@intrinsic
def either(typingctx, x, y):
    """Lanes set in one mask or the other."""

    def codegen(context, builder, sig, args):
        return builder.or_(args[0], args[1])

    return lanes(lanes, lanes), codegen


@intrinsic
def both(typingctx, x, y):
    """Lanes set in both masks."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], args[1])

    return lanes(lanes, lanes), codegen


@intrinsic
def no_lanes(typingctx):
    """The empty mask."""

    def codegen(context, builder, sig, args):
        return ir.Constant(LLVM_MASK, [0] * LANES)

    return lanes(), codegen


@intrinsic
def first_lanes(typingctx, n):
    """The mask of the first ``n`` lanes (all of them when ``n >= 16``)."""

    def codegen(context, builder, sig, args):
        count = broadcast(builder, builder.trunc(args[0], I32), LLVM_INTS)
        return builder.icmp_signed("<", ir.Constant(LLVM_INTS, list(range(LANES))), count)

    return lanes(types.int64), codegen


@intrinsic
def select(typingctx, mask, x, y):
    """``x`` where the mask is set, else ``y``."""

    def codegen(context, builder, sig, args):
        return builder.select(*args)

    return floats(lanes, floats, floats), codegen


@intrinsic
def count(typingctx, mask):
    """How many lanes are set."""

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], I16)
        return builder.zext(call_llvm(builder, "llvm.ctpop.i16", I16, bits), I64)

    return types.int64(lanes), codegen


def _reduction(name: str, start: float | None):
    @intrinsic
    def reduce(typingctx, x):
        def codegen(context, builder, sig, args):
            arguments = [args[0]] if start is None else [ir.Constant(F32, start), args[0]]
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(F32, [a.type for a in arguments]), f"llvm.vector.reduce.{name}.v16f32"
            )
            # Without leave to reassociate, the sum would be sixteen dependent additions.
            return builder.call(function, arguments, fastmath=("reassoc", "nnan"))

        return types.float32(floats), codegen

    return reduce


sum_lanes = _reduction("fadd", 0.0)
max_lanes = _reduction("fmax", None)


@intrinsic
def indices(typingctx, start):
    """``start, start + 1, ..., start + 15`` as int32."""

    def codegen(context, builder, sig, args):
        first = broadcast(builder, builder.trunc(args[0], I32), LLVM_INTS)
        return builder.add(first, ir.Constant(LLVM_INTS, list(range(LANES))))

    return ints(types.int64), codegen


def _compress(builder, mask, value, address) -> None:
    if HAS_AVX512:
        # The register form followed by a full store: the memory form is microcoded on some machines. It writes sixteen
        # lanes whatever the mask, so callers leave that much room.
        packed = call_llvm(
            builder, "llvm.x86.avx512.mask.compress.v16f32", LLVM_FLOATS, value, ir.Constant(LLVM_FLOATS, None), mask
        )
        store_vector(builder, packed, address)
    else:
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [LLVM_FLOATS, F32.as_pointer(), LLVM_MASK]),
            "llvm.masked.compressstore.v16f32",
        )
        builder.call(function, [value, pointer(builder, address, F32), mask])


@intrinsic
def compress(typingctx, mask, value, address):
    """Store the set lanes side by side at ``address``; up to sixteen floats there may be overwritten."""

    def codegen(context, builder, sig, args):
        _compress(builder, *args)
        return context.get_dummy_value()

    return types.void(lanes, floats, types.int64), codegen


@intrinsic
def compress_index(typingctx, mask, value, address):
    """Like ``compress`` for int32 lanes."""

    def codegen(context, builder, sig, args):
        mask, value, address = args
        _compress(builder, mask, builder.bitcast(value, LLVM_FLOATS), address)
        return context.get_dummy_value()

    return types.void(lanes, ints, types.int64), codegen


@intrinsic
def round_nearest(typingctx, x):
    """Round to the nearest integer, as float."""

    def codegen(context, builder, sig, args):
        return call_llvm(builder, "llvm.rint.v16f32", LLVM_FLOATS, args[0])

    return floats(floats), codegen


@intrinsic
def scale_by_power_of_two(typingctx, x, n):
    """``x * 2**n`` for integral ``n`` in [-126, 127], by building the float 2**n from its exponent bits."""

    def codegen(context, builder, sig, args):
        exponent = builder.add(builder.fptosi(args[1], LLVM_INTS), int_constant(127))
        power = builder.bitcast(builder.shl(exponent, int_constant(23)), LLVM_FLOATS)
        return builder.fmul(args[0], power)

    return floats(floats, floats), codegen


# The bits of sqrt(1/2): subtracting them first puts the mantissa into [sqrt(1/2), sqrt(2)), centred on 1.
_SQRT_HALF_BITS = 0x3F3504F3


@intrinsic
def binary_exponent(typingctx, x):
    """The integer ``e`` (as float) for which ``x / 2**e`` lies in [sqrt(1/2), sqrt(2)); x > 0 and not subnormal."""

    def codegen(context, builder, sig, args):
        bits = builder.sub(builder.bitcast(args[0], LLVM_INTS), int_constant(_SQRT_HALF_BITS))
        return builder.sitofp(builder.ashr(bits, int_constant(23)), LLVM_FLOATS)

    return floats(floats), codegen


@intrinsic
def binary_mantissa(typingctx, x):
    """``x / 2**binary_exponent(x)``."""

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], LLVM_INTS)
        offset = builder.sub(bits, int_constant(_SQRT_HALF_BITS))
        exponent = builder.and_(offset, int_constant(-(1 << 23)))
        return builder.bitcast(builder.sub(bits, exponent), LLVM_FLOATS)

    return floats(floats), codegen


@intrinsic
def hashed_keep(typingctx, index, key, threshold):
    """Lanes whose hash of (index, key) is at least ``threshold``: a dropout mask that can be drawn again.

    ``key`` is a 64-bit number: its halves enter before and between the two rounds of a 32-bit integer mix.
    """

    def codegen(context, builder, sig, args):
        index, key, threshold = args
        low = broadcast(builder, builder.trunc(key, I32), LLVM_INTS)
        high = broadcast(builder, builder.trunc(builder.lshr(key, I64(32)), I32), LLVM_INTS)

        def mix(h, shift: int, factor: int):
            h = builder.xor(h, builder.lshr(h, int_constant(shift)))
            return builder.mul(h, int_constant(factor))

        h = mix(builder.add(builder.mul(index, int_constant(0x9E3779B1)), low), 16, 0x7FEB352D)
        h = mix(builder.xor(h, high), 15, 0x846CA68B)
        h = builder.xor(h, builder.lshr(h, int_constant(16)))
        limit = broadcast(builder, builder.trunc(threshold, I32), LLVM_INTS)
        return builder.icmp_unsigned(">=", h, limit)

    return lanes(ints, types.int64, types.int64), codegen
