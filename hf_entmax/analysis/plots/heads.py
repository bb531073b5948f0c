"""Figures of single heads and of their roles: attention maps, distance profiles, role grids, importance, checkpoints of a training."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.roles import ROLE_NAMES
from hf_entmax.analysis.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Checkpoints; fewer make no line.
_LEAST = 3


def attention_map(
    weights: Tensor,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one head's attention on one sentence; every nonzero weight is outlined.

    Args:
        weights: [T_q, T_k] in [0, 1].
        query_tokens: labels of the rows.
        key_tokens: labels of the columns; default: ``query_tokens`` for square weights.
        title: above the map.

    Raises:
        ValueError: labels that do not fit the weights.

    Reference:
        Peters, Niculae, Martins 2019, figure 5; Correia, Niculae, Martins 2019, figures 7 to 10.
    """
    return attention_maps([(title or "", weights, query_tokens, key_tokens)])


@style.house_style()
def attention_maps(
    maps: Sequence[tuple[str, Tensor, Sequence[str] | None, Sequence[str] | None]], columns: int = 3
) -> Figure:
    """Draw several attention maps side by side.

    Args:
        maps: ``(title, weights [T_q, T_k], query tokens, key tokens)`` each, as for :func:`attention_map`.
        columns: most panels in a row.

    Raises:
        ValueError: no map, or labels that do not fit their weights.
    """
    if not maps:
        raise ValueError("there is no attention map to draw.")
    checked = [_check_map(*entry) for entry in maps]
    longest = max(max(weights.shape) for _, weights, _, _ in checked)
    side = min(max(0.19 * longest + 1.3, 2.6), 9.0)
    figure, axes = style.panels(len(checked), columns, width=side, height=side)
    for axis, entry in zip(axes, checked, strict=True):
        _draw_map(axis, *entry)
    style.colour_bar(figure, axes[0].images[0], axes, "attention weight", shrink=0.6, fraction=0.03, pad=0.01)
    return figure


def _check_map(title: str, weights: Tensor, rows: Any, keys: Any) -> tuple[str, Tensor, Any, Any]:
    weights = torch.as_tensor(weights).detach().float().cpu()
    if weights.dim() != 2:
        raise ValueError(f"weights must be [T_q, T_k], got {list(weights.shape)}: choose one sentence and one head.")
    if keys is None and weights.shape[0] == weights.shape[1]:
        keys = rows
    for what, labels, size in (("query_tokens", rows, weights.shape[0]), ("key_tokens", keys, weights.shape[1])):
        if labels is not None and len(labels) != size:
            raise ValueError(f"{what} has {len(labels)} labels for {size} tokens.")
    names = [None if labels is None else list(map(str, labels)) for labels in (rows, keys)]
    return title, weights, names[0], names[1]


def _draw_map(axis: Axes, title: str, weights: Tensor, rows: list[str] | None, keys: list[str] | None) -> None:
    from matplotlib.collections import LineCollection

    axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    # The outline of the support: the border between zero and nonzero cells, drawn once.
    support = torch.nn.functional.pad(weights != 0, (1, 1, 1, 1))
    segments = []
    for i, j in (support[1:] != support[:-1])[:, 1:-1].nonzero().tolist():
        segments.append([(j - 0.5, i - 0.5), (j + 0.5, i - 0.5)])
    for i, j in (support[:, 1:] != support[:, :-1])[1:-1].nonzero().tolist():
        segments.append([(j - 0.5, i - 0.5), (j - 0.5, i + 0.5)])
    axis.add_collection(LineCollection(segments, colors="#D55E00", linewidths=1.0))
    small = 6 if max(weights.shape) > 30 else 7.5
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        if keys is not None:
            axis.set_xticks(range(len(keys)), [style.plain(token) for token in keys], rotation=90, fontsize=small)
        if rows is not None:
            axis.set_yticks(range(len(rows)), [style.plain(token) for token in rows], fontsize=small)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    axis.set(xlabel="key", ylabel="query")
    if title:
        axis.set_title(title, pad=8)


