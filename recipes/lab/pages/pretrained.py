"""Real pretrained models made sparse: the tables, the figure and the verdicts, for every model that there are rows for."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..rows import Row, Rows, by_setting, column, grouped, mean, numbers, pick, row_table, spread, table
from .judging import Finding, found

#: Conversions: group of rows -> what its model is called.
MODELS = {"convert_encoder": "all-MiniLM-L6-v2", "convert_smollm2": "SmolLM2-135M-Instruct"}

#: Columns of a table of conversions by title: what `column` takes after the rows. One that no row has is left out.
_COLUMNS: dict[str, tuple[str | int, ...]] = {
    "patched, Spearman": ("start_spearman", 3), "patched, perplexity": ("start_perplexity", 1),
    "patched, %": ("start_density", 1, 100), "steps": ("steps", 0), "nonzero weights, %": ("density", 2, 100),
    "keys with weight": ("support_encoder_self",), "of keys": ("keys",), "keys with weight ": ("support_decoder_self",),
    "Spearman": ("spearman", 4), "Pearson": ("pearson", 4),
    "partner found before, %": ("accuracy_before", 1, 100), "after, %": ("accuracy", 1, 100), "MRR": ("mrr", 4),
    "perplexity before": ("perplexity_before",), "after": ("perplexity",),
}  # fmt: skip


def settings_of(rows: Rows, group: str) -> list[list[Row]]:
    """The rows of each setting, its seeds together, softmax first; what was measured before training begins with ``start_``."""
    starts = {
        row["command"]: {f"start_{k}": v for k, v in row.items()} for row in rows(f"{group}_curve", stage="patched")
    }
    groups = by_setting({**row, **starts.get(row["command"], {})} for row in rows(group))
    return sorted(groups, key=lambda own: (own[0]["attention"] != "softmax", -mean(own, "density")))


def label(row: Row) -> str:
    """What was trained and what held it back."""
    parts = [row["attention"]]
    for name, text in (("loss_budget", "budget {}"), ("density_target", "density target {}")):
        if row.get(name) not in ("", "None", None):
            parts.append(text.format(row[name]))
    if length := re.search(r"--train_tokens (\d+)", row["command"]):
        parts.append(f"{int(length[1]):,} tokens")
    if rate := re.search(r"--lr (\S+)", row["command"]):
        parts.append(f"learning rate {float(rate[1]):g}")
    if "--softened true" in row["command"].lower():
        release = re.search(r"--release (\S+)", row["command"])
        parts.append(f"softened at {release[1] if release else 1.5}")
    if row.get("freeze_weights") == "True":
        parts.append("alphas alone")
    if row.get("lora_rank") not in ("", "0", None):
        parts.append(f"LoRA {row['lora_rank']}")
    return ", ".join(parts)


def conversions(rows: Rows, group: str) -> str:
    """A line for each setting, mean and spread over its seeds."""
    settings = settings_of(rows, group)
    shown = {title: chosen for title, chosen in _COLUMNS.items() if any(own[0].get(chosen[0]) for own in settings)}  # type: ignore[call-overload]
    lines = []
    for own in settings:
        cells = [column(own, *chosen) for chosen in shown.values()]  # type: ignore[arg-type]
        lines.append([label(own[0]), len(own), *cells, f"{mean(own, 'train_seconds') / 60:.0f}"])
    return table(["attention", "seeds", *(title.strip() for title in shown), "minutes"], lines)


def calibrations(rows: Rows) -> str:
    """What zeros cost without training a weight, budget by budget."""

    def zeros(name: str) -> Callable[[Row], str]:
        return lambda row: f"{100 * (1 - float(row[name])):.1f}"

    found = sorted(rows("calibration"), key=lambda row: (row["model"], row["temperature"], float(row["budget"])))
    return row_table(found, {
        "model": "model", "set for each head": _calibrated, "budget, %": lambda row: f"{float(row['budget']):g}",
        "zeros on calibration text, %": zeros("density_calibration"),
        "heads with less than 10 %": lambda row: f"{row['heads_sparse']} of {row['heads']}", "with at least 95 %": "heads_full",
        "loss on other text, %": lambda row: f"{float(row['heldout_percent']):+.2f}", "zeros there, %": zeros("density"),
        "similarity correlation": ("similarity_correlation", 4),
        "partner found before, %": ("accuracy_before", 1, 100), "after, %": ("accuracy", 1, 100),
        "median alpha": ("alpha_median",), "largest": ("alpha_max",), "minutes": ("seconds", 0, 1 / 60),
    })  # fmt: skip


def _calibrated(row: Row) -> str:
    return "alpha, temperature" if row["temperature"] == "True" else "alpha"


def _difference(row: Row) -> str:
    return f"{float(row['difference']):+.4f} ({float(row['low']):+.4f} to {float(row['high']):+.4f})"


def tasks(rows: Rows) -> str:
    """What else is lost, with 95 % intervals of the difference; rows of several seeds follow each other."""
    return row_table(rows("pretrained_tasks"), {
        "model": "model", "task": "task", "measure": "measure", "units": "units", "original": ("before", 4),
        "here": ("after", 4), "difference (95 %)": _difference,
    })  # fmt: skip


def figure(rows: Rows) -> Figure | None:
    """Quality against density: every evaluation on the way, and where each setting ended."""
    known = (("convert_encoder", "spearman", "similarity correlation"), ("convert_smollm2", "perplexity", "perplexity"))
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
            axes[-1].plot(*points, "o-", label=f"{own[0]['model']}: {_calibrated(own[0])}")
        axes[-1].plot(1, 50, "*", color="grey", markersize=10, label="our aim")
        axes[-1].set(xlabel="loss on other text, %", ylabel="weights exactly zero, %", title="No weight trained")
        axes[-1].legend(**below)
    for axis, (group, measure, what) in zip(axes, groups, strict=False):
        curves = grouped(rows(f"{group}_curve"), "command")
        for place, own in enumerate(settings_of(rows, group)):
            colour = f"C{place % 10}"
            for row in own:
                points = [point for point in curves.get((row["command"],), []) if point["stage"] == "training"]
                axis.plot(numbers(points, "density", 100), numbers(points, measure), color=colour, alpha=0.3, lw=1)
            ends = numbers(own, "density", 100), numbers(own, measure)
            axis.plot(*ends, "o", color=colour, label=label(own[0]))
        if group == "convert_encoder":
            axis.axhline(0.995, color="grey", linestyle=":", label="our aim")
        else:
            before = mean(rows(group), f"{measure}_before")
            axis.axhline(before, color="grey", linestyle=":", label="as it came (test)")
        axis.invert_xaxis()
        axis.set(xlabel="nonzero attention weights, %", ylabel=what, title=f"{MODELS[group]}, lines: dev, dots: test")
        axis.legend(**below)
        if group == "convert_smollm2":  # from all weights to a fiftieth of them
            axis.set_xscale("log")
            axis.set_xticks((100, 50, 20, 10, 5, 2), ("100", "50", "20", "10", "5", "2"))
            axis.minorticks_off()
    return drawn


class _Stand(NamedTuple):
    """How a setting stands to an aim: whether it is sparse enough, by how much it misses the rest (reached at 0), in words."""

    sparse: bool
    miss: float
    here: str


def _beside(own: list[Row], controls: list[list[Row]], name: str, best: Callable[..., float]) -> tuple[float, str]:
    """What a measure is compared with: the best of the controls."""
    if not controls:
        return mean(own, f"{name}_before"), "the model before"
    return best(mean(control, name) for control in controls), "the better control" if controls[1:] else "the control"


def _encoder(own: list[Row], controls: list[list[Row]]) -> _Stand:
    reference, which = _beside(own, controls, "accuracy", max)
    gap = 100 * (mean(own, "accuracy") - reference)
    here = f"similarity correlation {column(own, 'spearman', 4)}, partners found {gap:+.1f} points against {which}"
    return _Stand(mean(own, "density") <= 0.1, max(0.0, 0.995 - mean(own, "spearman")), here)


def _causal(own: list[Row], controls: list[list[Row]]) -> _Stand:
    reference, which = _beside(own, controls, "perplexity", min)
    price = 100 * (mean(own, "perplexity") / reference - 1)
    here = f"perplexity {price:+.1f} % against {which}"
    return _Stand(mean(own, "density") <= 0.05, max(0.0, price) if controls else math.inf, here)


#: Our aims: group of rows, what is said, how rows stand to it.
_AIMS: tuple[tuple[str, str, Callable[[list[Row], list[list[Row]]], _Stand]], ...] = (
    ("convert_encoder", "at most 10 % of the weights left, similarity correlation of at least 0.995", _encoder),
    ("convert_smollm2", "at most 5 % of the weights left at no more loss than the softmax control", _causal),
)


def _calibration(rows: Rows) -> list[Finding]:
    """The sparsest causal model within 1 % of perplexity on other text of which no weight was trained."""
    made = [
        ([row], numbers([row], "heldout_percent"), f"{_calibrated(row)}, budget {float(row['budget']):g} %", "")
        for row in rows("calibration", model="smollm2")
    ]
    for own in settings_of(rows, "convert_smollm2"):
        if own[0]["freeze_weights"] == "True":
            prices = [100 * (float(row["perplexity"]) / float(row["perplexity_before"]) - 1) for row in own]
            made.append((own, prices, label(own[0]), "one seed, " if len(own) == 1 else ""))
    within = [entry for entry in made if statistics.fmean(entry[1]) <= 1]
    if not within:
        return []
    own, prices, what, reservation = min(within, key=lambda entry: mean(entry[0], "density"))
    zeros = spread([100 - value for value in numbers(own, "density", 100)], 1)
    shown = f"{what}: {zeros} % zeros at {'+' if statistics.fmean(prices) > 0 else ''}{spread(prices)} %"
    aim = "Our aim: SmolLM2-135M-Instruct, no weight trained, at least 50 % of the weights zero at 1 % perplexity"
    return [Finding(aim, "", shown, found(mean(own, "density") <= 0.5, f"{reservation}one set of texts"))]


def findings(rows: Rows) -> list[Finding]:
    """Our own aims for real models: of the settings that are sparse enough, the one that comes nearest."""
    made = _calibration(rows)
    for group, aim, stand in _AIMS:
        settings = settings_of(rows, group)
        judged = []
        for own in settings:
            if own[0]["attention"] != "softmax" and own[0]["freeze_weights"] != "True":
                length = own[0]["steps"]
                controls = [other for other in settings if pick(other, attention="softmax", steps=length)]
                judged.append((stand(own, controls), own, min(len(each) for each in (own, *controls))))
        if not judged:
            continue
        (sparse, miss, here), own, seeds = min(
            judged, key=lambda entry: (not entry[0].sparse, entry[0].miss, mean(entry[1], "density"))
        )
        shown = f"{label(own[0])}: {column(own, 'density', 1, 100)} % left, {here}"
        verdict = found(sparse and not miss, "one seed" if seeds == 1 else "")
        made.append(Finding(f"Our aim: {MODELS[group]}, {aim}", "", shown, verdict))
    return made
