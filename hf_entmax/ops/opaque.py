"""The row solvers as custom operators: single nodes in a compiled graph on CPUs.

Traced, a solver is a loop unrolled into hundreds of nodes without early exit, compiled anew for every layer. Called as one
operator it compiles at once, stops when it has converged, works in chunks and still refuses a wrong alpha. On accelerators, where
the compiler fuses the unrolled loop into few kernels, and in `torch.export`, whose graphs must stand alone, the plain
operations are traced instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.ops import gradients, solve


def wanted(tensor: Tensor) -> bool:
    """Whether a call is to become one operator: in a graph that is compiled (not exported) for a CPU."""
    return tensor.device.type == "cpu" and torch.compiler.is_compiling() and not solve.exporting()


@torch.library.custom_op(
    "hf_entmax::row_probabilities",
    mutates_args=(),
    schema="(Tensor scores, Tensor? row_u, float u, bool kernels=False) -> Tensor",
)
def row_probabilities(scores: Tensor, row_u: Tensor | None, u: float, kernels: bool = False) -> Tensor:
    """Call `hf_entmax.ops.solve.row_probabilities` with ``row_u [R, 1]``, or with ``u`` where that is None."""
    return solve.row_probabilities(scores, u if row_u is None else solve.checked(row_u), kernels=kernels)


@row_probabilities.register_fake
def _(scores: Tensor, row_u: Tensor | None, u: float, kernels: bool = False) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "hf_entmax::row_gradients",
    mutates_args=(),
    schema="(Tensor probs, Tensor grad, Tensor? row_u, float u, bool with_scores, bool with_alpha) -> (Tensor, Tensor)",
)
def row_gradients(
    probs: Tensor, grad: Tensor, row_u: Tensor | None, u: float, with_scores: bool, with_alpha: bool
) -> tuple[Tensor, Tensor]:
    """Call `hf_entmax.ops.gradients.gradient_rows`; a gradient that is not wanted has no columns."""
    value = u if row_u is None else row_u
    grad_scores, grad_alpha = gradients.gradient_rows(probs, grad, value, with_scores, with_alpha)
    rows = probs.shape[0]
    return (
        probs.new_empty((rows, 0)) if grad_scores is None else grad_scores,
        probs.new_empty((rows, 0)) if grad_alpha is None else grad_alpha,
    )


@row_gradients.register_fake
def _(
    probs: Tensor, grad: Tensor, row_u: Tensor | None, u: float, with_scores: bool, with_alpha: bool
) -> tuple[Tensor, Tensor]:
    rows, length = probs.shape
    dtype = solve.compute_dtype(probs.dtype) if with_alpha else probs.dtype
    return probs.new_empty((rows, length if with_scores else 0)), probs.new_empty((rows, int(with_alpha)), dtype=dtype)
