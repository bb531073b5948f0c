"""Fenchel-Young losses of entmax, on logits and on hidden states."""

from hf_entmax.losses.fenchel_young import EntmaxLoss, entmax15_loss, entmax_loss, sparsemax_loss
from hf_entmax.losses.linear import linear_entmax_loss

__all__ = ["EntmaxLoss", "entmax15_loss", "entmax_loss", "linear_entmax_loss", "sparsemax_loss"]
