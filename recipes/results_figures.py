"""The figures of model_cards/RESULTS.md, from the rows in recipes/results.

python recipes/results_figures.py
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))

from common.tables import Row, grouped, order, read

FIGURES = Path(__file__).parents[1] / "model_cards" / "figures"


def alpha_grid() -> Figure | None:
    """Figure 4 of Peters et al. 2019: accuracy by the alpha of the output, and of attention."""
    rows = read("inflection_alpha")
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    for name, other, label in (
        ("output_alpha", "attention", "output (attention 1.5)"),
        ("attention", "output_alpha", "attention (output 1.5)"),
    ):
        points = sorted((float(row[name]), float(row["accuracy"])) for row in rows if row[other] == "1.5")
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(xlabel="alpha", ylabel="word accuracy, %", title="German inflection, 10,000 words, one seed")
    axis.legend()
    return figure


def training_time() -> Figure | None:
    """Figure 6 of Peters et al. 2019: accuracy on dev against the time of training."""
    settings = {row["command"]: (row["attention"], row["output_alpha"]) for row in read("inflection")}
    times = [row for row in read("training_speed") if row["recipe"] == "inflection"]
    curves: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read("dev_curves"):
        if row["group"] == "inflection" and row["command"] in settings:
            curves[settings[row["command"]]][int(row["step"])].append(float(row["dev_score"]))
    if not (times and curves):
        return None
    figure, axis = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    # Seconds of a softmax step, of the latest stretch that was timed; the others by their ratios to it.
    late = {(row["attention"], row["output_alpha"]): row for row in times}
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


def conversion() -> Figure | None:
    """Quality against density, evaluation by evaluation, while finished softmax models become sparse."""
    groups = [
        (group, measure, what)
        for group, measure, what in (
            ("convert_lm", "perplexity", "perplexity (dev)"),
            ("convert_mt", "bleu", "BLEU (200 dev sentences)"),
        )
        if read(group) and read(f"{group}_curve")
    ]
    if not groups:
        return None
    figure, axes = plt.subplots(1, len(groups), figsize=(5.0 * len(groups), 3.6), layout="constrained", squeeze=False)
    for axis, (group, measure, what) in zip(axes[0], groups, strict=True):
        runs = {row["command"]: row for row in read(group)}
        for (command,), rows in grouped(read(f"{group}_curve"), "command").items():
            if command not in runs or runs[command]["attention"] == "softmax":
                continue
            points = [(100 * float(row["density"]), float(row[measure])) for row in rows if row["stage"] == "training"]
            axis.plot(*zip(*points, strict=True), marker=".", label=conversion_name(runs[command]))
        control = next((row for row in runs.values() if row["attention"] == "softmax"), None)
        if control:
            last = [row for row in read(f"{group}_curve") if row["command"] == control["command"]][-1]
            axis.axhline(float(last[measure]), color="grey", linestyle=":", label="softmax control, at its end")
        axis.invert_xaxis()
        axis.set(xlabel="nonzero attention weights, %", ylabel=what)
        axis.legend(fontsize="small")
    return figure


def conversion_name(row: Row) -> str:
    """Attention, schedule and what pushed it."""
    parts = [row["attention"], row["schedule"]]
    if row["density_target"] not in ("", "None"):
        parts.append(f"target {100 * float(row['density_target']):g} %")
    if float(row["distill_logits"]):
        parts.append("distilled")
    return ", ".join(parts)


DRAWN: dict[str, Callable[[], Figure | None]] = {
    "inflection_alpha": alpha_grid,
    "inflection_time": training_time,
    "conversion": conversion,
}


def shown(name: str, text: str) -> list[str]:
    """Lines that show a figure on the page; none where it has not been drawn."""
    return [f"![{text}](figures/{name}.png)", ""] if (FIGURES / f"{name}.png").exists() else []


def main() -> None:
    plt.switch_backend("Agg")  # no window
    for name, draw in DRAWN.items():
        figure = draw()
        if figure is not None:
            figure.savefig(FIGURES / f"{name}.png", dpi=150)
            plt.close(figure)
            print(f"wrote {(FIGURES / name).relative_to(FIGURES.parents[1])}.png")


if __name__ == "__main__":
    main()
