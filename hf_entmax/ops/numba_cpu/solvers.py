"""Which solver each alpha takes: only those that a call needs are compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from . import compiler

#: Below this ``u = alpha - 1`` the mapping is softmax to float32.
SOFTMAX_U = 1e-8
#: Below this u the argument ``1 + u (x - c)`` is too close to 1 to hold the digits of ``u (x - c)``.
SMALL_U = 0.25


def solver_name(u: float) -> str:
    """The name in `kernels.KERNELS` of the solver of single rows."""
    if u < SOFTMAX_U:
        return "softmax"
    return {0.5: "square", 1.0: "linear"}.get(u, "general" if u < 1.0 else "steep")


def solved_in_batches(u):
    """Whether rows with few candidates are solved sixteen at a time: no closed form, and no delicate limit."""
    return SMALL_U <= u < 1.0 and u != 0.5


def solved_as_even_rows(u):
    """Whether rows of which nearly every score is a candidate are solved where they stand."""
    return SOFTMAX_U <= u < SMALL_U


class Solvers(NamedTuple):
    """Addresses: of the solver of every head or row (int64), where these stand, and of two that not every call needs (else 0)."""

    single: np.ndarray
    table: int
    batch: int
    even_rows: int


def find_solvers(u: np.ndarray, kernel: str, soon: Sequence[str] = ()) -> Solvers:
    """Compile a kernel (a name in `kernels.KERNELS`) and the solvers that it needs for ``u`` (float64); ``soon`` are for later."""
    values = np.unique(u).tolist()
    names = {value: solver_name(value) for value in values}
    batch = any(map(solved_in_batches, values))
    even = kernel == "forward" and any(map(solved_as_even_rows, values))
    used = dict.fromkeys((kernel, *names.values(), *["batch"] * batch, *["even_rows"] * even))
    compiler.prepare(list(used), soon)
    address = {name: compiler.kernel(name).address for name in used}
    single = np.array([address[names[value]] for value in u.tolist()], np.int64)
    return Solvers(single, single.ctypes.data, address.get("batch", 0), address.get("even_rows", 0))


@lru_cache(maxsize=256)
def attention_solvers(u: bytes, training: bool) -> Solvers:
    """What the forward kernel needs for ``u`` (float64 [H], as bytes); alphas that are learned leave those with a short form."""
    return find_solvers(np.frombuffer(u), "forward", ("backward", "general", "batch") if training else ())