@style.house_style()
def distance_profile(profile: Any, heads: Sequence[tuple[str, int, int]] | None = None, max_lines: int = 7) -> Figure:
    """Draw where heads look, by distance between key and query.

    Args:
        profile: ``AttentionStatistics``, or a tensor [heads, 2 D + 3] of :func:`hf_entmax.analysis.distance_profile`.
        heads: ``(site, layer, head)`` to draw from ``AttentionStatistics``; default: the heads of self-attention that
            concentrate most on one distance.
        max_lines: largest number of lines.

    Returns:
        A Figure; the first and the last point gather everything farther away.

    Raises:
        TypeError: a wrong type. ValueError: nothing to draw.
    """
    if isinstance(profile, Tensor):
        lines = [(f"head {head}", row) for head, row in enumerate(profile.detach().double().cpu()[:max_lines])]
    else:
        lines = _profile_lines(profile, heads, max_lines)
    if not lines:
        raise ValueError("there is no distance profile to draw.")
    distance = (len(lines[0][1]) - 3) // 2
    positions = list(range(-distance - 1, distance + 2))
    figure, axis = style.one_axis(6.4, 3.0)
    for place, (name, values) in enumerate(lines):
        line = style.look(place // len(style.PALETTE), linestyle=style.LINE_STYLES)  # colours first, then lines
        axis.plot(positions, 100 * values.numpy(), **style.line_look(place, 4.0) | line, label=name)
    step = max(distance // 5, 1)
    inner = sorted({0, *range(step, distance, step), *range(-step, -distance, -step)})
    names = [f"{tick:+d}".replace("-", "−") if tick else "0" for tick in inner]
    axis.set_xticks([-distance - 1, *inner, distance + 1], [f"< −{distance}", *names, f"> {distance}"])
    axis.set(title="Where heads look", xlabel="key position − query position (tokens)", ylabel="attention mass (%)")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def _profile_lines(statistics: Any, heads: Sequence[Any] | None, limit: int) -> list[tuple[str, Tensor]]:
    if not hasattr(statistics, "sites"):
        raise TypeError(f"expected AttentionStatistics or a tensor [heads, 2 D + 3], got {type(statistics).__name__}.")
    profiles = {site: value.distance_profile() for site, value in statistics.sites.items()}
    if heads is None:
        ranked = []
        for site, profile in profiles.items():
            if site == "cross":
                continue
            peak = profile[..., 1:-1].amax(-1).nan_to_num(0.0)
            ranked += [(float(peak[layer, head]), site, layer, head) for layer, head in (peak > 0).nonzero().tolist()]
        heads = [(site, layer, head) for _, site, layer, head in sorted(ranked, key=lambda entry: -entry[0])[:limit]]
    chosen = list(heads)[:limit]
    return [(f"{style.site_title(site)} {layer}.{head}", profiles[site][layer, head]) for site, layer, head in chosen]


@style.house_style()
def head_roles(statistics: Any, min_strength: float = 0.5) -> Figure:
    """Draw a grid of all heads, each with the role that explains it best.

    Args:
        statistics: ``AttentionStatistics``.
        min_strength: heads below it have no role.

    Returns:
        A Figure, one panel per site; rows are layers, columns are heads.
    """
    from matplotlib.patches import Patch, Rectangle

    grids = {site: value.best_roles(min_strength) for site, value in statistics.sites.items()}
    found = dict.fromkeys(role.role for grid in grids.values() for row in grid for role in row if role)
    order = [name for name in dict.fromkeys((*ROLE_NAMES, *found)) if name in found]
    looks: dict[str | None, dict[str, Any]] = {}
    for place, name in enumerate(order):
        looks[name] = style.look(place, facecolor=style.PALETTE)
        looks[name] |= style.look(place // len(style.PALETTE), hatch=style.HATCHES)
    looks[None] = {"facecolor": "#d9dde1"}
    widest = max(len(row) for grid in grids.values() for row in grid)
    tallest = max(len(grid) for grid in grids.values())
    figure, axes = style.new_figure(len(grids), width=0.3 * widest + 1.1, height=max(0.3 * tallest + 1.4, 2.2))
    for axis, (site, grid) in zip(axes[0], grids.items(), strict=True):
        for layer, row in enumerate(grid):
            for head, role in enumerate(row):
                shade = 0.35 + 0.65 * role.strength if role else 1.0
                look = looks[role.role if role else None] | {"alpha": shade, "linewidth": 0}
                axis.add_patch(Rectangle((head - 0.44, layer - 0.44), 0.88, 0.88, **look))
        axis.set(title=style.site_title(site), xlabel="head", ylabel="layer", aspect="equal")
        axis.set(xlim=(-0.6, len(grid[0]) - 0.4), ylim=(len(grid) - 0.4, -0.6))
        axis.set_xticks(range(len(grid[0])))
        axis.set_yticks(range(len(grid)))
        axis.grid(visible=False)
    patches = [
        Patch(**look, label=ROLE_NAMES.get(name, name) if name else "no single role") for name, look in looks.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 4))
    return figure


@style.house_style()
def positional_heads(statistics: Any) -> Figure:
    """Draw the confidence of the positional heads at the offsets -1, 0 and +1, with medians.

    Args:
        statistics: ``AttentionStatistics`` or several of them.

    Returns:
        A Figure; one point per positional head, a bar at the median.

    Reference:
        Correia, Niculae, Martins 2019, figure 7.
    """
    models = list(statistics) if isinstance(statistics, Sequence) else [statistics]
    # Beside every bar stands its median; beside the axes, the legend.
    figure, axis = style.one_axis(max(5.2, 1.8 + 2.1 * len(models)), 3.0)
    half = min(0.14, 0.22 / len(models))
    for place, model in enumerate(models):
        colour = style.pick(style.PALETTE, place)
        for spot, offset in enumerate((-1, 0, 1)):
            own = [site for name, site in model.sites.items() if name != "cross"]
            values = [100 * value for site in own for value in site.positional_census(offset)["confidences"]]
            at = spot + (place - (len(models) - 1) / 2) * 0.85 / len(models)
            label = style.plain(model.name) if spot == 0 and len(models) > 1 else None
            spread = torch.linspace(-0.4 * half, 0.4 * half, len(values)).tolist() if len(values) > 1 else [0.0]
            points = [at + shift for shift in spread[: len(values)]]
            look = {"color": colour, "marker": style.pick(style.MARKERS, place), "alpha": 0.8, "linewidth": 0}
            axis.scatter(points, values, s=24, **look, label=label)
            if values:
                median = float(torch.tensor(values).quantile(0.5))
                axis.hlines(median, at - half, at + half, color=colour, linewidth=2)
                axis.annotate(f"{median:.1f} %", (at + half, median), fontsize=8, va="center")
            else:
                axis.annotate("none", (at, 2), fontsize=7, ha="center", color="#6b7280")
    axis.set_xticks(range(3), ["previous token\n(−1)", "same token\n(0)", "next token\n(+1)"])
    axis.set(title="Positional heads", ylabel="mean weight at that offset (%)", xlim=(-0.5, 2.6), ylim=(0, 103))
    axis.grid(visible=False, axis="x")
    if len(models) > 1:
        figure.legend(loc="outside right upper")
    return figure


def head_importance(importance: Any, label: str = "importance (nats per token)") -> Figure:
    """Draw the importance of every head as a grid per site.

    Args:
        importance: ``{site: [layers, heads]}``.
        label: of the colour bar, with unit.

    Raises:
        ValueError: nothing to draw.

    Reference:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?".
    """
    values = style.per_site(importance, "importance")
    largest = max(float(value.abs().nan_to_num(0.0).max()) for value in values.values()) or 1.0
    if any(bool((value < 0).any()) for value in values.values()):
        return style.head_grid(values, label, (-largest, largest), "PuOr")
    return style.head_grid(values, label, (0.0, largest), "cividis")


@style.house_style()
def over_training(models: Sequence[Any], min_strength: float = 0.5) -> Figure:
    """Draw how many heads have which role, and mean alpha and density, over the checkpoints of a training.

    Args:
        models: ``AttentionStatistics`` of at least three checkpoints of one model; where all their names end in different
            numbers (``checkpoint-500``), these are the steps, else they stand in the order given.
        min_strength: heads below it have no role.

    Raises:
        ValueError: fewer than three checkpoints, or models with different heads.
    """
    if len(models) < _LEAST:
        raise ValueError(f"{len(models)} checkpoints make no curve: give at least {_LEAST}.")
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
    """Return the number at the end of each name, and the models in that order."""
    found = [re.search(r"(\d+)$", str(model.name)) for model in models]
    steps = [int(match[1]) for match in found if match]
    if len(set(steps)) < len(models):
        return list(range(len(models))), list(models)
    return sorted(steps), [model for _, model in sorted(zip(steps, models, strict=True), key=lambda pair: pair[0])]
