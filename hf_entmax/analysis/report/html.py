"""Putting the page together: template, styles, scripts, data and figures in one file."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from hf_entmax.analysis.metrics.roles import ROLE_NAMES
from hf_entmax.analysis.plots.style import INK, finite, house_style
from hf_entmax.analysis.report.findings import HeadName, all_roles, head_name
from hf_entmax.analysis.report.page_data import build_payload
from hf_entmax.analysis.statistics.result import AttentionStatistics


def render(
    models: list[AttentionStatistics], title: str | None, figures: bool, max_bytes: int, files: list[str]
) -> str:
    """Render the page as HTML, the main model first; ``files`` are the names of the files beside it."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader(__package__ or "", "assets"), autoescape=True)
    missing = figures and importlib.util.find_spec("matplotlib") is None
    drawn = list(_figures(models)) if figures and not missing else []
    assets = resources.files(__package__ or "") / "assets"
    names = ("style.css", "page.js", "viewer.js", "table.js")
    parts = {name: (assets / name).read_text(encoding="utf-8") for name in names}
    fixed = sum(len(svg) for _, _, svg in drawn) + sum(map(len, parts.values()))
    room = max_bytes - fixed
    while True:
        payload = build_payload(models, max(room, 0))
        data = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        excess = len(data.encode()) + fixed + 20_000 - max_bytes
        if excess <= 0 or all(len(model["examples"]) <= 1 for model in payload["models"]) or room <= 0:
            break
        room -= excess
    return environment.get_template("report.html.j2").render(
        title=title or " and ".join(model.name for model in models),
        models=models,
        # "</" would end the script element inside a string of the data.
        data=data.replace("<", "\\u003c"),
        style=parts["style.css"],
        scripts="\n".join(parts[name] for name in ("viewer.js", "table.js", "page.js")),
        figures=drawn,
        figures_missing=missing,
        files=files,
    )


def _figures(models: Sequence[AttentionStatistics]) -> Iterator[tuple[str, str, str]]:
    """Yield ``(identifier, caption, SVG)`` of every figure that has something to show."""
    from hf_entmax.analysis import plots

    main, several = models[0], len(models) > 1
    everyone: Any = list(models) if several else main
    named = any(role for _, role in all_roles(main))
    sparse = [any(bool((values < 1).any()) for values in model.density.values()) for model in models]
    alphas_differ = len({round(value, 6) for values in main.alphas.values() for value in finite(values)}) > 1
    about_roles = "The role that explains each head best; the stronger the colour, the better it does."
    about_positions = "Heads whose largest weight is at a fixed distance for most queries."
    about_sorted = "Heads of each layer from the sparsest to the densest."
    about_diversity = "How much the heads of a layer differ from one another."
    about_masking, about_gradient = "What removing each head costs.", "How sensitive the loss is to each head."
    about_training = "The models in the order of their steps."
    about_maps = "Heads with a clear role on one sentence; nonzero weights are outlined."
    masking, gradient = (main.importance.get(method) for method in ("masking", "gradient"))
    maps = _role_maps(main)
    entries: list[tuple[Any, ...]] = [  # whether it is wanted, identifier, caption, function and its arguments
        (named, "roles", about_roles, plots.head_roles, main),
        (len(models) > 2, "over-training", about_training, plots.over_training, models),
        (several, "density-sites", "Mean density of each site.", plots.density_by_site, everyone),
        (any(sparse), "density-histogram", "How dense the heads of each site are.", plots.density_histograms, everyone),
        (sparse[0], "density-sorted", about_sorted, plots.sorted_density, main),
        (True, "diversity", about_diversity, plots.head_diversity, everyone),
        (alphas_differ, "alpha", "Learned alphas.", plots.alpha_histograms, main),
        (alphas_differ, "alpha-density", "The larger alpha, the sparser the head.", plots.alpha_against_density, main),
        (True, "positional", about_positions, plots.positional_heads, everyone),
        (True, "distance", "Where the heads look that keep a distance.", plots.distance_profile, main),
        (masking, "importance-masking", about_masking, plots.head_importance, masking, "loss increase (nats per token)"),
        (gradient, "importance-gradient", about_gradient, plots.head_importance, gradient, "gradient (nats per token)"),
        (maps, "maps", about_maps, plots.attention_maps, maps),
    ]  # fmt: skip
    for wanted, identifier, caption, draw, *arguments in entries:
        if not wanted:
            continue
        try:
            figure = draw(*arguments)
        except ValueError:  # nothing to draw: no self-attention, no profile, ...
            continue
        yield identifier, caption, to_svg(figure)


def _role_maps(model: AttentionStatistics, limit: int = 3) -> list[Any]:
    """Choose the clearest head of each of the strongest roles, on the first example."""
    if not model.examples:
        return []
    sites = model.examples[0].sites
    best: dict[str, tuple[float, HeadName]] = {}
    for name, role in all_roles(model):
        if role is not None and name[0] in sites and role.strength > best.get(role.role, (0.0,))[0]:
            best[role.role] = (role.strength, name)
    maps = []
    for role, (_, (site, layer, head)) in sorted(best.items(), key=lambda item: -item[1][0])[:limit]:
        example = sites[site]
        if max(example.weights.shape[2:]) <= 60:
            tokens = (example.queries, example.keys)
            labels = [[("-" if token.continues else "") + token.text for token in side] for side in tokens]
            title = f"{head_name(site, layer, head)}: {ROLE_NAMES.get(role, role)}"
            maps.append((title, example.weights[layer, head], *labels))
    return maps


def to_svg(figure: Any) -> str:
    """Turn a matplotlib figure into SVG that follows the text colour of the page and needs no XML header."""
    stream = io.StringIO()
    # "svg.fonttype" is read when the figure is saved: text stays text, in the fonts of the page.
    with warnings.catch_warnings(), house_style():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = svg.replace(INK, "currentColor")
    width, height = (float(size) for size in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups())  # type: ignore[union-attr]
    svg = re.sub(
        r'width="[\d.]+pt" height="[\d.]+pt"',
        f'style="width:{width * 4 / 3:.0f}px" {"data-wide " if width > 440 else ""}data-height="{height:.0f}"',
        svg,
        count=1,
    )
    svg = re.sub(r"font: ([\d.]+)px '[^']*'(?:, '[^']*')*(?:, [a-z-]+)*", r"font: \1px var(--sans)", svg)
    # Identifiers of several figures in one page must differ.
    salt = f"f{zlib.crc32(svg.encode()):08x}-"
    svg = re.sub(r'\bid="', f'id="{salt}', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{salt}", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
