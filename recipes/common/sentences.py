"""Sentence encoders: embeddings that are means over tokens, pairs of texts, and how well a text finds its partner."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import ModelOutput

from hf_entmax.analysis.reading.tables import read_lists, read_pairs

#: A cosine times this is a score: the inverse temperature that such encoders are trained with.
SCALE = 20.0

Pair = tuple[str, str]


def read_text_pairs(where: str, source: str, target: str) -> list[Pair]:
    """Read texts and what means the same: two columns of a file, or two parallel files where ``where`` contains ``{lang}``.

    A list of sentences in the first column is one text; of a list in the second, such as the summaries that several people
    wrote, the first is the partner.

    Raises:
        FileNotFoundError, ValueError: as `hf_entmax.analysis.reading.tables.read_lists`.
    """
    if "{lang}" in where:
        return read_pairs(where, source, target)
    return [(" ".join(text), partners[0]) for text, *(partners,) in read_lists(where, (source, target))]


def check_pooling(folder: str) -> None:
    """Say before training that the embedding of a sentence is no mean over its tokens.

    Raises:
        ValueError: if a folder of Sentence Transformers says so.
    """
    path = Path(folder) / "1_Pooling" / "config.json"
    if path.exists():
        chosen = json.loads(path.read_text(encoding="utf-8"))
        ways = [name for name, value in chosen.items() if name.startswith("pooling_mode") and value is True]
        if ways and ways != ["pooling_mode_mean_tokens"]:
            raise ValueError(
                f"{path} has {', '.join(ways)}: only encoders that take the mean of the tokens can be used."
            )


def pair_batch(pairs: Sequence[Pair], tokenizer: Any, longest: int) -> dict[str, Tensor]:
    """Tokenize texts and then their partners, cut to ``longest`` tokens: row ``i`` belongs to row ``i + n``."""
    return _tokens([text for text, _ in pairs] + [partner for _, partner in pairs], tokenizer, longest)


def _tokens(texts: list[str], tokenizer: Any, longest: int) -> dict[str, Tensor]:
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"))


def embeddings(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the tokens, of length 1: ``[rows, D]``."""
    return _pooled(model(**batch).last_hidden_state, batch["attention_mask"])


def _pooled(states: Tensor, mask: Tensor) -> Tensor:
    return F.normalize((states * mask[..., None]).sum(1), dim=-1)


@torch.no_grad()
def embed(model: Any, texts: Sequence[str], tokenizer: Any, longest: int, size: int = 32) -> Tensor:
    """Embed texts in their order, those of like length together: ``[texts, D]``, on the CPU."""
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    rows = torch.empty(0)
    for start in range(0, len(order), size):
        places = order[start : start + size]
        batch = {
            name: values.to(next(model.parameters()).device)
            for name, values in _tokens([texts[place] for place in places], tokenizer, longest).items()
        }
        found = embeddings(model, batch).float().cpu()
        rows = rows if len(rows) else torch.empty(len(texts), found.shape[1])
        rows[places] = found
    return rows


def contrast(vectors: Tensor) -> Tensor:
    """InfoNCE of `pair_batch`: each text among the partners of its batch, nats per text."""
    texts, partners = vectors.chunk(2)
    return F.cross_entropy(SCALE * texts @ partners.T, torch.arange(len(texts), device=texts.device))


@dataclasses.dataclass
class SentenceOutput(ModelOutput):
    """What an encoder says about pairs: InfoNCE (`contrast`) and, as logits, the embeddings ``[rows, D]``."""

    loss: Tensor | None = None
    logits: Tensor | None = None


def add_contrast(model: Any) -> None:
    """Let an encoder compute a loss as a model with a head does: of batches of pairs that have ``labels``."""

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = type(self).forward(self, *args, **kwargs)
        if labels is None:
            return output
        vectors = _pooled(output.last_hidden_state, kwargs["attention_mask"])
        return SentenceOutput(loss=contrast(vectors), logits=vectors)

    model.forward = types.MethodType(forward, model)


def cosine_distance(student: Tensor, teacher: Tensor, labels: Tensor | None) -> Tensor:
    """Measure how far the score of a text with itself falls, nats: ``SCALE (1 - cosine)``, mean over embeddings ``[rows, D]``."""
    return SCALE * (1 - (student * teacher).sum(-1)).mean()


def retrieval(similarities: Tensor) -> dict[str, float]:
    """Measure how well each text finds its partner among all, from ``[texts, partners]``: accuracy and mean reciprocal rank.

    Partners that are as similar as the right one, or not a number, stand before it.
    """
    ranks = (~(similarities < similarities.diagonal()[:, None])).sum(1).double()
    return {"accuracy": float((ranks == 1).double().mean()), "mrr": float(ranks.reciprocal().mean())}


def spearman(values: Tensor) -> float:
    """Rank correlation of ``[2, n]``; NaN where one of them is."""
    if values.isnan().any():
        return math.nan
    return float(torch.corrcoef(values.argsort(-1).argsort(-1).double())[0, 1])
