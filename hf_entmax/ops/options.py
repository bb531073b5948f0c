"""What attention is asked to do besides its tensors and alpha: one record, and the one place that says who sees whom."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from hf_entmax.ops.solve import masked_below

# No sequence is this long, and sums of it with lengths and positions still fit the 32-bit integers of the kernels.
_LONGEST_WINDOW = 2**30
# Weights that survive dropout are divided by `1 - dropout` in float32, where anything closer to 1 is 1.
_LARGEST_DROPOUT = 1 - 2**-24


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What one attention call is asked to do, for every backend alike.

    Who may attend to whom: key ``j`` is visible to query ``i`` if every limit that is given allows it. Limits by position
    are aligned bottom-right: the last query stands at the last key. A key that is not visible has weight 0 and is not
    read, whatever it holds.

    The fields are the arguments of `hf_entmax.ops.entmax_attention`, where they are described, and two more. A position bias
    may carry mask values as well; a window is a lower limit alone, the usual causal one with ``is_causal``.

    Args:
        sink: floating ``[H]``, the score of one more key that every query sees, whose value is 0; it comes after the cap.
        alpha_max: the caller's promise that no alpha is above it; up to 2 it spares graphs a solver.

    Raises:
        TypeError: if ``sliding_window`` is no integer.
        ValueError: if a number is out of its range.
    """

    attention_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    position_bias: Tensor | None = None
    is_causal: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    dropout: float = 0.0
    need_weights: bool | Literal["sparse"] = False
    sink: Tensor | None = None
    alpha_max: float = math.inf

    def __post_init__(self) -> None:
        window = self.sliding_window
        if window is not None:
            if not hasattr(window, "__index__"):
                raise TypeError(f"sliding_window is {window!r}, but must be an integer (or None).")
            if window < 1:
                raise ValueError(f"sliding_window is {window}, but must be at least 1 (or None).")
            object.__setattr__(self, "sliding_window", min(window, _LONGEST_WINDOW))
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}, but must be above 0 (or None).")
        if self.scaling is not None and not abs(self.scaling) < math.inf:
            raise ValueError(f"scaling is {self.scaling}, but must be finite (or None for D ** -0.5).")
        if not isinstance(self.need_weights, bool) and self.need_weights != "sparse":
            raise ValueError(f"need_weights is {self.need_weights!r}, but must be True, False or 'sparse'.")
        if not 0 <= self.dropout <= _LARGEST_DROPOUT:
            raise ValueError(f"dropout is {self.dropout}, but must be in [0, 1), and at most 1 - 2**-24.")

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check the tensors of a call, as `hf_entmax.ops.entmax_attention` describes them, and that these options fit them."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not tensor.is_floating_point():
                raise TypeError(f"{name} must be a floating tensor, not {tensor.dtype}.")
            if tensor.dim() != 4:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but must have four dimensions [B, heads, T, D]."
                )
            if tensor.shape[3] == 0:
                raise ValueError(f"{name} has head dimension 0 (shape {tuple(tensor.shape)}); it must be at least 1.")
        (batch, heads, queries, depth), (_, kv_heads, keys, _), values = query.shape, key.shape, value.shape
        if not (batch == key.shape[0] == values[0]):
            raise ValueError(
                f"query, key and value have batch sizes {batch}, {key.shape[0]} and {values[0]}; they must be equal."
            )
        if depth != key.shape[3]:
            raise ValueError(f"query has head dimension {depth} and key {key.shape[3]}; they must be equal.")
        if (kv_heads, keys) != (values[1], values[2]):
            raise ValueError(
                f"key has [H_kv, T_k] = {(kv_heads, keys)} and value {tuple(values[1:3])}; they must be equal."
            )
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"query has {heads} heads, which is no multiple of the {kv_heads} heads of key and value.")
        scores_shape = (batch, heads, queries, keys)
        _check_addend("attention_mask", self.attention_mask, scores_shape, allow_bool=True)
        _check_addend("position_bias", self.position_bias, scores_shape, allow_bool=False)
        if (padding := self.key_padding_mask) is not None:
            if padding.dtype != torch.bool:
                raise TypeError(f"key_padding_mask must be bool (True = real key), not {padding.dtype}.")
            if tuple(padding.shape) != (batch, keys):
                raise ValueError(
                    f"key_padding_mask has shape {tuple(padding.shape)}, but must have [B, T_k] = {(batch, keys)}."
                )
        if self.sink is not None:
            _check_sink(self.sink, query)

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores."""
        return head_dim**-0.5 if self.scaling is None else float(self.scaling)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors among the options that broadcast over keys, by name: all but the sink."""
        given = {
            "attention_mask": self.attention_mask,
            "key_padding_mask": self.key_padding_mask,
            "position_bias": self.position_bias,
        }
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def addends(self) -> list[Tensor]:
        """Return what is added to the scores: the position bias, and the mask where it is additive."""
        return [t for t in (self.position_bias, self.attention_mask) if t is not None and t.dtype != torch.bool]

    def key_range(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first visible key of each of ``T_q`` queries and one past the last, of ``T_k`` keys, by position alone.

        Returns:
            Two int64 ``[T_q]`` in ``0...T_k``, the first nowhere above the second.
        """
        end = torch.arange(queries, device=device) + (keys - queries) + 1
        stop = end.clamp(0, keys) if self.is_causal else torch.full_like(end, keys)
        if self.sliding_window is None:
            return torch.zeros_like(stop), stop
        return torch.minimum((end - self.sliding_window).clamp(min=0), stop), stop

    def visible(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Tell which of ``T_k`` keys each of ``T_q`` queries may attend to.

        Returns:
            bool, broadcastable to ``[B, H, T_q, T_k]``, True = may attend; None where every query sees every key.
        """
        allowed = None
        if self.is_causal or self.sliding_window is not None:
            position = torch.arange(keys, device=device)
            start, stop = self.key_range(queries, keys, device)
            allowed = position < stop[:, None]
            if self.sliding_window is not None:
                allowed = allowed & (position >= start[:, None])
        if self.key_padding_mask is not None:
            allowed = _both(allowed, self.key_padding_mask[:, None, None, :])
        for mask in (self.position_bias, self.attention_mask):
            if mask is not None:
                allowed = _both(allowed, mask if mask.dtype == torch.bool else mask > masked_below(mask.dtype))
        return allowed

    def visible_pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """Tell the same for the tensors of a call, always as bool ``[B, H, T_q, T_k]``, a view."""
        allowed = self.visible(query.shape[2], key.shape[2], query.device)
        allowed = query.new_ones(1, dtype=torch.bool) if allowed is None else allowed
        return allowed.expand(*query.shape[:3], key.shape[2])

    def visible_keys(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Count the keys of ``T_k`` that each of ``T_q`` queries may attend to: int64 ``[B or 1, H or 1, T_q or 1]``."""
        if self.attention_mask is None and self.position_bias is None:
            start, stop = self.key_range(queries, keys, device)
            if self.key_padding_mask is None:
                return (stop - start)[None, None]
            before = torch.nn.functional.pad(self.key_padding_mask.long().cumsum(-1), (1, 0))
            return (before[:, stop] - before[:, start])[:, None]
        allowed: Tensor = self.visible(queries, keys, device)  # type: ignore[assignment]
        return allowed.expand(torch.broadcast_shapes(allowed.shape, (1, 1, 1, keys))).sum(-1)

    def restricted(self, allowed: Tensor) -> AttentionOptions:
        """Return the options with an attention mask that also hides what ``allowed``, bool, does not allow."""
        mask = self.attention_mask
        if mask is None:
            mask = allowed
        elif mask.dtype == torch.bool:
            mask = mask & allowed
        else:
            mask = mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)
        return dataclasses.replace(self, attention_mask=mask)


def append_sink(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, AttentionOptions]:
    """Write the sink, where there is one, as one more key of zeros with its score as position bias and a value of zeros.

    Returns:
        Key, value and options with it; zeros stay zeros under a softcap, and the bias comes after it.
    """
    sink = options.sink
    if sink is None:
        return key, value, options
    length_q, length_k = query.shape[-2], key.shape[-2]
    # Of four dimensions: a broadcast head is not the batch, a broadcast key not the sink.
    given = {"attention_mask": options.attention_mask, "position_bias": options.position_bias}
    given = {name: None if t is None else t[(None,) * (4 - t.dim())] for name, t in given.items()}
    options = dataclasses.replace(options, **given)
    mask, bias = options.attention_mask, options.position_bias
    # Limits by position would be aligned to the new last key: write them out before that key exists.
    limits = dataclasses.replace(options, attention_mask=None, position_bias=None)
    allowed = limits.visible(length_q, length_k, query.device)
    if allowed is not None:
        mask = options.restricted(allowed).attention_mask
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], length_k)
        open_ = torch.ones if mask.dtype == torch.bool else torch.zeros
        mask = torch.cat([mask, open_(*mask.shape[:-1], 1, dtype=mask.dtype, device=mask.device)], -1)
    if bias is None:
        bias = query.new_zeros(1, 1, 1, 1)
    bias = bias.expand(*bias.shape[:1], query.shape[1], length_q, length_k)
    # A bias that is NaN would hide the sink; an infinite one makes what it is: NaN in every row.
    score = (
        torch.where(sink.isnan(), math.inf, sink)
        .to(bias.dtype)
        .view(1, -1, 1, 1)
        .expand(bias.shape[0], -1, length_q, 1)
    )
    options = dataclasses.replace(
        options,
        attention_mask=mask,
        key_padding_mask=None,
        position_bias=torch.cat([bias, score], -1),
        is_causal=False,
        sliding_window=None,
        sink=None,
    )
    return torch.nn.functional.pad(key, (0, 0, 0, 1)), torch.nn.functional.pad(value, (0, 0, 0, 1)), options


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def _check_sink(sink: Tensor, query: Tensor) -> None:
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        given = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise TypeError(f"sink must be a floating tensor [H] = [{query.shape[1]}] (or None), not {given}.")
    if sink.shape != query.shape[1:2]:
        raise ValueError(f"sink has shape {tuple(sink.shape)}, but must have [H] = [{query.shape[1]}].")
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device}, but query on {query.device}: move one of them.")


def _check_addend(name: str, tensor: Tensor | None, shape: tuple[int, ...], *, allow_bool: bool) -> None:
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
