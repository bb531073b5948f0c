"""The figures of the pages of results, from the rows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from hf_entmax.analysis import plots
from hf_entmax.ops import controllable, entmax

from .. import views
from ..rows import Row, Rows, by_setting, distinct, grouped, mean, numbers, order, pick
from .judges import calibrated as set_for
from .judges import label as setting_of
from .judges import settings_of
from .judges_heads import LOGGED, SMOLLM2, STUDIES, kinds, trajectory
from .lengths import accuracies, alpha_of, lines
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


def beyond_training(rows: Rows) -> Figure | None:
    """Max retrieval: accuracy against the number of items, mean over the seeds."""
    found = rows("length", task="max_retrieval")
    if not found:
        return None
    drawn = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = drawn.subplots()
    for place, (name, own) in enumerate(lines(found).items()):
        values = [accuracies(row) for row in own]
        lengths = sorted(values[0])
        means = [statistics.fmean(v[n] for v in values) for n in lengths]
        line = {"color": f"C{place % 10}", "linestyle": ("-", "--", ":")[place // 10 % 3]}
        axis.plot(lengths, means, marker=".", label=name, **line)
    axis.axhline(10, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set(xlabel=f"items (trained at {found[0]['train_length']})", ylabel="accuracy, %")
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def long_context(rows: Rows) -> Figure | None:
    """Tokens per second against the length of the cache; keys read in full and keys of weight against alpha."""
    found, single = rows("long_context", softmax_cache="dynamic"), rows("long_context_operator", dtype="float32")
    if not found:
        return None
    drawn = Figure(figsize=(10, 3.6), layout="constrained")
    speed, shares = drawn.subplots(1, 2)
    for (_, batch), own in grouped(found, "alpha", "batch").items():
        lengths = numbers(own, "length")
        label = f"alpha {alpha_of(own[0])}, batch {batch}"
        (line,) = speed.plot(lengths, numbers(own, "tokens_per_second"), marker=".", label=label)
        speed.plot(lengths, numbers(own, "softmax_tokens_per_second"), linestyle=":", color=line.get_color())
    speed.set(xlabel="tokens in the cache (dotted: softmax)", ylabel="tokens per second", xscale="log", yscale="log")
    speed.legend(fontsize="small")
    by_length = grouped([row for row in single if row["alpha"] != "own"], "length")
    fixed = sorted(max(by_length.values(), key=len, default=[]), key=lambda row: float(row["alpha"]))
    for (bits,), own in grouped(fixed, "bits").items():
        shares.plot(numbers(own, "alpha"), numbers(own, "read", 100), marker=".", label=f"read, {bits} bits")
    if fixed:
        own = pick(fixed, bits=fixed[0]["bits"])
        shares.plot(numbers(own, "alpha"), numbers(own, "nonzero", 100), color="black", label="nonzero weight")
        shares.set(xlabel="alpha", ylabel="keys, %", yscale="log", title=f"{fixed[0]['length']} keys")
        shares.legend(fontsize="small")
    return drawn


def pretrained(rows: Rows) -> Figure | None:
    """Quality against density: every evaluation on the way, and where each setting ended."""
    known = (
        ("convert_encoder", "all-MiniLM-L6-v2", "spearman", "similarity correlation"),
        ("convert_smollm2", "SmolLM2-135M-Instruct", "perplexity", "perplexity"),
    )
    groups = [entry for entry in known if rows(entry[0])]
    calibrated = grouped(sorted(rows("calibration"), key=lambda row: float(row["budget"])), "model", "temperature")
    panels = len(groups) + bool(calibrated)
    if not panels:
        return None
    drawn = Figure(figsize=(5.2 * panels, 5.4), layout="constrained")
    axes = drawn.subplots(1, panels, squeeze=False)[0]
    below: dict[str, Any] = {"fontsize": "small", "loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    if calibrated:
        for own in calibrated.values():
            points = numbers(own, "heldout_percent"), [100 - value for value in numbers(own, "density", 100)]
            axes[-1].plot(*points, "o-", label=f"{own[0]['model']}: {set_for(own[0])}")
        axes[-1].plot(1, 50, "*", color="grey", markersize=10, label="our aim")
        axes[-1].set(xlabel="loss on other text, %", ylabel="weights exactly zero, %", title="No weight trained")
        axes[-1].legend(**below)
    for axis, (group, name, measure, what) in zip(axes, groups, strict=False):
        curves = grouped(rows(f"{group}_curve"), "command")
        for place, own in enumerate(settings_of(rows, group)):
            colour = f"C{place % 10}"
            for row in own:
                points = [point for point in curves.get((row["command"],), []) if point["stage"] == "training"]
                axis.plot(numbers(points, "density", 100), numbers(points, measure), color=colour, alpha=0.3, lw=1)
            ends = numbers(own, "density", 100), numbers(own, measure)
            axis.plot(*ends, "o", color=colour, label=setting_of(own[0]))
        if group == "convert_encoder":
            axis.axhline(0.995, color="grey", linestyle=":", label="our aim")
        else:
            before = mean(rows(group), f"{measure}_before")
            axis.axhline(before, color="grey", linestyle=":", label="as it came (test)")
        axis.invert_xaxis()
        axis.set(xlabel="nonzero attention weights, %", ylabel=what, title=f"{name}, lines: dev, dots: test")
        axis.legend(**below)
        if group == "convert_smollm2":  # from all weights to a fiftieth of them
            axis.set_xscale("log")
            axis.set_xticks((100, 50, 20, 10, 5, 2), ("100", "50", "20", "10", "5", "2"))
            axis.minorticks_off()
    return drawn


def smollm2_heads(rows: Rows) -> Figure | None:
    """Every head before and after: its largest weight, its weight on the previous and on the first token."""
    if not rows(f"{SMOLLM2}/sites"):
        return None
    before, after = (
        pick(rows(f"{SMOLLM2}/heads"), model=model) for model in distinct(rows(f"{SMOLLM2}/heads"), "model")[:2]
    )
    drawn = Figure(figsize=(11, 3.9), layout="constrained")
    shown = {"max_weight": "largest weight", "confidence_previous": "on the previous token"}
    shown["first_mass"] = "on the first token"
    *axes, last = drawn.subplots(1, len(shown) + 1)
    layers = [int(row["layer"]) for row in before]
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        axis.plot((0, 1), (0, 1), color="grey", lw=0.8, ls=":")
        dots = axis.scatter(numbers(before, name), numbers(after, name), c=layers, cmap="viridis", s=14, alpha=0.85)
        axis.set(title=title, xlabel="softmax, as it came", ylabel="made sparse", aspect="equal")
    drawn.colorbar(dots, ax=axes, label="layer", shrink=0.8, pad=0.01)
    densities = [
        [100 * float(row["density"]) for row in after if int(row["layer"]) == layer] for layer in sorted(set(layers))
    ]
    last.plot([statistics.mean(own) for own in densities], color="C3", label="mean of the layer")
    last.plot(layers, numbers(after, "density", 100), ".", color="C0", alpha=0.6, label="head")
    last.set(title="nonzero weights, %", xlabel="layer", ylim=(0, None))
    last.legend(fontsize="small")
    drawn.suptitle(f"The {len(before)} heads of SmolLM2-135M before and after, 1,000 sentences of English-PUD")
    return drawn


def attention_map(rows: Rows) -> Figure | None:
    """Figure 5 of Peters et al.: cross-attention of all heads of the last layer; nonzero weights are outlined."""
    found = views.read(rows.folder / views.FILE)
    named = [(f"Head {head}", found, weights) for head, weights in enumerate(found.get("weights", []))]
    return _maps(named, columns=2)


def attention_lambda(rows: Rows) -> Figure | None:
    """Figures 8 and 9 of Laha et al.: the maps of the two models side by side."""
    found = views.read(rows.folder / views.LAMBDA_FILE)
    return _maps([(title, found[title], found[title]["weights"]) for title in views.LAMBDAS if found])


def _maps(named: list[tuple[str, dict[str, Any], Any]], **options: Any) -> Figure | None:
    maps = [(title, torch.tensor(weights), own["queries"], own["keys"]) for title, own, weights in named]
    return plots.attention_maps(maps, **options) if maps else None


def heads(draw: Callable[..., Figure], name: str, wanted: Sequence[str], rows: Rows, **options: Any) -> Figure | None:
    """Figures 3 to 5 of Correia et al.: a column of the heads by study and attention, several seeds together."""
    named = {}
    for study in STUDIES:
        for kind, models in kinds(rows, study).items():
            if kind in wanted:
                called = study + (f", {len(models)} seeds" if len(models) > 1 else "")
                title = called if len(wanted) == 1 else f"{called}\n{'alpha 1.5' if kind == '1.5' else kind + ' alpha'}"
                named[title] = _tensors([head for model in models for head in model], name)
    return draw(named, **options) if named else None


def _tensors(found: Sequence[Row], name: str) -> dict[str, Tensor]:
    """By site, ``[layers, heads]``; the heads of several seeds beside one another."""
    return {
        site: torch.tensor([numbers(layer, name) for layer in grouped(own, "layer").values()], dtype=torch.float64)
        for (site,), own in grouped(found, "site").items()
    }


def alpha_training(study: str, faster: bool, rows: Rows) -> Figure | None:
    """Figure 2 of Correia et al.: every alpha over training."""
    log = trajectory(rows, LOGGED[study][faster])
    return None if log is None else plots.alpha_trajectories(log)


#: Figures and their resolution, by file name.
DRAWN: dict[str, tuple[Callable[[Rows], Figure | None], int]] = {
    "inflection_alpha": (alpha_grid, 150),
    "inflection_time": (training_time, 150),
    "attention_map": (attention_map, 100),
    "attention_lambda": (attention_lambda, 100),
    "heads_alpha": (partial(heads, plots.alpha_histograms, "alpha", ["learned"], bins=10), 110),
    "heads_alpha_training_translation": (partial(alpha_training, "translation", False), 110),
    "heads_alpha_training_translation_fast": (partial(alpha_training, "translation", True), 110),
    "heads_alpha_training": (partial(alpha_training, "inflection", False), 110),
    "heads_alpha_training_fast": (partial(alpha_training, "inflection", True), 110),
    "heads_density": (partial(heads, plots.density_histograms, "density", ["1.5", "learned"]), 110),
    "heads_density_sorted": (partial(heads, plots.sorted_density, "density", ["1.5", "learned"]), 110),
    "conversion": (conversion, 150),
    "length": (beyond_training, 150),
    "pretrained": (pretrained, 120),
    "smollm2_heads": (smollm2_heads, 120),
    "entmax_curves": (curves, 110),
    "controllable_regions": (regions, 90),
    "long_context": (long_context, 110),
    "multilabel_synthetic": (synthetic, 90),
}


def draw_all(rows: Rows, folder: Path) -> None:
    """Draw all figures that there are rows for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, dpi) in DRAWN.items():
        if (figure := draw(rows)) is not None:
            figure.savefig(folder / f"{name}.png", dpi=dpi)
            print(f"wrote {folder / name}.png")
