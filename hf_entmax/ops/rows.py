"""Rows of scores to probabilities: by plain operations, by a fused kernel, or as one operator of a compiled graph.

Traced, a solver is a loop unrolled into hundreds of nodes without early exit, compiled anew for every layer. Called as one
operator it compiles at once, stops when it has converged, works in chunks and still refuses a wrong alpha. On accelerators, where
the compiler fuses the unrolled loop into few kernels, and in `torch.export`, whose graphs must stand alone, the plain
operations are traced instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.ops.backends import row_kernel
from hf_entmax.ops.gradients import gradient_rows
from hf_entmax.ops.solve import (
    any_above_two,
    checked,
    chunk_rows,
    compute_dtype,
    exporting,
    masked_below,
    solve_chunk,
    values_visible,
)

#: Fewest entries, and shortest rows, for which `row_probabilities` asks for a fused kernel on a CPU: below, compiling it (once
#: per user, many seconds) would cost more than it saves.
KERNEL_ELEMENTS, KERNEL_LENGTH = 1 << 18, 256


def row_probabilities(scores: Tensor, u: float | Tensor, *, kernels: bool = False, above_two: bool = True) -> Tensor:
    """Map every row of ``scores`` to its entmax probabilities.

    Args:
        scores: ``[R, d]``, any floating dtype. Entries at or below ``finfo.min / 2`` get no mass.
        u: ``alpha - 1 >= 0``, a float or a tensor ``[R, 1]`` in the compute dtype.
        kernels: whether a fused kernel may do it, where there is one and it is worth its compilation.
        above_two: whether ``u`` may be above 1; False saves looking, and in graphs the way for it.

    Returns:
        ``[R, d]`` probabilities in the dtype of ``scores``; rows without any unmasked entry are 0, rows that contain
        NaN or ``+inf`` are NaN. Not differentiable.
    """
    if not values_visible(scores):
        return solve_chunk(scores, u, visible=False, above_two=above_two).to(scores.dtype)
    rows, length = scores.shape
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    kernel = None
    if kernels and (scores.device.type != "cpu" or (length >= KERNEL_LENGTH and scores.numel() >= KERNEL_ELEMENTS)):
        # Above alpha = 2 the kernels' thresholds, in float32, are not as exact as the edge of the support found here.
        kernel = None if above_two and any_above_two(u) else row_kernel(scores)
    chunk = chunk_rows(rows, length, scores.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        part_u = u[part] if isinstance(u, Tensor) else u
        if kernel is None:
            out[part] = solve_chunk(scores[part], part_u, visible=True, above_two=above_two)
        else:
            kernel.solve_rows(scores[part], part_u, floor=masked_below(scores.dtype), out=out[part])
    return out


def as_operator(tensor: Tensor) -> bool:
    """Tell whether a call is to become one operator: in a graph that is compiled (not exported) for a CPU."""
    return tensor.device.type == "cpu" and torch.compiler.is_compiling() and not exporting()


@torch.library.custom_op(
    "hf_entmax::row_probabilities",
    mutates_args=(),
    schema="(Tensor scores, Tensor? row_u, float u, bool kernels=False) -> Tensor",
)
def probabilities_operator(scores: Tensor, row_u: Tensor | None, u: float, kernels: bool = False) -> Tensor:
    """Call `row_probabilities` with ``row_u [R, 1]``, or with ``u`` where that is None."""
    return row_probabilities(scores, u if row_u is None else checked(row_u), kernels=kernels)


@probabilities_operator.register_fake
def _(scores: Tensor, row_u: Tensor | None, u: float, kernels: bool = False) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "hf_entmax::row_gradients",
    mutates_args=(),
    schema="(Tensor probs, Tensor grad, Tensor? row_u, float u, bool with_scores, bool with_alpha) -> (Tensor, Tensor)",
)
def gradients_operator(
    probs: Tensor, grad: Tensor, row_u: Tensor | None, u: float, with_scores: bool, with_alpha: bool
) -> tuple[Tensor, Tensor]:
    """Call `hf_entmax.ops.gradients.gradient_rows`; a gradient that is not wanted has no columns."""
    value = u if row_u is None else row_u
    grad_scores, grad_alpha = gradient_rows(probs, grad, value, with_scores, with_alpha)
    rows = probs.shape[0]
    return (
        probs.new_empty((rows, 0)) if grad_scores is None else grad_scores,
        probs.new_empty((rows, 0)) if grad_alpha is None else grad_alpha,
    )


@gradients_operator.register_fake
def _(
    probs: Tensor, grad: Tensor, row_u: Tensor | None, u: float, with_scores: bool, with_alpha: bool
) -> tuple[Tensor, Tensor]:
    rows, length = probs.shape
    dtype = compute_dtype(probs.dtype) if with_alpha else probs.dtype
    return probs.new_empty((rows, length if with_scores else 0)), probs.new_empty((rows, int(with_alpha)), dtype=dtype)
