"""What the quickstart prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from torch import Tensor

from hf_entmax.analysis import AttentionStatistics
from hf_entmax.quickstart.data import GROUPS
from hf_entmax.quickstart.evaluate import Score
from hf_entmax.quickstart.search import NUM_BEAMS, Certificates

SITE_NAMES = {"encoder_self": "encoder self", "cross": "cross", "decoder_self": "decoder self"}


def accuracy_table(columns: Mapping[str, Mapping[str, Score]]) -> Table:
    """Accuracy by group, one column per model."""
    table = Table(title="Accuracy on held-out verbs (no lemma seen in training)")
    table.add_column("group")
    table.add_column("questions", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    first = next(iter(columns.values()))
    for group, title in GROUPS.items():
        table.add_row(title, str(first[group].total), *(percent(scores[group].share) for scores in columns.values()))
    return table


def site_table(before: AttentionStatistics, after: AttentionStatistics) -> Table:
    """Density per site, alpha and head diversity per layer."""
    table = Table(
        title="Attention on held-out verbs",
        caption="density: share of nonzero weights; diversity: Jensen-Shannon divergence of the heads in nats",
    )
    for name in ("site", "layer", "density", "diversity before", "diversity after", "alpha per head"):
        table.add_column(name, justify="left" if name in ("site", "alpha per head") else "right")
    for site, density in after.density.items():
        diversity = (before.head_diversity_nats[site], after.head_diversity_nats[site])
        table.add_row(
            SITE_NAMES[site],
            "all",
            percent(float(density.nanmean())),
            *(f"{float(d.nanmean()):.3f}" for d in diversity),
            "",
            style="bold",
        )
        for layer in range(density.shape[0]):
            alphas = _row(after.alphas[site][layer]) if site in after.alphas else "softmax"
            table.add_row(
                "",
                str(layer),
                percent(float(density[layer].nanmean())),
                *(f"{float(d[layer]):.3f}" for d in diversity),
                alphas,
            )
        table.add_section()
    return table


def output_table(certificates: Certificates, output_alpha: float) -> Table:
    """What the sparse output proves."""
    table = Table(
        title=f"Sparse output (alpha {output_alpha:g}), beam of {NUM_BEAMS} on {certificates.total} held-out questions",
        show_header=False,
    )
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("answer certified as the most probable one", percent(certificates.optimal))
    table.add_row("all answers with nonzero probability are known", percent(certificates.exhaustive))
    table.add_row("all probability on a single answer", percent(certificates.single))
    table.add_row("mean number of answers, where all are known", _number(certificates.hypotheses))
    table.add_row("mean number of possible characters per step", _number(certificates.support))
    table.add_row("best answer of the search is right", percent(certificates.right))
    return table


def hypothesis_table(rows: Sequence[tuple[str, list[tuple[str, float]]]], limit: int = 4) -> Table:
    """Questions with their hypotheses and probabilities."""
    table = Table(title="Answers that the model holds possible, with their probabilities")
    table.add_column("question")
    table.add_column("answers")
    for question, found in rows:
        listed = ", ".join(f"{text} {percent(p)}" for text, p in found[:limit])
        more = f", and {len(found) - limit} more" if len(found) > limit else ""
        table.add_row(question, listed + more)
    return table


def percent(share: float | None) -> str:
    """A share in [0, 1] with one decimal, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _row(alphas: Tensor) -> str:
    shown = " ".join(f"{float(value):.2f}" for value in alphas[:8] if value == value)
    return shown + (" ..." if len(alphas) > 8 else "")
