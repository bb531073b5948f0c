"""Text to analyse: files of many kinds, or data sets of the Hub."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_entmax.analysis.reading import records


@dataclass(frozen=True)
class TextRecord:
    """One sentence, or a pair.

    Attributes:
        source: the text, or the source side.
        target: the target side, or None.
    """

    source: str
    target: str | None = None


def read_data(
    data: str | os.PathLike[str],
    *,
    source_column: str | None = None,
    target_column: str | None = None,
    split: str | None = None,
    dataset_config: str | None = None,
    limit: int | None = None,
) -> list[TextRecord]:
    """Read sentences or sentence pairs.

    Files (``.gz`` too): ``.tsv`` and ``.csv`` with or without a header (`hf_entmax.analysis.reading.records.is_header`),
    ``.json`` and ``.jsonl`` with one object per line (or one list), ``.parquet``, anything else as plain text, one sentence a
    line. Empty sentences are left out. A name that is no file is taken for a data set of the Hub (or a folder that
    ``datasets`` can load), which is streamed.

    Args:
        data: path or Hub id.
        source_column: column or field of the text; default: a usual name, else the first column.
        target_column: column or field of the target; default: a usual name, else the second column of a TSV file.
        split: of a Hub data set; default: test, validation or train, the first there is.
        dataset_config: configuration of a Hub data set ("de-en").
        limit: largest number of records.

    Raises:
        FileNotFoundError: neither a file nor a data set.
        ValueError: a broken line (its number is named), a missing column, no text at all, a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of sentences must be at least 1, got {limit}.")
    path = Path(data)
    columns = (source_column, target_column)
    found = _read_file(path, *columns) if path.is_file() else _read_hub(str(data), *columns, split, dataset_config)
    kept = (record for record in found if record.source.strip() and (record.target is None or record.target.strip()))
    result = list(itertools.islice(kept, limit))
    if not result:
        raise ValueError(f"{data}: no sentence in it.")
    return result


def _read_file(path: Path, source: str | None, target: str | None) -> Iterator[TextRecord]:
    kind = records.kind_of_file(path)
    if kind in ("tsv", "csv"):
        yield from _read_columns(path, source, target)
    elif kind == "text":
        if source or target:
            raise ValueError(f"{path}: plain text has no columns; leave out their names, or use .tsv, .csv or .jsonl.")
        for _, line in records.numbered_lines(path):
            yield TextRecord(line.strip())
    else:
        found = records.json_records(path, lenient=True) if kind == "json" else records.dataset_records(str(path))
        for place, record in found:
            yield _from_fields(record, source, target, place)


def _read_columns(path: Path, source: str | None, target: str | None) -> Iterator[TextRecord]:
    places: tuple[int, int | None] | None = None
    for number, row in records.table_rows(path):
        if places is None:
            header = records.is_header(row, [name for name in (source, target) if name and not name.isdigit()])
            names = [name.strip().lower() for name in row] if header else None
            places = _places(names, len(row), source, target, path)
            if header:
                continue
        if not any(cell.strip() for cell in row):
            continue
        least = max(place for place in places if place is not None) + 1
        if len(row) < least:
            raise ValueError(f"{path}:{number}: {len(row)} column(s), expected at least {least}.")
        yield TextRecord(row[places[0]].strip(), None if places[1] is None else row[places[1]].strip())


def _places(names: list[str] | None, width: int, source: Any, target: Any, path: Path) -> tuple[int, int | None]:
    def find(name: str | None, usual: Sequence[str]) -> int | None:
        if name is not None:
            if name.isdigit() and (names is None or name not in names) and int(name) < width:
                return int(name)
            if names is None or name.lower() not in names:
                unnamed = f"{width} columns without names (use 0 to {width - 1})"
                have = unnamed if names is None else f"columns {', '.join(names)}"
                raise ValueError(f"{path}: no column {name!r}; it has {have}.")
            return names.index(name.lower())
        return next((names.index(usual_name) for usual_name in usual if names and usual_name in names), None)

    first = find(source, records.SOURCE_NAMES)
    second = find(target, records.TARGET_NAMES)
    if first is None:
        first = 0 if second != 0 or width == 1 else 1
    if second is None and target is None and names is None and width > 1:
        second = 1 if first == 0 else 0
    return first, None if second == first else second


def _from_fields(value: Any, source: str | None, target: str | None, where: str) -> TextRecord:
    """Read one record: a string, or an object with the columns."""
    if isinstance(value, str):
        return TextRecord(value)
    fields = records.fields_of(value, where, "an object or a string")
    nested = value.get("translation")
    if isinstance(nested, Mapping):
        languages = list(nested)
        source = source or languages[0]
        target = target or next((language for language in languages if language != source), None)

    def text(name: str | None, usual: Sequence[str], required: bool) -> str | None:
        if name is not None and name not in fields:
            raise ValueError(f"{where}: no field {name!r}; it has {', '.join(map(str, fields))}.")
        name = name or next((usual_name for usual_name in usual if usual_name in fields), None)
        if name is None:
            if required:
                raise ValueError(
                    f"{where}: none of the fields {', '.join(map(str, fields))} is known to hold text; name it (source column)."
                )
            return None
        content = fields[name]
        if isinstance(content, list) and content and all(isinstance(part, str) for part in content):
            content = " ".join(content)
        if not isinstance(content, str):
            if required or target is not None:
                raise ValueError(f"{where}: field {name!r} holds {type(content).__name__}, not text.")
            return None
        return content.strip()

    first = text(source, records.SOURCE_NAMES, True)
    return TextRecord(first or "", text(target, records.TARGET_NAMES, False))


def _read_hub(
    name: str, source: str | None, target: str | None, split: str | None, config: str | None
) -> Iterator[TextRecord]:
    path, endings = Path(name), (".txt", ".tsv", ".csv", ".json", ".jsonl", ".gz")
    if (path.suffix.lower() in endings or name.startswith((".", "/", "~"))) and not path.exists():
        raise FileNotFoundError(f"{name}: no such file.")
    for place, record in records.dataset_records(name, config, split, streaming=True):
        yield _from_fields(record, source, target, place)
