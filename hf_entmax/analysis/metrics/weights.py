"""Attention weights in two forms, dense and sparse, behind the few operations that every statistic is made of.

A statistic is written once, over these operations. The sparse form does each of them on the nonzero weights alone; none
of its results has the size of the dense weights, except :meth:`SparseWeights.between_words`, whose result is a dense
[B, H, W_q, W_k] between words because the links and arcs read off it are largest entries of its rows and columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_entmax.ops.sparse_rows import SparseRows


def diagonal_sums(values: Tensor) -> Tensor:
    """Sum matrices [..., T_q, T_k] along their diagonals.

    Entry ``c`` of the result [..., T_q + T_k - 1] holds the sum over all (i, j) with ``j - i = c - (T_q - 1)``.
    """
    *lead, num_queries, num_keys = values.shape
    if num_queries == 0 or num_keys == 0:
        return values.new_zeros(*lead, max(num_queries + num_keys - 1, 0))
    # Row i, padded to width T_k + T_q and read again with width T_k + T_q - 1, is shifted right by i: after a flip
    # every diagonal has become a column, without a Python loop over the offsets.
    width = num_queries + num_keys
    skewed = F.pad(values.flip(-2), (0, num_queries)).reshape(*lead, num_queries * width)
    skewed = skewed[..., : num_queries * (width - 1)].reshape(*lead, num_queries, width - 1)
    return skewed.sum(dim=-2)


class DenseWeights:
    """Weights [B, H, T_q, T_k] as a tensor in float32 or better, zero outside the pairs that count."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)

    def dense(self) -> Tensor:
        """Return the weights as one tensor [B, H, T_q, T_k], not to be changed."""
        return self.values

    def entry_sums(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum ``function(weights)``, elementwise and 0 at 0, over the entries of each head: float64 [B, H]."""
        values = function(self.values)
        # PyTorch adds up bools in int64, which takes three times as long.
        row_sums = values.sum(dim=-1, dtype=torch.int32) if values.dtype == torch.bool else values.sum(dim=-1)
        return row_sums.double().sum(dim=-1)

    def row_max(self) -> Tensor:
        """Return the largest weight of each row: [B, H, T_q]."""
        return self.values.amax(dim=-1)

    def row_argmax(self) -> Tensor:
        """Return the key with the largest weight, the first of equals: long [B, H, T_q]; -1 for a row without weight."""
        largest, argmax = self.values.max(dim=-1)
        return argmax.masked_fill(largest <= 0, -1)

    def diagonal(self, offset: int) -> Tensor:
        """Return the weights on the key at ``offset`` from the query, of the queries that have one: [B, H, L]."""
        return self.values.diagonal(offset, dim1=-2, dim2=-1)

    def row_sums(self, targets: Tensor) -> Tensor:
        """Sum the mass of each row on the pairs marked in ``targets`` bool [B, T_q, T_k]: [B, H, T_q]."""
        return self.values.masked_fill(~targets.unsqueeze(1), 0.0).sum(-1)

    def window_sums(self, start: Tensor, width: int) -> Tensor:
        """Sum the mass of each row on ``width`` keys from ``start`` long [B, H, T_q] on; 0 where ``start`` is -1: [B, H, T_q]."""
        places = start.unsqueeze(-1) + torch.arange(width, device=start.device)
        keys = self.shape[-1]
        inside = (start >= 0).unsqueeze(-1) & (places < keys)
        return F.pad(self.values, (0, 1)).gather(-1, torch.where(inside, places, keys)).sum(-1)

    def target_sums(self, targets: Tensor) -> Tensor:
        """Sum the mass of each head on R sets of pairs, ``targets`` 0 or 1 [B, T_q * T_k, R]: float64 [B, H, R]."""
        return (self.values.flatten(2) @ targets.to(self.values.dtype)).double()

    def mean_head(self) -> DenseWeights:
        """Return the mean over the heads, as weights of one head [B, 1, T_q, T_k]."""
        return DenseWeights(self.values.mean(dim=1, keepdim=True))

    def offset_sums(self, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum the mass of each head by the distance from query to key.

        Args:
            shift: long [B], added to the distances of each sentence; None = 0 throughout.

        Returns:
            ``(mass float64 [H, n], distance long [n])``; a distance may stand there several times.
        """
        num_queries, num_keys = self.shape[-2:]
        device = self.values.device
        if shift is None:
            sums = diagonal_sums(self.values.sum(dim=0, dtype=torch.float64))
            return sums, torch.arange(sums.shape[-1], device=device) - (num_queries - 1)
        steps = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device).unsqueeze(-1)
        return self.values.transpose(0, 1).flatten(1).double(), (steps + shift.view(-1, 1, 1)).flatten()

    def between_words(self, query_words: Tensor, key_words: Tensor, num_query_words: int, num_key_words: int) -> Tensor:
        """Sum over the tokens of both words, [B, H, W_q, W_k]; ids long [B, T_q] and [B, T_k], -1 (or W and more) = none."""
        # Padded rows and columns may hold NaN in the input; a zero in the one-hot matrices would not remove it.
        real = (query_words >= 0).unsqueeze(-1) & (key_words >= 0).unsqueeze(-2)
        clean = self.values.masked_fill(~real.unsqueeze(1), 0.0)
        rows = word_indicator(query_words, num_query_words, clean.dtype)
        columns = word_indicator(key_words, num_key_words, clean.dtype)
        return rows.transpose(1, 2).unsqueeze(1) @ clean @ columns.unsqueeze(1)


