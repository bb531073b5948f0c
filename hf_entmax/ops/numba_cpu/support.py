"""What the forward kernel keeps for the backward kernel: the sparse rows, and where each of them lies."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import layout
from .runtime import storage


@dataclass
class Support:
    """The sparse rows of one call: what the backward pass runs on."""

    slabs: list[Tensor]
    bases: Tensor
    row_address: Tensor
    row_size: Tensor
    row_start: Tensor
    chunks: int
    block_rows: int
    store_gradient: bool

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which `restore` takes them."""
        return [self.row_address, self.row_size, self.row_start, self.bases, *self.slabs]

    def without_tensors(self) -> Support:
        """Return what remains to be kept when autograd keeps the tensors."""
        nothing = torch.empty(0)
        return dataclasses.replace(
            self, slabs=[], bases=nothing, row_address=nothing, row_size=nothing, row_start=nothing
        )

    def restore(self, tensors: Sequence[Tensor]) -> Support:
        """Return the support in the memory of ``tensors``.

        Hooks for saved tensors may have moved the slabs, say to a disk and back, or made them anew as checkpointing does:
        what the addresses are relative to is known from ``bases``, which comes the same way as they do.
        """
        address, size, start, bases, *slabs = tensors
        now = torch.tensor([slab.data_ptr() for slab in slabs])
        if not torch.equal(now, bases):
            old, address = address, address.clone()
            for slab, before, after in zip(slabs, bases.tolist(), now.tolist(), strict=True):
                inside = (old >= before) & (old < before + slab.numel())
                address[inside] += after - before
        return dataclasses.replace(self, slabs=slabs, bases=now, row_address=address, row_size=size, row_start=start)

    def in_one_piece(self) -> Support:
        """Copy the rows behind each other, into memory whose size follows from them alone.

        How many slabs are begun is a matter of which thread takes which rows, but checkpointing compares the shapes of what
        is saved in both of its passes.
        """
        address, size = self.row_address.numpy(), self.row_size.numpy().astype(np.int64)
        dense = layout.dense_row_bytes(-1 - size, self.store_gradient)
        taken = np.where(size < 0, dense, size * layout.entry_bytes(self.store_gradient))
        # Rows without entries first: they share their place with the row after them.
        order = np.lexsort((taken, address))
        place, ends = address[order], np.cumsum(taken[order])
        begins = np.flatnonzero(np.diff(place, prepend=-1) != np.concatenate(([-1], taken[order][:-1])))
        whole = storage((int(ends[-1]) if len(ends) else 0) + layout.SPARE)
        sizes = np.add.reduceat(taken[order], begins)
        targets = whole.data_ptr() + np.cumsum(sizes) - sizes
        for source, target, count in zip(place[begins].tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, count)
        moved = np.empty_like(address)
        moved[order] = whole.data_ptr() + ends - taken[order]
        bases = torch.tensor([whole.data_ptr()])
        return dataclasses.replace(self, slabs=[whole], bases=bases, row_address=torch.from_numpy(moved))
