"""Benchmarks: attention implementations and losses side by side in one process, and training speed of whole models.

`run` is what ``hf-entmax bench`` calls.
"""

from __future__ import annotations

from hf_entmax.bench.cases import PRESETS, Case, LossCase, ModelCase
from hf_entmax.bench.runner import Measurement, run

__all__ = ["PRESETS", "Case", "LossCase", "Measurement", "ModelCase", "run"]
