"""Reading training data strictly: a line that is not as it should be is named and stops the recipe."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_entmax.analysis.textfiles import numbered_lines

HUB = "hub:"


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


def read_rows(where: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of named columns.

    Args:
        where: a ``.tsv``, ``.csv`` or ``.jsonl`` file (also ``.gz``), or ``hub:OWNER/NAME[#CONFIG]@SPLIT``. A table whose
            first row names all the columns has a header; in any other the columns are taken in order.
        columns: their names; a number names a column of a table without a header, from 0.

    Returns:
        The columns of each row, stripped; none is empty. A JSON list of sentences is one text.

    Raises:
        FileNotFoundError: if there is no such file or data set.
        ValueError: for bad UTF-8, a wrong number of columns, an empty field, broken JSON or no row at all, with file and line.
    """
    return [tuple(" ".join(texts) for texts in row) for row in read_lists(where, columns)]


def read_lists(where: str, columns: Sequence[str]) -> list[tuple[list[str], ...]]:
    """As `read_rows`, for columns that hold several texts, such as the references of a summary.

    Returns:
        The texts of each column of each row: the members of a JSON list, else one.

    Raises:
        FileNotFoundError, ValueError: as `read_rows`.
    """
    rows: list[tuple[list[str], ...]]
    if where.startswith(HUB):
        rows = list(_hub_rows(where, columns))
    else:
        path = find(where)
        name = path.name.removesuffix(".gz")
        if name.endswith((".tsv", ".csv")):
            table = _table_rows(path, columns, "\t" if name.endswith(".tsv") else ",")
            rows = [tuple([text] for text in row) for row in table]
        elif name.endswith((".jsonl", ".json")):
            rows = list(_json_rows(path, columns))
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
        lines = [str(_require(record, [column], place)[column]) for place, record in _hub_records(where)]
    elif Path(where).name.removesuffix(".gz").endswith(".txt"):
        lines = [line for _, line in numbered_lines(find(where))]
    else:
        lines = [row[0] for row in read_rows(where, (column,))]
    if not any(line.strip() for line in lines):
        raise ValueError(f"{where}: there is nothing in it.")
    return [line.rstrip("\n") for line in lines]


def _table_rows(path: Path, columns: Sequence[str], delimiter: str) -> Iterator[tuple[str, ...]]:
    places: list[int] = []
    width = 0
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL  # a quotation mark of a TSV file is text
    for number, line in numbered_lines(path):
        cells = next(csv.reader([line], delimiter=delimiter, quoting=quoting), [])
        if not places:
            names = [cell.strip() for cell in cells]
            width = len(cells)
            if set(columns) <= set(names):
                places = [names.index(column) for column in columns]
                continue
            if missing := [column for column in columns if column not in names] if set(columns) & set(names) else []:
                raise ValueError(f"{path}:1: no column {', '.join(missing)}; it has {', '.join(names)}.")
            numbers = all(column.isdigit() for column in columns)
            places = [int(column) for column in columns] if numbers else list(range(len(columns)))
            if width <= max(places):
                raise ValueError(
                    f"{path}:1: {width} column(s) {names}; expected {', '.join(columns)}, tab-separated in a .tsv, by commas in a .csv."
                )
        if len(cells) != width:
            raise ValueError(f"{path}:{number}: {len(cells)} column(s), the first line has {width}.")
        yield _complete((cells[place] for place in places), columns, f"{path}:{number}")


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[list[str], ...]]:
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
        yield _fields(record, columns, where)


def _hub_rows(where: str, columns: Sequence[str]) -> Iterator[tuple[list[str], ...]]:
    for place, record in _hub_records(where):
        yield _fields(record, columns, place)


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


def _fields(record: Any, columns: Sequence[str], where: str) -> tuple[list[str], ...]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(columns)}, found {type(record).__name__}.")
    fields = record | record["translation"] if isinstance(record.get("translation"), dict) else record
    _require(fields, columns, where)
    row = []
    for column in columns:
        value = fields[column]
        texts = [str(text).strip() for text in (value if isinstance(value, list) else [value]) if text is not None]
        _complete(iter([" ".join(texts)]), [column], where)
        row.append([text for text in texts if text])
    return tuple(row)


def _require(record: Any, columns: Sequence[str], where: str) -> Any:
    if missing := [column for column in columns if column not in record]:
        raise ValueError(f"{where}: no {', '.join(missing)}; it has {', '.join(map(str, record))}.")
    return record


def _complete(values: Iterator[str], columns: Sequence[str], where: str) -> tuple[str, ...]:
    row = tuple(value.strip() for value in values)
    if empty := [column for column, value in zip(columns, row, strict=True) if not value]:
        raise ValueError(f"{where}: {', '.join(empty)} is empty.")
    return row
