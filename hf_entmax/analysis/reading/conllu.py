"""Reading dependency heads from CoNLL-U files (Universal Dependencies)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_entmax.analysis.reading.textfiles import numbered_lines

#: The 37 universal relations; a subtype (``nsubj:pass``) counts as its relation.
UNIVERSAL_RELATIONS = (
    "acl",
    "advcl",
    "advmod",
    "amod",
    "appos",
    "aux",
    "case",
    "cc",
    "ccomp",
    "clf",
    "compound",
    "conj",
    "cop",
    "csubj",
    "dep",
    "det",
    "discourse",
    "dislocated",
    "expl",
    "fixed",
    "flat",
    "goeswith",
    "iobj",
    "list",
    "mark",
    "nmod",
    "nsubj",
    "nummod",
    "obj",
    "obl",
    "orphan",
    "parataxis",
    "punct",
    "reparandum",
    "root",
    "vocative",
    "xcomp",
)


@dataclass
class DependencySentence:
    """One sentence of a treebank.

    Attributes:
        words: its syntactic words.
        heads: for each word the zero-based index of its head; -1 for the root.
        relations: for each word the universal relation to its head, without subtype.
        interrogative: for each word whether its features say ``PronType=Int``.
        spaces: for each surface token whether a space follows it.
        surface: surface tokens (a multiword token such as "zum" once).
        word_surface: for each word the index of the surface token it is part of.
        sent_id: identifier in the file, or "".
    """

    words: list[str] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    relations: list[str] = field(default_factory=list)
    interrogative: list[bool] = field(default_factory=list)
    spaces: list[bool] = field(default_factory=list)
    surface: list[str] = field(default_factory=list)
    word_surface: list[int] = field(default_factory=list)
    sent_id: str = ""

    @property
    def text(self) -> str:
        """The sentence as it was written."""
        pieces = [token + (" " if space else "") for token, space in zip(self.surface, self.spaces, strict=True)]
        return "".join(pieces).strip()

    def surface_dependencies(self) -> tuple[list[int], list[str], list[bool]]:
        """Heads, relations and interrogative marks of the surface tokens.

        The words of a multiword token are one node: it depends where its first word depends whose head lies outside.
        """
        heads, relations, asks = [-1] * len(self.surface), ["root"] * len(self.surface), [False] * len(self.surface)
        decided = [False] * len(self.surface)
        for word, surface in enumerate(self.word_surface):
            asks[surface] = asks[surface] or self.interrogative[word]
            head = self.heads[word]
            target = self.word_surface[head] if head >= 0 else -1
            if decided[surface] or target == surface:
                continue
            heads[surface], relations[surface], decided[surface] = target, self.relations[word], True
        return heads, relations, asks

    def surface_spans(self) -> list[tuple[int, int]]:
        """Character span [start, end) of every surface token in :attr:`text`."""
        spans, position = [], 0
        for token, space in zip(self.surface, self.spaces, strict=True):
            spans.append((position, position + len(token)))
            position += len(token) + int(space)
        return spans


def read_conllu(path: str | os.PathLike[str]) -> list[DependencySentence]:
    """Reads a CoNLL-U file.

    Multiword tokens (``3-4``) are kept as one surface token over several words, empty nodes (``5.1``) are left out.

    Args:
        path: ``.conllu``, also ``.conllu.gz``, UTF-8.

    Returns:
        Its sentences.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line, with its number, or a file without a sentence.
    """
    path = Path(path)
    sentences = list(_sentences(numbered_lines(path), path))
    if not sentences:
        raise ValueError(
            f"{path}: no sentence in it; a CoNLL-U file has ten tab-separated columns and a blank line after each sentence."
        )
    return sentences


def _sentences(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[DependencySentence]:
    sentence, first_line, heads = DependencySentence(), 0, []
    multiword_end = 0
    for number, line in lines:
        if not line.strip():
            if sentence.words:
                yield _finish(sentence, heads, first_line, path)
            sentence, heads, multiword_end = DependencySentence(), [], 0
            continue
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            if key.strip() == "sent_id":
                sentence.sent_id = value.strip()
            continue
        columns = line.split("\t")
        if len(columns) != 10:
            raise ValueError(
                f"{path}:{number}: expected 10 tab-separated columns, found {len(columns)}: {_short(line)}"
            )
        identifier, form, _, _, _, features, head, relation, _, misc = columns
        space = "SpaceAfter=No" not in misc.split("|")
        if "." in identifier:
            continue
        if "-" in identifier:
            start, _, end = identifier.partition("-")
            if (
                not (start.isdigit() and end.isdigit())
                or int(start) != len(sentence.words) + 1
                or int(end) < int(start)
            ):
                raise ValueError(
                    f"{path}:{number}: {identifier!r} is not a range of words that starts at {len(sentence.words) + 1}."
                )
            multiword_end = int(end)
            sentence.surface.append(form)
            sentence.spaces.append(space)
            continue
        if not identifier.isdigit() or int(identifier) != len(sentence.words) + 1:
            raise ValueError(
                f"{path}:{number}: word number {identifier!r} where {len(sentence.words) + 1} was expected."
            )
        if not head.isdigit() and head != "_":
            raise ValueError(f"{path}:{number}: the head {head!r} is not a number (0 = root).")
        if not sentence.words:
            first_line = number
        if int(identifier) > multiword_end:
            sentence.surface.append(form)
            sentence.spaces.append(space)
        sentence.words.append(form)
        sentence.word_surface.append(len(sentence.surface) - 1)
        heads.append((int(head) if head != "_" else 0, number))
        sentence.relations.append(relation.split(":")[0])
        sentence.interrogative.append("Int" in _feature(features, "PronType"))
    if sentence.words:
        yield _finish(sentence, heads, first_line, path)


def _finish(
    sentence: DependencySentence, heads: list[tuple[int, int]], first_line: int, path: Path
) -> DependencySentence:
    for position, (head, line) in enumerate(heads):
        if head > len(sentence.words):
            raise ValueError(
                f"{path}:{line}: head {head} in a sentence of {len(sentence.words)} words (it starts at line {first_line})."
            )
        if head == position + 1:
            raise ValueError(f"{path}:{line}: word {head} is its own head.")
        sentence.heads.append(head - 1)
    return sentence


def _feature(features: str, name: str) -> list[str]:
    for feature in features.split("|"):
        key, _, value = feature.partition("=")
        if key == name:
            return value.split(",")
    return []


def _short(line: str, limit: int = 60) -> str:
    return repr(line if len(line) <= limit else line[: limit - 1] + "…")
