"""Figures of density and diversity: histograms, sorted heads per layer, divergence per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_entmax.analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style.house_style()
def density_histograms(models: Any, bins: int = 20) -> Figure:
    """Draw a histogram of the densities of the heads of every site, one row of panels per model.

    Args:
        models: ``AttentionStatistics`` or several of them, ``{site: [layers, heads]}``, or ``{name: either}``.
        bins: of each histogram.

    Returns:
        A Figure; rows are models, columns are sites.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.

    Reference:
        Correia, Niculae, Martins 2019, figure 4.
    """
    named = style.named_models(models, "density")
    figure, axes = style.site_grid(named, "number of heads", sharex=True, sharey=True, height=2.2)
    for row, densities in zip(axes, named.values(), strict=True):
        for site, axis in row.items():
            values = [100 * value for value in style.finite(densities[site])]
            colour = style.SITE_COLOURS.get(site, style.PALETTE[3])
            axis.hist(values, bins=bins, range=(0, 100), color=colour, edgecolor="white")
            if values:
                mean = sum(values) / len(values)
                axis.axvline(mean, color=style.INK, linewidth=1, linestyle="--")
                shift, side = (-4, "right") if mean > 60 else (4, "left")
                axis.annotate(
                    f"mean {mean:.0f} %", (mean, 0.94), (shift, 0), ("data", "axes fraction"), "offset points",
                    ha=side, va="top", fontsize=8,
                )  # fmt: skip
            axis.margins(y=0.18)
            style.whole_numbers(axis.yaxis)
    for axis in axes[-1].values():
        axis.set_xlabel("nonzero weights (%)")
    return figure


@style.house_style()
def sorted_density(densities: Any) -> Figure:
    """Draw the densities of the heads of each layer, in ascending order: which layers hold the sparse heads.

    Args:
        densities: as the models of :func:`density_histograms`.

    Returns:
        A Figure, one panel per model (rows) and site (columns), one line per layer.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.

    Reference:
        Correia, Niculae, Martins 2019, figure 5.
    """
    named = style.named_models(densities, "density")
    colours = style.layer_colours(max(len(layers) for values in named.values() for layers in values.values()))
    height = 2.9 if len(named) == 1 else 2.1
    figure, axes = style.site_grid(named, "nonzero weights (%)", sharey=True, width=3.4, height=height)
    for row, values in zip(axes, named.values(), strict=True):
        for site, axis in row.items():
            for layer, (heads, colour) in enumerate(zip(values[site], colours, strict=False)):
                ordered = sorted(100 * value for value in style.finite(heads))
                look = style.look(layer, marker=style.MARKERS) | {"color": colour, "markersize": 4, "linewidth": 1.2}
                axis.plot(range(1, len(ordered) + 1), ordered, **look, label=f"layer {layer}")
            axis.set_ylim(0, 103)
            style.whole_numbers(axis.xaxis)
    for axis in axes[-1].values():
        axis.set_xlabel("heads of a layer, sparsest first")
    deepest = max((axis for row in axes for axis in row.values()), key=lambda axis: len(axis.lines))
    figure.legend(*deepest.get_legend_handles_labels(), loc="outside right center")
    return figure


@style.house_style()
def head_diversity(models: Any) -> Figure:
    """Draw the divergence between the heads of each layer, for one or several models.

    Args:
        models: ``AttentionStatistics`` or several of them, ``{site: [layers]}``, or ``{name: either}``.

    Returns:
        A Figure, one panel per site, one line per model.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.

    Reference:
        Correia, Niculae, Martins 2019, figure 6.
    """
    named = style.named_models(models, "head_diversity")
    sites = style.all_sites(named)
    figure, axes = style.new_figure(len(sites), sharey=True, width=3.4, height=2.9)
    for axis, site in zip(axes[0], sites, strict=True):
        for place, (name, values) in enumerate(named.items()):
            if site in values:
                axis.plot(range(len(values[site])), values[site].numpy(), **style.line_look(place), label=name or None)
        axis.set(title=style.site_title(site), xlabel="layer")
        style.whole_numbers(axis.xaxis)
    everything = [value for values in named.values() for layers in values.values() for value in style.finite(layers)]
    axes[0][0].set_ylim(0, max(1.08 * max(everything, default=1.0), 0.05))
    if len(named) > 1:
        axes[0][-1].legend(loc="best")
    axes[0][0].set_ylabel("Jensen–Shannon divergence of heads\n(units of log number of heads)")
    return figure


@style.house_style()
def density_by_site(models: Any) -> Figure:
    """Draw the mean density of every site, models side by side.

    Args:
        models: as for :func:`density_histograms`.

    Returns:
        A Figure with one group of bars per site.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.
    """
    named = style.named_models(models, "density")
    sites = style.all_sites(named)
    width = 0.8 / len(named)
    # A bar must be as wide as the number above it.
    figure, axis = style.one_axis(1.6 + max(1.5, 0.32 * len(named)) * len(sites), 2.8)
    for place, (name, values) in enumerate(named.items()):
        heights = [100 * float(values[site].nanmean()) if site in values else 0.0 for site in sites]
        positions = [spot - 0.4 + (place + 0.5) * width for spot in range(len(sites))]
        look = style.look(place, color=style.PALETTE, hatch=style.HATCHES)
        bars = axis.bar(positions, heights, width * 0.92, **look, edgecolor="white", label=name)
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axis.set_xticks(range(len(sites)), [style.site_title(site).replace(" ", "\n", 1) for site in sites])
    axis.set(ylabel="nonzero weights (%)", ylim=(0, 112))
    axis.grid(visible=False, axis="x")
    if len(named) > 1:
        figure.legend(loc="outside upper left", ncols=min(len(named), 5))
    return figure
