"""Colours, line styles and axes shared by all figures: readable in print, in grey and in colour-blind vision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

#: Okabe and Ito's palette for colour-blind vision, without its yellow (too pale on white).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
SITE_NAMES = {
    "encoder_self": "encoder self-attention",
    "cross": "cross-attention",
    "decoder_self": "decoder self-attention",
}
SITE_COLOURS = {"encoder_self": "#0072B2", "cross": "#D55E00", "decoder_self": "#009E73"}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "\\\\\\")
INK = "#1b1f24"
_RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # an SVG repeats the list in every text
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "grid.color": "#8a9199",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_entmax",
    "pdf.fonttype": 42,
}


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Apply the style for the time of drawing, without touching the settings of the caller."""
    import matplotlib

    with matplotlib.rc_context(_RC):  # pyright: ignore[reportArgumentType]
        yield


def new_figure(
    columns: int = 1, rows: int = 1, width: float = 3.2, height: float = 2.6, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with a grid of axes, each of that size in inches, independent of pyplot (no window, no global state).

    ``options`` go to ``Figure.subplots``, such as ``sharey=True``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in axes]


def site_grid(
    models: Mapping[str, Mapping[str, Any]], label: str, **options: Any
) -> tuple[Figure, list[dict[str, Axes]]]:
    """Return a figure with a row per model and a column per site; of each model, the axes of the sites that it has.

    ``label`` stands beside each row, below the model's name where there are several; ``options`` go to :func:`new_figure`.
    """
    sites = all_sites(models)
    figure, axes = new_figure(len(sites), len(models), **options)
    for axis, site in zip(axes[0], sites, strict=True):
        axis.set_title(site_title(site))
    for row, name in zip(axes, models, strict=True):
        row[0].set_ylabel(f"{name}\n{label}" if len(models) > 1 else label)
    rows = [dict(zip(sites, row, strict=True)) for row in axes]
    for row, values in zip(rows, models.values(), strict=True):
        for site in set(row) - set(values):
            row.pop(site).set_visible(False)
    return figure, rows


def one_axis(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with a single axis, its size in inches."""
    figure, axes = new_figure(width=width, height=height)
    return figure, axes[0][0]


def pick(looks: Sequence[str], place: int) -> str:
    """Return the colour, marker, ... at this place, starting over after the last."""
    return looks[place % len(looks)]


def look(place: int, **choices: Sequence[str]) -> dict[str, Any]:
    """Return the entry of each list at this place, such as ``color=PALETTE``, starting over after the last."""
    return {name: pick(values, place) for name, values in choices.items()}


def line_look(place: int, size: float = 5.0) -> dict[str, Any]:
    """Return colour, line and marker of the line at this place among several; told apart without colour, too."""
    return look(place, color=PALETTE, linestyle=LINE_STYLES, marker=MARKERS) | {"markersize": size}


def layer_colours(layers: int) -> Any:
    """Return one colour per layer, [layers, 4]: from dark to light with the depth."""
    import matplotlib

    return matplotlib.colormaps["viridis"](torch.linspace(0, 0.85, max(layers, 1)).numpy())


def colour_bar(figure: Figure, image: Any, axes: Sequence[Axes], label: str, **options: Any) -> None:
    """Draw a colour bar without a frame beside the axes."""
    bar = figure.colorbar(image, ax=axes, **options)
    bar.set_label(label)
    bar.outline.set_visible(False)


@house_style()
def head_grid(values: Mapping[str, Tensor], label: str, limits: tuple[float, float], colours: str) -> Figure:
    """Draw a number per head, ``{site: [layers, heads]}``, by colour in a grid, a panel per site; NaN stays white.

    ``label``, with unit, and ``limits`` are the colour bar's, ``colours`` is matplotlib's name of the map.
    """
    heads = max(value.shape[1] for value in values.values())
    layers = max(value.shape[0] for value in values.values())
    figure, axes = new_figure(len(values), width=0.28 * heads + 1.4, height=max(0.28 * layers + 1.2, 2.0))
    for axis, (site, value) in zip(axes[0], values.items(), strict=True):
        axis.imshow(value.numpy(), cmap=colours, vmin=limits[0], vmax=limits[1], aspect="equal")
        axis.set(title=site_title(site), xlabel="head", ylabel="layer")
        axis.grid(visible=False)
        whole_numbers(axis.xaxis)
        whole_numbers(axis.yaxis)
    colour_bar(figure, axes[0][0].images[0], axes[0], label, shrink=0.8, pad=0.02)
    return figure


def site_title(site: str) -> str:
    """Name of a site for titles, capitalised."""
    name = SITE_NAMES.get(site, site)
    return name[:1].upper() + name[1:]


def per_site(values: Any, attribute: str) -> dict[str, Tensor]:
    """Read ``{site: tensor}`` from a mapping or from the attribute of an ``AttentionStatistics``."""
    if not isinstance(values, Mapping):
        if not hasattr(values, attribute):
            raise TypeError(f"expected {{site: tensor}} or AttentionStatistics, got {type(values).__name__}.")
        values = getattr(values, attribute)
    if not values:
        raise ValueError(f"there is no {attribute} to draw: no site has any.")
    return {site: torch.as_tensor(value, dtype=torch.float64).detach().cpu() for site, value in values.items()}


def named_models(models: Any, attribute: str) -> dict[str, dict[str, Tensor]]:
    """Read ``{model name: {site: tensor}}`` from one or several models.

    They are ``AttentionStatistics`` (whose ``attribute`` is read) or several, ``{site: tensor}``, or ``{name: either}``.
    """
    several = lambda values: all(isinstance(value, Mapping) or hasattr(value, attribute) for value in values)  # noqa: E731
    if isinstance(models, Mapping) and several(models.values()):
        return {plain(str(name)): per_site(value, attribute) for name, value in models.items()}
    if isinstance(models, Sequence):
        result: dict[str, dict[str, Tensor]] = {}
        for place, model in enumerate(models):
            name = plain(str(getattr(model, "name", f"model {place + 1}")))
            if name in result:
                name = f"{name} ({place + 1})"
            result[name] = per_site(model, attribute)
        return result
    return {plain(str(getattr(models, "name", ""))): per_site(models, attribute)}


def plain(label: str) -> str:
    """Escape the name of a model or a token so that matplotlib does not take it for mathematics."""
    return label.replace("$", r"\$")


def all_sites(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the sites of several models, each once, in the usual order."""
    present = dict.fromkeys(site for per_model in models.values() for site in per_model)
    return [site for site in SITE_NAMES if site in present] + [site for site in present if site not in SITE_NAMES]


def in_order(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same by site, in the usual order."""
    return {site: values[site] for site in all_sites({"": values})}


def finite(values: Tensor) -> list[float]:
    """Return all numbers of a tensor but NaN."""
    flat = values.flatten()
    return flat[~flat.isnan()].tolist()


def panels(count: int, columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` axes, at most ``columns`` of them in a row; ``options`` as for :func:`new_figure`."""
    figure, axes = new_figure(min(count, columns), math.ceil(count / columns), **options)
    flat = [axis for row in axes for axis in row]
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def whole_numbers(axis: Axis) -> None:
    """Put ticks only at whole numbers: layers and heads have no halves."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
