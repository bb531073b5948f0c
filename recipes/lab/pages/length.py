"""Longer than trained on: the tables and the figure."""

from __future__ import annotations

import re
import statistics

from matplotlib.figure import Figure

from ..rows import Row, Rows, distinct, grouped, spread, table
from .judging import judge

COMPARED = ("softmax", "entmax 1.5", "ASEntmax")
#: Exact match in percent of those three: Vasylenko et al. 2025, and an independent rerun of one seed.
PAPERS = {
    ("sort", 4): ((0.0, 57.8, 79.7), (4.0, 53.0, 81.0)),
    ("reverse", 4): ((0.0, 28.5, 96.4), (0.0, 61.0, 53.0)),
    ("copy", 64): ((85.5, 0.0, 86.6), (63.0, 50.0, 76.0)),
}


def accuracies(row: Row) -> dict[int, float]:
    """By length, in percent."""
    return {int(length): float(value) for length, value in re.findall(r"(\d+)=([\d.]+)", row["accuracies"])}


def lines(found: list[Row]) -> dict[str, list[Row]]:
    """The rows of each attention; where it was measured with several settings, those of each, named after them."""
    made: dict[str, list[Row]] = {}
    settings = {row["command"]: re.sub(r" --(seeds|only)( (?!--)\S+)*", "", row["command"]) for row in found}
    for (name,), own in grouped(found, "row").items():
        several = distinct([{"of": settings[row["command"]]} for row in own], "of")
        for one in several:
            title = name if len(several) == 1 else f"{name} (`{one.partition('.length ')[2]}`)"
            made[title] = [row for row in own if settings[row["command"]] == one]
    return made


def lengths_table(rows: Rows, task: str) -> str:
    """A line for each attention: mean and spread over its seeds at every length."""
    found = rows("length", task=task)
    lengths = sorted(accuracies(found[0]))
    trained_at = int(found[0]["train_length"])
    titles = [f"to {n}" if task == "text" else f"{n // trained_at}x" for n in lengths]
    head = ["attention", "seeds", *(["trained"] if task != "text" else []), "alpha", *titles]
    listed = []
    for name, own in lines(found).items():
        values = [accuracies(row) for row in own]
        alphas = [float(row["alpha"]) for row in own if row["alpha"]]
        learned = spread(alphas) if "learned" in name and alphas else ""
        trained = [sum(row["trained"] == "True" for row in own)] if task != "text" else []
        listed.append([name, len(own), *trained, learned, *(spread([v[n] for v in values], 1) for n in lengths)])
    return table(head, listed)


def at_length(rows: Rows, task: str, name: str, factor: int) -> list[float]:
    """Exact match of every seed at ``factor`` times the length of training, of the runs with the most steps."""
    own = rows("length", task=task, row=name)
    most = max((int(row["steps"]) for row in own), default=0)
    return [accuracies(row)[factor * int(row["train_length"])] for row in own if int(row["steps"]) == most]


def beside_the_papers(rows: Rows) -> str:
    """Which attention is better at copy, reverse and sort: the paper's numbers, the rerun's, ours, and whether it holds.

    At the length that the paper reports and, as that may be too long for models as small as ours, at twice that of training.
    """
    listed = []
    for (task, factor), (paper, rerun) in PAPERS.items():
        for one, other in ((0, 1), (1, 2)):
            worse, better = sorted((one, other), key=lambda place: paper[place])
            for at in (2, factor):
                ours, theirs = (at_length(rows, task, COMPARED[place], at) for place in (better, worse))
                if not ours or not theirs:
                    continue
                there = [f"{found[better]:g} / {found[worse]:g}" if at == factor else "" for found in (paper, rerun)]
                here = " / ".join(spread(values, 1) for values in (ours, theirs))
                verdict = judge(ours, theirs)[1] if max(ours + theirs) > 0 else "not found: nobody solves it"
                listed.append([f"{task}, {at}x: {COMPARED[better]} above {COMPARED[worse]}", *there, here, verdict])
    return table(["exact match, %", "paper", "rerun", "here", "verdict"], listed)


def figure(rows: Rows) -> Figure | None:
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
