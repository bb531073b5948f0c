"""Measuring: interleaved timing with quantiles, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def _milliseconds(function: Callable[[], object], device: str) -> float:
    """The time of one call: by events on the device where there are such, else by the clock."""
    if device != "cuda":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    function()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def interleaved_times(
    functions: dict[str, Callable[[], object]], repeats: int, device: str, budget: float
) -> dict[str, list[float]]:
    """Time functions in turn (A B C A B C ...), so that a change of the machine's speed meets all of them: ms by name.

    ``repeats`` rounds follow one of warm-up; after ``budget`` seconds none begins, once three are done.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for turn in range(repeats + 1):
        for name, function in functions.items():
            spent = _milliseconds(function, device)
            if turn:
                times[name].append(spent)
        if turn >= 3 and time.perf_counter() - begin > budget:
            break
    return times


def quantile(values: list[float], share: float) -> float:
    """A quantile by linear interpolation."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def peak_memory(function: Callable[[], object], device: str) -> float:
    """The most memory in MiB that PyTorch's allocator gives out during a call, beyond what was held before it."""
    function()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results: Any = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise RuntimeError("The profiler recorded nothing; peak memory cannot be measured.")
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak / 2**20
