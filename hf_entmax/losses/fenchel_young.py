"""Fenchel-Young losses on logits: one function for softmax, sparsemax and everything between and beyond."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_entmax.losses.blocks import BatchLosses, write_residuals
from hf_entmax.losses.compiled import entmax_losses
from hf_entmax.losses.core import sparse_residual
from hf_entmax.losses.targets import Reduction, check_alpha, check_floating, check_labels, check_options, check_shapes
from hf_entmax.ops.solve import compute_dtype


class EntmaxLossFunction(torch.autograd.Function):
    """The losses of all rows. It keeps ``p - q`` on its support, or, for rows that are not sparse, only their thresholds."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        keep: Tensor | None,
        alpha: Tensor | None,
        number: float | None,
        smoothing: float,
    ) -> Tensor:
        """Take ``logits`` ``[N, V]``, ``target`` ``[N]`` or ``[N, V]``, ``alpha`` ``[N]`` or a scalar with its ``number``."""
        length = logits.shape[1]
        batch = BatchLosses(logits, need_slope=ctx.needs_input_grad[3])
        dense: list[slice] = []
        places: list[Tensor] = []
        values: list[Tensor] = []
        for block, result in batch.run(logits, target, keep, number, alpha, smoothing):
            if not ctx.needs_input_grad[0]:
                continue
            if result.solution.rows is None or target.dim() == 2:
                dense.append(block)
            else:
                row, column, value = sparse_residual(result, target[block], smoothing)
                places.append((row + block.start) * length + column)
                values.append(value)
        ctx.dense, ctx.smoothing, ctx.number = dense, smoothing, number
        ctx.shape, ctx.dtype, ctx.alpha_dtype = logits.shape, logits.dtype, None if alpha is None else alpha.dtype
        sparse = (torch.cat(places), torch.cat(values)) if places else (None, None)
        again = (logits, target, batch.solved) if dense else (None, None, None)
        ctx.save_for_backward(batch.dead, batch.slopes, *sparse, *again, alpha if dense and number is None else None)
        return batch.losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return ``g (p - q)`` for the logits and ``g dH/dalpha`` for alpha."""
        grad = grad_outputs[0]
        dead, slopes, places, values, logits, target, solved, alpha = ctx.saved_tensors
        grad_logits = grad_alpha = None
        if ctx.needs_input_grad[0]:
            rows, length = ctx.shape
            weight = grad.masked_fill(dead, 0.0)[:, None].to(compute_dtype(ctx.dtype))
            if places is None:
                grad_logits = weight.new_empty(rows, length, dtype=ctx.dtype)
            elif ctx.smoothing:
                spread = (weight * (-ctx.smoothing / length)).to(ctx.dtype)
                grad_logits = spread.repeat(1, length)
            else:
                grad_logits = weight.new_zeros(rows, length, dtype=ctx.dtype)
            if ctx.dense:
                write_residuals(
                    ctx.dense, logits, solved, ctx.number, alpha, target, weight, dead, ctx.smoothing, grad_logits
                )
            if places is not None:
                change = values - ctx.smoothing / length if ctx.smoothing else values
                row = places.div(length, rounding_mode="floor")
                grad_logits.view(-1)[places] = (change * weight[row, 0]).to(ctx.dtype)
        if slopes is not None:
            grad_alpha = (slopes * grad).sum() if ctx.number is not None else slopes * grad
            grad_alpha = grad_alpha.to(ctx.alpha_dtype)
        return grad_logits, None, None, grad_alpha, None, None


def reduce_losses(
    losses: Tensor, keep: Tensor | None, reduction: Reduction, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the sum, the mean over the rows kept (0 where there is none), or the losses in the shape of the rows."""
    if reduction == "none":
        return losses.reshape(shape).to(dtype)
    total = losses.sum()
    if reduction == "mean":
        total = total / (max(losses.numel(), 1) if keep is None else keep.sum().clamp(min=1))
    return total.to(dtype)


