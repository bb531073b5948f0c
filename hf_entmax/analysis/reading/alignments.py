"""Reading gold word alignments: JSON lines, or two texts with Pharaoh links."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_entmax.analysis.reading.records import numbered_lines


@dataclass(frozen=True)
class AlignedPair:
    """One sentence pair with gold links.

    Attributes:
        source: source words.
        target: target words.
        sure: links (source index, target index), zero-based, that must be found.
        possible: further links that may be found.
        identifier: name in the file, or "".
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    sure: tuple[tuple[int, int], ...]
    possible: tuple[tuple[int, int], ...]
    identifier: str = ""


def read_alignments(path: str | os.PathLike[str]) -> list[AlignedPair]:
    r"""Read gold word alignments from a file, UTF-8, also gzip-compressed (``.gz``).

    Two formats, told apart by their first line:

    - JSON lines: ``{"src": [words], "tgt": [words], "sure": [[i, j], ...], "possible": [[i, j], ...]}`` (``possible`` and
      ``id`` may be missing).
    - Tab-separated: source words, target words (separated by spaces), links in Pharaoh form, ``0-0`` sure and ``1p2``
      or ``1?2`` possible.

    Indices are zero-based.

    Args:
        path: of the file.

    Returns:
        The sentence pairs in their order, with their sure and possible links.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line or a link outside its sentence, with the line number; or an empty file.
    """
    path = Path(path)
    pairs: list[AlignedPair] = []
    for number, line in numbered_lines(path):
        if line.strip():
            parse = _from_json if line.lstrip().startswith("{") else _from_pharaoh
            pairs.append(parse(line, f"{path}:{number}"))
    if not pairs:
        raise ValueError(f"{path}: no aligned sentence pair in it.")
    return pairs


def _from_json(line: str, where: str) -> AlignedPair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
    for key in ("src", "tgt"):
        words = record.get(key)
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{where}: {key!r} must be a non-empty list of words, found {words!r}.")
    if "sure" not in record:
        raise ValueError(f"{where}: 'sure' is missing; it must be a list of [source index, target index].")
    links = (record["sure"], record.get("possible") or [])
    return _pair(record["src"], record["tgt"], *links, where, str(record.get("id", "")))


def _from_pharaoh(line: str, where: str) -> AlignedPair:
    columns = line.split("\t")
    if len(columns) != 3:
        raise ValueError(
            f"{where}: expected a JSON object, or three tab-separated columns (source words, target words, links such as 0-0), "
            f"found {len(columns)} columns."
        )
    source, target = columns[0].split(), columns[1].split()
    if not source or not target:
        raise ValueError(f"{where}: an empty sentence.")
    sure, possible = [], []
    for link in columns[2].split():
        for mark, links in (("-", sure), ("p", possible), ("?", possible)):
            left, found, right = link.partition(mark)
            if found and left.isdigit() and right.isdigit():
                links.append([int(left), int(right)])
                break
        else:
            raise ValueError(f"{where}: {link!r} is not a link; write 0-0 for a sure and 0p0 for a possible one.")
    return _pair(source, target, sure, possible, where)


def _pair(source: list[str], target: list[str], sure: Any, possible: Any, where: str, name: str = "") -> AlignedPair:
    size = len(source), len(target)
    links = _links(sure, *size, f"{where}: sure"), _links(possible, *size, f"{where}: possible")
    return AlignedPair(tuple(source), tuple(target), *links, name)


def _links(links: Any, num_source: int, num_target: int, where: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(links, list):
        raise ValueError(f"{where} must be a list of [source index, target index], found {links!r}.")
    result = []
    for link in links:
        if not isinstance(link, list) or len(link) != 2 or not all(type(index) is int for index in link):
            raise ValueError(f"{where} holds {link!r}; a link is [source index, target index].")
        source, target = link
        if not 0 <= source < num_source or not 0 <= target < num_target:
            raise ValueError(
                f"{where} holds {link!r}, outside a sentence of {num_source} source and {num_target} target words (zero-based)."
            )
        result.append((source, target))
    return tuple(result)
