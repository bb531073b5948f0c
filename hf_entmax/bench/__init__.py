"""Benchmarks: attention implementations side by side in one process, and training speed of whole models.

`run` is what ``hf-entmax bench`` calls.
"""

from __future__ import annotations

from hf_entmax.bench.cases import PRESETS, Case, ModelCase
from hf_entmax.bench.runner import Measurement, run

__all__ = ["PRESETS", "Case", "Measurement", "ModelCase", "run"]
