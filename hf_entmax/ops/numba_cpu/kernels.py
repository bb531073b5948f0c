"""What is compiled, each by itself: the kernels, which take the address of one record, and the solvers that they call.

Only what a call needs is compiled for it; see `threshold.solver_name` for which solver takes which alpha.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types

from . import compiler
from .above_two import solve_above_two
from .backward import run_backward, run_bias_gradient
from .exact_bounds import run_bounds_2, run_bounds_4, run_bounds_6, run_bounds_8
from .exact_rows import run_exact_rows
from .forward import run_forward
from .intrinsics import FULL_ROWS, SHORT_ROWS, SOLVER
from .layout import EXACT_RECORD, RECORD, ROWS_RECORD
from .row_groups import solve_full_rows, solve_short_rows
from .row_kernels import run_recompute, run_solve, run_write
from .rows import run_support_rows
from .threshold import (
    solve_general, solve_linear, solve_softmax, solve_square, solved_as_full_rows, solved_as_short_rows, solver_name,
)  # fmt: skip

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
    "above_two": (SOLVER, solve_above_two),
    "short_rows": (SHORT_ROWS, solve_short_rows),
    "full_rows": (FULL_ROWS, solve_full_rows),
}


class Solvers(NamedTuple):
    """The addresses of the solver of every head or row (int64), where these stand, and of two that not every call needs (else 0)."""

    single: np.ndarray
    table: int
    short_rows: int
    full_rows: int


def kernel(name: str) -> compiler.Kernel:
    """Return a kernel or solver by its name in `KERNELS`, compiled or loaded from disk at the first call."""
    return compiler.known(name) or compiler.load(name, *KERNELS[name])


def find_solvers(u: np.ndarray, name: str, soon: Sequence[str] = ()) -> Solvers:
    """Compile a kernel and the solvers that it needs for ``u`` (float64); ``soon`` names what will be needed later."""
    values = np.unique(u).tolist()
    names = {value: solver_name(value) for value in values}
    short = any(map(solved_as_short_rows, values))
    full = name == "forward" and any(map(solved_as_full_rows, values))
    used = dict.fromkeys((name, *names.values(), *["short_rows"] * short, *["full_rows"] * full))
    compiler.prepare(list(used), soon)
    address = {name: kernel(name).address for name in used}
    single = np.array([address[names[value]] for value in u.tolist()], np.int64)
    return Solvers(single, single.ctypes.data, address.get("short_rows", 0), address.get("full_rows", 0))


@lru_cache(maxsize=256)
def attention_solvers(u: bytes, training: bool) -> Solvers:
    """Return what the forward kernel needs for ``u`` (float64 [H], as bytes), in training also for what alphas turn into."""
    return find_solvers(np.frombuffer(u), "forward", ("backward", "general", "short_rows") if training else ())


def compile_all(report: Callable[[str], None]) -> None:
    """Compile every kernel that is not in the cache; ``report`` is called with the name of each that is ready."""
    compiler.prepare(list(KERNELS))
    for name in KERNELS:
        kernel(name)
        report(name)


def compile_and_say(names: Iterable[str]) -> None:
    """Compile kernels one after the other and print the name of each that is ready: what the second process does."""
    compiler.be_quiet()
    for name in names:
        kernel(name)
        with contextlib.suppress(OSError):
            print(name, flush=True)
