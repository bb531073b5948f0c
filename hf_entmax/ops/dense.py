"""The dense torch path of attention: scores, any normaliser, weights, output.

Every argument of `hf_entmax.ops.entmax_attention` is honoured here by plain differentiable torch operations, on
every device and dtype. The fused kernels are measured against this path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from hf_entmax.ops.mapping import entmax
from hf_entmax.ops.solve import masked_below

#: Maps scores ``[B, H, T_q, T_k]`` and a bool mask broadcastable to them (True = may receive mass, or None) to weights.
Normalizer = Callable[[Tensor, "Tensor | None"], Tensor]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    normalizer: Normalizer,
    *,
    attention_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    need_weights: bool | Literal["sparse"] = False,
) -> tuple[Tensor, Tensor | None]:
    r"""Attend with a normaliser of choice.

    .. math:: O = \mathrm{normalizer}(\mathrm{cap}(\mathrm{scaling} \cdot Q K^\top) + \mathrm{bias} + \mathrm{mask}) V

    Args:
        query: ``[B, H, T_q, D]``.
        key: ``[B, H_kv, T_k, D]`` with ``H`` a multiple of ``H_kv``; query head ``h`` reads key head ``h // (H //
            H_kv)``.
        value: ``[B, H_kv, T_k, D_v]``.
        normalizer: maps scores ``[B, H, T_q, T_k]`` and a bool mask (True = may receive mass; None = all may) to
            weights. It may overwrite the scores.
        attention_mask: bool (True = may attend) or additive float, broadcastable to ``[B, H, T_q, T_k]``. Entries at or
            below ``finfo.min / 2`` of the mask's dtype (``-inf``, ``finfo.min``) never receive mass.
        key_padding_mask: bool ``[B, T_k]``, True for real keys.
        position_bias: float, broadcastable to ``[B, H, T_q, T_k]``; added after the cap; may carry mask values as
            above.
        is_causal: query ``i`` sees key ``j`` only when ``j <= i + T_k - T_q`` (aligned bottom-right).
        sliding_window: query ``i`` sees key ``j`` only when ``j > i + T_k - T_q - sliding_window``. A lower limit
            alone: combine it with ``is_causal`` for the usual causal window.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before bias and mask.
        scaling: factor of the scores; ``D ** -0.5`` if None.
        dropout: probability of dropping a weight, applied whenever it is above 0 (pass 0 in evaluation).
        need_weights: whether to return the weights; "sparse" returns them all the same, for here they are dense.

    Returns:
        ``[B, H, T_q, D_v]`` and the weights ``[B, H, T_q, T_k]`` (after dropout, as Transformers' eager attention
        returns them) or None. Queries that may attend to no key have output 0.

    Differentiable in query, key, value, position_bias, a float attention_mask and whatever the normaliser is
    differentiable in.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    scale = head_dim**-0.5 if scaling is None else scaling
    # Queries of the heads that share a key head are stacked, so that keys and values are never repeated.
    stacked = (query * scale).reshape(batch, kv_heads, groups * queries, head_dim)
    scores = torch.matmul(stacked, key.transpose(-1, -2))
    if groups > 1:
        scores = scores.reshape(batch, heads, queries, keys)
    # Autograd copies whole tensors to undo an addition into a view, so only what is no view is added to in place.
    in_place = groups == 1 or softcap is not None
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap

    allowed = _limits(queries, keys, is_causal, sliding_window, query.device)
    if key_padding_mask is not None:
        allowed = _both(allowed, key_padding_mask[:, None, None, :])
    for addend in (position_bias, attention_mask):
        if addend is None:
            continue
        if addend.dtype == torch.bool:
            allowed = _both(allowed, addend)
        else:
            allowed = _both(allowed, addend > masked_below(addend.dtype))
            scores = _add(scores, addend, in_place)

    weights = normalizer(scores, allowed)
    del scores
    if weights.dtype != value.dtype:
        weights = weights.to(value.dtype)
    if dropout > 0:
        weights = torch.nn.functional.dropout(weights, dropout, training=True)
    out = torch.matmul(weights.reshape(batch, kv_heads, groups * queries, keys), value)
    out = out.reshape(batch, heads, queries, value.shape[-1])
    return out, weights if need_weights else None


def entmax_normalizer(alpha: float | Tensor) -> Normalizer:
    """Return entmax over the keys with one alpha (a float) or one per head (a tensor ``[H]``) as a normaliser."""
    per_head = alpha[:, None, None] if isinstance(alpha, Tensor) and alpha.dim() == 1 else alpha

    def normalize(scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None or torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None:
            return entmax(scores, per_head, -1, mask)
        # Where there is no mass there is no gradient: autograd need not know of the masking, nor repeat it.
        with torch.no_grad():
            scores.masked_fill_(~mask, -math.inf)
        return entmax(scores, per_head, -1)

    return normalize


def attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, **options
) -> tuple[Tensor, Tensor | None]:
    """Entmax attention on the dense path; the options are those of `dense_attention`."""
    return dense_attention(query, key, value, entmax_normalizer(alpha), **options)


def _limits(
    queries: int, keys: int, is_causal: bool, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """Return the bool mask ``[T_q, T_k]`` of the causal limit and the sliding window, or None."""
    if not is_causal and sliding_window is None:
        return None
    last = torch.arange(queries, device=device)[:, None] + (keys - queries)
    position = torch.arange(keys, device=device)[None, :]
    allowed = position <= last if is_causal else None
    if sliding_window is not None:
        allowed = _both(allowed, position > last - sliding_window)
    return allowed


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def _add(scores: Tensor, addend: Tensor, in_place: bool) -> Tensor:
    """Add, in place if allowed and if that does not narrow the result's dtype."""
    if in_place and torch.promote_types(scores.dtype, addend.dtype) == scores.dtype:
        return scores.add_(addend)
    return scores + addend
