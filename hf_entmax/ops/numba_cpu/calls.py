"""Calls of functions that are compiled by themselves (see `kernels`), by their address.

Such a function is compiled once for all kernels that use it, only if something needs it, and not as a part of each of them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .vector_types import I64, operation

SOLVER = types.int64(*[types.int64] * 5, types.float64)
BATCH = types.void(types.int64, types.int64)
EVEN_ROWS = types.int64(*[types.int64] * 5, types.float64, *[types.int64] * 4)


def _call(builder, result, address, *values):
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), values)


@operation(SOLVER.return_type, types.int64, *SOLVER.args)
def call_solver(builder, address, x, index, p, other, n, u):
    """One of the solvers of `threshold` and `steep`."""
    return _call(builder, I64, address, x, index, p, other, n, u)


@operation(BATCH.return_type, types.int64, *BATCH.args)
def call_batch(builder, address, batch, rows):
    """`small_rows.solve_batch`."""
    _call(builder, ir.VoidType(), address, batch, rows)


@operation(EVEN_ROWS.return_type, types.int64, *EVEN_ROWS.args)
def call_even_rows(builder, address, limits, scores, span, rows, low, u, p, p_row, group, row_bytes):
    """`even_rows.solve_even_rows`."""
    return _call(builder, I64, address, limits, scores, span, rows, low, u, p, p_row, group, row_bytes)
