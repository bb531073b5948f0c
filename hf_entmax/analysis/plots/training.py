"""What heads become over training: checkpoints of one run side by side."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_entmax.analysis.metrics.roles import ROLE_NAMES
from hf_entmax.analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Fewer than this make no line.
LEAST = 3


@style.house_style()
def over_training(models: Sequence[Any], min_strength: float = 0.5) -> Figure:
    """How many heads have which role, and mean alpha and density, over the checkpoints of a training.

    Args:
        models: ``AttentionStatistics`` of at least three checkpoints of one model; where all their names end in different
            numbers (``checkpoint-500``), these are the steps, else they stand in the order given.
        min_strength: heads below it have no role.

    Raises:
        ValueError: fewer than three checkpoints, or models with different heads.
    """
    if len(models) < LEAST:
        raise ValueError(f"{len(models)} checkpoints make no curve: give at least {LEAST}.")
    if len({str({site: values.shape for site, values in model.density.items()}) for model in models}) > 1:
        raise ValueError("the models have different heads: give checkpoints of one training.")
    steps, ordered = _steps(models)
    figure, axes = style.panels(3, 3, width=3.4)
    roles = [
        Counter(
            role.role for site in model.sites.values() for row in site.best_roles(min_strength) for role in row if role
        )
        for model in ordered
    ]
    for place, name in enumerate(sorted({name for found in roles for name in found})):
        counts = [found[name] for found in roles]
        axes[0].plot(steps, counts, label=ROLE_NAMES.get(name, name), **style.line_look(place, 3.5))
    for axis, attribute in ((axes[1], "alphas"), (axes[2], "density")):
        tables = [getattr(model, attribute) for model in ordered]
        for place, site in enumerate(style.all_sites({str(number): table for number, table in enumerate(tables)})):
            # A softmax model has no alphas: its line begins later.
            means = [float(table[site].nanmean()) if site in table else math.nan for table in tables]
            look: dict[str, Any] = style.line_look(place, 3.5) | {
                "color": style.SITE_COLOURS.get(site, style.PALETTE[3])
            }
            axis.plot(steps, means, label=style.site_title(site), **look)
    titles = ("Heads with a role", "Alpha, mean over heads", "Share of nonzero weights")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step" if steps != list(range(len(models))) else "checkpoint")
        style.whole_numbers(axis.xaxis)
        if axis.lines:
            axis.legend(fontsize=6.5)
    style.whole_numbers(axes[0].yaxis)
    axes[2].set_ylim(bottom=0)
    return figure


def _steps(models: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """The number at the end of each name, and the models in that order."""
    found = [re.search(r"(\d+)$", str(model.name)) for model in models]
    steps = [int(match[1]) for match in found if match]
    if len(set(steps)) < len(models):
        return list(range(len(models))), list(models)
    return sorted(steps), [model for _, model in sorted(zip(steps, models, strict=True), key=lambda pair: pair[0])]
