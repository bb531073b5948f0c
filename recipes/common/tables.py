"""Rows of results into Markdown tables."""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"

Row = dict[str, str]

SITES = ("encoder_self", "cross", "decoder_self")


def read(group: str) -> list[Row]:
    """The rows of a group; none where it has not been run."""
    path = RESULTS / f"{group}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and, of several, the sample standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows that agree in some columns, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def column(rows: Sequence[Row], name: str, digits: int = 2, factor: float = 1.0) -> str:
    """Mean and spread of a column; empty where a row has no number there."""
    if not all(row.get(name) for row in rows):
        return ""
    return spread([factor * float(row[name]) for row in rows], digits)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return [_line(head), _line(["---"] * len(head)), *(_line([str(cell) for cell in row]) for row in rows), ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def origin(rows: Sequence[Row]) -> list[str]:
    """The commands, seeds left open, the hardware and the hours."""
    commands = sorted({re.sub(r"--seed \d+", "--seed SEED", row["command"]) for row in rows})
    seconds = sum(float(row.get("train_seconds") or 0) for row in rows)
    where = "; ".join(sorted({f"{row['hardware']}; {row['versions']}" for row in rows}))
    runs = f"{len(rows)} runs" if len(rows) > 1 else "One run"
    return [
        "<details><summary>Commands</summary>",
        "",
        *(f"    {command}" for command in commands),
        "",
        "</details>",
        "",
        f"{runs}, {seconds / 3600:.1f} hours of training beside other work on the same two cores. {where}.",
        "",
    ]


def order(key: tuple[str, ...]) -> tuple[float, float, str]:
    """By output, then attention: softmax, fixed, learned."""
    attention, output = key[0], float(key[1])
    place = 1.0 if attention == "softmax" else float(attention) if re.fullmatch(r"[\d.]+", attention) else 9.0
    return output, place, "".join(key[2:])