def entmax_loss(
    logits: Tensor,
    labels: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Compute the Fenchel-Young loss of alpha-entmax: cross-entropy at ``alpha = 1``, the sparsemax loss at ``alpha = 2``.

        L(z, q) = (p - q).z + H(p) - H(q),     p = entmax(z),     H(p) = sum_j (p_j - p_j^alpha) / (alpha (alpha - 1))

    For a class index, ``q`` is one-hot and ``H(q) = 0``. For ``alpha > 1`` the loss is exactly 0, gradient included,
    as soon as the right class leads by ``1 / (alpha - 1)``. With ``label_smoothing = s`` the target becomes
    ``q' = (1 - s) q + s / V``. With targets that are not one-hot the loss is still 0 at its minimum ``p = q``; at
    ``alpha = 1`` that makes it the Kullback-Leibler divergence, i.e. ``F.cross_entropy`` minus the entropy of the
    target (a constant: the gradients agree).

    Only the entries of ``p - q`` that are not zero are kept for the backward pass (the whole of it, once, where it is
    not sparse), and rows are solved on a few candidates instead of being sorted.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; computed in float32 at least. ``-inf`` marks
            impossible classes; a row without a possible class has an infinite loss and no gradient.
        labels: class indices ``[...]`` of an integer dtype, or distributions over the classes ``[..., V]`` of a
            floating dtype. Unlike for ``F.cross_entropy`` the classes are always the *last* dimension.
        alpha: ``>= 1``; a number, a scalar tensor, or a tensor broadcastable to ``[...]`` (one alpha per row).
        ignore_index: rows with this class index contribute neither loss nor gradient.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``; the mean is over the rows that are not ignored, 0 if there are
            none. For a batch accumulated over several steps: ``reduction="sum"`` divided by the number of labels in it.
        label_smoothing: share of the target mass spread evenly over the classes, in [0, 1].

    Returns:
        float32 (float64 for float64 logits), in nats at ``alpha = 1``: a scalar, or ``[...]`` for ``"none"``.
        Once differentiable in ``logits`` (``p - q``) and in ``alpha`` (``dH(p)/dalpha - dH(q)/dalpha``, by Danskin's
        theorem).

    Raises:
        ValueError: for alpha below 1, labels out of range or of the wrong shape, an unknown reduction.
        TypeError: for labels, alpha or logits of an unsuitable dtype.

    Examples:
        >>> import torch
        >>> from hf_entmax.losses import entmax_loss
        >>> logits = torch.tensor([[2.0, 0.5, -1.0]], requires_grad=True)
        >>> loss = entmax_loss(logits, torch.tensor([0]), alpha=1.5)
        >>> loss.backward()
        >>> round(loss.item(), 4), logits.grad
        (0.0088, tensor([[-0.0504,  0.0504,  0.0000]]))

    Reference:
        Peters, Niculae, Martins 2019, eq. 11-12; Blondel, Martins, Niculae 2020 (Fenchel-Young losses).
    """
    check_options(reduction, label_smoothing)
    check_floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} have no classes: their last dimension must be at least 1."
        )
    shape, classes = logits.shape[:-1], logits.shape[-1]
    if torch.compiler.is_compiling():
        losses, keep = _compiled_losses(logits, labels, alpha, ignore_index, float(label_smoothing))
        return reduce_losses(losses, keep, reduction, shape, compute_dtype(logits.dtype))
    number, per_row = check_alpha(alpha, shape)
    target, keep = check_labels(labels.to(logits.device), shape, classes, ignore_index)
    learned = alpha.reshape(()) if number is not None and isinstance(alpha, Tensor) and alpha.requires_grad else None
    with torch.autocast(logits.device.type, enabled=False):
        losses = EntmaxLossFunction.apply(
            logits.reshape(-1, classes),
            target,
            keep,
            per_row.reshape(-1) if per_row is not None else learned,
            number,
            float(label_smoothing),
        )
    return reduce_losses(losses, keep, reduction, shape, compute_dtype(logits.dtype))  # type: ignore[arg-type]


def _compiled_losses(
    logits: Tensor, labels: Tensor, alpha: float | Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of all rows by one operator of a compiled graph, and the rows to keep. Values are checked when it runs."""
    shape, classes = logits.shape[:-1], logits.shape[-1]
    check_shapes(labels, shape, classes)
    number, flat_alpha = 0.0, None
    if not isinstance(alpha, Tensor):
        number, _ = check_alpha(alpha, shape)
    elif alpha.numel() == 1:
        flat_alpha = alpha.reshape(1)
    else:
        flat_alpha = alpha.expand(shape).reshape(-1)
    distributions = labels.is_floating_point()
    flat = labels.to(logits.device).reshape((-1, classes) if distributions else (-1,))
    slope = flat_alpha is not None and flat_alpha.requires_grad
    rows = logits.reshape(-1, classes)
    losses = entmax_losses(rows, flat, flat_alpha, number, ignore_index, smoothing, slope)[0]
    return losses, None if distributions else flat != ignore_index


def entmax15_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Compute the 1.5-entmax loss, :func:`entmax_loss` at ``alpha = 1.5``.

        L(z, y) = (p - e_y).z + (4/3) sum_j (p_j - p_j^1.5),     p = 1.5-entmax(z)

    Arguments, result and errors are those of :func:`entmax_loss`. It is 0 once the right class leads by 2.

    Reference:
        Peters, Niculae, Martins 2019, eq. 12.
    """
    return entmax_loss(
        logits, labels, 1.5, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def sparsemax_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Compute the sparsemax loss, :func:`entmax_loss` at ``alpha = 2``.

        L(z, y) = (p - e_y).z + (1 - ||p||^2) / 2,     p = sparsemax(z)

    Arguments, result and errors are those of :func:`entmax_loss`. It is 0 once the right class leads by 1; with a
    distribution as the label it is the multilabel loss of the reference.

    Reference:
        Martins and Astudillo 2016, sec. 3.
    """
    return entmax_loss(
        logits, labels, 2.0, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


class EntmaxLoss(nn.Module):
    """Module form of :func:`entmax_loss`, with the same options and errors; an alpha that is a parameter is learned."""

    def __init__(
        self,
        alpha: float | Tensor = 1.5,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing)
        if isinstance(alpha, nn.Parameter) or not isinstance(alpha, Tensor):
            if not isinstance(alpha, Tensor):
                check_alpha(alpha, torch.Size())
            self.alpha = alpha
        else:
            self.register_buffer("alpha", alpha)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of ``logits`` ``[..., V]`` against ``labels``, see :func:`entmax_loss`."""
        return entmax_loss(
            logits,
            labels,
            self.alpha,  # type: ignore[arg-type]
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """Show the options."""
        alpha = "tensor" if isinstance(self.alpha, Tensor) else self.alpha
        return (
            f"alpha={alpha}, ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )
