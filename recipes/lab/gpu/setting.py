"""Where a part runs and how large its problems are; timing and goals, the same for all parts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_entmax.bench.timing import interleaved_times, spread

from ..rows import ROOT

#: Processes that compile at the same time: about as many as the machine has cores.
PROCESSES = 14


@dataclass
class Setting:
    """One run of a part.

    Args:
        out: the folder of what is found.
        tiny: tiny problems on the CPU, interpreted.
        seconds: what the part has.
    """

    out: Path
    tiny: bool
    seconds: float
    _start: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        """Where tensors live."""
        return "cpu" if self.tiny else "cuda"

    @property
    def left(self) -> float:
        """Seconds that are left to the part."""
        return max(self.seconds - (time.monotonic() - self._start), 0.0)

    def times(self, functions: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
        """Milliseconds of functions that take turns, by name."""
        return interleaved_times(functions, 1 if self.tiny else 30, self.device, min(seconds, max(self.left, 1.0)))


def figures(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median and spread in milliseconds, by name."""
    names = ("median", "q20", "q80", "repeats")
    return {name: dict(zip(names, (round(x, 5) for x in spread(own)), strict=True)) for name, own in times.items()}


def together(module: str, calls: Iterable[Sequence[object]]) -> None:
    """Run a module of this package once for each list of arguments, in many processes at once: to fill Triton's cache.

    What fails here fails again, with its reason, where it is measured.
    """
    start = [sys.executable, "-m", f"recipes.lab.gpu.{module}"]
    with ThreadPoolExecutor(PROCESSES) as pool:
        for arguments in calls:
            pool.submit(subprocess.run, [*start, *map(str, arguments)], cwd=ROOT)


def goal(ratio: float, at_most: float) -> dict[str, Any]:
    """A ratio beside the most it should be."""
    return {"ratio": ratio, "at_most": at_most, "met": ratio <= at_most}
