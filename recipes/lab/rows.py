"""Rows of results: read, written by what measures, shown as Markdown tables."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.row_file import Results, command, hardware, versions

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
RESULTS = RECIPES / "lab" / "results"
CARDS = ROOT / "model_cards"
FIGURES = CARDS / "figures"

Row = dict[str, str]

SITES = ("encoder_self", "cross", "decoder_self")


class Rows:
    """The CSV files of a folder, by group.

    Args:
        folder: of the files, default those of this repository.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder

    def __call__(self, group: str, /, **wanted: object) -> list[Row]:
        """Return the rows of a group (``length``, or ``length?task=sort``) with these values; none where it has not been run."""
        group, _, conditions = group.partition("?")
        wanted |= dict(condition.split("=") for condition in conditions.split("&") if condition)
        path = self.folder / f"{group}.csv"
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as lines:
            return pick(csv.DictReader(lines), **wanted)


class RowFile(Results):
    """`Results` whose columns are given between blanks."""

    def __init__(self, path: Path, fields: str) -> None:
        super().__init__(path, fields.split())


def made_by(module: str, *places: str) -> dict[str, str]:
    """Return the columns that say how a row was made: the command (but for options that name places), the machine, the versions."""
    called = command(places, module=f"recipes.lab.{module}")
    return {"command": called, "hardware": hardware(), "versions": versions()}


def pick(rows: Iterable[Row], /, **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == str(value) for name, value in wanted.items())]


def distinct(rows: Iterable[Row], name: str) -> list[str]:
    """List the values of a column, in order of first appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Group rows that agree in some columns, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows whose commands differ in nothing but the seed, together, in order of first appearance."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[re.sub(r" --seed \d+", "", row["command"])].append(row)
    return list(groups.values())


def numbers(rows: Iterable[Row], name: str, factor: float = 1.0) -> list[float]:
    return [factor * float(row[name]) for row in rows]


def mean(rows: Iterable[Row], name: str) -> float:
    return statistics.mean(numbers(rows, name))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Write the mean and, of several finite numbers, the sample standard deviation."""
    middle = statistics.fmean(values)
    found = f"{middle:.{digits}f}"
    return (
        found if len(values) == 1 or not math.isfinite(middle) else f"{found} ± {statistics.stdev(values):.{digits}f}"
    )


def column(rows: Sequence[Row], name: str, digits: int = 2, factor: float = 1.0) -> str:
    """Write mean and spread of a column; empty where a row has no number there."""
    return spread(numbers(rows, name, factor), digits) if rows and all(row.get(name) for row in rows) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)


def row_table(rows: Iterable[Row], columns: Mapping[str, str | tuple[Any, ...] | Callable[[Row], object]]) -> str:
    """Make a table with a line for every row.

    Args:
        rows: in their order.
        columns: by title, the name of a column, what `column` takes after the rows, or a function of the row. Blanks at the
            end of a title tell it from another.
    """

    def cell(row: Row, shown: Any) -> object:
        return row[shown] if isinstance(shown, str) else shown(row) if callable(shown) else column([row], *shown)

    lines = [[cell(row, shown) for shown in columns.values()] for row in rows]
    return table([title.strip() for title in columns], lines)


def order(key: tuple[str, ...]) -> tuple[float, float, str]:
    """Sort by output, then attention: softmax, fixed, learned."""
    attention, output = key[0], float(key[1])
    place = 1.0 if attention == "softmax" else float(attention) if re.fullmatch(r"[\d.]+", attention) else 9.0
    return output, place, "".join(key[2:])


def machines(rows: Sequence[Row], *names: str) -> str:
    """Name hardware and versions behind some rows."""
    return "; ".join(sorted({"; ".join(row[name] for name in (*names, "hardware", "versions")) for row in rows}))
