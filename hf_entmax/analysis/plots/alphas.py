"""Figures of alpha: grids, histograms, trajectories, alpha against density, and the mapping itself."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_entmax.analysis.plots import style
from hf_entmax.analysis.reading.trajectory import Trajectory, read_trajectory
from hf_entmax.ops import entmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def alpha_per_head(alphas: Any) -> Figure:
    """Return the alpha of every head.

    Args:
        alphas: ``{site: [layers, heads]}`` as :func:`hf_entmax.alphas` returns, or ``AttentionStatistics``.

    Returns:
        A Figure; colours go from 1 to 2, further where values lie outside.

    Raises:
        TypeError: alphas of a wrong type.
        ValueError: no alphas (a softmax model).
    """
    values = style.per_site(alphas, "alphas")
    return style.head_grid(values, "α", _alpha_limits(values), "cividis")


def _alpha_limits(values: Mapping[str, Tensor]) -> tuple[float, float]:
    everything = [number for tensor in values.values() for number in style.finite(tensor)]
    return min([1.0, *everything]), max([2.0, *everything])


@style.house_style()
def alpha_histograms(alphas: Any, bins: int = 20, limits: tuple[float, float] | None = None) -> Figure:
    """Draw a histogram of the learned alphas of every site, one row of panels per model.

    Args:
        alphas: ``{site: [layers, heads]}`` as :func:`hf_entmax.alphas` returns, ``AttentionStatistics`` or several of them,
            or ``{name: either}``.
        bins: of each histogram.
        limits: of alpha; default: 1 to 2, wider where values lie outside.

    Returns:
        A Figure; rows are models, columns are sites.

    Raises:
        TypeError: alphas of a wrong type. ValueError: no alphas (a softmax model).

    Reference:
        Correia, Niculae, Martins 2019, figure 3.
    """
    named = style.named_models(alphas, "alphas")
    every = [_alpha_limits(values) for values in named.values()]
    limits = limits or (min(low for low, _ in every), max(high for _, high in every))
    figure, axes = style.site_grid(named, "number of heads", sharey="row")
    for row, values in zip(axes, named.values(), strict=True):
        for site, axis in row.items():
            colour = style.SITE_COLOURS.get(site, style.PALETTE[3])
            axis.hist(style.finite(values[site]), bins=bins, range=limits, color=colour, edgecolor="white")
            axis.set_xlim(limits)
            style.whole_numbers(axis.yaxis)
    for axis in axes[-1].values():
        axis.set_xlabel("α (1 = softmax, 2 = sparsemax)")
    return figure


@style.house_style()
def alpha_trajectories(log: Trajectory | str | os.PathLike[str] | Mapping[str, Any], site: str | None = None) -> Figure:
    """Draw the alpha of every head over the training steps.

    Args:
        log: a :class:`Trajectory`, or the path of the log of ``AlphaLoggingCallback``.
        site: draw only this site, one panel per layer; default: one panel per site, heads coloured by layer. Where a line
            ends stands its layer and head; of more than twenty lines, only of those that end highest and lowest.

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
    if site is None:
        lines = {style.site_title(name): values for name, values in style.in_order(trajectory.alpha).items()}
    else:
        values = trajectory.alpha[site]
        lines = {f"{style.site_title(site)}, layer {i}": values[:, i : i + 1] for i in range(values.shape[1])}
    figure, axes = style.panels(len(lines), 3, sharey=True, width=3.4)
    for axis, (title, values) in zip(axes, lines.items(), strict=True):
        layers = values.shape[1]
        for layer, colour in enumerate(style.layer_colours(layers)):
            heads = axis.plot(trajectory.steps, values[:, layer].numpy(), color=colour, linewidth=1.0, alpha=0.85)
            for head, line in enumerate(heads):
                line.set(linestyle=style.pick(style.LINE_STYLES, head))
            if layers > 1:
                heads[0].set_label(f"layer {layer}")
        axis.set(title=title, xlabel="training step")
    for axis, values in zip(axes, lines.values(), strict=True):  # when all lines have set the common limits
        pairs = [(layer, head) for layer in range(values.shape[1]) for head in range(values.shape[2])]
        names = [f"{layer}.{head}" if site is None else f"head {head}" for layer, head in pairs]
        _label_ends(axis, float(trajectory.steps[-1]), values[-1].flatten().tolist(), names)
    for axis in axes[::3]:
        axis.set_ylabel("α of each head")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center")
    return figure


