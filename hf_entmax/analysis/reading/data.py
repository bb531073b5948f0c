"""Text to analyse: files of many kinds, or data sets of the Hub."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_entmax.analysis.reading.textfiles import numbered_lines

_SOURCE_NAMES = ("source", "src", "text", "sentence", "input", "document", "question", "premise", "content", "lemma")
_TARGET_NAMES = ("target", "tgt", "output", "summary", "translation", "answer", "form")


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
    """Reads sentences or sentence pairs.

    Files (``.gz`` too): ``.tsv`` and ``.csv`` with or without a header, ``.json`` and ``.jsonl`` with one object per line
    (or one list), anything else as plain text, one sentence a line. Empty sentences are left out. A name that is no file
    is taken for a data set of the Hub (or a folder that ``datasets`` can load), which is streamed.

    Args:
        data: path or Hub id.
        source_column: column or field of the text; default: a usual name, else the first column.
        target_column: column or field of the target; default: a usual name, else the second column of a TSV file.
        split: of a Hub data set; default: test, validation or train, the first there is.
        dataset_config: configuration of a Hub data set ("de-en").
        limit: read at most so many records.

    Returns:
        The records.

    Raises:
        FileNotFoundError: neither a file nor a data set.
        ValueError: a broken line (its number is named), a missing column, no text at all, a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of sentences must be at least 1, got {limit}.")
    path = Path(data)
    records = (
        _read_file(path, source_column, target_column)
        if path.is_file()
        else _read_hub(str(data), path, source_column, target_column, split, dataset_config)
    )
    kept = (record for record in records if record.source.strip() and (record.target is None or record.target.strip()))
    result = list(itertools.islice(kept, limit))
    if not result:
        raise ValueError(f"{data}: no sentence in it.")
    return result


def _read_file(path: Path, source: str | None, target: str | None) -> Iterator[TextRecord]:
    suffix = path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()
    if suffix in (".tsv", ".csv"):
        yield from _read_columns(path, "\t" if suffix == ".tsv" else ",", source, target)
    elif suffix in (".json", ".jsonl"):
        yield from _read_json(path, source, target)
    else:
        if source or target:
            raise ValueError(
                f"{path}: plain text has no columns; leave out the column names, or use .tsv, .csv or .jsonl."
            )
        for _, line in numbered_lines(path):
            yield TextRecord(line.strip())


def _read_columns(path: Path, delimiter: str, source: str | None, target: str | None) -> Iterator[TextRecord]:
    # Quotation marks of a TSV file are text.
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader((line + "\n" for _, line in numbered_lines(path)), delimiter=delimiter, quoting=quoting)
    first = next(reader, None)
    if first is None:
        return
    names = [name.strip().lower() for name in first]
    known = {*_SOURCE_NAMES, *_TARGET_NAMES, *(name.lower() for name in (source, target) if name)}
    has_header = bool(known & set(names))
    places = _places(names if has_header else None, len(first), source, target, path)
    rows: Iterator[list[str]] = reader if has_header else itertools.chain([first], reader)
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        if len(row) <= max(place for place in places if place is not None):
            raise ValueError(
                f"{path}:{reader.line_num}: {len(row)} column(s), expected at least {max(p for p in places if p is not None) + 1}."
            )
        yield TextRecord(row[places[0]].strip(), None if places[1] is None else row[places[1]].strip())


def _places(
    names: list[str] | None, width: int, source: str | None, target: str | None, path: Path
) -> tuple[int, int | None]:
    def find(name: str | None, usual: Sequence[str]) -> int | None:
        if name is not None:
            if name.isdigit() and (names is None or name not in names) and int(name) < width:
                return int(name)
            if names is None or name.lower() not in names:
                have = (
                    f"columns {', '.join(names)}"
                    if names is not None
                    else f"{width} columns without names (use 0 to {width - 1})"
                )
                raise ValueError(f"{path}: no column {name!r}; it has {have}.")
            return names.index(name.lower())
        return next((names.index(usual_name) for usual_name in usual if names and usual_name in names), None)

    first = find(source, _SOURCE_NAMES)
    second = find(target, _TARGET_NAMES)
    if first is None:
        first = 0 if second != 0 or width == 1 else 1
    if second is None and target is None and names is None and width > 1:
        second = 1 if first == 0 else 0
    return first, None if second == first else second


def _read_json(path: Path, source: str | None, target: str | None) -> Iterator[TextRecord]:
    lines = ((number, line) for number, line in numbered_lines(path) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip().startswith("["):
        try:
            values = json.loads("\n".join(line for _, line in itertools.chain([first], lines)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{first[0] + error.lineno - 1}: not valid JSON ({error.msg}).") from error
        for place, value in enumerate(values):
            yield _from_fields(value, source, target, f"{path}: entry {place}")
        return
    for number, line in itertools.chain([first], lines):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno}).") from error
        yield _from_fields(value, source, target, f"{path}:{number}")


def _from_fields(value: Any, source: str | None, target: str | None, where: str) -> TextRecord:
    """Reads one record; ``translation: {"en": ..., "de": ...}`` as in the Hub's translation sets counts as its content."""
    if isinstance(value, str):
        return TextRecord(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object or a string, found {type(value).__name__}.")
    fields = dict(value)
    nested = fields.get("translation")
    if isinstance(nested, Mapping):
        fields |= nested
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

    first = text(source, _SOURCE_NAMES, True)
    return TextRecord(first or "", text(target, _TARGET_NAMES, False))


def _read_hub(
    name: str, path: Path, source: str | None, target: str | None, split: str | None, dataset_config: str | None
) -> Iterator[TextRecord]:
    looks_like_file = path.suffix.lower() in (".txt", ".tsv", ".csv", ".json", ".jsonl", ".gz") or name.startswith(
        (".", "/", "~")
    )
    if looks_like_file and not path.exists():
        raise FileNotFoundError(f"{name}: no such file.")
    import datasets

    try:
        splits = (
            [split]
            if split
            else [
                found
                for found in ("test", "validation", "train")
                if found in datasets.get_dataset_split_names(name, dataset_config)
            ]
        )
        if not splits:
            raise ValueError(f"{name}: has none of the splits test, validation, train; name one.")
        stream = datasets.load_dataset(name, dataset_config, split=splits[0], streaming=True)
    except (FileNotFoundError, ConnectionError, OSError) as error:
        raise FileNotFoundError(f"{name}: neither a file nor a data set that can be loaded ({error}).") from error
    for place, value in enumerate(stream):
        yield _from_fields(value, source, target, f"{name}, record {place}")
