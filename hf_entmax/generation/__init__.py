"""Generation from sparse outputs: the processor behind ``generate()``, search with certificates, views and metrics.

The parts are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_entmax.generation.beam import beam_search, certified_beam_search
    from hf_entmax.generation.best_first import enumerate_hypotheses, exact_map
    from hf_entmax.generation.certificate import Certificate
    from hf_entmax.generation.exact_cache import ExactSparseCache
    from hf_entmax.generation.forced import ForcedDecoding, force_decode
    from hf_entmax.generation.metrics import (
        SAMPLING_METRIC,
        SamplingMetrics,
        epsilon_perplexity,
        jensen_shannon,
        sampling_metrics,
        sparsemax_score,
        support_size,
    )
    from hf_entmax.generation.processor import EntmaxLogitsProcessor
    from hf_entmax.generation.results import SearchResult
    from hf_entmax.generation.sets import ConformalSets, calibrate_sets, prediction_sets
    from hf_entmax.generation.tree import HypothesisTree, hypothesis_tree

_HOMES = {
    "SAMPLING_METRIC": "metrics",
    "Certificate": "certificate",
    "ConformalSets": "sets",
    "EntmaxLogitsProcessor": "processor",
    "ExactSparseCache": "exact_cache",
    "ForcedDecoding": "forced",
    "HypothesisTree": "tree",
    "SamplingMetrics": "metrics",
    "SearchResult": "results",
    "beam_search": "beam",
    "calibrate_sets": "sets",
    "certified_beam_search": "beam",
    "enumerate_hypotheses": "best_first",
    "epsilon_perplexity": "metrics",
    "exact_map": "best_first",
    "force_decode": "forced",
    "hypothesis_tree": "tree",
    "jensen_shannon": "metrics",
    "prediction_sets": "sets",
    "sampling_metrics": "metrics",
    "sparsemax_score": "metrics",
    "support_size": "metrics",
}

__all__ = [
    "SAMPLING_METRIC",
    "Certificate",
    "ConformalSets",
    "EntmaxLogitsProcessor",
    "ExactSparseCache",
    "ForcedDecoding",
    "HypothesisTree",
    "SamplingMetrics",
    "SearchResult",
    "beam_search",
    "calibrate_sets",
    "certified_beam_search",
    "enumerate_hypotheses",
    "epsilon_perplexity",
    "exact_map",
    "force_decode",
    "hypothesis_tree",
    "jensen_shannon",
    "prediction_sets",
    "sampling_metrics",
    "sparsemax_score",
    "support_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
