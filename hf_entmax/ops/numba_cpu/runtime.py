"""Running a kernel on several threads.

The threads are those of the OpenMP runtime that PyTorch itself computes with: a second pool would compete with PyTorch's
threads, which keep spinning for milliseconds after every parallel operation. Where that runtime cannot be reached, and
in a process forked from one that used it (whose OpenMP threads do not exist), a small pool of Python threads is used;
the kernels run without the interpreter lock either way. Work is handed out by an atomic counter, so it does not matter
how many threads really come, and calls from several threads at once do not share anything.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .compiler import Kernel


class _State:
    """What must be built anew in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.openmp: Any = None
        self.openmp_known = False


_state = _State()


def _after_fork() -> None:
    global _state
    _state = _State()
    _state.openmp_known = True  # and None: the parent's OpenMP threads were not copied


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _openmp() -> Any:
    """Return ``GOMP_parallel(function, data, threads, flags)`` of the OpenMP runtime in this process, or None."""
    if not _state.openmp_known:
        found = None
        if sys.platform.startswith("linux") and torch.backends.openmp.is_available():
            try:
                # PyTorch loads its OpenMP runtime into the global symbol table.
                found = ctypes.CDLL(None).GOMP_parallel
            except (AttributeError, OSError):
                found = None
        if found is not None:
            found.restype = None
            found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        _state.openmp, _state.openmp_known = found, True
    return _state.openmp


def _run_in_pool(run: Kernel, record: int, threads: int) -> None:
    with _state.lock:
        if _state.pool is None:
            _state.pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="hf_entmax")
        pool = _state.pool
    helpers = [pool.submit(run.call, record) for _ in range(threads - 1)]
    run.call(record)
    for helper in helpers:
        # All work is taken by now: a helper that has not begun would find nothing.
        if not helper.cancel():
            helper.result()


def storage(size: int) -> Tensor:
    """Allocate bytes for the kernels."""
    return torch.empty(size, dtype=torch.uint8)


def launch(
    run: Kernel, record: Any, items: int, threads: int, scratch: Mapping[str, int] | None = None
) -> ctypes.Array[ctypes.c_int64]:
    """Run a kernel over ``items`` work items and wait for it.

    Args:
        run: the kernel.
        record: its record, in which the memory of this launch is noted.
        items: how many pieces of work the threads share.
        threads: the most threads that take part.
        scratch: how the scratch of a thread is divided, from `layout`; by default as at the launch before.

    Returns:
        The four counters of the record as the kernel left them.
    """
    for name, size in (scratch or {}).items():
        setattr(record, name, size)
    threads = max(1, min(threads, items))
    # The address of an array of ctypes takes a tenth of the time of NumPy's, which a step of decoding would notice.
    memory, counters = storage(threads * record.scratch_bytes), (ctypes.c_int64 * 4)()
    record.scratch, record.counters = memory.data_ptr(), ctypes.addressof(counters)
    address = ctypes.addressof(record)
    if threads == 1:
        run.call(address)
    elif (parallel := _openmp()) is None:
        _run_in_pool(run, address, threads)
    else:
        parallel(run.address, address, threads, 0)
    return counters
