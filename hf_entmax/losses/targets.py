"""What may be given as labels, alpha, reduction: checked once, in plain words, for every loss of this package."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hf_entmax import config

Reduction = Literal["none", "mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


def check_floating(name: str, tensor: object) -> None:
    """Raise TypeError unless it is a floating-point tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point tensor, not {getattr(tensor, 'dtype', type(tensor).__name__)}."
        )


def check_options(reduction: str, label_smoothing: float) -> None:
    """Raise ValueError for an unknown reduction or a smoothing outside [0, 1]."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not known; choose one of {list(REDUCTIONS)}.")
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, (int, float)):
        raise TypeError(f"label_smoothing must be a float, not {type(label_smoothing).__name__}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} is not allowed: it must lie between 0.0 and 1.0.")


def check_alpha(alpha: float | Tensor, row_shape: torch.Size) -> tuple[float | None, Tensor | None]:
    """Return alpha as ``(number, None)``, or ``(None, tensor)`` of one per row, broadcast to ``row_shape`` (differentiably).

    Raises:
        ValueError: if alpha is below 1, not finite, or cannot be broadcast to the rows.
        TypeError: if alpha is neither a number nor a floating-point tensor.
    """
    if isinstance(alpha, Tensor):
        if not alpha.is_floating_point():
            raise TypeError(f"alpha must be a floating-point tensor or a float, not a tensor of {alpha.dtype}.")
        config.check_alphas(alpha)
        if alpha.numel() == 1:
            return float(alpha.detach()), None
        try:
            return None, alpha.expand(row_shape)
        except RuntimeError:
            raise ValueError(
                f"alpha of shape {tuple(alpha.shape)} cannot be broadcast to the rows {tuple(row_shape)}: "
                "give a number, a scalar tensor or one value per row (the shape of logits without the last dimension)."
            ) from None
    return config.check_alpha(alpha, alternative=", or a tensor of them"), None


def check_labels(
    labels: Tensor, row_shape: torch.Size, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Flatten the labels and find the rows to keep: ``(int64 [N], bool [N])``, or ``(floating point [N, V], None)``.

    They are class indices of any integer dtype and shape ``row_shape``, ``ignore_index`` among them, or distributions
    ``[*row_shape, classes]``; ``row_shape`` is that of the logits without their last dimension.
    """
    check_shapes(labels, row_shape, classes)
    if labels.is_floating_point():
        return _check_distributions(labels, classes), None
    flat = labels.reshape(-1).long()
    keep = flat != ignore_index
    wrong = keep & ((flat < 0) | (flat >= classes))
    if bool(wrong.any()):
        raise ValueError(
            f"labels hold {int(flat[wrong][0])}, but with {classes} classes they must lie between 0 and {classes - 1}, "
            f"or be ignore_index={ignore_index}."
        )
    return flat, keep


def check_shapes(labels: Tensor, row_shape: torch.Size, classes: int) -> None:
    """Check what can be said of labels without looking at their values; see :func:`check_labels`."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, not {type(labels).__name__}.")
    shape = (*row_shape, classes)
    if labels.is_floating_point():
        if labels.shape != shape:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} and dtype {labels.dtype} are taken for distributions over the "
                f"classes, which must have the shape of the logits, {shape}. Class indices must be integers."
            )
        if labels.requires_grad:
            raise ValueError("labels require a gradient, which this loss does not give them: pass labels.detach().")
        return
    if labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"labels must hold class indices (integers) or distributions (floats), not {labels.dtype}.")
    if labels.shape != row_shape:
        hint = " For one distribution per row give a floating-point tensor." if labels.shape[:-1] == row_shape else ""
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {shape}: class indices "
            f"must have the shape {tuple(row_shape)}.{hint}"
        )


def _check_distributions(labels: Tensor, classes: int) -> Tensor:
    flat = labels.reshape(-1, classes)
    total = flat.sum(-1, dtype=torch.promote_types(flat.dtype, torch.float32))
    # Half-precision distributions sum to 1 only within the rounding of their many small entries.
    slack = 1e-4 if flat.dtype in (torch.float32, torch.float64) else 2e-2
    wrong = ~((total - 1.0).abs() <= slack)
    if bool(wrong.any()):
        raise ValueError(f"labels are distributions and must sum to 1, but one sums to {total[wrong][0].item():.6g}.")
    if flat.numel() and bool((flat < 0).any()):
        raise ValueError(f"labels are distributions and must not be negative, but hold {flat.min().item():.6g}.")
    return flat
