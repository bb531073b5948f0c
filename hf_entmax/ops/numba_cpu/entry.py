"""The C entry points of the kernels.

Each is a closure over ``version`` so that the number becomes part of Numba's cache key (see `runtime`).
"""

from __future__ import annotations

from .backward import run_backward, run_bias_gradient
from .forward import run_forward
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


ENTRIES = {
    "forward": _forward,
    "backward": _backward,
    "bias_gradient": _bias_gradient,
    "support_rows": _support_rows,
}
