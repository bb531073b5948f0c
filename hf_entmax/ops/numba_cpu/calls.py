"""Calls of functions that are compiled by themselves (see `kernels`), by their address.

Such a function is compiled once for all kernels that use it, only if something needs it, and not as a part of each of them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .vector_types import intrinsic

SOLVER = types.int64(*[types.int64] * 5, types.float64)
BATCH = types.void(types.int64, types.int64)
EVEN_ROWS = types.int64(*[types.int64] * 5, types.float64, *[types.int64] * 4)


def _call(context, builder, sig, args):
    kinds = [context.get_value_type(kind) for kind in sig.args[1:]]
    nothing = sig.return_type == types.void
    result = ir.VoidType() if nothing else context.get_value_type(sig.return_type)
    function = builder.inttoptr(args[0], ir.FunctionType(result, kinds).as_pointer())
    value = builder.call(function, args[1:])
    return context.get_dummy_value() if nothing else value


@intrinsic
def call_solver(typingctx, address, x, index, p, other, n, u):
    """One of the solvers of `threshold` and `steep`."""
    return SOLVER.return_type(types.int64, *SOLVER.args), _call


@intrinsic
def call_batch(typingctx, address, batch, rows):
    """`small_rows.solve_batch`."""
    return BATCH.return_type(types.int64, *BATCH.args), _call


@intrinsic
def call_even_rows(typingctx, address, limits, scores, span, rows, low, u, p, p_row, group, row_bytes):
    """`even_rows.solve_even_rows`."""
    return EVEN_ROWS.return_type(types.int64, *EVEN_ROWS.args), _call
