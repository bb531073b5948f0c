"""A batch of rows, block by block: the losses of all of them, and later the dense part of their gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hf_entmax.losses.core import RowLosses, dense_residual, row_losses
from hf_entmax.ops.solve import compute_dtype, exact_dtype

# Rows are handled in blocks of about so many logits: small enough for the caches of a CPU, large enough to fill a GPU.
BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the blocks in which the rows of ``logits`` ``[N, V]`` are worked on."""
    rows, length = logits.shape
    size = max(1, BLOCK_ELEMENTS.get(logits.device.type, 1 << 24) // max(length, 1))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def alpha_minus_one(number: float | None, alpha: Tensor | None, block: slice, dtype: torch.dtype) -> float | Tensor:
    """Return ``u`` of a block of rows: a float where all rows have the same ``number``, else ``[n, 1]``."""
    if number is not None:
        return number - 1.0
    return (alpha[block].to(dtype) - 1.0)[:, None]  # type: ignore[index]


class BatchLosses:
    """The losses of all rows of a batch and what their gradient needs, filled in by :meth:`run`.

    Attributes:
        losses: ``[N]``, in float64 where the device has it.
        dead: bool ``[N]``, rows without a gradient: ignored, or without a possible class.
        slopes: the derivatives in alpha, ``[N]``, or None where they are not wanted.
        solved: maximum, shift and scale of the rows, ``[3, N, 1]`` of the dtype of the losses.
    """

    def __init__(self, logits: Tensor, need_slope: bool) -> None:
        rows, dtype, device = logits.shape[0], exact_dtype(logits), logits.device
        self.losses = torch.empty(rows, dtype=dtype, device=device)
        self.dead = torch.empty(rows, dtype=torch.bool, device=device)
        self.slopes = torch.empty(rows, dtype=dtype, device=device) if need_slope else None
        self.solved = torch.empty(3, rows, 1, dtype=dtype, device=device)

    def run(
        self,
        logits: Tensor,
        target: Tensor,
        keep: Tensor | None,
        number: float | None,
        alpha: Tensor | None,
        smoothing: float,
    ) -> Iterator[tuple[slice, RowLosses]]:
        """Solve the rows; yield every block with its solution, of which only the attributes above are remembered.

        The rows ``logits`` ``[N, V]`` have class indices ``[N]`` or distributions ``[N, V]`` as ``target``; where ``keep``
        ``[N]`` is False they are ignored. Alpha is one ``number`` or, where that is None, ``alpha`` ``[N]``.
        """
        for block in row_blocks(logits):
            result = row_losses(
                logits[block],
                target[block],
                alpha_minus_one(number, alpha, block, compute_dtype(logits.dtype)),
                keep=None if keep is None else keep[block],
                smoothing=smoothing,
                need_alpha_slope=self.slopes is not None,
            )
            solution = result.solution
            self.losses[block], self.dead[block] = result.losses, result.dead
            for row, value in enumerate((solution.maximum, solution.shift, solution.scale)):
                self.solved[row, block] = value
            if self.slopes is not None:
                self.slopes[block] = result.alpha_slopes  # type: ignore[assignment]
            yield block, result


def write_residuals(
    blocks: Iterable[slice],
    logits: Tensor,
    solved: Tensor,
    number: float | None,
    alpha: Tensor | None,
    target: Tensor,
    weight: Tensor,
    dead: Tensor,
    smoothing: float,
    out: Tensor,
) -> None:
    """Write ``weight (p - q)`` of some blocks of rows to ``out`` ``[N, V]``, of any floating dtype; zeros for dead rows.

    ``weight`` ``[N, 1]`` is of the computing dtype, ``solved`` and ``dead`` are a :class:`BatchLosses`', the others as for
    :meth:`BatchLosses.run`.
    """
    for block in blocks:
        maximum, shift, scale = solved[:, block].unbind(0)
        dense_residual(
            logits[block],
            (maximum, shift, scale),
            alpha_minus_one(number, alpha, block, weight.dtype),
            target[block],
            weight[block],
            dead[block],
            smoothing,
            out=out[block],
        )
