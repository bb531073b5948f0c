"""Which (query, key) pairs of a batch of attention weights count."""

from __future__ import annotations

import torch
from torch import Tensor


def as_mask(mask: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Convert a padding mask of that shape to bool; True, or 1 as tokenizers return it, marks a real token."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {list(shape)}, got {type(mask).__name__}.")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} has shape {list(mask.shape)}; these weights need {list(shape)}.")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name} has dtype {mask.dtype}; pass a bool mask (True = real token), not an additive one. "
            "`attention_mask.bool()` of a tokenizer is right."
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{name} holds integers other than 0 and 1; pass a bool mask (True = real token).")
    return mask.bool()


def check_weights(weights: Tensor) -> None:
    """Raise unless ``weights`` is a floating-point tensor of shape [B, H, T_q, T_k]."""
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor of shape [B, H, T_q, T_k], got {type(weights).__name__}.")
    if weights.dim() != 4:
        raise ValueError(f"weights must have shape [B, H, T_q, T_k], got {list(weights.shape)}.")
    if not weights.is_floating_point():
        raise TypeError(f"weights must be floating point, got {weights.dtype}.")


def query_mask_or_default(weights: Tensor, key_mask: Tensor, query_mask: Tensor | None) -> Tensor:
    """Return the bool query mask [B, T_q]; square weights take the key mask, others count every query."""
    batch, _, num_queries, num_keys = weights.shape
    if query_mask is not None:
        return as_mask(query_mask, "query_mask", (batch, num_queries))
    if num_queries == num_keys:
        return key_mask
    return torch.ones(batch, num_queries, dtype=torch.bool, device=weights.device)


def possible_pairs(weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Mark the pairs that could receive weight: a real query with a real key that it may see.

    A causal site has ``t (t + 1) / 2`` pairs for ``t`` real tokens, any other ``t_q * t_k``.

    Args:
        weights: attention weights [B, H, T_q, T_k].
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q], True = real query. Default: ``key_mask`` for square weights, otherwise all.
        causal: query i sees key j only when ``j <= i + T_k - T_q`` (aligned bottom-right).

    Returns:
        bool [B, T_q, T_k].

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.
    """
    check_weights(weights)
    batch, _, num_queries, num_keys = weights.shape
    key_mask = as_mask(key_mask, "key_mask", (batch, num_keys))
    query_mask = query_mask_or_default(weights, key_mask, query_mask)
    pairs = query_mask.unsqueeze(-1) & key_mask.unsqueeze(-2)
    if causal:
        pairs = pairs.tril(diagonal=num_keys - num_queries)
    return pairs
