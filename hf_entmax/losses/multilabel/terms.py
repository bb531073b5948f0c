"""What the multilabel losses are made of: labels, checked once, and the loss of every row before any reduction."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from hf_entmax.losses import entmax_loss
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
    """Return the labels present and the labels that take part, both bool ``[N, K]``."""
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
    """Return the weights of the labels, ``[K]``, ones by default."""
    if weight is None:
        return torch.ones(n_labels, device=device, dtype=dtype)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"class_weight must be a float tensor, not {getattr(weight, 'dtype', type(weight).__name__)}.")
    if weight.shape != (n_labels,):
        raise ValueError(f"class_weight has shape {tuple(weight.shape)}: one weight per label is needed, [{n_labels}].")
    if not holds((weight >= 0) & weight.isfinite()):
        raise ValueError("class_weight must be finite and at least 0 for every label.")
    return weight.to(device=device, dtype=dtype)


def log_loss(z: Tensor, rows: LabelRows) -> Tensor:
    """Return ``-sum_i w_i eta_i log softmax_i(z)``, ``[N]``."""
    log_sum = torch.logsumexp(z.masked_fill(~rows.member, -math.inf), dim=-1, keepdim=True)
    return (torch.where(rows.on, log_sum - z, 0.0) * rows.target * rows.weight).sum(-1)


def fenchel_young_loss(z: Tensor, rows: LabelRows, alpha: float | Tensor) -> Tensor:
    """Return the entmax loss with the target ``eta``, ``[N]``."""
    scores = z.masked_fill(~rows.member, -math.inf)
    losses = entmax_loss(scores, rows.target, alpha, reduction="none")  # type: ignore[reportCallIssue]
    # The loss does not fall apart into labels: a row weighs as much as its labels do on average.
    return losses * (rows.target * rows.weight).sum(-1)


def sparsegen_lin_hinge(z: Tensor, rows: LabelRows, lam: float | Tensor) -> Tensor:
    """Return the hinge loss of L18, eq. 6, ``[N]``."""
    return hinge(z / (1.0 - lam), rows.target, rows)


def sparsehourglass_hinge(z: Tensor, rows: LabelRows, q: float | Tensor) -> Tensor:
    """Return the hinge loss of L18, eq. 7, ``[N]``."""
    if not isinstance(q, Tensor) and q == math.inf:
        return hinge(z, rows.target, rows)
    total = torch.where(rows.member, z, 0.0).sum(-1, keepdim=True).abs()
    weight = rows.member.sum(-1, keepdim=True).to(z.dtype) * q
    return hinge(z, rows.target * (total + weight) / (1.0 + weight), rows)


def hinge(y: Tensor, margin: Tensor, rows: LabelRows) -> Tensor:
    r"""Sum over pairs of labels, without forming the pairs.

        sum_{i, j on} w_i |y_i - y_j| + sum_{i on, j off} w_i max(margin_i - (y_i - y_j), 0)

    The sum is linear in ``y`` and ``margin`` wherever it is smooth, and its coefficients are counts of how many entries
    lie above and below each other, found by sorting. So it is an inner product with constants, in O(K log K), and
    autograd needs nothing else. At kinks the coefficients are those of ``sign(0) = 0``.
    """
    # The coefficients sum to zero; a common offset would only cost digits.
    y = y - torch.where(rows.member, y, 0.0).mean(-1, keepdim=True).detach()
    low = y - margin
    with torch.no_grad():
        # searchsorted wants contiguous rows; entries that do not count sort behind all others.
        weight = torch.where(rows.on, rows.weight, 0.0)
        n_on, n_off = rows.on.sum(-1, keepdim=True), rows.off.sum(-1, keepdim=True)

        def order(values: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
            ordered, index = values.masked_fill(~member, math.inf).sort(dim=-1)
            total = torch.nn.functional.pad(weight.gather(-1, index).cumsum(-1), (1, 0))
            return ordered.contiguous(), total

        values = y.detach().contiguous()
        ordered, total = order(values, rows.on)
        below = torch.searchsorted(ordered, values)
        upto = torch.searchsorted(ordered, values, right=True)
        inner = weight * (below - (n_on - upto)) + total.gather(-1, below)
        inner = inner - (total.gather(-1, n_on) - total.gather(-1, torch.minimum(upto, n_on)))
        lowest = low.detach().contiguous()
        ordered, total = order(lowest, rows.on)
        above = total.gather(-1, torch.minimum(torch.searchsorted(ordered, values), n_on))
        ordered, _ = order(values, rows.off)
        beneath = weight * (n_off - torch.searchsorted(ordered, lowest, right=True)).clamp(min=0)
    pairs = torch.where(rows.on, y * inner - low * beneath, 0.0) + torch.where(rows.off, y * above, 0.0)
    return pairs.sum(-1)
