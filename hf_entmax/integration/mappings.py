"""Attention with a mapping other than entmax: its learned options, and the fast path where it is a scaled sparsemax."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_entmax.alpha import FixedAlpha, LearnedAlpha, MappingOptions
from hf_entmax.config import EntmaxConfig
from hf_entmax.ops.attention import entmax_attention
from hf_entmax.ops.controllable import as_sparsemax_attention, attention_mapping
from hf_entmax.ops.dense import dense_attention
from hf_entmax.ops.sparse_rows import SparseRows

_SPARSEMAX = 2.0


def mapping_heads(num_heads: int, config: EntmaxConfig) -> MappingOptions:
    """The options of a mapping as modules, one number per head where an option is learned.

    Raises:
        ValueError: if the mapping is unknown or cannot serve as attention, or an option is unknown or out of range.
    """
    keep = config.alpha_dtype == "float32"
    options: dict[str, nn.Module] = {}
    for name, setting in attention_mapping(config.mapping).settings(config.mapping_options).items():
        if setting.bounds is None:
            options[name] = FixedAlpha(num_heads, setting.value)
        else:
            shared = config.tie == "layer"
            options[name] = LearnedAlpha(num_heads, setting.value, setting.bounds, shared=shared, keep_float32=keep)
    return MappingOptions(config.mapping, options)


def mapped_attention(
    mapping: str,
    values: dict[str, Tensor | float],
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | SparseRows | None]:
    """Attention weights by a mapping of Laha et al. 2018.

    Where the mapping is sparsemax at scaled scores, the scale goes into the query and the fused sparsemax kernel does
    the work; otherwise the scores are formed.

    Args:
        mapping: name in ``hf_entmax.ops.controllable.ATTENTION_MAPPINGS``.
        values: its options, numbers or ``[H]``.
        backend: as in ``entmax_attention``.
        query: ``[B, H, T_q, D]``.
        key: ``[B, H_kv, T_k, D]``.
        value: ``[B, H_kv, T_k, D_v]``.
        options: the keyword arguments of ``entmax_attention`` but alpha and backend.

    Returns:
        As ``entmax_attention``.
    """
    folded = (
        "scaling",
        "attention_mask",
        "key_padding_mask",
        "position_bias",
        "is_causal",
        "sliding_window",
        "softcap",
    )
    scaled = as_sparsemax_attention(mapping, values, query, key, **{name: options[name] for name in folded})
    if scaled is not None:
        changed = {"attention_mask": scaled.attention_mask, "position_bias": scaled.position_bias}
        return entmax_attention(scaled.query, key, value, _SPARSEMAX, backend=backend, **{**options, **changed})
    if backend not in ("auto", "torch"):
        raise ValueError(
            f"backend={backend!r} cannot compute mapping={mapping!r} (with softcap={options['softcap']!r}): only "
            "scaled sparsemax has a fused kernel. Use backend='auto' or 'torch'."
        )
    spec = attention_mapping(mapping)

    def normalizer(scores: Tensor, mask: Tensor | None) -> Tensor:
        return spec.weights(scores, mask, **values)

    return dense_attention(query, key, value, normalizer, **options)
