"""Figures of alpha: histograms, trajectories, alpha against density."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_entmax.analysis.plots.style import (
    LINE_STYLES,
    MARKERS,
    PALETTE,
    SITE_COLOURS,
    all_sites,
    finite,
    hide_unused,
    house_style,
    new_figure,
    per_site,
    site_title,
)
from hf_entmax.analysis.reading.trajectory import Trajectory, read_trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def alpha_histograms(alphas: Any, bins: int = 20, limits: tuple[float, float] | None = None) -> Figure:
    """Histogram of the learned alphas of every site.

    Args:
        alphas: ``{site: [layers, heads]}`` as :func:`hf_entmax.alphas` returns, or ``AttentionStatistics``.
        bins: of each histogram.
        limits: of alpha; default: 1 to 2, wider where values lie outside.

    Returns:
        A Figure, one panel per site.

    Raises:
        TypeError: alphas of a wrong type. ValueError: no alphas (a softmax model).

    Reference:
        Correia, Niculae, Martins 2019, figure 3.
    """
    values = {site: finite(tensor.detach()) for site, tensor in per_site(alphas, "alphas").items()}
    everything = [value for numbers in values.values() for value in numbers]
    low, high = limits or (min([1.0, *everything]), max([2.0, *everything]))
    with house_style():
        figure, axes = new_figure(len(values), sharey=True)
        for axis, site in zip(axes[0], all_sites({"": values}), strict=True):
            axis.hist(
                values[site], bins=bins, range=(low, high), color=SITE_COLOURS.get(site, PALETTE[3]), edgecolor="white"
            )
            axis.set(title=site_title(site), xlabel="α (1 = softmax, 2 = sparsemax)", xlim=(low, high))
        axes[0][0].set_ylabel("number of heads")
        return figure


def alpha_trajectories(log: Trajectory | str | os.PathLike[str] | Mapping[str, Any], site: str | None = None) -> Figure:
    """Alpha of every head over the training steps.

    Args:
        log: a :class:`Trajectory`, or the path of the log of ``AlphaLoggingCallback``.
        site: draw only this site, one panel per layer; default: one panel per site, heads coloured by layer. Where a line
            ends stands its layer and head; of more than twenty lines, only of those that end highest and lowest.

    Returns:
        A Figure.

    Raises:
        ValueError: the log holds no alpha, or none of that site.

    Reference:
        Correia, Niculae, Martins 2019, figure 2.
    """
    trajectory = log if isinstance(log, Trajectory) else read_trajectory(log)  # type: ignore[arg-type]
    if not trajectory.alpha:
        raise ValueError("the log holds no alpha: was the model patched with alpha='learned'?")
    if site is not None and site not in trajectory.alpha:
        raise ValueError(f"the log holds no alpha of {site!r}; it has {', '.join(trajectory.alpha)}.")
    panels: list[tuple[str, Tensor]] = []
    if site is None:
        panels = [(site_title(name), trajectory.alpha[name]) for name in all_sites({"": trajectory.alpha})]
    else:
        values = trajectory.alpha[site]
        panels = [
            (f"{site_title(site)}, layer {layer}", values[:, layer : layer + 1]) for layer in range(values.shape[1])
        ]
    with house_style():
        import matplotlib

        figure, axes = new_figure(min(len(panels), 3), -(-len(panels) // 3), sharey=True, width=3.4)
        flat = [axis for row in axes for axis in row]
        for axis, (title, values) in zip(flat, panels, strict=False):
            layers = values.shape[1]
            colours = matplotlib.colormaps["viridis"](torch.linspace(0, 0.85, max(layers, 1)).numpy())
            for layer in range(layers):
                lines = axis.plot(
                    trajectory.steps, values[:, layer].numpy(), color=colours[layer], linewidth=1.0, alpha=0.85
                )
                for head, line in enumerate(lines):
                    line.set_linestyle(LINE_STYLES[head % len(LINE_STYLES)])
                if layers > 1:
                    lines[0].set_label(f"layer {layer}")
            axis.set(title=title, xlabel="training step")
        for axis, (_, values) in zip(flat, panels, strict=False):  # when all lines have set the common limits
            pairs = [(layer, head) for layer in range(values.shape[1]) for head in range(values.shape[2])]
            names = [f"{layer}.{head}" if site is None else f"head {head}" for layer, head in pairs]
            _label_ends(axis, float(trajectory.steps[-1]), values[-1].flatten().tolist(), names)
        for row in axes:
            row[0].set_ylabel("α of each head")
        hide_unused(axes, len(panels))
        handles, labels = flat[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside right center")
        return figure


def _label_ends(axis: Axes, step: float, ends: list[float], names: list[str], most: int = 20) -> None:
    """Writes the name of every line at its right end, one above the other where lines end close together."""
    lines = sorted((end, name) for end, name in zip(ends, names, strict=True) if not math.isnan(end))
    if len(lines) > most:
        lines = lines[: most // 2] + lines[-(most // 2) :]
    low, high = axis.get_ylim()
    gap, place = (high - low) / most, -math.inf
    for end, name in lines:
        place = max(end, place + gap)
        axis.annotate(name, (step, place), (3, 0), textcoords="offset points", fontsize=6.5, va="center")


def alpha_against_density(alphas: Any, densities: Any = None) -> Figure:
    """Density of every head against its alpha.

    Args:
        alphas: ``{site: [layers, heads]}`` or ``AttentionStatistics``.
        densities: the same for density; default: those of ``alphas``, where that is ``AttentionStatistics``.

    Returns:
        A Figure.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.

    Reference:
        Correia, Niculae, Martins 2019, section 5.1 (alpha and density by site).
    """
    alpha = per_site(alphas, "alphas")
    density = per_site(alphas if densities is None else densities, "density")
    shared = [site for site in all_sites({"": alpha}) if site in density]
    if not shared:
        raise ValueError("alphas and densities have no site in common.")
    with house_style():
        figure, axes = new_figure(width=4.2, height=3.2)
        axis = axes[0][0]
        for place, site in enumerate(shared):
            axis.scatter(
                alpha[site].flatten().numpy(),
                100 * density[site].flatten().numpy(),
                s=26,
                marker=MARKERS[place % len(MARKERS)],
                color=SITE_COLOURS.get(site, PALETTE[place]),
                edgecolor="white",
                linewidth=0.5,
                label=site_title(site),
            )
        axis.set(title="Alpha and density of every head", xlabel="α", ylabel="nonzero weights (%)")
        axis.set_ylim(bottom=0)
        axis.legend()
        return figure