class SparseWeights:
    """Weights [B, H, T_q, T_k] by their nonzero entries; the operations are those of :class:`DenseWeights`.

    Args:
        rows: the weights.
        pairs: bool [B, T_q, T_k]; weights on other pairs count as zero.
    """

    def __init__(self, rows: SparseRows, pairs: Tensor) -> None:
        self.shape = rows.shape
        self._offsets, self._columns = rows.offsets, rows.columns
        self._row = rows.rows()
        # Everything about an entry but its column is that of its row, looked up in a table with one number per row.
        batch, heads, queries, keys = rows.shape
        axes = torch.meshgrid(*map(torch.arange, (batch, heads, queries)), indexing="ij")
        self._sentence, self._head, self._query = (axis.flatten() for axis in axes)
        self._pair = self._of_row((self._sentence * queries + self._query) * keys) + self._columns
        kept = pairs.flatten().index_select(0, self._pair)
        values = rows.weights.float() if rows.weights.element_size() < 4 else rows.weights
        # An entry outside the pairs stays as a zero, which is cheaper than closing the gaps and changes no sum.
        self._values = torch.where(kept, values, 0.0)

    def _of_row(self, table: Tensor) -> Tensor:
        return table.index_select(0, self._row)

    @functools.cached_property
    def _distance(self) -> Tensor:
        return self._columns - self._of_row(self._query)

    @functools.cached_property
    def _largest(self) -> Tensor:
        return torch.segment_reduce(self._values, "max", offsets=self._offsets, initial=0.0)

    def _heads(self) -> Tensor:
        """Return the offsets at which the entries of each head begin; its rows are adjacent."""
        batch, heads, queries, _ = self.shape
        return self._offsets[::queries].contiguous() if queries else self._offsets.new_zeros(batch * heads + 1)

    def _add_to_rows(self, values: Tensor) -> Tensor:
        return values.new_zeros(math.prod(self.shape[:3])).scatter_add_(0, self._row, values).view(self.shape[:3])

    def dense(self) -> Tensor:
        """See :meth:`DenseWeights.dense`: for statistics that are given as functions of a tensor."""
        flat = self._values.new_zeros(math.prod(self.shape))
        flat[self._row * self.shape[3] + self._columns] = self._values
        return flat.view(self.shape)

    def entry_sums(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """See :meth:`DenseWeights.entry_sums`."""
        values = function(self._values).double()
        return torch.segment_reduce(values, "sum", offsets=self._heads(), initial=0.0).view(self.shape[:2])

    def row_max(self) -> Tensor:
        """See :meth:`DenseWeights.row_max`."""
        return self._largest.view(self.shape[:3])

    def row_argmax(self) -> Tensor:
        """See :meth:`DenseWeights.row_argmax`."""
        keys = self.shape[3]
        candidates = torch.where(self._values == self._of_row(self._largest), self._columns.long(), keys)
        first = candidates.new_full(self._largest.shape, keys).scatter_reduce_(0, self._row, candidates, "amin")
        return first.masked_fill(self._largest <= 0, -1).view(self.shape[:3])

    def diagonal(self, offset: int) -> Tensor:
        """See :meth:`DenseWeights.diagonal`."""
        queries, keys = self.shape[2:]
        first = max(0, -offset)
        last = max(first, min(queries, keys - offset))
        return self._add_to_rows(torch.where(self._distance == offset, self._values, 0.0))[..., first:last]

    def row_sums(self, targets: Tensor) -> Tensor:
        """See :meth:`DenseWeights.row_sums`."""
        return self._add_to_rows(torch.where(targets.flatten().index_select(0, self._pair), self._values, 0.0))

    def window_sums(self, start: Tensor, width: int) -> Tensor:
        """See :meth:`DenseWeights.window_sums`."""
        first = self._of_row(start.flatten())
        inside = (first >= 0) & (self._columns >= first) & (self._columns < first + width)
        return self._add_to_rows(torch.where(inside, self._values, 0.0))

    def target_sums(self, targets: Tensor) -> Tensor:
        """See :meth:`DenseWeights.target_sums`."""
        # A weighted sum of table rows per head, without a tensor of one row per entry.
        table = targets.flatten(0, 1).to(self._values.dtype)
        options = {"mode": "sum", "per_sample_weights": self._values, "include_last_offset": True}
        sums = F.embedding_bag(self._pair, table, self._heads(), **options)
        return sums.double().view(*self.shape[:2], -1)

    def mean_head(self) -> DenseWeights:
        """See :meth:`DenseWeights.mean_head`: dense, as the heads together are far less sparse than each of them."""
        batch, heads, queries, keys = self.shape
        total = self._values.new_zeros(batch * queries * keys).index_add_(0, self._pair, self._values)
        return DenseWeights(total.div_(heads).view(batch, 1, queries, keys))

    def offset_sums(self, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`DenseWeights.offset_sums`."""
        _, heads, queries, keys = self.shape
        low, high = (0, 0) if shift is None or not shift.numel() else (int(shift.min()), int(shift.max()))
        width = max(queries + keys - 1, 0) + high - low
        start = self._head * width + (queries - 1 - low)
        if shift is not None:
            start = start + shift.index_select(0, self._sentence)
        places = self._of_row(start) + self._distance
        sums = torch.zeros(heads * width, dtype=torch.float64).index_add_(0, places, self._values.double())
        return sums.view(heads, width), torch.arange(width) - (queries - 1 - low)

    def between_words(self, query_words: Tensor, key_words: Tensor, num_query_words: int, num_key_words: int) -> Tensor:
        """See :meth:`DenseWeights.between_words`."""
        batch, heads, queries, keys = self.shape
        words_q = query_words.flatten().index_select(0, self._sentence * queries + self._query)
        words_k = key_words.flatten().index_select(0, self._of_row(self._sentence * keys) + self._columns)
        table = ((self._sentence * heads + self._head) * num_query_words + words_q) * num_key_words
        start = self._of_row(table.masked_fill((words_q < 0) | (words_q >= num_query_words), -1))
        inside = (start >= 0) & (words_k >= 0) & (words_k < num_key_words)
        sums = self._values.new_zeros(batch * heads * num_query_words * num_key_words)
        sums.index_add_(0, torch.where(inside, start + words_k, 0), torch.where(inside, self._values, 0.0))
        return sums.view(batch, heads, num_query_words, num_key_words)


HeadWeights = DenseWeights | SparseWeights


def keep_pairs(weights: Tensor | SparseRows, pairs: Tensor) -> HeadWeights:
    """Take weights [B, H, T_q, T_k] in either form, in float32 or better, with zero outside ``pairs`` [B, T_q, T_k].

    Rows of padded queries often hold meaningless numbers (even NaN), so they are replaced, not multiplied.
    """
    if isinstance(weights, SparseRows):
        return SparseWeights(weights, pairs)
    if weights.dtype in (torch.float16, torch.bfloat16):
        weights = weights.float()
    return DenseWeights(weights.masked_fill(~pairs.unsqueeze(1), 0.0))


def word_indicator(word_ids: Tensor, num_words: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [B, T, W] with a 1 where a token belongs to a word; ``word_ids`` long [B, T], -1 (or W and more) = no word."""
    words = torch.arange(num_words, device=word_ids.device)
    return (word_ids.unsqueeze(-1) == words).to(dtype)


def result_dtype(weights: Tensor) -> torch.dtype:
    """Return the dtype of statistics of these weights: float32 for half precision, else their own."""
    return torch.float32 if weights.dtype in (torch.float16, torch.bfloat16) else weights.dtype


def ratio(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide float64 sums; where nothing was counted the result is NaN."""
    return (numerator / denominator).to(dtype)
