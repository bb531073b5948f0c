"""Reading dependency heads from CoNLL-U files (Universal Dependencies)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_entmax.analysis.reading.records import numbered_lines

#: The 37 universal relations; a subtype (``nsubj:pass``) counts as its relation.
UNIVERSAL_RELATIONS = (
    "acl", "advcl", "advmod", "amod", "appos", "aux", "case", "cc", "ccomp", "clf", "compound", "conj", "cop",
    "csubj", "dep", "det", "discourse", "dislocated", "expl", "fixed", "flat", "goeswith", "iobj", "list", "mark",
    "nmod", "nsubj", "nummod", "obj", "obl", "orphan", "parataxis", "punct", "reparandum", "root", "vocative",
    "xcomp",
)  # fmt: skip


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
        """Return heads, relations and interrogative marks of the surface tokens.

        The words of a multiword token are one node: it depends where its first word depends whose head lies outside.
        """
        size = len(self.surface)
        found: dict[int, tuple[int, str]] = {}
        for surface, head, relation in zip(self.word_surface, self.heads, self.relations, strict=True):
            target = self.word_surface[head] if head >= 0 else -1
            if target != surface:
                found.setdefault(surface, (target, relation))
        asking = {surface for surface, asks in zip(self.word_surface, self.interrogative, strict=True) if asks}
        nodes = [found.get(surface, (-1, "root")) for surface in range(size)]
        return [head for head, _ in nodes], [name for _, name in nodes], [surface in asking for surface in range(size)]

    def surface_spans(self) -> list[tuple[int, int]]:
        """Return the character span [start, end) of every surface token in :attr:`text`."""
        return word_spans(self.surface, self.spaces)


def word_spans(words: Sequence[str], spaces: Iterable[bool] = itertools.repeat(True)) -> list[tuple[int, int]]:
    """Return the character span [start, end) of every word of a text, where ``spaces`` says whether a space follows it."""
    widths = [len(word) + space for word, space in zip(words, spaces, strict=False)]
    starts = itertools.accumulate(widths, initial=0)
    return [(start, start + len(word)) for word, start in zip(words, starts, strict=False)]


def read_conllu(path: str | os.PathLike[str]) -> list[DependencySentence]:
    """Read a CoNLL-U file, ``.conllu`` or ``.conllu.gz``, UTF-8.

    Multiword tokens (``3-4``) are kept as one surface token over several words, empty nodes (``5.1``) are left out.

    Args:
        path: of the file.

    Returns:
        The sentences in their order; those without a word are left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line, with its number, or a file without a sentence.
    """
    path = Path(path)
    blocks = itertools.groupby(numbered_lines(path), key=lambda line: bool(line[1].strip()))
    sentences = [sentence for full, lines in blocks if full and (sentence := _sentence(lines, path)).words]
    if not sentences:
        raise ValueError(
            f"{path}: no sentence in it; a CoNLL-U file has ten tab-separated columns and a blank line after each sentence."
        )
    return sentences


def _sentence(lines: Iterable[tuple[int, str]], path: Path) -> DependencySentence:
    sentence, first_line, heads = DependencySentence(), 0, []
    multiword_end = 0
    for number, line in lines:
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            if key.strip() == "sent_id":
                sentence.sent_id = value.strip()
            continue
        columns, where = line.split("\t"), f"{path}:{number}"
        if len(columns) != 10:
            raise ValueError(f"{where}: expected 10 tab-separated columns, found {len(columns)}: {_short(line)}")
        identifier, form, _, _, _, features, head, relation, _, misc = columns
        if "." in identifier:
            continue
        start, dash, end = identifier.partition("-")
        expected = len(sentence.words) + 1
        if dash and (not (start.isdigit() and end.isdigit()) or int(start) != expected or int(end) < int(start)):
            raise ValueError(f"{where}: {identifier!r} is not a range of words that starts at {expected}.")
        if not dash and (not identifier.isdigit() or int(identifier) != expected):
            raise ValueError(f"{where}: word number {identifier!r} where {expected} was expected.")
        if dash or expected > multiword_end:
            sentence.surface.append(form)
            sentence.spaces.append("SpaceAfter=No" not in misc.split("|"))
        if dash:
            multiword_end = int(end)
            continue
        if not head.isdigit() and head != "_":
            raise ValueError(f"{where}: the head {head!r} is not a number (0 = root).")
        first_line = first_line or number
        sentence.words.append(form)
        sentence.word_surface.append(len(sentence.surface) - 1)
        heads.append((int(head) if head != "_" else 0, number))
        sentence.relations.append(relation.split(":")[0])
        kinds = [value for key, _, value in (f.partition("=") for f in features.split("|")) if key == "PronType"]
        sentence.interrogative.append("Int" in ",".join(kinds).split(","))
    for word, (head, number) in enumerate(heads, start=1):
        if head > len(heads):
            raise ValueError(
                f"{path}:{number}: head {head} in a sentence of {len(heads)} words (it starts at line {first_line})."
            )
        if head == word:
            raise ValueError(f"{path}:{number}: word {head} is its own head.")
        sentence.heads.append(head - 1)
    return sentence


def _short(line: str, limit: int = 60) -> str:
    return repr(line if len(line) <= limit else line[: limit - 1] + "…")
