"""Benchmarks: attention implementations and losses side by side in one process, and training speed of whole models.

`run` is what ``hf-entmax bench`` calls. The timer serves other measurements as well.
"""

from __future__ import annotations

from hf_entmax.bench.cases import PRESETS, Case, LossCase, ModelCase
from hf_entmax.bench.runner import Measurement, run
from hf_entmax.bench.timing import Spread, interleaved_times, machine, peak_memory, ratios, spread

__all__ = [
    "PRESETS",
    "Case",
    "LossCase",
    "Measurement",
    "ModelCase",
    "Spread",
    "interleaved_times",
    "machine",
    "peak_memory",
    "ratios",
    "run",
    "spread",
]
