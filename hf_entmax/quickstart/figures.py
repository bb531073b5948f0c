"""The figures of the quickstart; all drawing is done by ``hf_entmax.analysis.plots``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_entmax.analysis import AttentionStatistics, plots
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.generation import HypothesisTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Panels of the figure of attention maps; models with more cross-attention heads show the first layers.
MOST_MAPS = 12


def write_figures(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    statistics: tuple[AttentionStatistics, AttentionStatistics],
    trajectory: Path,
    example: dict[str, Tensor],
    tree: HypothesisTree | None = None,
) -> list[Path]:
    """Draw and write all figures as PNG.

    Args:
        folder: created if need be.
        model: the patched model.
        tokenizer: names the tokens of the attention maps.
        statistics: of the model before and after.
        trajectory: the file that ``AlphaLoggingCallback`` wrote.
        example: a batch with the question, and its answer as labels, that the attention maps show.
        tree: of hypotheses, if the output is sparse.

    Returns:
        The files.
    """
    before, after = statistics
    figures: dict[str, Figure] = {
        "alpha_per_head": plots.alpha_per_head(after),
        "alpha_histograms": plots.alpha_histograms(after),
        "alpha_over_training": plots.alpha_trajectories(trajectory),
        "alpha_against_density": plots.alpha_against_density(after),
        "density_by_site": plots.density_by_site([before, after]),
        "density_per_head": plots.sorted_density(after),
        "head_diversity": plots.head_diversity([before, after]),
        "attention_maps": plots.attention_maps(_cross_attention(model, tokenizer, after, example), columns=4),
    }
    if tree is not None:
        figures["hypothesis_tree"] = tree.to_figure()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1])
    return files


def _cross_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    statistics: AttentionStatistics,
    example: dict[str, Tensor],
) -> list[tuple[str, Tensor, list[str], list[str]]]:
    found = collect_examples(model, [example], tokenizer, limit=1)[0].sites["cross"]
    rows, columns = [token.text for token in found.queries], [token.text for token in found.keys]
    alphas = statistics.alphas["cross"]
    heads = [(layer, head) for layer in range(found.weights.shape[0]) for head in range(found.weights.shape[1])][
        :MOST_MAPS
    ]
    return [
        (f"{layer}.{head}  α {alphas[layer, head]:.2f}", found.weights[layer, head], rows, columns)
        for layer, head in heads
    ]
