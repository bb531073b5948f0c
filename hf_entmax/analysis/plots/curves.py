"""The mapping itself: entmax in two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_entmax.analysis.plots.style import LINE_STYLES, PALETTE, house_style, new_figure
from hf_entmax.ops import entmax

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def entmax_curves(alphas: Sequence[float] = (1.0, 1.25, 1.5, 2.0, 4.0), limit: float = 3.0) -> Figure:
    """First coordinate of entmax([t, 0]) for several alphas: where it leaves the interior it is exactly 0 or 1.

    Args:
        alphas: each at least 1.
        limit: t runs from ``-limit`` to ``limit``.

    Returns:
        A Figure.

    Raises:
        ValueError: no alpha, or a limit that is not positive.

    Reference:
        Peters, Niculae, Martins 2019, figure 3.
    """
    if not alphas or limit <= 0:
        raise ValueError(
            f"entmax_curves needs at least one alpha and a positive limit, got {list(alphas)} and {limit}."
        )
    t = torch.linspace(-limit, limit, 601, dtype=torch.float64)
    scores = torch.stack([t, torch.zeros_like(t)], dim=-1)
    names = {1.0: "softmax", 2.0: "sparsemax"}
    with house_style():
        figure, axes = new_figure(width=4.4, height=3.0)
        axis = axes[0][0]
        for place, alpha in enumerate(alphas):
            name = f"α = {alpha:g}" + (f" ({names[float(alpha)]})" if float(alpha) in names else "")
            axis.plot(
                t.numpy(),
                entmax(scores, float(alpha))[:, 0].numpy(),
                color=PALETTE[place % len(PALETTE)],
                linestyle=LINE_STYLES[place % len(LINE_STYLES)],
                label=name,
            )
        axis.set(
            title="α-entmax of two scores",
            xlabel="difference of scores t",
            ylabel="α-entmax([t, 0])₁",
            xlim=(-limit, limit),
        )
        axis.legend()
        return figure
