"""Reading training data strictly: a line that is not as it should be is named and stops the recipe."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_entmax.analysis.reading.textfiles import numbered_lines

HUB = "hub:"

ItemT = TypeVar("ItemT")


def evenly(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """So many items, from all over a sequence; all of them if there are fewer."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def name_of(where: str) -> str:
    """What a card calls the data: the data set of the Hub, else the folder that holds the files, else the file."""
    if where.startswith(HUB):
        return where.removeprefix(HUB).partition("@")[0].partition("#")[0]
    fixed = where.partition("{")[0]
    folder = Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    return folder.name or Path(where).name.partition(".")[0]


def find(where: str) -> Path:
    """A file or folder, relative to here or to ``$HF_ENTMAX_DATA``.

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


def read_rows(where: str, columns: Sequence[str], blank: bool = False) -> list[tuple[str, ...]]:
    """Rows of named columns.

    Args:
        where: a ``.tsv``, ``.csv`` or ``.jsonl`` file (also ``.gz``), or ``hub:OWNER/NAME[#CONFIG]@SPLIT``. A table whose
            first row names all the columns has a header. In any other, which must have just as many, the columns are taken in
            order, and said so.
        columns: their names; a number names a column of a table without a header, from 0.
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
    """As `read_rows`, for columns that hold several texts, such as the references of a summary.

    Returns:
        The texts of each column of each row: the members of a JSON list, else one.

    Raises:
        FileNotFoundError, ValueError: as `read_rows`.
    """
    rows: list[tuple[list[str], ...]]
    if where.startswith(HUB):
        rows = list(_hub_rows(where, columns, blank))
    else:
        path = find(where)
        name = path.name.removesuffix(".gz")
        if name.endswith((".tsv", ".csv")):
            table = _table_rows(path, columns, blank, _tabbed if name.endswith(".tsv") else _comma_separated)
            rows = [tuple([text] for text in row) for row in table]
        elif name.endswith((".jsonl", ".json")):
            rows = list(_json_rows(path, columns, blank))
        else:
            raise ValueError(f"{path}: this kind of file has no columns; give .tsv, .csv or .jsonl (also .gz).")
    if not rows:
        raise ValueError(f"{where}: there is nothing in it.")
    return rows


def read_pairs(where: str, source: str, target: str) -> list[tuple[str, str]]:
    """Sentence pairs: two parallel files where ``where`` contains ``{lang}``, else two columns of one file.

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
    """The lines of a text file, stripped; an empty one is an error."""
    lines = []
    for number, line in numbered_lines(path):
        if not line.strip():
            raise ValueError(f"{path}:{number}: the line is empty.")
        lines.append(line.strip())
    if not lines:
        raise ValueError(f"{path}: there is nothing in it.")
    return lines


def read_text(where: str, column: str = "text") -> list[str]:
    """Running text: the lines of a ``.txt`` file, or one text per record. Blank lines belong to it and are kept.

    Args:
        where: a ``.txt`` file, or what `read_rows` reads (also ``.gz``, ``hub:``).
        column: which column of records holds the text.

    Raises:
        FileNotFoundError: as `read_rows`.
        ValueError: as `read_rows`, but only where there is no word at all is a blank line an error.
    """
    if where.startswith(HUB):
        texts = (_require(record, [column], place)[column] for place, record in _hub_records(where))
        lines = ["" if text is None else str(text) for text in texts]
    elif Path(where).name.removesuffix(".gz").endswith(".txt"):
        lines = [line for _, line in numbered_lines(find(where))]
    else:
        lines = [row[0] for row in read_rows(where, (column,), blank=True)]
    if not any(line.strip() for line in lines):
        raise ValueError(f"{where}: there is nothing in it.")
    return [line.rstrip("\n") for line in lines]


def _tabbed(path: Path) -> Iterator[tuple[int, list[str]]]:
    # Not the csv module's: in these files a quotation mark is text.
    return ((number, line.split("\t")) for number, line in numbered_lines(path))


def _comma_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of their first line: a quoted field may go over several."""
    reader = csv.reader((line + "\n" for _, line in numbered_lines(path)), strict=True)
    first = 1
    try:
        for cells in reader:
            yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{first}: not valid CSV ({error}).") from error


def _table_rows(
    path: Path, columns: Sequence[str], blank: bool, read: Callable[[Path], Iterator[tuple[int, list[str]]]]
) -> Iterator[tuple[str, ...]]:
    places: list[int] = []
    width = 0
    for number, cells in read(path):
        cells = cells or [""]  # so the csv module sees an empty line
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
    """Where the columns stand, and whether the first row is a header."""
    if set(columns) <= set(first):
        return [first.index(column) for column in columns], True
    if set(columns) & set(first):
        missing = [column for column in columns if column not in first]
        raise ValueError(f"{path}:1: no column {', '.join(missing)}; it has {', '.join(first)}.")
    if all(column.isdigit() for column in columns):
        if len(first) <= max(map(int, columns)):
            raise ValueError(f"{path}:1: {len(first)} column(s) {first}; there is no column {max(map(int, columns))}.")
        return [int(column) for column in columns], False
    if len(first) != len(columns):
        raise ValueError(
            f"{path}:1: {len(first)} column(s) {first}; expected {', '.join(columns)}, tab-separated in a .tsv, by commas in a "
            ".csv. Of a table with more columns, name them in a first row or give their numbers, from 0."
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        taken = ", ".join(f"{column} {cell[:40]!r}" for column, cell in zip(columns, first, strict=True))
        print(f"{path}: no header; the columns in order are {taken}.", file=sys.stderr)
    return list(range(len(columns))), False


def _json_rows(path: Path, columns: Sequence[str], blank: bool) -> Iterator[tuple[list[str], ...]]:
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
        yield _fields(record, columns, where, blank)


def _hub_rows(where: str, columns: Sequence[str], blank: bool) -> Iterator[tuple[list[str], ...]]:
    for place, record in _hub_records(where):
        yield _fields(record, columns, place, blank)


def _hub_records(where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records with what to call them in a complaint."""
    import datasets

    name, at, split = where.removeprefix(HUB).partition("@")
    name, _, config = name.partition("#")
    if not at or not name or not split:
        raise ValueError(f"{where}: name a data set of the Hub as {HUB}OWNER/NAME[#CONFIG]@SPLIT.")
    try:
        data = datasets.load_dataset(name, config or None, split=split)
    except (FileNotFoundError, ConnectionError, OSError) as error:
        raise FileNotFoundError(f"{where}: the data set cannot be loaded ({error}).") from error
    for place, record in enumerate(data):
        yield f"{where}, record {place}", record


def _fields(record: Any, columns: Sequence[str], where: str, blank: bool) -> tuple[list[str], ...]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(columns)}, found {type(record).__name__}.")
    fields = record | record["translation"] if isinstance(record.get("translation"), dict) else record
    _require(fields, columns, where)
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


def _complete(values: Sequence[str], columns: Sequence[str], where: str, blank: bool) -> tuple[str, ...]:
    row = tuple(value.strip() for value in values)
    empty = [column for column, value in zip(columns, row, strict=True) if not value]
    if empty and not blank:
        raise ValueError(f"{where}: {', '.join(empty)} is empty.")
    return row
