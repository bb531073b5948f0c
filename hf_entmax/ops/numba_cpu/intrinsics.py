"""The language that the kernels are written in: how functions are compiled, vectors of sixteen floats, calls by address.

LLVM vectorises simple loops by itself, but not the three this backend lives on: a register-tiled product, a compaction
(keep the lanes above a threshold) and a gather of dot products. They are written with explicit vectors instead. Sixteen
lanes is one AVX-512 register; on narrower machines LLVM splits a vector into two or four registers, so the same source
runs everywhere. The operations on them are in `simd`.

Addresses are plain int64 byte addresses: the kernels receive tensors as pointers with byte strides.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils, registry
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from .layout import LANES


# They are called from kernels alone, so Numba need not compile two more copies of each to be called from Python and C.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

#: A function that kernels call.
jit: Any = njit(**_OPTIONS)
#: A function that is to be compiled into each of its callers.
jit_inline: Any = njit(forceinline=True, **_OPTIONS)


def jit_as(name: str) -> Any:
    """Compile a function made by a factory under a name of its own.

    From the caches of two processes, the machine code of one such function would else run in the place of another's.
    """

    def compiled(function: Any) -> Any:
        function.__qualname__ = name
        return jit(function)

    return compiled


def operation(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn ``emit(builder, *values)``, which emits LLVM code, into a function on these types that kernels can call."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context, builder, sig, args):
            value = emit(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        def define(typingctx, *args):
            return result(*kinds), codegen

        typing: Any = define
        # Numba counts the arguments, all but the first, by the signature.
        typing.__name__, typing.__signature__ = emit.__name__, inspect.signature(emit)
        return extending.intrinsic(typing)

    return decorate


_register_model: Any = register_model
_infer_global: Any = infer_global


I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
LLVM_FLOATS = ir.VectorType(F32, LANES)
LLVM_INTS = ir.VectorType(I32, LANES)
LLVM_MASK = ir.VectorType(I1, LANES)


def target_features() -> str:
    """Return the instruction set that Numba compiles for, honouring NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
    context: Any = registry.cpu_target.target_context
    return context.codegen().magic_tuple()[2]


HAS_AVX512 = "+avx512f" in target_features()


class _VectorType(types.Type):
    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name)


@_register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


floats = _VectorType("float32x16", LLVM_FLOATS)
ints = _VectorType("int32x16", LLVM_INTS)
lanes = _VectorType("mask16", LLVM_MASK)


def pointer(builder, address, llvm_type):
    """Make an LLVM pointer from a byte address."""
    return builder.inttoptr(address, llvm_type.as_pointer())


def load_vector(builder, address):
    """Load sixteen floats from any address that is a multiple of 4."""
    return builder.load(pointer(builder, address, LLVM_FLOATS), align=4)


def store_vector(builder, value, address) -> None:
    """Store sixteen floats to any address that is a multiple of 4."""
    builder.store(value, pointer(builder, address, LLVM_FLOATS), align=4)


def broadcast(builder, scalar, llvm_type=LLVM_FLOATS):
    """Make a vector whose lanes all hold ``scalar``."""
    undefined = ir.Constant(llvm_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(LLVM_INTS, [0] * LANES))


def call_llvm(builder, name: str, result, *args):
    """Call an LLVM intrinsic by its full name."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, list(args))


def fused_multiply_add(builder, x, y, z):
    """Return ``x * y + z``, fused where the machine can (``fmuladd`` never falls back to a library call)."""
    return call_llvm(builder, "llvm.fmuladd.v16f32", LLVM_FLOATS, x, y, z)


def int_constant(value: int):
    """Make a vector of sixteen times the same 32-bit pattern."""
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return ir.Constant(LLVM_INTS, [signed] * LANES)


def _binary(op, method: str) -> None:
    @_infer_global(op)
    class _Template(AbstractTemplate):
        def generic(self, args, kws):
            if args == (floats, floats):
                return signature(floats, floats, floats)
            return None

    @lower_builtin(op, floats, floats)
    def _lower(context, builder, sig, args):
        return getattr(builder, method)(*args)


for _op, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _binary(_op, _method)


# Functions that are compiled by themselves (see `kernels`) and called by their address: once for all kernels that use one,
# only if something needs it, and not as a part of each of them.
SOLVER = types.int64(*[types.int64] * 5, types.float64)
SHORT_ROWS = types.void(types.int64, types.int64)
FULL_ROWS = types.int64(*[types.int64] * 5, types.float64, *[types.int64] * 4)


def _call(builder, result, address, *values):
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), values)


@operation(SOLVER.return_type, types.int64, *SOLVER.args)
def call_solver(builder, address, x, index, p, other, n, u):
    return _call(builder, I64, address, x, index, p, other, n, u)


@operation(SHORT_ROWS.return_type, types.int64, *SHORT_ROWS.args)
def call_short_rows(builder, address, batch, rows):
    _call(builder, ir.VoidType(), address, batch, rows)


@operation(FULL_ROWS.return_type, types.int64, *FULL_ROWS.args)
def call_full_rows(builder, address, limits, scores, span, rows, low, u, p, p_row, group, row_bytes):
    return _call(builder, I64, address, limits, scores, span, rows, low, u, p, p_row, group, row_bytes)
