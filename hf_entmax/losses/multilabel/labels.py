"""The labels of a batch: checked once, and brought into the form that the losses work on."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_entmax.ops.controllable.domain import holds


@dataclasses.dataclass
class LabelRows:
    """The labels of ``N`` rows, each with at least one present label.

    Args:
        target: ``eta``, ``[N, K]``: uniform over the present labels.
        on: bool ``[N, K]``, present.
        off: bool ``[N, K]``, absent; labels that are neither take no part.
        weight: ``[N, K]``, the weight of each label.
    """

    target: Tensor
    on: Tensor
    off: Tensor
    weight: Tensor

    @property
    def member(self) -> Tensor:
        """Which labels take part at all."""
        return self.on | self.off


def check_labels(
    logits: Tensor, labels: Tensor, mask: Tensor | None, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """Present labels and labels that take part, both bool ``[N, K]``.

    Raises:
        ValueError: if a label is neither 0, 1 nor ``ignore_index``, or a shape does not fit.
        TypeError: for an unsuitable dtype.
    """
    if not isinstance(labels, Tensor) or labels.is_complex():
        raise TypeError(f"labels must be a bool, int or float tensor, not {getattr(labels, 'dtype', type(labels))}.")
    if logits.ndim == 0 or labels.shape != logits.shape or logits.shape[-1] == 0:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: both must be "
            "[..., K], one 0 or 1 for each of the K labels."
        )
    labels = labels.to(logits.device).reshape(-1, labels.shape[-1])
    on = labels == 1
    ignored = torch.zeros_like(on) if ignore_index is None else labels == ignore_index
    if not holds(on | (labels == 0) | ignored):
        wrong = labels[~(on | (labels == 0) | ignored)][0].item()
        allowed = "0 or 1" if ignore_index is None else f"0 or 1 (or ignore_index={ignore_index})"
        raise ValueError(f"labels hold {wrong:g}, but each must be {allowed}: 1 where the label is present.")
    member = ~ignored
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor (True: takes part), not {getattr(mask, 'dtype', type(mask))}.")
        try:
            member = member & mask.to(logits.device).expand(logits.shape).reshape(on.shape)
        except RuntimeError:
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} cannot be broadcast to logits of shape {tuple(logits.shape)}."
            ) from None
    return on & member, member


def check_weight(weight: Tensor | None, n_labels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The weights of the labels, ``[K]``, ones by default.

    Raises:
        ValueError: if they are negative, not finite or not ``[K]``.
        TypeError: if they are not floating point.
    """
    if weight is None:
        return torch.ones(n_labels, device=device, dtype=dtype)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"class_weight must be a float tensor, not {getattr(weight, 'dtype', type(weight).__name__)}.")
    if weight.shape != (n_labels,):
        raise ValueError(f"class_weight has shape {tuple(weight.shape)}: one weight per label is needed, [{n_labels}].")
    if not holds((weight >= 0) & weight.isfinite()):
        raise ValueError("class_weight must be finite and at least 0 for every label.")
    return weight.to(device=device, dtype=dtype)
