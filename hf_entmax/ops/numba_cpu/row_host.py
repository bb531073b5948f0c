"""Independent rows of scores: from tensors to argument records and back."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hf_entmax.ops.solve import RowSolution

from . import layout
from .kernels import find_solvers, kernel
from .layout import ROWS_RECORD, structure
from .runtime import launch, storage

_Record = structure(ROWS_RECORD)
# Rows that a thread takes at a time: enough to fill the lanes, few enough to share them out.
_MOST_ROWS = 64
_GROUPS_PER_THREAD = 4
#: Rows with more nonzero weights than this share are written densely.
DENSE_ABOVE = 0.25
#: Whether alpha may be above 2.
ABOVE_TWO = True


def _shift_alpha(u: float | Tensor, rows: int) -> tuple[np.ndarray, int]:
    """Return ``u`` in float64, and its bytes per row."""
    if not isinstance(u, Tensor):
        return np.array([float(u)]), 0
    values = np.ascontiguousarray(u.detach().double().reshape(-1).numpy())
    return values, 0 if values.size == 1 and rows != 1 else 8


class _Call:
    """The record that the kernels of one call share."""

    def __init__(self, scores: Tensor, u: float | Tensor) -> None:
        scores = scores.detach().float()
        self.scores = scores if scores.stride(-1) == 1 or scores.shape[-1] == 1 else scores.contiguous()
        self.rows, self.length = scores.shape
        self.u, step = _shift_alpha(u, self.rows)
        self.record = _Record()
        self.threads = torch.get_num_threads()
        r = self.record
        r.scores, r.score_step = self.scores.data_ptr(), 4 * self.scores.stride(0)
        r.u, r.u_step = self.u.ctypes.data, step
        r.rows, r.length = self.rows, self.length
        r.group = max(1, min(_MOST_ROWS, self.rows // (_GROUPS_PER_THREAD * self.threads)))

    def launch(self, name: str) -> None:
        groups = -(-self.rows // int(self.record.group))
        launch(kernel(name), self.record, groups, self.threads, layout.rows_scratch(self.length))


def solve_rows(
    scores: Tensor, u: float | Tensor, *, floor: float = -math.inf, out: Tensor | None = None
) -> RowSolution:
    """Map each row by entmax.

    Args:
        scores: ``[n, V]`` with ``V >= 1``, float32, bfloat16 or float16, on the CPU.
        u: ``alpha - 1 >= 0``, a float or ``[n, 1]``.
        floor: entries at or below it get no mass.
        out: ``[n, V]``, any dtype: written with all probabilities, which are then those of the solution, too.

    Returns:
        The solution, computed in float32. A row that holds NaN or ``+inf`` has NaN for everything.
    """
    if floor > -math.inf and scores.dtype != torch.float32:
        # The floor of a half type is an ordinary number in float32, whose own lies far from every other.
        scores = scores.float().masked_fill_(scores <= floor, -math.inf)
    call = _Call(scores, u)
    n, length, r = call.rows, call.length, call.record
    maximum, scale = torch.empty((2, n, 1)).unbind(0)
    shift, conjugate = torch.empty((n, 1), dtype=torch.float64), torch.empty(n, dtype=torch.float64)
    counts = torch.zeros(n, dtype=torch.int64)
    slot_bytes = layout.slot_bytes(length)
    slots = storage(n * slot_bytes)
    solve = find_solvers(call.u, "solve_rows", ("write_rows", "general", "short_rows", "recompute_rows"))
    r.solvers, r.solver_step, r.solve_short_rows = solve.table, int(r.u_step), solve.short_rows
    for name, tensor in (("maximum", maximum), ("shift", shift), ("scale", scale), ("conjugate", conjugate)):
        setattr(r, name, tensor.data_ptr())
    r.counts, r.slots, r.slot_bytes = counts.data_ptr(), slots.data_ptr(), slot_bytes
    call.launch("solve_rows")
    rows = columns = None
    if out is None and (total := int(counts.sum())) <= DENSE_ABOVE * n * length:
        rows, columns = torch.empty((2, total), dtype=torch.int64).unbind(0)
        probs = torch.empty(total)
        offsets = counts.cumsum(0).sub_(counts)
        r.offsets, r.row_index, r.columns = offsets.data_ptr(), rows.data_ptr(), columns.data_ptr()
    else:
        direct = out is not None and out.dtype == torch.float32 and out.is_contiguous()
        probs = out if direct and out is not None else torch.empty(n, length)
    r.out = probs.data_ptr()
    call.launch("write_rows")
    impossible = maximum <= floor
    if bool(impossible.any()):
        for tensor in (maximum, shift, scale, *([] if out is None else [probs])):
            tensor.masked_fill_(impossible, 0.0)
        conjugate.masked_fill_(impossible.squeeze(-1), 0.0)
    if out is not None and out is not probs:
        out.copy_(probs)
    return RowSolution(maximum, shift, scale, conjugate, probs, rows, columns, impossible.squeeze(-1))


def recompute_rows(
    scores: Tensor, maximum: Tensor, shift: Tensor, scale: Tensor, u: float | Tensor, out: Tensor
) -> None:
    """Write all weights of rows that were solved before, times ``scale``.

    ``scores`` and ``u``, at most 1, are as given to `solve_rows`, ``maximum`` and ``shift`` ``[n, 1]`` as returned by it, and
    finite; ``scale`` ``[n, 1]`` may hold whatever else the weights are to be multiplied by; ``out`` is contiguous float32.
    """
    call = _Call(scores, u)
    r = call.record
    dtypes = {"maximum": torch.float32, "shift": torch.float64, "scale": torch.float32}
    numbers = [t.to(d).contiguous() for t, d in zip((maximum, shift, scale), dtypes.values(), strict=True)]
    for name, tensor in zip(dtypes, numbers, strict=True):
        setattr(r, name, tensor.data_ptr())
    r.out = out.data_ptr()
    call.launch("recompute_rows")
