"""Figures of attention heads. Every function returns a matplotlib ``Figure``; nothing is shown or saved.

matplotlib is imported when a figure is drawn: ``pip install hf_entmax[figures]``.
"""

from hf_entmax.analysis.plots.alphas import (
    alpha_against_density,
    alpha_histograms,
    alpha_per_head,
    alpha_trajectories,
    entmax_curves,
)
from hf_entmax.analysis.plots.circuits import circuit, faithfulness_curves
from hf_entmax.analysis.plots.densities import density_by_site, density_histograms, head_diversity, sorted_density
from hf_entmax.analysis.plots.heads import (
    attention_map,
    attention_maps,
    distance_profile,
    head_importance,
    head_roles,
    over_training,
    positional_heads,
)
from hf_entmax.analysis.plots.speech import word_times

__all__ = [
    "alpha_against_density", "alpha_histograms", "alpha_per_head", "alpha_trajectories", "attention_map",
    "attention_maps", "circuit", "density_by_site", "density_histograms", "distance_profile", "entmax_curves",
    "faithfulness_curves", "head_diversity", "head_importance", "head_roles", "over_training", "positional_heads",
    "sorted_density", "word_times",
]  # fmt: skip
