"""The figures of the pages of results, from the rows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure

from hf_entmax.ops import controllable, entmax

from .. import mapping_views, views
from ..rows import CARDS, RESULTS, Rows, by_setting, distinct, grouped, numbers, order, pick
from . import head_alphas, length, long_context, pretrained, pretrained_heads
from .tables import conversion_name

REGIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": controllable.softmax,
    "sparsegen-lin, λ = −1": lambda z: controllable.sparsegen_lin(z, -1.0),
    "sparsemax (λ = 0)": lambda z: controllable.sparsegen_lin(z, 0.0),
    "sparsegen-lin, λ = 0.75": lambda z: controllable.sparsegen_lin(z, 0.75),
    "sparsehourglass, q = 0.1": lambda z: controllable.sparsehourglass(z, 0.1),
    "sparsehourglass, q = 0.5": lambda z: controllable.sparsehourglass(z, 0.5),
    "sparsehourglass, q = 5": lambda z: controllable.sparsehourglass(z, 5.0),
    "sparsegen-sq": controllable.sparsegen_sq,
}


def alpha_grid(rows: Rows) -> Figure | None:
    """Figure 4 of Peters et al. 2019: accuracy by the alpha of the output, and of attention."""
    found = rows("inflection_alpha")
    if not found:
        return None
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axis = figure.subplots()
    for name, other, label in (
        ("output_alpha", "attention", "output (attention 1.5)"),
        ("attention", "output_alpha", "attention (output 1.5)"),
    ):
        points = sorted((float(row[name]), float(row["accuracy"])) for row in pick(found, **{other: "1.5"}))
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(xlabel="alpha", ylabel="word accuracy, %", title="German inflection, 10,000 words, one seed")
    axis.legend()
    return figure


def training_time(rows: Rows) -> Figure | None:
    """Figure 6 of Peters et al. 2019: accuracy on dev against the time of training."""
    settings = {row["command"]: (row["attention"], row["output_alpha"]) for row in rows("inflection")}
    # Of the latest stretch that was timed.
    late = {(row["attention"], row["output_alpha"]): row for row in rows("training_speed", recipe="inflection")}
    curves: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows("dev_curves", group="inflection"):
        if row["command"] in settings:
            curves[settings[row["command"]]][int(row["step"])].append(float(row["dev_score"]))
    if not (late and curves):
        return None
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axis = figure.subplots()
    base = float(late["softmax", "1.0"]["seconds_per_step"])
    for key in sorted(set(curves) & set(late), key=order):
        seconds = base * float(late[key]["time_ratio"])
        steps = sorted(curves[key])
        means = [statistics.fmean(curves[key][step]) for step in steps]
        seeds = max(map(len, curves[key].values()))
        label = f"{key[1]} / {key[0]}" + (f", {seeds} seeds" if seeds > 1 else "")
        axis.plot([step * seconds / 60 for step in steps], means, label=label)
    axis.set(xlabel="training time, minutes of one core", ylabel="dev accuracy (greedy), %")
    axis.set_title("Inflection, 12 languages: output / attention alpha")
    axis.legend(fontsize="small")
    return figure


def conversion(rows: Rows) -> Figure | None:
    """Quality against density, evaluation by evaluation, while finished softmax models become sparse."""
    known = (("convert_lm", "perplexity", "perplexity (dev)"), ("convert_mt", "bleu", "BLEU (200 dev sentences)"))
    groups = [group for group in known if rows(group[0]) and rows(f"{group[0]}_curve")]
    if not groups:
        return None
    figure = Figure(figsize=(5.6 * len(groups), 5.4), layout="constrained")
    for axis, (group, measure, what) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        curves = grouped(rows(f"{group}_curve"), "command")
        sparse = [own for own in by_setting(rows(group)) if own[0]["attention"] != "softmax"]
        for place, own in enumerate(sparse):
            for row in own:
                points = pick(curves.get((row["command"],), []), stage="training")
                label = conversion_name(row) if row is own[0] else None
                axis.plot(numbers(points, "density", 100), numbers(points, measure), f".C{place}-", label=label)
        if control := rows(group, attention="softmax"):
            last = statistics.fmean(float(curves[row["command"],][-1][measure]) for row in control)
            axis.axhline(last, color="grey", linestyle=":", label="softmax control, at its end")
        axis.invert_xaxis()
        axis.set(xlabel="nonzero attention weights, %", ylabel=what)
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return figure


def regions(rows: Rows | None = None) -> Figure:
    """Figures 1 to 3 of Laha et al. 2018: the first probability over the plane of two scores.

    Black lines bound the region where both entries are nonzero.
    """
    axis = torch.linspace(-2, 2, 401)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    image = None
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flat
    for axes, (name, mapping) in zip(panels, REGIONS.items(), strict=True):
        probs = mapping(grid)
        image = axes.imshow(probs[..., 0], origin="lower", extent=(-2, 2, -2, 2), cmap="RdBu_r", vmin=0, vmax=1)
        dense = ((probs > 0).sum(-1) == 2).float()
        if bool((dense == 0).any()):
            axes.contour(axis, axis, dense, levels=[0.5], colors="black", linewidths=1)
        axes.set_title(name, fontsize=9)
    figure.supxlabel("$z_1$")
    figure.supylabel("$z_2$")
    figure.colorbar(image, ax=figure.axes, label="$p_1$")  # type: ignore[arg-type]
    return figure


def curves(rows: Rows | None = None) -> Figure:
    """Figure 3 of Peters et al. 2019: the first probability of the scores ``[t, 0]``."""
    scores = torch.linspace(-3, 3, 601, dtype=torch.float64)
    pairs = torch.stack([scores, torch.zeros_like(scores)], dim=-1)
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axis = figure.subplots()
    for alpha in (1.0, 1.25, 1.5, 2.0, 4.0):
        label = {1.0: "1 (softmax)", 2.0: "2 (sparsemax)"}.get(alpha, f"{alpha:g}")
        axis.plot(scores, entmax(pairs, alpha)[..., 0], label=label)
    axis.set(xlabel="t", ylabel="$p_1$ of entmax([t, 0])")
    axis.legend(title="alpha", fontsize="small")
    return figure


def synthetic(rows: Rows) -> Figure | None:
    """Figures 4 to 6 of Laha et al. 2018: scores of every method along the three axes of the synthetic study."""
    found = rows("multilabel/synthetic")
    if not found:
        return None
    panels = {"mean_labels": "mean number of labels", "label_range": "range of labels r", "length": "document length"}
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    for column, (dataset, label) in enumerate(panels.items()):
        for line, metric in enumerate(("micro_f1", "jsd")):
            axes = grid[line, column]
            for method in distinct(found, "method"):
                runs = grouped(pick(found, dataset=dataset, method=method), "setting")
                points = sorted((float(setting), numbers(own, metric)) for (setting,), own in runs.items())
                settings, means = [s for s, _ in points], [statistics.mean(v) for _, v in points]
                spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]
                axes.errorbar(settings, means, spreads, label=method, lw=1.2, capsize=2)
            axes.set_xlabel(label)
    grid[0, 0].set_ylabel("micro-F1")
    grid[1, 0].set_ylabel("Jensen-Shannon divergence (nats)")
    grid[0, 0].legend(fontsize=7)
    return figure


#: Figures and their resolution, by file name.
DRAWN: dict[str, tuple[Callable[[Rows], Figure | None], int]] = {
    "inflection_alpha": (alpha_grid, 150),
    "inflection_time": (training_time, 150),
    "attention_map": (views.draw, 100),
    "attention_lambda": (mapping_views.draw, 100),
    "heads_alpha": (head_alphas.draw_alphas, 110),
    "heads_alpha_training_translation": (lambda rows: head_alphas.draw_training(rows, "translation"), 110),
    "heads_alpha_training_translation_fast": (lambda rows: head_alphas.draw_training(rows, "translation", True), 110),
    "heads_alpha_training": (lambda rows: head_alphas.draw_training(rows, "inflection"), 110),
    "heads_alpha_training_fast": (lambda rows: head_alphas.draw_training(rows, "inflection", True), 110),
    "heads_density": (head_alphas.draw_densities, 110),
    "heads_density_sorted": (head_alphas.draw_sorted, 110),
    "conversion": (conversion, 150),
    "length": (length.figure, 150),
    "pretrained": (pretrained.figure, 120),
    "smollm2_heads": (pretrained_heads.figure, 120),
    "entmax_curves": (curves, 110),
    "controllable_regions": (regions, 90),
    "long_context": (long_context.figure, 110),
    "multilabel_synthetic": (synthetic, 90),
}


def draw_all(results: Path = RESULTS, folder: Path = CARDS / "figures") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, dpi) in DRAWN.items():
        if (figure := draw(Rows(results))) is not None:
            figure.savefig(folder / f"{name}.png", dpi=dpi)
            print(f"wrote {folder / name}.png")
