"""What a pretrained model must be able to do, checked before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_entmax.integration.labels import shifts_labels

#: A smaller change comes from kernels that add up the rows of a batch in different orders.
ROUNDING = 1e-4

#: What Transformers calls its tables of absolute positions.
TABLES = ("position_embeddings", "embed_positions", "wpe")


def longest(model: Any) -> int | None:
    """Return how many tokens a model can see; None where positions are relative and nothing bounds them.

    Args:
        model: from Transformers, or a part of one such as its encoder.
    """
    tables = [m for name, m in model.named_modules() if name.split(".")[-1] in TABLES and isinstance(m, nn.Embedding)]
    config = model.config
    named = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    relative = ("relative_attention_num_buckets", "relative_attention", "alibi")
    if not tables and any(getattr(config, name, None) for name in relative):
        return None  # T5's n_positions says how long its pretraining texts were
    return min([*(number for number in named if number and number > 0), *map(_places, tables)], default=None)


def _places(table: nn.Embedding) -> int:
    """Count the positions of a table without those it keeps for something else."""
    if hasattr(table, "offset"):  # BART and OPT
        return table.num_embeddings - int(table.offset)
    # RoBERTa counts from behind the position of padding.
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def check_length(model: Any, tokens: int, what: str) -> None:
    """Say before training that a sequence is longer than the model can see.

    Args:
        model: from Transformers, or a part of one such as its encoder. With rotary positions its
            ``max_position_embeddings`` is the bound too: longer texts are not what it has learned.
        tokens: the longest sequence it will be given, with special tokens.
        what: the setting that says so, for the message.

    Raises:
        ValueError: if the model has fewer positions than ``tokens``.
    """
    bound = longest(model)
    if bound is not None and tokens > bound:
        raise ValueError(f"{what}={tokens} is not allowed: it must be at most {bound}, all that the model can see.")


def _change_by_later_tokens(model: Any) -> float:
    """Measure how much what a model makes of a token depends on later ones: logits, or the last layer of a model without a head.

    Args:
        model: its training flag and the random numbers are left as they are.

    Returns:
        The largest change, of the largest value; NaN where the model gives no finite numbers.
    """
    size = model.get_input_embeddings().num_embeddings
    bound = longest(model)
    length = 4 if bound is None else min(4, bound)  # short: the last token weighs much for those before it
    row = torch.arange(size // 2, size // 2 + length + 1, device=model.device) % size
    ids = torch.stack([row[:length], torch.cat([row[: length - 1], row[length:]])])
    options = {"use_cache": False} if model.can_generate() else {}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(input_ids=ids, **options)
    finally:
        model.train(training)
    states = output.logits if "logits" in output else output.last_hidden_state
    first, second = states[:, :-1].float()
    return float((first - second).abs().max() / first.abs().max())


def check_causal(model: Any) -> None:
    """Say before training that a model sees the tokens that it is to predict, or is asked for those that it sees.

    ``AutoModelForCausalLM`` also loads encoders such as BERT; only with ``is_decoder`` do they look back alone.

    Raises:
        ValueError: if the logits of a token depend on a later one, or the model compares them with the same token.
    """
    if _change_by_later_tokens(model) > ROUNDING:
        raise ValueError(
            f"{_called(model)} sees later tokens: it would copy what it is to predict. Give a causal model, or an encoder "
            "whose config.json says is_decoder=true; as it is, it suits recipes/classification.py, and with pairs of texts "
            "(--train, --dev, --test) recipes/convert.py."
        )
    if not shifts_labels(model):
        raise ValueError(
            f"model={model.config._name_or_path!r} ({type(model).__name__}) compares logits and labels as they stand: it would "
            "learn to copy each token. Give a causal model that predicts the next one, or an encoder-decoder to the recipes "
            "for pairs."
        )


def check_encoder(model: Any) -> None:
    """Say before training that a model is no encoder: its tokens do not see later ones.

    Raises:
        ValueError: if it is so.
    """
    if _change_by_later_tokens(model) <= ROUNDING:
        raise ValueError(
            f"{_called(model)} is causal: its tokens do not see later ones, and --train gives pairs for a sentence encoder. "
            "Leave --train, --dev and --test out; a causal model learns from --data."
        )


def _called(model: Any) -> str:
    return f"model={model.config._name_or_path!r} ({model.config.model_type})"
