"""Independent rows of scores: from tensors to kernel launches and back, without waiting for the device."""

# The type of a kernel is that of its Python function: launch options and constants are not in its signature.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_entmax.ops.solve import RowSolution, conjugate_of
from hf_entmax.ops.triton_gpu import row_kernels
from hf_entmax.ops.triton_gpu.blocks import padded
from hf_entmax.ops.triton_gpu.launch import _MAX_PASSES, FUSED, _on_device

#: Whether alpha may be above 2: thresholds are float32, too coarse for probabilities that rise like a root there.
ABOVE_TWO = False


def solve_rows(
    scores: Tensor, u: float | Tensor, *, floor: float = -math.inf, out: Tensor | None = None
) -> RowSolution:
    """As `hf_entmax.ops.numba_cpu.row_host.solve_rows` on CUDA, for ``u`` up to 1, all probabilities; sums per row are float64."""
    maximum = scores.amax(-1, keepdim=True).float()
    impossible = maximum <= floor
    maximum.masked_fill_(impossible, 0.0)
    solved = torch.empty((3, *maximum.shape), dtype=torch.float32, device=scores.device)
    passes = 1 if not isinstance(u, Tensor) and u == 0 else _MAX_PASSES
    _launch(row_kernels._solve_rows_kernel, scores, maximum, u, floor, solved, passes, whole_rows=True)
    shift, total, expected = solved.double()
    conjugate = conjugate_of(shift, total, expected, u)
    # NaN stays: it belongs in every probability of its row.
    scale = (1.0 / total).masked_fill(impossible, 0.0).float()
    shift, conjugate = shift.masked_fill(impossible, 0.0), conjugate.masked_fill(impossible, 0.0)
    probs = torch.empty(scores.shape, dtype=torch.float32, device=scores.device) if out is None else out
    _launch(row_kernels._write_rows_kernel, scores, maximum, u, floor, shift.float(), scale, probs)
    return RowSolution(maximum, shift, scale, conjugate.squeeze(-1), probs, None, None, impossible.squeeze(-1))


def recompute_rows(
    scores: Tensor, maximum: Tensor, shift: Tensor, scale: Tensor, u: float | Tensor, out: Tensor
) -> None:
    """As `hf_entmax.ops.numba_cpu.row_host.recompute_rows` on CUDA, to a contiguous ``out`` of any dtype."""
    numbers = (tensor.float().contiguous() for tensor in (maximum, shift, scale))
    _launch(row_kernels._write_rows_kernel, scores, next(numbers), u, -math.inf, *numbers, out)


def _launch(
    kernel: Any,
    scores: Tensor,
    maximum: Tensor,
    u: float | Tensor,
    floor: float,
    *operands: Any,
    whole_rows: bool = False,
) -> None:
    """Run a kernel over tiles of 1024 entries, 8 a thread; a row that long or longer is alone in its tiles."""
    n_rows, n_cols = scores.shape
    cols = min(padded(n_cols), 1024)
    grid = (-(-n_rows * cols // 1024), 1 if whole_rows else -(-n_cols // cols))
    if isinstance(u, Tensor):
        alpha, step, exact_alpha = u.detach().float().view(-1) + 1.0, 1, 0.0
    else:
        alpha, step = torch.full((1,), 1.0 + u, dtype=torch.float32, device=scores.device), 0
        exact_alpha = 1.0 + u if 1.0 + u in (1.0, 1.5, 2.0) else 0.0
    with _on_device(scores):
        kernel[grid](
            (scores.detach(), *scores.stride()), maximum, (alpha, step), floor, n_rows, n_cols, *operands,
            ALPHA=exact_alpha, ROWS=1024 // cols, COLS=cols, **FUSED,
        )  # fmt: skip
