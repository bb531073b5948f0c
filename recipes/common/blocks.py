"""Running text as blocks of tokens, and the words it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_entmax.analysis.reading.tables import read_text

Block = dict[str, list[int]]


def check_sizes(settings: Any) -> None:
    """Ranges of the settings that say how much text there is, also for other recipes with such settings.

    Raises:
        ValueError: if one is out of its range.
    """
    settings.require("block", settings.block >= 2, "at least 2")
    enough = settings.train_tokens == 0 or settings.train_tokens >= settings.block
    settings.require("train_tokens", enough, f"0 for all, or at least block={settings.block}")
    for name in ("dev_tokens", "test_tokens"):
        count = getattr(settings, name)
        settings.require(name, count == 0 or count >= 2, "0 for all, or at least 2: the first is not predicted")


def encode(lines: list[str], tokenizer: Any, limit: int = 0) -> tuple[list[int], int | None]:
    """Token ids of lines with their ends, joined, and how many words they are.

    Args:
        lines: without their ends.
        tokenizer: of the model.
        limit: return at most so many ids; 0 for all.

    Returns:
        The ids, and the words between blanks of the text that they stand for, with one end per line; None where the limit
        cuts a line and the tokenizer cannot say which of its words come before the cut.
    """
    ids: list[int] = []
    words = 0
    for start in range(0, len(lines), 1000):
        part = [line + "\n" for line in lines[start : start + 1000]]
        rows = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        for text, row in zip(part, rows, strict=True):
            if limit and len(ids) + len(row) >= limit:
                kept = limit - len(ids)
                begun = _words_before(text, row, kept, tokenizer)
                return ids + row[:kept], None if begun is None else words + begun
            ids += row
            words += count_words(text)
    return ids, words


def count_words(text: str) -> int:
    """Words between blanks, and one end per line."""
    return len(text.split()) + text.count("\n")


def _words_before(text: str, row: list[int], kept: int, tokenizer: Any) -> int | None:
    """Words of a text up to the end of its first tokens, of all its tokens ``row``."""
    if kept == len(row):
        return count_words(text)
    start = tokenizer.decode(row[:kept])
    if text.startswith(start):
        return count_words(start)
    if not tokenizer.is_fast:
        return None
    places = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    # A tokenizer may drop what stands between two tokens: the cut is exact only if that is no word and no end of a line.
    counts = {count_words(text[: places[kept - 1][1]]), count_words(text[: places[kept][0]])}
    return counts.pop() if len(counts) == 1 else None


def cut(ids: list[int], length: int, full_only: bool = False) -> list[Block]:
    """Blocks that overlap by one token; the last may be shorter, or is left out with ``full_only``."""
    blocks = [ids[start : start + length] for start in range(0, len(ids) - 1, length - 1)]
    return [{"input_ids": block} for block in blocks if len(block) == length or not full_only]


def collate(blocks: list[Block]) -> dict[str, Tensor]:
    """Blocks as tensors; a shorter one is filled up behind with its last token, which nobody sees or predicts."""
    longest = max(len(block["input_ids"]) for block in blocks)
    rows = [(block["input_ids"], longest - len(block["input_ids"])) for block in blocks]
    return {
        "input_ids": torch.tensor([ids + ids[-1:] * missing for ids, missing in rows]),
        "labels": torch.tensor([ids + [-100] * missing for ids, missing in rows]),
    }


def prepare(
    settings: Any, lines: dict[str, list[str]], tokenizer: Any
) -> tuple[dict[str, list[Block]], dict[str, int | None]]:
    """Blocks of train, dev and test, the training text only in whole ones; and the words of each, as `encode` counts them."""
    limits = {"train": settings.train_tokens, "dev": settings.dev_tokens, "test": settings.test_tokens}
    if settings.smoke:
        limits = dict.fromkeys(limits, 8 * settings.block)
    encoded = {split: encode(text, tokenizer, limits[split]) for split, text in lines.items()}
    blocks = {split: cut(ids, settings.block, full_only=split == "train") for split, (ids, _) in encoded.items()}
    for split, found in blocks.items():
        if not found:
            raise ValueError(f"{settings.data}: the {split} text is shorter than one block of {settings.block} tokens.")
    return blocks, {split: words for split, (_, words) in encoded.items()}


def read_splits(settings: Any) -> dict[str, list[str]]:
    """The lines of train, dev and test."""
    if "{split}" not in settings.data:
        raise ValueError(f"data={settings.data!r} must contain {{split}}: there are three texts, train, dev and test.")
    names = {"train": "train", "dev": settings.dev_split, "test": "test"}
    return {split: read_text(settings.data.replace("{split}", name), settings.column) for split, name in names.items()}
