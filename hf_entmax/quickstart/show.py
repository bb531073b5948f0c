"""What the quickstart prints and draws; all drawing is done by ``hf_entmax.analysis.plots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from torch import Tensor

from hf_entmax.analysis import AttentionStatistics, plots
from hf_entmax.analysis.collecting.examples import SiteExample
from hf_entmax.generation import HypothesisTree
from hf_entmax.quickstart.data import GROUPS
from hf_entmax.quickstart.measure import NUM_BEAMS, Certificates, Score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Panels of the figure of attention maps; models with more cross-attention heads show the first layers.
MOST_MAPS = 12


def _table(title: str, left: Sequence[str], right: Sequence[str] = (), **options: object) -> Table:
    table = Table(title=title, **options)  # type: ignore[arg-type]
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def accuracy_table(columns: Mapping[str, Mapping[str, Score]]) -> Table:
    """Accuracy by group, one column per model."""
    title = "Accuracy on held-out verbs (no lemma seen in training)"
    table = _table(title, ["group"], ["questions", *columns])
    first = next(iter(columns.values()))
    for group, meaning in GROUPS.items():
        shares = (percent(scores[group].share) for scores in columns.values())
        table.add_row(meaning, str(first[group].total), *shares)
    return table


def site_table(before: AttentionStatistics, after: AttentionStatistics) -> Table:
    """Density per site, alpha and head diversity per layer."""
    caption = "density: share of nonzero weights; diversity: Jensen-Shannon divergence of the heads in nats"
    numbers = ["density", "diversity before", "diversity after"]
    table = _table("Attention on held-out verbs", ["site"], ["layer", *numbers], caption=caption)
    table.add_column("alpha per head")
    for site, density in after.density.items():
        diversity = [before.head_diversity_nats[site], after.head_diversity_nats[site]]
        row = lambda d, js: (percent(float(d.nanmean())), *(f"{float(one.nanmean()):.3f}" for one in js))  # noqa: E731
        table.add_row(site.replace("_", " "), "all", *row(density, diversity), "", style="bold")
        for layer, own in enumerate(density):
            alphas = _alphas(after.alphas[site][layer]) if site in after.alphas else "softmax"
            table.add_row("", str(layer), *row(own, [one[layer] for one in diversity]), alphas)
        table.add_section()
    return table


def output_table(certificates: Certificates, output_alpha: float) -> Table:
    """What the sparse output proves."""
    title = f"Sparse output (alpha {output_alpha:g}), beam of {NUM_BEAMS} on {certificates.total} held-out questions"
    table = _table(title, ["measure"], ["value"], show_header=False)
    number = lambda value: "-" if value is None else f"{value:.2f}"  # noqa: E731
    table.add_row("answer certified as the most probable one", percent(certificates.optimal))
    table.add_row("all answers with nonzero probability are known", percent(certificates.exhaustive))
    table.add_row("all probability on a single answer", percent(certificates.single))
    table.add_row("mean number of answers, where all are known", number(certificates.hypotheses))
    table.add_row("mean number of possible characters per step", number(certificates.support))
    table.add_row("best answer of the search is right", percent(certificates.right))
    return table


def hypothesis_table(rows: Sequence[tuple[str, list[tuple[str, float]]]], limit: int = 4) -> Table:
    """Questions with their hypotheses and probabilities."""
    table = _table("Answers that the model holds possible, with their probabilities", ["question", "answers"])
    for question, found in rows:
        listed = ", ".join(f"{text} {percent(p)}" for text, p in found[:limit])
        table.add_row(question, listed + (f", and {len(found) - limit} more" if len(found) > limit else ""))
    return table


def percent(share: float | None) -> str:
    """A share in [0, 1] with one decimal, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _alphas(alphas: Tensor) -> str:
    shown = " ".join(f"{float(value):.2f}" for value in alphas[:8] if value == value)
    return shown + (" ..." if len(alphas) > 8 else "")


def write_figures(
    folder: Path,
    before: AttentionStatistics,
    after: AttentionStatistics,
    trajectory: Path,
    example: SiteExample,
    tree: HypothesisTree | None = None,
) -> list[Path]:
    """Draw all figures and write them as PNG; ``trajectory`` is the log of ``AlphaLoggingCallback``."""
    queries, keys = ([token.text for token in tokens] for tokens in (example.queries, example.keys))
    alphas = after.alphas["cross"]
    heads = [(layer, head) for layer, row in enumerate(example.weights) for head in range(len(row))][:MOST_MAPS]
    maps = [(f"{i}.{j}  α {alphas[i, j]:.2f}", example.weights[i, j], queries, keys) for i, j in heads]
    figures: dict[str, Figure] = {
        "alpha_per_head": plots.alpha_per_head(after),
        "alpha_histograms": plots.alpha_histograms(after),
        "alpha_over_training": plots.alpha_trajectories(trajectory),
        "alpha_against_density": plots.alpha_against_density(after),
        "density_by_site": plots.density_by_site([before, after]),
        "density_per_head": plots.sorted_density(after),
        "head_diversity": plots.head_diversity([before, after]),
        "attention_maps": plots.attention_maps(maps, columns=4),
    }
    if tree is not None:
        figures["hypothesis_tree"] = tree.to_figure()
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.png" for name in figures]
    for file, figure in zip(files, figures.values(), strict=True):
        figure.savefig(file)
    return files
