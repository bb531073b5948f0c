"""Which labels a model's loss is taken over, and what it is divided by."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_entmax.integration.discovery import unwrapped

_CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def shifts_labels(model: nn.Module) -> bool:
    """Whether a head model predicts token t + 1 from position t, or compares logits and labels as they stand.

    Encoder-decoders shift their decoder inputs instead. Most causal models shift, but a few decoders (BART's and its
    relatives') compare as they stand; a model that shifts says so in its code.
    """
    model = unwrapped(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or not any(n in name for n in _CAUSAL_NAMES):
        return False
    code = inspect.unwrap(type(model).forward).__code__
    return divides_by_items(model) or any("shift" in variable for variable in code.co_varnames)


def divides_by_items(model: nn.Module) -> bool:
    """Whether a head model's own loss heeds ``num_items_in_batch``, as that of Transformers does; others return a mean."""
    return "loss_function" in inspect.unwrap(type(unwrapped(model)).forward).__code__.co_names


def count_labels(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Number of labels that the model's mean loss of a batch with ``labels`` is taken over; -100 does not count."""
    labels: torch.Tensor = batch["labels"]
    if shifts_labels(model):
        shifted = batch.get("shift_labels")
        labels = labels[..., 1:] if shifted is None else shifted
    return int((labels != -100).sum())
