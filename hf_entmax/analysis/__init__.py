"""What did each head learn? Statistics, roles, figures and a report for any Transformers model."""

from hf_entmax.analysis import plots
from hf_entmax.analysis.collecting.collect import AnalysisError, collect
from hf_entmax.analysis.metrics import (
    alignment_error_rate,
    ambiguity,
    density,
    dependency_accuracy,
    distance_profile,
    entropy,
    head_diversity,
    interrogation,
    max_weight,
    mean_support,
    positional_census,
    positional_confidence,
    positional_share,
    sentence_density,
    sink_mass,
    subword_merging,
    word_attention,
)
from hf_entmax.analysis.report import write_report
from hf_entmax.analysis.statistics.result import AttentionStatistics

__all__ = [
    "AnalysisError",
    "AttentionStatistics",
    "alignment_error_rate",
    "ambiguity",
    "collect",
    "density",
    "dependency_accuracy",
    "distance_profile",
    "entropy",
    "head_diversity",
    "interrogation",
    "max_weight",
    "mean_support",
    "plots",
    "positional_census",
    "positional_confidence",
    "positional_share",
    "sentence_density",
    "sink_mass",
    "subword_merging",
    "word_attention",
    "write_report",
]
