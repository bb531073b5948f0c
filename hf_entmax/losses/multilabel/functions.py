"""The multilabel loss, its predictions, and the module."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hf_entmax.losses.multilabel.registry import parse_mapping, resolve
from hf_entmax.losses.multilabel.terms import LabelRows, check_labels, check_weight
from hf_entmax.losses.targets import REDUCTIONS, Reduction, check_floating
from hf_entmax.ops.controllable.domain import Interval, holds

Empty = Literal["ignore", "uniform", "error"]
EMPTY: tuple[Empty, ...] = get_args(Empty)
THRESHOLD = Interval("threshold", 0.0, 1.0, False, True, "labels whose probability exceeds it are predicted")


def multilabel_loss(
    logits: Tensor,
    labels: Tensor,
    mapping: str = "sparsehourglass",
    *,
    class_weight: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int | None = -100,
    empty: Empty = "ignore",
    reduction: Reduction = "mean",
    **options: float | Tensor,
) -> Tensor:
    r"""Compute the loss of a mapping for rows with any number of labels; see the table at the top of `hf_entmax.losses.multilabel`.

    With ``eta = y / |y|_1`` and ``a(z) = (1 + K q) / (|sum z| + K q)`` the two hinge losses are

        sparsegen_lin (eq. 6):
            1/(1-lam) sum_{i,j on} |z_i - z_j| + sum_{i on, j off} max(eta_i - (z_i - z_j)/(1-lam), 0)
        sparsehourglass (eq. 7):
            sum_{i,j on} |z_i - z_j| + sum_{i on, j off} max(eta_i/a(z) - (z_i - z_j), 0)

    (sums over ordered pairs), computed in O(K log K) time and O(K) memory. Each loss but the log loss is 0 exactly
    where the mapping gives ``eta``.

    Args:
        logits: ``[..., K]``, any floating dtype; computed in float32 at least.
        labels: ``[..., K]``, bool, integer or float, each 0 or 1, or ``ignore_index``.
        mapping: a name in ``MULTILABEL_LOSSES``, optionally with options: ``"entmax(alpha=1.3)"``.
        class_weight: ``[K]``, at least 0. In the log and hinge losses it multiplies the terms of a present label; in
            the Fenchel-Young losses, which do not fall apart into labels, a row is weighted by the mean weight of its
            labels. A row with one label is weighted by that label's weight in either case.
        mask: bool, broadcastable to ``[..., K]``; False = this label is left out of this row.
        ignore_index: a label value with the same meaning as ``mask=False``; None allows 0 and 1 only.
        empty: rows without any label: ``"ignore"`` (no loss, no gradient), ``"uniform"`` (``eta`` is uniform over the
            labels that take part) or ``"error"``.
        reduction: ``"mean"`` over the rows that count (0 if none does), ``"sum"``, or ``"none"``.
        **options: ``alpha`` of entmax (>= 1), ``lam`` of sparsegen_lin (< 1), ``q`` of sparsehourglass (>= 0): numbers,
            or tensors of one element, in which the loss is then differentiable.

    Returns:
        A scalar, or ``[...]`` for ``"none"``; float32 (float64 for float64 logits). Differentiable in ``logits``.

    Raises:
        ValueError: for labels not in {0, 1}, unknown names or options, options outside their range, or shapes that do
            not fit.
        TypeError: for tensors of an unsuitable dtype.

    Reference:
        L18, eq. 6 and 7; Martins and Astudillo 2016, eq. 21 (sparsemax); Blondel, Martins, Niculae 2020 (entmax).
    """
    spec, values = resolve(mapping, options)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not allowed: choose from {list(REDUCTIONS)}.")
    if empty not in EMPTY:
        raise ValueError(f"empty={empty!r} is not allowed: choose from {list(EMPTY)}.")
    check_floating("logits", logits)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    on, member = check_labels(logits, labels, mask, ignore_index)
    weight = check_weight(class_weight, logits.shape[-1], logits.device, wide)
    n_labels = on.sum(-1, keepdim=True)
    if empty == "error" and not holds(n_labels > 0):
        raise ValueError(
            'labels hold rows without any label, and empty="error": use empty="ignore" or "uniform", or add a label '
            "for rows that have no other."
        )
    if empty == "uniform":
        # Every label that takes part counts as present.
        on = on | (member & (n_labels == 0))
        n_labels = on.sum(-1, keepdim=True)
    counts = (n_labels > 0).squeeze(-1)
    # Rows that do not count get one stand-in label, so that every loss is finite there, and are zeroed afterwards.
    stand_in = torch.zeros_like(on)
    stand_in[..., 0] = True
    on = torch.where(counts[:, None], on, stand_in)
    rows = LabelRows(
        target=on.to(wide) / n_labels.clamp(min=1),
        on=on,
        off=member & ~on & counts[:, None],
        weight=weight.expand(on.shape),
    )
    z = logits.reshape(on.shape).to(wide)
    losses = spec.loss(torch.where(rows.member, z, 0.0), rows, **values)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses.reshape(logits.shape[:-1])
    return losses.sum() / counts.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def multilabel_probabilities(
    logits: Tensor, mapping: str = "sparsehourglass", *, mask: Tensor | None = None, **options: float | Tensor
) -> Tensor:
    """Return the distribution over the labels that a mapping gives.

    Args:
        logits: ``[..., K]``.
        mapping: a name in ``MULTILABEL_LOSSES``, optionally with options in parentheses.
        mask: bool, broadcastable to ``logits``; False = not to be predicted.
        **options: as for :func:`multilabel_loss`.

    Returns:
        Probabilities ``[..., K]``, dtype of ``logits``; differentiable.

    Raises:
        ValueError: for unknown names or options, or options outside their range.
    """
    spec, values = resolve(mapping, options)
    return spec.probs(logits, mask, **values)


def multilabel_predict(
    logits: Tensor,
    mapping: str = "sparsehourglass",
    *,
    mask: Tensor | None = None,
    threshold: float | None = None,
    **options: float | Tensor,
) -> Tensor:
    """Return the labels that a mapping predicts: its support, or what exceeds a threshold.

    Args:
        logits: ``[..., K]``.
        mapping: a name in ``MULTILABEL_LOSSES``, optionally with options in parentheses.
        mask: bool, broadcastable to ``logits``; False = not to be predicted.
        threshold: in [0, 1): labels with a larger probability are predicted. None means 0, i.e. the support, for the
            sparse mappings, and the uniform probability, one over the number of labels, for softmax, whose support is
            everything (as for entmax at ``alpha = 1``). Better values are found on validation data.
        **options: as for :func:`multilabel_loss`.

    Returns:
        bool ``[..., K]``.

    Raises:
        ValueError: for unknown names or options, or options or a threshold outside their range.
    """
    _, values = resolve(mapping, options)
    probs = multilabel_probabilities(logits.detach(), mapping, mask=mask, **options)
    if threshold is not None:
        return probs > THRESHOLD.number(threshold)
    dense = parse_mapping(mapping)[0] == "softmax" or values.get("alpha") == 1
    if not dense:
        return probs > 0
    n_labels = logits.shape[-1] if mask is None else mask.expand(logits.shape).sum(-1, keepdim=True).clamp(min=1)
    return probs > 1.0 / n_labels


class MultilabelLoss(nn.Module):
    """Module form of :func:`multilabel_loss`.

    Args:
        mapping: a name in ``MULTILABEL_LOSSES``, optionally with options in parentheses.
        class_weight: ``[K]``, at least 0.
        ignore_index: a label value that does not count; None allows 0 and 1 only.
        empty: ``"ignore"``, ``"uniform"`` or ``"error"``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        **options: of the mapping; an ``nn.Parameter`` is learned along.

    Raises:
        ValueError: for unknown names or options, or options outside their range.
    """

    def __init__(
        self,
        mapping: str = "sparsehourglass",
        *,
        class_weight: Tensor | None = None,
        ignore_index: int | None = -100,
        empty: Empty = "ignore",
        reduction: Reduction = "mean",
        **options: float | Tensor,
    ) -> None:
        super().__init__()
        resolve(mapping, options)
        if reduction not in REDUCTIONS or empty not in EMPTY:
            raise ValueError(f"reduction must be one of {list(REDUCTIONS)}, empty one of {list(EMPTY)}.")
        self.mapping = mapping
        self.ignore_index = ignore_index
        self.empty: Empty = empty
        self.reduction: Reduction = reduction
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", class_weight)
        self.options = nn.ParameterDict({k: v for k, v in options.items() if isinstance(v, nn.Parameter)})
        self.fixed = {k: v for k, v in options.items() if not isinstance(v, nn.Parameter)}

    def forward(self, logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the loss of ``logits`` against ``labels``, both ``[..., K]``."""
        return multilabel_loss(
            logits,
            labels,
            self.mapping,
            class_weight=self.class_weight,
            mask=mask,
            ignore_index=self.ignore_index,
            empty=self.empty,
            reduction=self.reduction,
            **{**self.fixed, **self.options},
        )

    def predict(self, logits: Tensor, mask: Tensor | None = None, threshold: float | None = None) -> Tensor:
        """Return the labels predicted, see :func:`multilabel_predict`."""
        options = {**self.fixed, **self.options}
        return multilabel_predict(logits, self.mapping, mask=mask, threshold=threshold, **options)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"{self.mapping!r}, empty={self.empty!r}, reduction={self.reduction!r}"
