"""How the functions of the kernels are compiled."""

from __future__ import annotations

from typing import Any

from numba import njit

# They are called from kernels alone, so Numba need not compile two more copies of each to be called from Python and C.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

#: A function that kernels call.
jit: Any = njit(**_OPTIONS)
#: A function that is to be compiled into each of its callers.
jit_inline: Any = njit(forceinline=True, **_OPTIONS)


def jit_as(name: str) -> Any:
    """A function that kernels call, made by a factory.

    It needs a name of its own: from the caches of two processes, the machine code of one would run in the place of another's.
    """

    def compiled(function: Any) -> Any:
        function.__qualname__ = name
        return jit(function)

    return compiled
