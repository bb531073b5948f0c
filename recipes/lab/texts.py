"""Running text as models read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode(lines: Sequence[str], tokenizer: Any, limit: int) -> list[int]:
    """At most ``limit`` token ids of lines with their ends, joined."""
    ids: list[int] = []
    for line in lines:
        if len(ids) >= limit:
            break
        ids += tokenizer(line + "\n", add_special_tokens=False, verbose=False)["input_ids"]
    return ids[:limit]
