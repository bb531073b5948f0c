"""The C entry points of the kernels.

Each is a closure over ``version`` so that the number becomes part of Numba's cache key (see `runtime`).
"""

from __future__ import annotations

from .arguments import RECORD, ROWS_RECORD
from .backward import run_backward, run_bias_gradient
from .forward import run_forward
from .rows import run_recompute, run_solve, run_write
from .support_rows import run_support_rows


def _forward(version: int):
    def entry(record):
        if version >= 0:
            run_forward(record)

    return entry


def _backward(version: int):
    def entry(record):
        if version >= 0:
            run_backward(record)

    return entry


def _bias_gradient(version: int):
    def entry(record):
        if version >= 0:
            run_bias_gradient(record)

    return entry


def _support_rows(version: int):
    def entry(record):
        if version >= 0:
            run_support_rows(record)

    return entry


def _solve_rows(version: int):
    def entry(record):
        if version >= 0:
            run_solve(record)

    return entry


def _write_rows(version: int):
    def entry(record):
        if version >= 0:
            run_write(record)

    return entry


def _recompute_rows(version: int):
    def entry(record):
        if version >= 0:
            run_recompute(record)

    return entry


#: Name of a kernel -> the record it takes, and what makes its entry point.
ENTRIES = {
    "forward": (RECORD, _forward),
    "backward": (RECORD, _backward),
    "bias_gradient": (RECORD, _bias_gradient),
    "support_rows": (RECORD, _support_rows),
    "solve_rows": (ROWS_RECORD, _solve_rows),
    "write_rows": (ROWS_RECORD, _write_rows),
    "recompute_rows": (ROWS_RECORD, _recompute_rows),
}
