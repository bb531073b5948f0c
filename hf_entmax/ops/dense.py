"""The dense torch path of attention: scores, any normaliser, weights, output.

Every argument of `hf_entmax.ops.entmax_attention` is honoured here by plain differentiable torch operations, on
every device and dtype. The fused kernels are measured against this path.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_entmax.ops.mapping import solve_along
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import transformed, values_visible

#: Maps scores ``[B, H, T_q, T_k]`` and a bool mask broadcastable to them (True = may receive mass, or None) to weights.
Normalizer = Callable[[Tensor, "Tensor | None"], Tensor]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, normalizer: Normalizer, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    r"""Attend with any normaliser.

    .. math:: O = \mathrm{normalizer}(\mathrm{cap}(\mathrm{scaling} \cdot Q K^\top) + \mathrm{bias} + \mathrm{mask}) V

    Tensors and results are those of `hf_entmax.ops.entmax_attention`; ``need_weights="sparse"`` gives dense weights all the
    same. The normaliser may overwrite the scores.

    Differentiable in query, key, value, position_bias, a float attention_mask and whatever the normaliser is
    differentiable in.
    """
    if query.dtype != key.dtype and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(f"query is {query.dtype} and key {key.dtype}, but the dense path needs one dtype: cast one.")
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    # Queries of the heads that share a key head are stacked, so that keys and values are never repeated.
    stacked = (query * options.scale(head_dim)).reshape(batch, kv_heads, groups * queries, head_dim)
    # Forward, what a hidden key holds is masked with its score; backward, 0 * NaN would bring it back.
    differentiable = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if differentiable and not (_known_finite(stacked) and _known_finite(key)):
        (stacked, spoilt_queries), (key, spoilt_keys) = without_nonfinite(stacked), without_nonfinite(key)
        scores = torch.matmul(stacked, key.transpose(-1, -2))
        spoilt = spoilt_queries[..., :, None] | spoilt_keys[..., None, :]
        scores = scores.masked_fill(spoilt, math.nan)
    else:
        scores = torch.matmul(stacked, key.transpose(-1, -2))
    if groups > 1:
        scores = scores.reshape(batch, heads, queries, keys)
    # Autograd copies whole tensors to undo an addition into a view, so only what is no view is added to in place.
    in_place = groups == 1 or options.softcap is not None
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap

    for addend in options.addends():
        scores = _add(scores, addend, in_place)
    weights = normalizer(scores, options.visible(queries, keys, query.device))
    del scores
    if weights.dtype != value.dtype:
        weights = weights.to(value.dtype)
    if options.dropout > 0:
        weights = torch.nn.functional.dropout(weights, options.dropout, training=True)
    stacked_weights = weights.reshape(batch, kv_heads, groups * queries, keys)
    out = torch.matmul(stacked_weights, value)
    if not _known_finite(out):
        # A weight of 0 times NaN is NaN, but a key without weight is not read.
        value, spoilt_values = without_nonfinite(value)
        read = torch.matmul(stacked_weights.detach(), spoilt_values.to(value.dtype)[..., None]) > 0
        out = torch.matmul(stacked_weights, value) * torch.where(read, math.nan, 1.0).to(value.dtype)
    out = out.reshape(batch, heads, queries, value.shape[-1])
    return out, weights if options.need_weights else None


def without_nonfinite(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[..., T, D]`` with 0 for NaN and infinities, and which rows held any, bool ``[..., T]``."""
    finite = tensor.isfinite()
    return torch.where(finite, tensor, 0.0), ~finite.all(-1)


def _known_finite(tensor: Tensor) -> bool:
    """Tell whether nothing in ``tensor`` is NaN or infinite, as far as looking is free: on CPUs, outside of transforms."""
    if tensor.device.type != "cpu" or not values_visible(tensor) or transformed():
        return False
    # One pass over the numbers; that a sum may overflow costs no more than the longer way.
    return math.isfinite(tensor.detach().sum())


def entmax_normalizer(alpha: float | Tensor, alpha_max: float = math.inf) -> Normalizer:
    """Return entmax over the keys as a normaliser, with one alpha (a float) or one per head (``[H]``), none above a bound."""
    per_head = alpha[:, None, None] if isinstance(alpha, Tensor) and alpha.dim() == 1 else alpha

    def normalize(scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and (torch.compiler.is_compiling() or transformed()):
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            # Where there is no mass there is no gradient: autograd need not know of the masking, nor repeat it.
            with torch.no_grad():
                scores.masked_fill_(~mask, -math.inf)
        return solve_along(scores, per_head, -1, alpha_max=alpha_max)

    return normalize


def attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """Attend with entmax on the dense path; results are those of `dense_attention`."""
    return dense_attention(query, key, value, entmax_normalizer(alpha, options.alpha_max), options)


def _add(scores: Tensor, addend: Tensor, in_place: bool) -> Tensor:
    """Add, in place if allowed and if that does not narrow the result's dtype."""
    if in_place and torch.promote_types(scores.dtype, addend.dtype) == scores.dtype:
        return scores.add_(addend)
    return scores + addend
