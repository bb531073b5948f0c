"""Where the keys of several sequences lie in the blocks of one buffer."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class BlockTable:
    """Where the keys of several sequences lie in a buffer of rows.

    Key ``j`` of sequence ``b`` is row ``tables[b, j // size] * stride + j % size``. A block may belong to several sequences.

    Attributes:
        tables: int32 ``[B, n]``, the numbers of each sequence's blocks; what lies behind its last one is not looked at.
        lengths: int32 ``[B]``, keys of each sequence, at least 1.
        sketched: int32 ``[B]``, of how many of its first keys there is a sketch, whole pages; 0 for none.
        size: keys of a block, a power of 2.
        stride: rows of the buffer from one block to the next.
    """

    tables: Tensor
    lengths: Tensor
    sketched: Tensor
    size: int
    stride: int

    @functools.cached_property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return int(self.lengths.max())

    @functools.cached_property
    def limits(self) -> np.ndarray:
        """int32 ``[B, 2]``: the first key of each sequence and one past its last."""
        return np.stack([np.zeros(len(self.lengths), np.int32), self.lengths.numpy()], 1)

    def rows(self, sequence: int) -> Tensor:
        """Return the rows of a sequence's keys, int64 ``[T]``."""
        length = int(self.lengths[sequence])
        first = self.tables[sequence, : -(-length // self.size)].long() * self.stride
        return (first[:, None] + torch.arange(self.size)).flatten()[:length]

    def pages(self, sequence: int, size: int) -> Tensor:
        """Return the places of a sequence's sketched pages of ``size`` keys in the sketch of the buffer, int64 ``[n]``."""
        count, per_block = int(self.sketched[sequence]) // size, self.size // size
        first = self.tables[sequence, : -(-count // per_block)].long() * per_block
        return (first[:, None] + torch.arange(per_block)).flatten()[:count]
