"""Operations on vectors of sixteen lanes (see `intrinsics`): memory, arithmetic, comparison, compaction, bits."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import (
    F32, HAS_AVX512, I8, I16, I32, I64, LANES, LLVM_FLOATS, LLVM_INTS, LLVM_MASK, broadcast, call_llvm, floats,
    fused_multiply_add, int_constant, ints, lanes, load_vector, operation, pointer, store_vector,
)  # fmt: skip


@operation(floats, types.float32)
def splat(builder, x):
    """Make a vector of sixteen times the same number."""
    return broadcast(builder, x)


@operation(floats, types.int64)
def load(builder, address):
    """Load sixteen consecutive float32."""
    return load_vector(builder, address)


@operation(types.void, types.int64, floats)
def store(builder, address, value):
    """Store sixteen consecutive float32."""
    store_vector(builder, value, address)


@operation(ints, types.int64)
def load_index(builder, address):
    """Load sixteen consecutive int32."""
    return builder.load(pointer(builder, address, LLVM_INTS), align=4)


@operation(types.void, types.int64, ints)
def store_index(builder, address, value):
    """Store sixteen consecutive int32."""
    builder.store(value, pointer(builder, address, LLVM_INTS), align=4)


@operation(lanes, types.int64)
def load_bytes(builder, address):
    """Tell which of sixteen consecutive bytes are not zero."""
    llvm_type = ir.VectorType(I8, LANES)
    value = builder.load(pointer(builder, address, llvm_type), align=1)
    return builder.icmp_unsigned("!=", value, ir.Constant(llvm_type, [0] * LANES))


@operation(types.void, types.int64)
def prefetch(builder, address):
    """Ask for the cache line of an address that will be read soon; it need not be one that may be read."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [pointer(builder, address, I8), I32(0), I32(3), I32(1)])  # to read, into all caches, data


def _scalar_access(llvm_type, numba_type):
    @operation(numba_type, types.int64)
    def read(builder, address):
        return builder.load(pointer(builder, address, llvm_type), align=1)

    @operation(types.void, types.int64, numba_type)
    def write(builder, address, value):
        builder.store(value, pointer(builder, address, llvm_type), align=1)

    return read, write


read_f32, write_f32 = _scalar_access(F32, types.float32)
read_f64, write_f64 = _scalar_access(ir.DoubleType(), types.float64)
read_i32, write_i32 = _scalar_access(I32, types.int32)
read_i64, write_i64 = _scalar_access(I64, types.int64)
read_u8, write_u8 = _scalar_access(I8, types.uint8)


@operation(types.int64, types.int64)
def atomic_increment(builder, address):
    """Add one to the int64 at ``address`` and return what it was."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), I64(1), "monotonic")


@operation(floats, floats, floats, floats)
def muladd(builder, x, y, z):
    """Return ``x * y + z``."""
    return fused_multiply_add(builder, x, y, z)


@operation(floats, floats, floats)
def maximum(builder, x, y):
    """Return the larger of two vectors, lane by lane (``y`` where either is NaN)."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(lanes, floats, floats)
def greater(builder, x, y):
    """Tell in which lanes ``x > y``."""
    return builder.fcmp_ordered(">", x, y)


@operation(lanes, floats)
def is_nan(builder, x):
    return builder.fcmp_unordered("uno", x, x)


@operation(lanes, lanes, lanes)
def either(builder, x, y):
    return builder.or_(x, y)


@operation(lanes, lanes, lanes)
def both(builder, x, y):
    return builder.and_(x, y)


@operation(lanes)
def no_lanes(builder):
    return ir.Constant(LLVM_MASK, [0] * LANES)


@operation(lanes, types.int64)
def first_lanes(builder, n):
    """Return the mask of the first ``n`` lanes (all of them when ``n >= 16``)."""
    count = broadcast(builder, builder.trunc(n, I32), LLVM_INTS)
    return builder.icmp_signed("<", ir.Constant(LLVM_INTS, list(range(LANES))), count)


@operation(floats, lanes, floats, floats)
def select(builder, mask, x, y):
    """Return ``x`` where the mask is set, else ``y``."""
    return builder.select(mask, x, y)


@operation(types.int64, lanes)
def count(builder, mask):
    """Count the lanes that are set."""
    bits = builder.bitcast(mask, I16)
    return builder.zext(call_llvm(builder, "llvm.ctpop.i16", I16, bits), I64)


def _reduction(name: str, start: float | None):
    @operation(types.float32, floats)
    def reduce(builder, x):
        arguments = [x] if start is None else [ir.Constant(F32, start), x]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [a.type for a in arguments]), f"llvm.vector.reduce.{name}.v16f32"
        )
        # Without leave to reassociate, the sum would be sixteen dependent additions.
        return builder.call(function, arguments, fastmath=("reassoc", "nnan"))

    return reduce


sum_lanes = _reduction("fadd", 0.0)
max_lanes = _reduction("fmax", None)


@operation(ints, types.int64)
def indices(builder, start):
    """Return ``start, start + 1, ..., start + 15`` as int32."""
    first = broadcast(builder, builder.trunc(start, I32), LLVM_INTS)
    return builder.add(first, ir.Constant(LLVM_INTS, list(range(LANES))))


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


@operation(types.void, lanes, floats, types.int64)
def compress(builder, mask, value, address):
    """Store the set lanes side by side at ``address``; up to sixteen floats there may be overwritten."""
    _compress(builder, mask, value, address)


@operation(types.void, lanes, ints, types.int64)
def compress_index(builder, mask, value, address):
    """Like ``compress`` for int32 lanes."""
    _compress(builder, mask, builder.bitcast(value, LLVM_FLOATS), address)


@operation(floats, floats)
def round_nearest(builder, x):
    return call_llvm(builder, "llvm.rint.v16f32", LLVM_FLOATS, x)


@operation(floats, floats, floats)
def scale_by_power_of_two(builder, x, n):
    """Return ``x * 2**n`` for integral ``n`` in [-126, 127], by building the float 2**n from its exponent bits."""
    exponent = builder.add(builder.fptosi(n, LLVM_INTS), int_constant(127))
    power = builder.bitcast(builder.shl(exponent, int_constant(23)), LLVM_FLOATS)
    return builder.fmul(x, power)


# The bits of sqrt(1/2): subtracting them first puts the mantissa into [sqrt(1/2), sqrt(2)), centred on 1.
_SQRT_HALF_BITS = 0x3F3504F3


@operation(floats, floats)
def binary_exponent(builder, x):
    """Return the integer ``e`` (as float) for which ``x / 2**e`` lies in [sqrt(1/2), sqrt(2)); x > 0 and not subnormal."""
    bits = builder.sub(builder.bitcast(x, LLVM_INTS), int_constant(_SQRT_HALF_BITS))
    return builder.sitofp(builder.ashr(bits, int_constant(23)), LLVM_FLOATS)


@operation(floats, floats)
def binary_mantissa(builder, x):
    """Return ``x / 2**binary_exponent(x)``."""
    bits = builder.bitcast(x, LLVM_INTS)
    offset = builder.sub(bits, int_constant(_SQRT_HALF_BITS))
    exponent = builder.and_(offset, int_constant(-(1 << 23)))
    return builder.bitcast(builder.sub(bits, exponent), LLVM_FLOATS)


@operation(lanes, ints, types.int64, types.int64)
def hashed_keep(builder, index, key, threshold):
    """Return the lanes whose hash of (index, key) is at least ``threshold``: a dropout mask that can be drawn again.

    ``key`` is a 64-bit number: its halves enter before and between the two rounds of a 32-bit integer mix.
    """
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
