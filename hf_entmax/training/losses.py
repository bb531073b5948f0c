"""A loss function for ``Trainer(compute_loss_func=...)``, where the Trainer's own options would replace the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_entmax.config import check_alpha
from hf_entmax.losses import entmax_loss


class SmoothedEntmaxLoss:
    r"""Entmax loss with label smoothing in Fenchel-Young form.

    ``L = (p - q) . z + H(p) - H(q)`` with ``q = (1 - s) e_y + s / V`` (maths of Blondel et al. 2019, sec. 3). It stands
    in for ``TrainingArguments(label_smoothing_factor=s)``, which is a smoothed cross-entropy.

    Args:
        alpha: >= 1; the model's ``output_alpha``.
        label_smoothing: share ``s`` of the mass spread over the vocabulary, in [0, 1).
        shift: predict token t + 1 from position t (causal language models).
    """

    #: Tells the Trainer's hook that this stands in for ``output_alpha`` on purpose.
    replaces_output_loss = True

    def __init__(self, alpha: float = 1.5, label_smoothing: float = 0.1, *, shift: bool = False) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={label_smoothing!r} is not allowed: give a number in [0, 1).")
        self.alpha = check_alpha(alpha)
        self.label_smoothing = label_smoothing
        self.shift = shift

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss of a batch: mean over its labels, or sum over ``num_items_in_batch`` where the Trainer gives that."""
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        if self.shift:
            labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = entmax_loss(logits, labels, self.alpha, reduction=reduction, label_smoothing=self.label_smoothing)
        return loss if num_items_in_batch is None else loss / num_items_in_batch
