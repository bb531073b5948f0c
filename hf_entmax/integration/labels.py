"""Which labels a model's loss is taken over, and what it is divided by."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_entmax.integration.discovery import unwrapped

_CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def shifts_labels(model: nn.Module) -> bool:
    """Check whether a head model predicts token t + 1 from position t, or compares logits and labels as they are.

    Encoder-decoders shift their decoder inputs instead. Most causal models shift, but a few decoders (BART's and its
    relatives') compare as they stand; a model that shifts says so in its code.
    """
    model = unwrapped(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or not any(n in name for n in _CAUSAL_NAMES):
        return False
    code = inspect.unwrap(type(model).forward).__code__
    return "loss_function" in code.co_names or any("shift" in variable for variable in code.co_varnames)


def divides_by_items(model: nn.Module) -> bool:
    """Check whether a head model's own loss divides a sum by ``num_items_in_batch`` where that is given; else it is a mean.

    It is for language models of Transformers. Most of its classifiers take the argument and leave it unused: ``forward``
    does not hand it on, or the loss (of regression, of several labels at once) has no use for it.
    """
    model = unwrapped(model)
    if not _hands_on_items(inspect.unwrap(type(model).forward), "loss_function"):
        return False
    if getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification"):
        return False
    loss: Any = model.loss_function
    return "num_items_in_batch" in inspect.signature(loss).parameters or _hands_on_items(loss, "fixed_cross_entropy")


@functools.cache
def _hands_on_items(function: Callable[..., Any], callee: str) -> bool:
    """Check whether a function calls something of that name with ``num_items_in_batch=`` or all its keywords."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or that of more than the function
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if callee in (getattr(call.func, "attr", None), getattr(call.func, "id", None))]
    return any(keyword.arg in (None, "num_items_in_batch") for call in named for keyword in call.keywords)


def count_labels(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Count the labels over which the model averages the loss of a batch; -100 does not count."""
    labels: torch.Tensor = batch["labels"]
    if shifts_labels(model):
        shifted = batch.get("shift_labels")
        labels = labels[..., 1:] if shifted is None else shifted
    return int((labels != -100).sum())
