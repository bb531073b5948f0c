"""Rows of results: read, written by what measures, shown as Markdown tables."""

from __future__ import annotations

import csv
import math
import os
import platform
import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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
        """The rows of a group (``length``, or ``length?task=sort``) with these values; none where it has not been run."""
        group, _, conditions = group.partition("?")
        wanted |= dict(condition.split("=") for condition in conditions.split("&") if condition)
        path = self.folder / f"{group}.csv"
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as lines:
            return pick(csv.DictReader(lines), **wanted)


class RowFile:
    """A CSV file that grows by a row for each measurement, on disk at once.

    Args:
        path: the file; it is made with its folders when the first row comes.
        fields: its columns, between blanks.

    Raises:
        ValueError: if the file has other columns.
    """

    def __init__(self, path: Path, fields: str) -> None:
        self.path, self.fields = path, fields.split()
        self.rows: list[Row] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                if reader.fieldnames != self.fields:
                    raise ValueError(
                        f"{path} has the columns {reader.fieldnames}, not {self.fields}: use another file."
                    )
                self.rows = list(reader)

    def add(self, **values: object) -> None:
        """Append one row."""
        row = {name: str(values.pop(name, "")) for name in self.fields}
        if values:
            raise ValueError(f"{self.path}: no columns for {sorted(values)}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, self.fields, lineterminator="\n")
            if not lines.seek(0, os.SEEK_END):
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)


def made_by(module: str, *places: str) -> dict[str, str]:
    """The columns that say how a row was made: the command (but for options that name places), the machine, the versions."""
    # Here, so that tables can be read where the package must not be imported: what loads without it is one of the things checked.
    import hf_entmax
    from hf_entmax.bench.timing import device_name

    words, kept = sys.argv[1:], []
    for word, before in zip(words, ["", *words], strict=False):
        if word.partition("=")[0] not in places and before not in places:
            kept.append(word)
    packages = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    names = [device_name("cpu"), *([device_name("cuda")] if torch.cuda.is_available() else [])]
    return {
        "command": shlex.join(["python", "-m", f"recipes.lab.{module}", *kept]),
        "hardware": f"{' + '.join(names)}, {torch.get_num_threads()} thread(s)",
        "versions": ", ".join([f"hf_entmax {hf_entmax.__version__}", *packages, f"python {platform.python_version()}"]),
    }


def pick(rows: Iterable[Row], /, **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == str(value) for name, value in wanted.items())]


def distinct(rows: Iterable[Row], name: str) -> list[str]:
    """The values of a column, in order of first appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows that agree in some columns, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows whose commands differ in nothing but the seed, together, in order of first appearance."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[re.sub(r" --seed \d+", "", row["command"])].append(row)
    return list(groups.values())


def numbers(rows: Iterable[Row], name: str, factor: float = 1.0) -> list[float]:
    return [factor * float(row[name]) for row in rows]


def mean(rows: Iterable[Row], name: str) -> float:
    return statistics.mean(numbers(rows, name))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and, of several finite numbers, the sample standard deviation."""
    middle = statistics.fmean(values)
    found = f"{middle:.{digits}f}"
    return (
        found if len(values) == 1 or not math.isfinite(middle) else f"{found} ± {statistics.stdev(values):.{digits}f}"
    )


def column(rows: Sequence[Row], name: str, digits: int = 2, factor: float = 1.0) -> str:
    """Mean and spread of a column; empty where a row has no number there."""
    return spread(numbers(rows, name, factor), digits) if rows and all(row.get(name) for row in rows) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)


def row_table(rows: Iterable[Row], columns: Mapping[str, str | tuple[Any, ...] | Callable[[Row], object]]) -> str:
    """A line for every row.

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
    """By output, then attention: softmax, fixed, learned."""
    attention, output = key[0], float(key[1])
    place = 1.0 if attention == "softmax" else float(attention) if re.fullmatch(r"[\d.]+", attention) else 9.0
    return output, place, "".join(key[2:])


def machines(rows: Sequence[Row], *names: str) -> str:
    """Hardware and versions behind some rows."""
    return "; ".join(sorted({"; ".join(row[name] for name in (*names, "hardware", "versions")) for row in rows}))
