"""Reading named columns strictly, for training: a line that is not as it should be is named, and stops the reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_entmax.analysis.reading import records

HUB = "hub:"

Texts = tuple[str, ...]


def find(where: str) -> Path:
    """Find a file or folder, relative to the working directory or to ``$HF_ENTMAX_DATA``.

    Raises:
        FileNotFoundError: if it is in neither place.
    """
    places = [Path(where), *([Path(os.environ["HF_ENTMAX_DATA"]) / where] if "HF_ENTMAX_DATA" in os.environ else [])]
    for place in places:
        if place.exists():
            return place
    looked = " or ".join(map(str, places))
    raise FileNotFoundError(
        f"there is no {looked}. Give a path, {HUB}OWNER/NAME@SPLIT for a data set of the Hub, or set HF_ENTMAX_DATA to the "
        "folder that such paths are relative to."
    )


def languages_of(where: str) -> list[str]:
    """List the folders that can stand for ``{language}`` in a path."""
    parent = find(where.split("{language}")[0] or ".")
    return sorted(entry.name for entry in parent.iterdir() if entry.is_dir())


def read_rows(where: str, columns: Sequence[str], blank: bool = False) -> list[Texts]:
    """Read rows of named columns.

    Args:
        where: a ``.tsv``, ``.csv`` or ``.jsonl`` file (also ``.gz``), a ``.parquet`` file, or
            ``hub:OWNER/NAME[#CONFIG]@SPLIT`` for what ``datasets`` can load, also from a folder. A table whose first row is a
            header (see `hf_entmax.analysis.reading.records.is_header`) must name all the columns in it. In any other, which
            must have exactly as many, the columns are taken in order, and a message says so.
        columns: their names; a number names a column of a table by its place, from 0.
        blank: whether a field may be empty.

    Returns:
        The columns of each row, stripped. A JSON list of sentences is one text.

    Raises:
        FileNotFoundError: if there is no such file or data set.
        ValueError: for bad UTF-8, a wrong number of columns, an empty field, broken JSON or CSV or no row at all, with file
            and line.
    """
    return [tuple(" ".join(texts) for texts in row) for row in read_lists(where, columns, blank)]


def read_lists(where: str, columns: Sequence[str], blank: bool = False) -> list[tuple[list[str], ...]]:
    """Read as `read_rows` does, for columns that hold several texts, such as the references of a summary.

    Returns:
        The texts of each column of each row: the members of a JSON list, else one.

    Raises:
        FileNotFoundError, ValueError: as `read_rows`.
    """
    if not where.startswith(HUB) and records.kind_of_file(path := find(where)) in ("tsv", "csv"):
        rows = [tuple([text] for text in row) for row in _table(path, columns, blank)]
    else:
        rows = [_fields(record, columns, place, blank) for place, record in _records(where)]
    if not rows:
        raise ValueError(f"{where}: there is nothing in it.")
    return rows


def read_splits(
    wheres: Mapping[str, str], columns: Sequence[str], read: Callable[..., list[Any]] = read_rows
) -> dict[str, list[Any]]:
    """Read the same columns of several splits, training first, each file once by ``read`` (`read_pairs`: two columns).

    Raises:
        FileNotFoundError, ValueError: as ``read`` and `check_first_rows`.
    """
    more = tuple(columns) if read is read_pairs else (columns,)
    tables = {where: read(where, *more) for where in dict.fromkeys(wheres.values())}
    check_first_rows({where: rows for where, rows in tables.items() if "{lang}" not in where}, columns)
    return {split: tables[where] for split, where in wheres.items()}


def check_first_rows(tables: Mapping[str, Sequence[Sequence[Any]]], columns: Sequence[str]) -> None:
    """Say that the first row of several tables looks like a header whose names are not those that were asked for.

    ``tables`` are rows by file, the training data first. Of columns asked for by number nothing is guessed.
    """
    if not tables:
        return
    (name, first), *others = tables.items()
    for other, rows in others if len(first) > 20 and not all(column.isdigit() for column in columns) else ():
        alone = all(
            sum(row[place] == first[0][place] for row in part) == 1
            for part in (first, rows)
            for place in range(len(columns))
        )
        if rows[0] == first[0] and rows[1:2] != first[1:2] and alone:
            shown = " / ".join(cell if isinstance(cell, str) else " ".join(cell) for cell in first[0])
            raise ValueError(
                f"{name} and {other} both begin with {shown}, which does not come again: it looks like a header. Name its "
                f"columns instead of {', '.join(columns)}, or give their numbers, from 0."
            )


def read_pairs(where: str, source: str, target: str) -> list[tuple[str, str]]:
    """Read sentence pairs: two parallel files where ``where`` contains ``{lang}``, else two columns of one file.

    Raises:
        ValueError: as `read_rows`; also if the two files differ in length.
    """
    if "{lang}" not in where:
        return [(row[0], row[1]) for row in read_rows(where, (source, target))]
    files = [find(where.replace("{lang}", side)) for side in (source, target)]
    sides = [read_lines(file) for file in files]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{files[0]} has {len(sides[0])} lines and {files[1]} {len(sides[1])}; they must be parallel.")
    return list(zip(*sides, strict=True))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, stripped; an empty line is an error."""
    lines = []
    for number, line in records.numbered_lines(path):
        if not line.strip():
            raise ValueError(f"{path}:{number}: the line is empty.")
        lines.append(line.strip())
    if not lines:
        raise ValueError(f"{path}: there is nothing in it.")
    return lines


def read_text(where: str, column: str = "text") -> list[str]:
    """Read running text: the lines of a ``.txt`` file, or one text per record. Blank lines belong to it and are kept.

    Args:
        where: a ``.txt`` file, or what `read_rows` reads (also ``.gz``, ``hub:``).
        column: which column of records holds the text.

    Raises:
        FileNotFoundError: as `read_rows`.
        ValueError: as `read_rows`, but only where there is no word at all is a blank line an error.
    """
    if where.startswith(HUB):
        texts = (_require(record, [column], place)[column] for place, record in _records(where))
        lines = ["" if text is None else str(text) for text in texts]
    elif Path(where).name.removesuffix(".gz").endswith(".txt"):
        lines = [line for _, line in records.numbered_lines(find(where))]
    else:
        lines = [row[0] for row in read_rows(where, (column,), blank=True)]
    if not any(line.strip() for line in lines):
        raise ValueError(f"{where}: there is nothing in it.")
    return [line.rstrip("\n") for line in lines]


def _records(where: str) -> Iterator[tuple[str, Any]]:
    """Yield records with what to call them in a complaint."""
    if not where.startswith(HUB):
        path = find(where)
        kind = records.kind_of_file(path)
        if kind == "text":
            raise ValueError(f"{path}: this kind of file has no columns; give .tsv, .csv or .jsonl (also .gz).")
        return records.dataset_records(str(path)) if kind == "parquet" else records.json_records(path)
    name, at, split = where.removeprefix(HUB).partition("@")
    name, _, config = name.partition("#")
    if not at or not name or not split:
        raise ValueError(f"{where}: name a data set of the Hub as {HUB}OWNER/NAME[#CONFIG]@SPLIT.")
    return records.dataset_records(name, config or None, split)


def _table(path: Path, columns: Sequence[str], blank: bool) -> Iterator[Texts]:
    places: list[int] = []
    width = 0
    for number, cells in records.table_rows(path):
        if not places:
            width = len(cells)
            places, header = _places(path, [cell.strip() for cell in cells], columns)
            if header:
                continue
        if cells == [""] and width > 1:
            raise ValueError(f"{path}:{number}: the line is empty.")
        if len(cells) != width:
            raise ValueError(f"{path}:{number}: {len(cells)} column(s), the first line has {width}.")
        yield _complete([cells[place] for place in places], columns, f"{path}:{number}", blank)


def _places(path: Path, first: list[str], columns: Sequence[str]) -> tuple[list[int], bool]:
    """Find the places of the columns, and whether the first row is a header."""
    header = records.is_header(first, columns)
    if all(column.isdigit() for column in columns):
        if len(first) <= max(map(int, columns)):
            raise ValueError(f"{path}:1: {len(first)} column(s) {first}; there is no column {max(map(int, columns))}.")
        return [int(column) for column in columns], header
    if header:
        names = [cell.lower() for cell in first]
        if missing := [column for column in columns if column.lower() not in names]:
            raise ValueError(f"{path}:1: no column {', '.join(missing)}; it has {', '.join(first)}.")
        return [first.index(c) if c in first else names.index(c.lower()) for c in columns], True
    if len(first) != len(columns):
        raise ValueError(
            f"{path}:1: {len(first)} column(s) {first}; expected {', '.join(columns)}, tab-separated in a .tsv, by commas in a "
            ".csv. Of a table with more columns, name them in a first row or give their numbers, from 0."
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        taken = ", ".join(f"{column} {cell[:40]!r}" for column, cell in zip(columns, first, strict=True))
        print(f"{path}: no header; the columns in order are {taken}.", file=sys.stderr)
    return list(range(len(columns))), False


def _fields(record: Any, columns: Sequence[str], where: str, blank: bool) -> tuple[list[str], ...]:
    fields = _require(records.fields_of(record, where, f"an object with {', '.join(columns)}"), columns, where)
    row = []
    for column in columns:
        value = fields[column]
        texts = [str(text).strip() for text in (value if isinstance(value, list) else [value]) if text is not None]
        _complete([" ".join(texts)], [column], where, blank)
        row.append([text for text in texts if text])
    return tuple(row)


def _require(record: Any, columns: Sequence[str], where: str) -> Any:
    if missing := [column for column in columns if column not in record]:
        raise ValueError(f"{where}: no {', '.join(missing)}; it has {', '.join(map(str, record))}.")
    return record


def _complete(values: Sequence[str], columns: Sequence[str], where: str, blank: bool) -> Texts:
    row = tuple(value.strip() for value in values)
    empty = [column for column, value in zip(columns, row, strict=True) if not value]
    if empty and not blank:
        raise ValueError(f"{where}: {', '.join(empty)} is empty.")
    return row
