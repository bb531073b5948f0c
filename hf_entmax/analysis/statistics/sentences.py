"""The sentences in which each head is densest and sparsest, kept in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Upper ends (in query tokens) of the length classes within which sentences are compared: short sentences are dense.
LENGTH_CLASSES = (8, 16, 32, 64, 1 << 30)
_KEPT = 2


@dataclass(frozen=True)
class SentencePair:
    """Two sentences of similar length, one in which a head is sparse and one in which it is dense.

    Attributes:
        layer: layer of the head.
        head: the head.
        sparse: index of the first sentence; ``sparse_density`` its density, ``sparse_text`` its text.
        dense: index of the second; ``dense_density``, ``dense_text`` likewise.
        length_class: index into :data:`LENGTH_CLASSES`.
    """

    layer: int
    head: int
    sparse: int
    sparse_density: float
    sparse_text: str
    dense: int
    dense_density: float
    dense_text: str

    length_class: int = 0

    @property
    def gap(self) -> float:
        """Difference of the two densities."""
        return self.dense_density - self.sparse_density


class SentenceExtremes:
    """Keeps, for every head and length class, the sentences of highest and lowest density."""

    def __init__(self, num_layers: int, num_heads: int) -> None:
        shape = (2, num_layers, num_heads, len(LENGTH_CLASSES), _KEPT)
        # The last entry of each sign: index 0 holds density, index 1 its negative, so that both keep their largest.
        self.values = torch.full(shape, float("-inf"), dtype=torch.float64)
        self.indices = torch.full(shape, -1, dtype=torch.long)
        self.texts: dict[int, str] = {}

    @classmethod
    def restore(cls, values: Tensor, indices: Tensor, texts: dict[int, str]) -> SentenceExtremes:
        """Build the object from its parts."""
        result = cls(values.shape[1], values.shape[2])
        result.values, result.indices, result.texts = values, indices, texts
        return result

    def update(self, densities: Tensor, lengths: Tensor, first_index: int) -> None:
        """Add the sentences of a batch, numbered from ``first_index`` on.

        ``densities`` are float64 [layers, B, heads] on the CPU, NaN = none; ``lengths`` long [B], in query tokens.
        """
        num_layers, batch, num_heads = densities.shape
        self._grow(num_layers, num_heads)
        classes = torch.bucketize(lengths, torch.tensor(LENGTH_CLASSES))
        own = torch.nn.functional.one_hot(classes, len(LENGTH_CLASSES)).bool()  # [B, classes]
        signed = torch.stack([densities, -densities])  # [2, layers, B, heads]
        signed = signed.permute(0, 1, 3, 2).unsqueeze(3)  # [2, layers, heads, 1, B]
        missing = signed.isnan() | ~own.T
        new = signed.masked_fill(missing, float("-inf")).expand(*signed.shape[:3], len(LENGTH_CLASSES), batch)
        indices = (torch.arange(batch) + first_index).expand_as(new)
        self._keep(new, indices)

    def merge(self, other: SentenceExtremes) -> None:
        """Add the sentences of another process."""
        self._grow(*other.values.shape[1:3])
        other._grow(*self.values.shape[1:3])
        self._keep(other.values, other.indices)
        self.texts.update(other.texts)

    def _keep(self, values: Tensor, indices: Tensor) -> None:
        values = torch.cat([self.values, values], dim=-1)
        indices = torch.cat([self.indices, indices], dim=-1)
        # Ties go to the earlier sentence, whatever the order of arrival.
        order = indices.argsort(dim=-1, stable=True)
        values, indices = values.gather(-1, order), indices.gather(-1, order)
        order = values.argsort(dim=-1, descending=True, stable=True)[..., :_KEPT]
        self.values, self.indices = values.gather(-1, order), indices.gather(-1, order)
        self.indices = self.indices.masked_fill(self.values.isinf(), -1)

    def _grow(self, num_layers: int, num_heads: int) -> None:
        layers, heads = self.values.shape[1:3]
        more = (0, 0, 0, 0, 0, max(num_heads - heads, 0), 0, max(num_layers - layers, 0))
        self.values = torch.nn.functional.pad(self.values, more, value=float("-inf"))
        self.indices = torch.nn.functional.pad(self.indices, more, value=-1)

    def wanted(self) -> set[int]:
        """Return the numbers of all sentences that are kept."""
        return set(self.indices.unique().tolist()) - {-1}

    def pairs(self, layer: int, head: int) -> list[SentencePair]:
        """Return the clearest contrasts of one head, the widest first, one per length class."""
        result = []
        for length_class in range(len(LENGTH_CLASSES)):
            dense, sparse = (int(self.indices[side, layer, head, length_class, 0]) for side in (0, 1))
            if dense < 0 or sparse < 0 or dense == sparse:
                continue
            high, low = self.values[:, layer, head, length_class, 0].tolist()
            texts = self.texts.get(sparse, ""), self.texts.get(dense, "")
            result.append(SentencePair(layer, head, sparse, -low, texts[0], dense, high, texts[1], length_class))
        return sorted(result, key=lambda pair: -pair.gap)
