"""Longer than trained on: the tables and the figure."""

from __future__ import annotations

import re
import statistics

from matplotlib.figure import Figure

from .rows import Row, Rows, distinct, grouped, spread, table

#: Exact match in percent of softmax / entmax 1.5 / ASEntmax: Vasylenko et al. 2025, and an independent rerun of one seed.
PAPERS = {
    ("sort", 4): ("0 / 57.8 / 79.7", "4 / 53 / 81"),
    ("reverse", 4): ("0 / 28.5 / 96.4", "0 / 61 / 53"),
    ("copy", 64): ("85.5 / 0 / 86.6", "63 / 50 / 76"),
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
            title = name if len(several) == 1 else f"{name} (`{one.partition('.py ')[2]}`)"
            made[title] = [row for row in own if settings[row["command"]] == one]
    return made


def lengths_table(rows: Rows, task: str) -> str:
    """A line for each attention: mean and spread over its seeds at every length."""
    found = rows("length", task=task)
    lengths = sorted(accuracies(found[0]))
    trained_at = int(found[0]["train_length"])
    titles = [f"to {n}" if task == "text" else f"{n // trained_at}x" for n in lengths]
    head = ["attention", "seeds", "trained", "alpha", *titles]
    listed = []
    for name, own in lines(found).items():
        values = [accuracies(row) for row in own]
        alphas = [float(row["alpha"]) for row in own if row["alpha"]]
        learned = spread(alphas) if "learned" in name and alphas else ""
        trained = sum(row["trained"] == "True" for row in own)
        listed.append([name, len(own), trained, learned, *(spread([v[n] for v in values], 1) for n in lengths)])
    return table(head, listed)


def beside_the_papers(rows: Rows) -> str:
    """Copy, reverse and sort at the length that the paper reports, beside its numbers and those of the rerun."""
    listed = []
    for (task, factor), (paper, rerun) in PAPERS.items():
        own = []
        for name in ("softmax", "entmax 1.5", "ASEntmax"):
            means = []
            for same in lines(rows("length", task=task, row=name)).values():
                at = [(accuracies(row), factor * int(row["train_length"])) for row in same]
                if values := [found[n] for found, n in at if n in found]:
                    means.append(f"{statistics.fmean(values):.1f}")
            own.append(" or ".join(means) or "not measured")
        listed.append([f"{task}, {factor}x", " / ".join(own), paper, rerun])
    return table(["exact match, %: softmax / entmax 1.5 / ASEntmax", "here", "paper", "rerun"], listed)


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
