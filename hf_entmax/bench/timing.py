"""Measuring: interleaved timing with quantiles, peak memory, and the machine that it was done on."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch


def interleaved_times(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str = "cpu",
    budget: float = math.inf,
    *,
    warm: int = 1,
    turn: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time functions in turn (A B C A B C ...), so that a change of the machine's speed meets all of them.

    Args:
        functions: by name.
        repeats: timed calls of each.
        device: "cuda": the clock is the device's own.
        budget: seconds after which no round begins, once three are done.
        warm: calls of each before these, which nobody times.
        turn: calls of one function before it is the next one's turn.
        clock: seconds, on other devices; ``time.process_time`` disregards other programs on the machine.

    Returns:
        Milliseconds of each call, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for first in range(0, warm + repeats, turn):
        calls = range(first, min(first + turn, warm + repeats))
        for name, function in functions.items():
            spent = [_milliseconds(function, device, clock) for _ in calls]
            times[name] += [value for call, value in zip(calls, spent, strict=True) if call >= warm]
        if calls.stop >= warm + 3 and time.perf_counter() - begin > budget:
            break
    return times


def _milliseconds(function: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    if device != "cuda":
        start = clock()
        function()
        return 1e3 * (clock() - start)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    function()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


class Spread(NamedTuple):
    """The median of some values, the quantiles on either side of it, and how many there are."""

    median: float
    low: float
    high: float
    repeats: int


def spread(values: Sequence[float], share: float = 0.2) -> Spread:
    """Sum up measurements by their median and the quantiles ``share`` and 1 - ``share``."""
    return Spread(quantile(values, 0.5), quantile(values, share), quantile(values, 1 - share), len(values))


def ratios(times: Sequence[float], base: Sequence[float], share: float = 0.2) -> Spread:
    """Sum up how many times as long calls took as those of ``base`` in the same rounds."""
    return spread([own / other for own, other in zip(times, base, strict=True)], share)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def peak_memory(function: Callable[[], object], device: str) -> float:
    """Return the most memory in MiB that PyTorch's allocator gives out during a call, beyond what was held before it."""
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


def package_version(package: str) -> str:
    """Return the version of a package, "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """Return what a row of measurements says of the machine: device, threads and versions."""
    packages = {package: package_version(package) for package in ("torch", "numba", "triton")}
    threads = torch.get_num_threads()
    return {"device": device_name(device), "threads": threads, **packages, "python": platform.python_version()}
