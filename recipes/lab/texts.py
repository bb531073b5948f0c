"""Texts as models read them: token ids of running text, embeddings of single texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def encode(lines: Sequence[str], tokenizer: Any, limit: int) -> list[int]:
    """At most ``limit`` token ids of lines with their ends, joined."""
    ids: list[int] = []
    for line in lines:
        if len(ids) >= limit:
            break
        ids += tokenizer(line + "\n", add_special_tokens=False, verbose=False)["input_ids"]
    return ids[:limit]


@torch.no_grad()
def embed(model: Any, texts: Sequence[str], tokenizer: Any, longest: int) -> Tensor:
    """Means over the tokens, of length 1, in the order of the texts: ``[texts, D]``. Texts of like length go together."""
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    vectors: dict[int, Tensor] = {}
    for start in range(0, len(order), 32):
        places = order[start : start + 32]
        cut = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
        batch = tokenizer([texts[place] for place in places], **cut)
        sums = (model(**batch).last_hidden_state * batch["attention_mask"][..., None]).sum(1)
        vectors |= zip(places, F.normalize(sums.float(), dim=-1), strict=True)
    return torch.stack([vectors[place] for place in range(len(texts))])