def _label_ends(axis: Axes, step: float, ends: list[float], names: list[str], most: int = 20) -> None:
    """Write the name of every line at its right end, one above the other where lines end close together."""
    lines = sorted((end, name) for end, name in zip(ends, names, strict=True) if not math.isnan(end))
    if len(lines) > most:
        lines = lines[: most // 2] + lines[-(most // 2) :]
    low, high = axis.get_ylim()
    gap, place = (high - low) / most, -math.inf
    for end, name in lines:
        place = max(end, place + gap)
        axis.annotate(name, (step, place), (3, 0), textcoords="offset points", fontsize=6.5, va="center")


@style.house_style()
def alpha_against_density(alphas: Any, densities: Any = None) -> Figure:
    """Draw the density of every head against its alpha.

    Args:
        alphas: ``{site: [layers, heads]}`` or ``AttentionStatistics``.
        densities: the same for density; default: those of ``alphas``, where that is ``AttentionStatistics``.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.

    Reference:
        Correia, Niculae, Martins 2019, section 5.1 (alpha and density by site).
    """
    alpha = style.in_order(style.per_site(alphas, "alphas"))
    density = style.per_site(alphas if densities is None else densities, "density")
    shared = [site for site in alpha if site in density]
    if not shared:
        raise ValueError("alphas and densities have no site in common.")
    figure, axis = style.one_axis(4.2, 3.2)
    for place, site in enumerate(shared):
        look = style.look(place, marker=style.MARKERS, color=style.PALETTE)
        look["color"] = style.SITE_COLOURS.get(site, look["color"])
        points = alpha[site].flatten().numpy(), 100 * density[site].flatten().numpy()
        axis.scatter(*points, s=26, **look, edgecolor="white", linewidth=0.5, label=style.site_title(site))
    axis.set(title="Alpha and density of every head", xlabel="α", ylabel="nonzero weights (%)")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


@style.house_style()
def entmax_curves(alphas: Sequence[float] = (1.0, 1.25, 1.5, 2.0, 4.0), limit: float = 3.0) -> Figure:
    """Draw the first coordinate of entmax([t, 0]) for several alphas: where it leaves the interior it is exactly 0 or 1.

    Args:
        alphas: each at least 1.
        limit: t runs from ``-limit`` to ``limit``.

    Raises:
        ValueError: no alpha, or a limit that is not positive.

    Reference:
        Peters, Niculae, Martins 2019, figure 3.
    """
    if not alphas or limit <= 0:
        raise ValueError(f"entmax_curves needs an alpha and a positive limit, got {list(alphas)} and {limit}.")
    t = torch.linspace(-limit, limit, 601, dtype=torch.float64)
    scores = torch.stack([t, torch.zeros_like(t)], dim=-1)
    names = {1.0: "softmax", 2.0: "sparsemax"}
    figure, axis = style.one_axis(4.4, 3.0)
    for place, alpha in enumerate(map(float, alphas)):
        name = f"α = {alpha:g}" + (f" ({names[alpha]})" if alpha in names else "")
        look = style.look(place, color=style.PALETTE, linestyle=style.LINE_STYLES)
        axis.plot(t.numpy(), entmax(scores, alpha)[:, 0].numpy(), **look, label=name)
    axis.set(title="α-entmax of two scores", xlabel="difference of scores t", ylabel="α-entmax([t, 0])₁")
    axis.set_xlim(-limit, limit)
    axis.legend()
    return figure
