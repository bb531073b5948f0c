"""The loss on logits as custom operators: two nodes in a compiled graph, whatever the rows hold.

How many candidates a row has, whether a label is out of range, whether alpha is 1: the loss looks at its data at every turn,
which a traced graph cannot. Called as one operator it compiles without a break, checks what it always checks, and skips what
can be skipped. Unlike the eager form it keeps the logits for the backward pass instead of the few entries of ``p - q``, whose
number no graph could know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_entmax.losses.blocks import BatchLosses, row_blocks, write_residuals
from hf_entmax.losses.targets import check_alpha, check_labels
from hf_entmax.ops.solve import compute_dtype, exact_dtype


def _prepared(
    logits: Tensor, labels: Tensor, alpha: Tensor | None, number: float, ignore_index: int
) -> tuple[Tensor, Tensor | None, float | None, Tensor | None]:
    """Return targets, rows to keep, and alpha as a number or one per row."""
    shape, classes = logits.shape[:1], logits.shape[1]
    target, keep = check_labels(labels, shape, classes, ignore_index)
    one, per_row = (number, None) if alpha is None else check_alpha(alpha, shape)
    return target, keep, one, per_row


@torch.library.custom_op(
    "hf_entmax::entmax_losses",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, Tensor? alpha, float number, int ignore_index, float smoothing, bool slope)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def entmax_losses(logits, labels, alpha, number, ignore_index, smoothing, slope):
    """Return the losses of all rows ``[N, V]``, as :func:`hf_entmax.losses.entmax_loss` defines them.

    Alpha is ``[1]`` or ``[N]``, or None for one ``number``; ``slope`` says whether derivatives in it are wanted.

    Returns:
        Losses ``[N]``; their derivatives in alpha ``[N]``, or ``[0]``; maximum, shift and scale of the rows ``[3, N, 1]``;
        bool ``[N]``, rows without a gradient.

    Raises:
        ValueError: for labels or alpha out of range.
    """
    target, keep, one, per_row = _prepared(logits, labels, alpha, number, ignore_index)
    batch = BatchLosses(logits, need_slope=slope)
    for _ in batch.run(logits, target, keep, one, per_row, smoothing):
        pass
    slopes = batch.losses.new_empty(0) if batch.slopes is None else batch.slopes
    return batch.losses, slopes, batch.solved, batch.dead


@entmax_losses.register_fake
def _(logits, labels, alpha, number, ignore_index, smoothing, slope):
    rows = logits.shape[0]
    losses = logits.new_empty(rows, dtype=exact_dtype(logits))
    solved = losses.new_empty(3, rows, 1)
    return losses, losses.new_empty(rows if slope else 0), solved, logits.new_empty(rows, dtype=torch.bool)


@torch.library.custom_op(
    "hf_entmax::entmax_loss_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor logits, Tensor labels, Tensor? alpha, float number, int ignore_index, float smoothing,"
    " Tensor solved, Tensor dead) -> Tensor",
)
def entmax_loss_gradient(grad, logits, labels, alpha, number, ignore_index, smoothing, solved, dead):
    """Return ``grad (p - q)`` ``[N, V]``, given arguments and results of :func:`entmax_losses`."""
    target, _, one, per_row = _prepared(logits, labels, alpha, number, ignore_index)
    weight = grad.masked_fill(dead, 0.0)[:, None].to(compute_dtype(logits.dtype))
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_residuals(row_blocks(logits), logits, solved, one, per_row, target, weight, dead, smoothing, out)
    return out


@entmax_loss_gradient.register_fake
def _(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, alpha, ctx.number, ctx.ignore_index, ctx.smoothing, _ = inputs
    _, slopes, solved, dead = output
    ctx.mark_non_differentiable(slopes, solved, dead)
    ctx.save_for_backward(logits, labels, alpha, slopes, solved, dead)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    logits, labels, alpha, slopes, solved, dead = ctx.saved_tensors
    grad_logits = grad_alpha = None
    if ctx.needs_input_grad[0]:
        options = (ctx.number, ctx.ignore_index, ctx.smoothing)
        grad_logits = entmax_loss_gradient(grads[0], logits, labels, alpha, *options, solved, dead)
    if ctx.needs_input_grad[2]:
        grad_alpha = slopes * grads[0]
        grad_alpha = (grad_alpha.sum().expand(1) if alpha.shape[0] == 1 else grad_alpha).to(alpha.dtype)
    return grad_logits, None, grad_alpha, None, None, None, None


entmax_losses.register_autograd(_backward, setup_context=_setup_context)
