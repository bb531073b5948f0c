"""Generation from sparse outputs: the processor behind ``generate()``, search with certificates, views and metrics.

The parts are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_entmax.generation.beam import beam_search, certified_beam_search
    from hf_entmax.generation.best_first import enumerate_hypotheses, exact_map
    from hf_entmax.generation.cache_reads import Certificate
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
    from hf_entmax.generation.results import SearchResult, certificates_in_words
    from hf_entmax.generation.sets import ConformalSets, calibrate_sets, prediction_sets
    from hf_entmax.generation.tree import HypothesisTree, hypothesis_tree
    from hf_entmax.generation.word_times import WordTime, word_times

_HOMES = {
    "beam": ("beam_search", "certified_beam_search"),
    "best_first": ("enumerate_hypotheses", "exact_map"),
    "certificate": ("Certificate",),
    "exact_cache": ("ExactSparseCache",),
    "forced": ("ForcedDecoding", "force_decode"),
    "metrics": (
        *("SAMPLING_METRIC", "SamplingMetrics", "epsilon_perplexity", "jensen_shannon", "sampling_metrics"),
        *("sparsemax_score", "support_size"),
    ),
    "processor": ("EntmaxLogitsProcessor",),
    "results": ("SearchResult", "certificates_in_words"),
    "sets": ("ConformalSets", "calibrate_sets", "prediction_sets"),
    "tree": ("HypothesisTree", "hypothesis_tree"),
    "word_times": ("WordTime", "word_times"),
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
    "WordTime",
    "beam_search",
    "calibrate_sets",
    "certificates_in_words",
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
    "word_times",
]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
