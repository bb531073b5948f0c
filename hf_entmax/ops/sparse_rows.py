"""Attention weights as sparse rows: only the nonzero ones, with their columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SparseRows(NamedTuple):
    """The nonzero weights of one attention call, row by row; scattered they are the dense weights.

    Row ``(b * H + h) * T_q + i`` holds the weights of query ``i`` in head ``h`` of sequence ``b``: entries
    ``offsets[row]`` to ``offsets[row + 1]`` of ``columns`` and ``weights``. They carry no gradient.

    Attributes:
        offsets: int64 ``[B * H * T_q + 1]``, from 0 to the number of entries, never falling.
        columns: int32 ``[nnz]``, the keys, rising within a row.
        weights: ``[nnz]`` in the dtype of the dense weights; half precision may round one to zero.
        shape: ``(B, H, T_q, T_k)``.
    """

    offsets: Tensor
    columns: Tensor
    weights: Tensor
    shape: tuple[int, int, int, int]

    def rows(self) -> Tensor:
        """Return the row of every entry, int64 ``[nnz]``."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.columns.shape[0])

    def first_keys(self, length: int) -> SparseRows:
        """Return the weights of the first ``length`` keys alone, as ``weights[..., :length]`` of dense weights."""
        keep = self.columns < length
        before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
        shape = (*self.shape[:3], min(length, self.shape[3]))
        return SparseRows(before[self.offsets], self.columns[keep], self.weights[keep], shape)

    def dense(self) -> Tensor:
        """Return the weights ``[B, H, T_q, T_k]``, zeros included."""
        batch, heads, queries, keys = self.shape
        flat = self.weights.new_zeros(batch * heads * queries * keys)
        flat[self.rows() * keys + self.columns] = self.weights
        return flat.view(self.shape)
