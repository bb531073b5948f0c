"""Attention whose weights are given by a mapping other than entmax: its general form and its fast one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_entmax.ops.attention import attend, of_keys
from hf_entmax.ops.backends import Backend
from hf_entmax.ops.controllable.domain import holds
from hf_entmax.ops.controllable.registry import HeadOption, attention_mapping, per_head
from hf_entmax.ops.dense import dense_attention, without_nonfinite
from hf_entmax.ops.options import AttentionOptions, append_sink
from hf_entmax.ops.solve import masked_below
from hf_entmax.ops.sparse_rows import SparseRows

_SPARSEMAX = 2.0


def as_sparsemax_attention(
    name: str, values: Mapping[str, HeadOption], query: Tensor, key: Tensor, options: AttentionOptions
) -> tuple[Tensor, AttentionOptions] | None:
    """Fold a mapping into the query, so that a fused sparsemax kernel computes it.

    sparsegen_lin is sparsemax at scores scaled by ``1 / (1 - lam)``, sparsehourglass at scores scaled row by row with
    ``a(z)``. A factor on a row of scores is a factor on its query (and on the biases of that row). The row sum that
    ``a(z)`` needs is ``q . (sum of the visible keys)``, so no matrix of scores is formed. Everything is differentiable
    by autograd, in the mapping's own options too. All arguments are as for `mapped_attention`.

    Returns:
        The query and the options of a sparsemax attention (alpha = 2) that equals it, with the same keys and values;
        None where the mapping is no scaled sparsemax (then compute the scores and use ``weights``).
    """
    spec = attention_mapping(name)
    if options.softcap is not None:  # a cap is not linear in the query
        return None
    factor = spec.as_scaled_sparsemax(values)
    if factor is not None:
        rows = per_head(factor, query)
    elif name == "sparsehourglass":
        total, count = _row_sums(query, key, options)
        weight = count.clamp(min=1) * per_head(values["q"], query)
        rows = (1.0 + weight) / (total.abs() + weight)
    else:
        return None
    wide = query.float() if query.dtype != torch.float64 else query
    scaled = dataclasses.replace(
        options,
        attention_mask=_scaled(options.attention_mask, rows),
        position_bias=_scaled(options.position_bias, rows),
    )
    return (wide * rows).to(query.dtype), scaled


def _scaled(addend: Tensor | None, rows: Tensor | float) -> Tensor | None:
    """Return what is added to scores that are scaled by ``rows``; what masks an entry stays as it is."""
    if addend is None or addend.dtype == torch.bool:
        return addend
    masked = addend <= masked_below(addend.dtype)
    # The usual additive mask holds 0 and finfo.min only, and is right as it stands at any scale.
    if not torch.compiler.is_compiling() and holds(masked | (addend == 0)):
        return addend
    return torch.where(masked, addend, addend.masked_fill(masked, 0.0) * rows)


def _row_sums(query: Tensor, key: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return sum and number of the visible scores of each query, ``[B, H, T_q, 1]`` (or broadcastable to it)."""
    (_, heads, n_query, width), n_key = query.shape, key.shape[-2]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # A key that is not seen is not read: what is not finite is summed as 0 and counted in a column of its own.
    finite, spoilt = without_nonfinite(key.to(dtype))
    keys = torch.cat([finite, spoilt.to(dtype)[..., None]], dim=-1)
    bias: Tensor | float = 0.0
    if options.attention_mask is None and options.position_bias is None:
        # Only limits by position: prefix sums of the keys, linear in the length.
        real = torch.ones(1, 1, n_key, 1, dtype=dtype, device=query.device)
        if options.key_padding_mask is not None:
            real = options.key_padding_mask[:, None, :, None].to(dtype)
        start, stop = options.key_range(n_query, n_key, query.device)
        sums, counts = (
            prefix[..., stop, :] - prefix[..., start, :]
            for prefix in (torch.nn.functional.pad(x.cumsum(-2), (0, 0, 1, 0)) for x in (keys * real, real))
        )
    else:
        visible = options.visible(n_query, n_key, query.device)
        visible = torch.ones((), dtype=torch.bool, device=query.device) if visible is None else visible
        visible = visible.expand(torch.broadcast_shapes(visible.shape, (1, 1, n_query, n_key)))
        bias = sum(torch.where(visible, term, 0.0).to(dtype).sum(-1, keepdim=True) for term in options.addends())
        counts = visible.sum(-1, keepdim=True).to(dtype)
        if visible.shape[1] != 1:
            keys = keys.repeat_interleave(heads // key.shape[1], dim=1)
        sums = visible.to(dtype) @ keys
    sums = sums[..., :-1].masked_fill(sums[..., -1:] > 0, math.nan)
    if sums.shape[1] not in (1, heads):
        sums = sums.repeat_interleave(heads // sums.shape[1], dim=1)
    return (query.to(dtype) * sums).sum(-1, keepdim=True) * options.scale(width) + bias, counts


def mapped_attention(
    name: str,
    values: Mapping[str, HeadOption],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | SparseRows | None]:
    """Attend with weights that a mapping of Laha et al. 2018 gives.

    Where the mapping is sparsemax at scaled scores, the scale goes into the query and the fused sparsemax kernel does
    the work; otherwise the scores are formed.

    Args:
        name: name in ``ATTENTION_MAPPINGS``.
        values: its options, numbers or ``[H]``, validated.
        query: ``[B, H, T_q, D]``.
        key: ``[B, H_kv, T_k, D]``.
        value: ``[B, H_kv, T_k, D_v]``.
        options: what the attention is asked to do.
        backend: as in `hf_entmax.ops.entmax_attention`.

    Returns:
        As `hf_entmax.ops.entmax_attention`.

    Raises:
        TypeError: if a tensor has the wrong dtype.
        ValueError: if shapes do not fit together, or ``backend`` names a kernel and the mapping has none.
    """
    options.check(query, key, value)
    keys = key.shape[2]
    key, value, options = append_sink(query, key, value, options)
    scaled = as_sparsemax_attention(name, values, query, key, options)
    if scaled is not None:
        query, options = scaled
        out, weights = attend(query, key, value, _SPARSEMAX, options, backend)
        return out, of_keys(weights, keys)
    if backend not in ("auto", "torch"):
        raise ValueError(
            f"backend={backend!r} cannot compute mapping={name!r} (with softcap={options.softcap!r}): only "
            "scaled sparsemax has a fused kernel. Use backend='auto' or 'torch'."
        )
    weights = attention_mapping(name).weights
    out, found = dense_attention(query, key, value, lambda scores, mask: weights(scores, mask, **values), options)
    return out, of_keys(found, keys)
