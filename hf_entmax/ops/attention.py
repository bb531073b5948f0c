"""Entmax attention: one signature for all backends."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hf_entmax.ops import backends
from hf_entmax.ops.mapping import check_alpha
from hf_entmax.ops.sparse_rows import SparseRows


def entmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
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
    backend: str = "auto",
) -> tuple[Tensor, Tensor | SparseRows | None]:
    r"""Attend with alpha-entmax in the place of softmax.

    .. math:: O = \mathrm{entmax}_\alpha(\mathrm{cap}(\mathrm{scaling} \cdot Q K^\top) + \mathrm{bias} + \mathrm{mask})V

    Args:
        query: ``[B, H, T_q, D]``, float32, float64, bfloat16 or float16.
        key: ``[B, H_kv, T_k, D]`` with ``H`` a multiple of ``H_kv``; query head ``h`` reads key head ``h // (H //
            H_kv)``.
        value: ``[B, H_kv, T_k, D_v]``.
        alpha: ``>= 1``; a float for all heads or a tensor ``[H]``, one per query head (or with one element). 1 is
            softmax.
        attention_mask: bool (True = may attend) or additive float, broadcastable to ``[B, H, T_q, T_k]``. Entries at
            or below ``finfo.min / 2`` of the mask's dtype (``-inf``, ``finfo.min``) never receive mass.
        key_padding_mask: bool ``[B, T_k]``, True for real keys; combined with the other limits.
        position_bias: float, broadcastable to ``[B, H, T_q, T_k]``, added to the scores (after the cap).
        is_causal: query ``i`` sees key ``j`` only when ``j <= i + T_k - T_q`` (aligned bottom-right).
        sliding_window: query ``i`` sees key ``j`` only when ``j > i + T_k - T_q - sliding_window``; at least 1.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before bias and mask; above 0.
        scaling: factor of the scores; ``D ** -0.5`` if None.
        dropout: probability in [0, 1) of dropping a weight; applied whenever it is above 0 (pass 0 in evaluation).
        need_weights: whether to return the weights. ``"sparse"`` lets a backend that works on sparse rows return those
            where few weights are nonzero, without ever writing the dense ones; weights that dropout changed, that carry
            a gradient or that are traced are dense all the same.
        backend: ``"auto"``, ``"torch"``, ``"numba"`` or ``"triton"``; see `hf_entmax.ops.available_backends`.

    Returns:
        ``[B, H, T_q, D_v]`` in the dtype of ``value`` and the weights ``[B, H, T_q, T_k]`` (after dropout, as
        Transformers' eager attention returns them; `hf_entmax.ops.SparseRows` only with ``need_weights="sparse"``) or
        None. A query that may attend to no key has output 0 and gradient 0.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if shapes do not fit together, a value is out of range, or ``backend`` is unknown, cannot run
        here or
            cannot honour an argument.

    Differentiable in query, key, value, alpha, position_bias and a float attention_mask.

    Reference:
        Correia, Niculae, Martins (2019), Adaptively Sparse Transformers, eq. 8-10.
    """
    _check_tensors(query, key, value)
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    alpha = _head_alpha(alpha, heads)
    _check_bias("attention_mask", attention_mask, (batch, heads, queries, keys), allow_bool=True)
    _check_bias("position_bias", position_bias, (batch, heads, queries, keys), allow_bool=False)
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool:
            raise TypeError(f"key_padding_mask must be bool (True = real key), not {key_padding_mask.dtype}.")
        if tuple(key_padding_mask.shape) != (batch, keys):
            raise ValueError(
                f"key_padding_mask has shape {tuple(key_padding_mask.shape)}, but must have [B, T_k] = {(batch, keys)}."
            )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, but must be at least 1 (or None).")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, but must be above 0 (or None).")
    if scaling is not None and not abs(scaling) < math.inf:
        raise ValueError(f"scaling is {scaling}, but must be finite (or None for D ** -0.5).")
    if not isinstance(need_weights, bool) and need_weights != "sparse":
        raise ValueError(f"need_weights is {need_weights!r}, but must be True, False or 'sparse'.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, but must be in [0, 1).")
    options = {
        "attention_mask": attention_mask,
        "key_padding_mask": key_padding_mask,
        "position_bias": position_bias,
        "is_causal": is_causal,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "scaling": scaling,
        "dropout": dropout,
        "need_weights": need_weights,
    }
    return backends.choose(backend, query, key, value, alpha, options)(query, key, value, alpha, **options)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating tensor, not {tensor.dtype}.")
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but must have four dimensions [B, heads, T, D].")
    if not (query.shape[0] == key.shape[0] == value.shape[0]):
        raise ValueError(
            f"query, key and value have batch sizes {query.shape[0]}, {key.shape[0]} and {value.shape[0]}; "
            "they must be equal."
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query has head dimension {query.shape[3]} and key {key.shape[3]}; they must be equal.")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"key has [H_kv, T_k] = {tuple(key.shape[1:3])} and value {tuple(value.shape[1:3])}; they must be equal."
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, which is no multiple of the {key.shape[1]} heads of key and value."
        )


def _head_alpha(alpha: float | Tensor, heads: int) -> float | Tensor:
    """Return a checked float, or a tensor ``[H]``."""
    if not isinstance(alpha, Tensor):
        return check_alpha(alpha)
    if alpha.dim() > 1 or (alpha.dim() == 1 and alpha.shape[0] not in (1, heads)):
        raise ValueError(f"alpha has shape {tuple(alpha.shape)}, but must be a float or a tensor [H] = [{heads}].")
    return alpha.expand(heads)


def _check_bias(name: str, tensor: Tensor | None, shape: tuple[int, int, int, int], *, allow_bool: bool) -> None:
    if tensor is None:
        return
    if not tensor.is_floating_point() and not (allow_bool and tensor.dtype == torch.bool):
        kinds = "bool (True = may attend) or floating (additive)" if allow_bool else "floating"
        raise TypeError(f"{name} must be {kinds}, not {tensor.dtype}.")
    sizes = shape[4 - tensor.dim() :] if tensor.dim() <= 4 else ()
    if tensor.dim() > 4 or any(given not in (1, wanted) for given, wanted in zip(tensor.shape, sizes, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, which cannot be broadcast to [B, H, T_q, T_k] = {shape}."
        )
