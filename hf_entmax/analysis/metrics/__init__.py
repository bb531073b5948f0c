"""Statistics of attention weights: pure functions on tensors [B, H, T_q, T_k], each with its equation and its paper.

All of them build sums first and divide last, so that :func:`hf_entmax.analysis.collect` can add the sums of many
batches and get exactly what one huge batch would have given.
"""

from hf_entmax.analysis.metrics.annotation import alignment_error_rate, alignment_links, dependency_accuracy
from hf_entmax.analysis.metrics.position import (
    distance_profile,
    positional_census,
    positional_confidence,
    positional_share,
)
from hf_entmax.analysis.metrics.sparsity import (
    ambiguity,
    density,
    entropy,
    head_diversity,
    max_weight,
    mean_support,
    sentence_density,
)
from hf_entmax.analysis.metrics.words import interrogation, sink_mass, subword_merging, word_attention
from hf_entmax.batches.pairs import possible_pairs

__all__ = [
    "alignment_error_rate", "alignment_links", "ambiguity", "density", "dependency_accuracy", "distance_profile",
    "entropy", "head_diversity", "interrogation", "max_weight", "mean_support", "positional_census",
    "positional_confidence", "positional_share", "possible_pairs", "sentence_density", "sink_mass", "subword_merging",
    "word_attention",
]  # fmt: skip
