"""One number per head as a grid of layers and heads, a panel per site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_entmax.analysis.plots.style import finite, house_style, new_figure, per_site, site_title, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def head_grid(values: Mapping[str, Tensor], label: str, limits: tuple[float, float], colours: str) -> Figure:
    """A number per head, by colour.

    Args:
        values: ``{site: [layers, heads]}``; NaN stays white.
        label: of the colour bar, with unit.
        limits: of the colours.
        colours: matplotlib's name of the colour map.

    Returns:
        A Figure.
    """
    with house_style():
        heads = max(value.shape[1] for value in values.values())
        layers = max(value.shape[0] for value in values.values())
        figure, axes = new_figure(len(values), width=0.28 * heads + 1.4, height=max(0.28 * layers + 1.2, 2.0))
        for axis, (site, value) in zip(axes[0], values.items(), strict=True):
            axis.imshow(value.numpy(), cmap=colours, vmin=limits[0], vmax=limits[1], aspect="equal")
            axis.set(title=site_title(site), xlabel="head", ylabel="layer")
            axis.grid(visible=False)
            for which in (axis.xaxis, axis.yaxis):
                whole_numbers(which)
        bar = figure.colorbar(axes[0][0].images[0], ax=axes[0], shrink=0.8, pad=0.02)
        bar.set_label(label)
        bar.outline.set_visible(False)
        return figure


def alpha_per_head(alphas: Any) -> Figure:
    """The alpha of every head.

    Args:
        alphas: ``{site: [layers, heads]}`` as :func:`hf_entmax.alphas` returns, or ``AttentionStatistics``.

    Returns:
        A Figure; colours go from 1 to 2, further where values lie outside.

    Raises:
        TypeError: alphas of a wrong type.
        ValueError: no alphas (a softmax model).
    """
    values = {site: tensor.detach().cpu() for site, tensor in per_site(alphas, "alphas").items()}
    everything = [number for tensor in values.values() for number in finite(tensor)]
    limits = (min([1.0, *everything]), max([2.0, *everything]))
    return head_grid(values, "α", limits, "cividis")
