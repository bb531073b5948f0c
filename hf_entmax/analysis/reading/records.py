"""Lines of text, rows of tables, JSON records and records of data sets, each with its place for complaints."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: What columns of text are usually called, and those of its target: a translation, a summary, a form.
SOURCE_NAMES = ("source", "src", "text", "sentence", "input", "document", "question", "premise", "content", "lemma")
TARGET_NAMES = ("target", "tgt", "output", "summary", "translation", "answer", "form")
_OTHER_NAMES = ("label", "labels", "class", "category", "lang", "language", "split", "id", "tags", "features", "word")
_USUAL = {*SOURCE_NAMES, *TARGET_NAMES, *_OTHER_NAMES}


def numbered_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yield ``(line number from 1, line without its end)`` of UTF-8 text; ``.gz`` is decompressed on the fly."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    yield number, raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    place = f"{error.reason} at byte {error.start}"
                    raise ValueError(f"{path}:{number}: not UTF-8 text ({place}).") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: a damaged gzip file ({error}).") from error


def kind_of_file(path: Path) -> str:
    """Tell the kind: ``tsv``, ``csv``, ``json`` (also for ``.jsonl``), ``parquet`` or ``text``, whether compressed (``.gz``) or not."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return {".tsv": "tsv", ".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(suffix, "text")


def table_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield ``(line number from 1, cells)`` of a ``.tsv`` or ``.csv`` file.

    In a ``.tsv`` a quotation mark is text; a quoted field of a ``.csv`` may go over several lines, and the first one counts.
    """
    if kind_of_file(path) == "tsv":
        yield from ((number, line.split("\t")) for number, line in numbered_lines(path))
        return
    reader = csv.reader((line + "\n" for _, line in numbered_lines(path)), strict=True)
    first = 1
    try:
        for cells in reader:
            yield first, cells or [""]
            first = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{first}: not valid CSV ({error}).") from error


def json_records(path: Path, lenient: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield ``(place, record)`` of a file with a JSON value per line, or with one list of objects.

    If ``lenient``, lines may be empty, and the list may be of strings.
    """
    lines = numbered_lines(path)
    if lenient:
        lines = ((number, line) for number, line in lines if line.strip())
    first = next(lines, None)
    if first is None:
        return
    begin = first[1].replace(" ", "")
    if begin == "[" or begin.startswith("[" if lenient else "[{"):
        try:
            values = json.loads("\n".join(line for _, line in itertools.chain([first], lines)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{first[0] + error.lineno - 1}: not valid JSON ({error.msg}).") from error
        yield from ((f"{path}: entry {place}", value) for place, value in enumerate(values))
        return
    for number, line in itertools.chain([first], lines):
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno}).") from error


def dataset_records(
    name: str, config: str | None = None, split: str | None = None, streaming: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield ``(place, record)`` of what ``datasets`` can load: a set of the Hub, a folder of one, a ``.parquet`` file.

    The default split is test, validation or train, the first there is; ``streaming`` keeps no copy.
    """
    import datasets

    try:
        if name.endswith(".parquet"):
            data = datasets.load_dataset("parquet", data_files=name, split="train", streaming=streaming)
        else:
            if split is None:
                have = datasets.get_dataset_split_names(name, config)
                split = next((usual for usual in ("test", "validation", "train") if usual in have), None)
                if split is None:
                    raise ValueError(f"{name}: has none of the splits test, validation, train; name one.")
            data = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (FileNotFoundError, ConnectionError, OSError) as error:
        raise FileNotFoundError(f"{name}: neither a file nor a data set that can be loaded ({error}).") from error
    for place, record in enumerate(data):
        yield f"{name}, record {place}", record


def fields_of(record: Any, where: str, expected: str) -> dict[str, Any]:
    """Return the fields of a record; ``translation: {"en": ..., "de": ...}``, as in the Hub's translation sets, counts as its content."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: expected {expected}, found {type(record).__name__}.")
    nested = record.get("translation")
    return {**record, **nested} if isinstance(nested, Mapping) else dict(record)


def is_header(first: Sequence[str], wanted: Sequence[str]) -> bool:
    """Tell whether the first row of a table is a header; the rule is the same for every table.

    The first row is a header if it has a column that is asked for by name (digits are places, not names), or if all of
    its cells are usual names of columns (``source``, ``text``, ``label``, ...) or, where no column is asked for, one is.
    """
    cells = {cell.strip().lower() for cell in first}
    names = {name.lower() for name in wanted if not name.isdigit()}
    return bool(cells & names) or (len(cells) > 1 and cells <= _USUAL) or (not wanted and bool(cells & _USUAL))
