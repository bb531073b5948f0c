"""What is compiled, each by itself: the kernels, which take the address of one record, and the functions that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import from_dtype, types

from .arguments import EXACT_RECORD, RECORD, ROWS_RECORD
from .backward import run_backward, run_bias_gradient
from .calls import BATCH, EVEN_ROWS, SOLVER
from .even_rows import solve_even_rows
from .exact_bounds import run_bounds_2, run_bounds_4, run_bounds_6, run_bounds_8
from .exact_rows import run_exact_rows
from .forward import run_forward
from .row_kernels import run_recompute, run_solve, run_write
from .small_rows import solve_batch
from .steep import solve_steep
from .support_rows import run_support_rows
from .threshold import solve_general, solve_linear, solve_softmax, solve_square

_ATTENTION = types.void(types.CPointer(from_dtype(RECORD)))
_ROWS = types.void(types.CPointer(from_dtype(ROWS_RECORD)))
_EXACT = types.void(types.CPointer(from_dtype(EXACT_RECORD)))

#: Name -> signature and Python function.
KERNELS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "forward": (_ATTENTION, run_forward),
    "backward": (_ATTENTION, run_backward),
    "bias_gradient": (_ATTENTION, run_bias_gradient),
    "support_rows": (_ATTENTION, run_support_rows),
    "solve_rows": (_ROWS, run_solve),
    "write_rows": (_ROWS, run_write),
    "recompute_rows": (_ROWS, run_recompute),
    "exact_bounds_2": (_EXACT, run_bounds_2),
    "exact_bounds_4": (_EXACT, run_bounds_4),
    "exact_bounds_6": (_EXACT, run_bounds_6),
    "exact_bounds_8": (_EXACT, run_bounds_8),
    "exact_rows": (_EXACT, run_exact_rows),
    "softmax": (SOLVER, solve_softmax),
    "linear": (SOLVER, solve_linear),
    "square": (SOLVER, solve_square),
    "general": (SOLVER, solve_general),
    "steep": (SOLVER, solve_steep),
    "batch": (BATCH, solve_batch),
    "even_rows": (EVEN_ROWS, solve_even_rows),
}
