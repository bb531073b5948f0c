"""The attention function that Transformers calls, and the mask that goes with it."""

from __future__ import annotations

import dataclasses
import math
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from hf_entmax.alpha import FixedAlpha, MappingOptions
from hf_entmax.integration.config_hook import IMPLEMENTATION
from hf_entmax.integration.discovery import head_count
from hf_entmax.integration.masks import StructuredMask
from hf_entmax.integration.observe import Observer, is_observed, observers_of
from hf_entmax.integration.paged import PagedCall, PagedMask
from hf_entmax.integration.parallel import heads_mesh, of_all_heads, of_own_heads, refuse_context_parallel
from hf_entmax.integration.scaled_query import scaled_query
from hf_entmax.integration.softmax_blocks import runs_softmax
from hf_entmax.ops.attention import attend
from hf_entmax.ops.backends import Backend
from hf_entmax.ops.controllable import mapped_attention
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import values_visible
from hf_entmax.ops.sparse_rows import SparseRows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The child module that holds the learned numbers. Trainer leaves parameters below ``*_norm`` without weight decay.
HEADS_MODULE = "entmax_norm"
#: Set on attention modules that keep their softmax because the configuration says so.
KEEPS_SOFTMAX = "_entmax_left_alone"
# Set on the keys that a cache hands out: its layer, which knows what of them need not be read.
_CACHE_LAYER = "_entmax_cache_layer"


def is_head_number(name: str) -> bool:
    """Tell by the name of a parameter whether it is one of the learned numbers of heads."""
    return f".{HEADS_MODULE}." in f".{name}"


def hand_out(key: Tensor, layer: Any) -> Tensor:
    """Name the cache layer that holds these keys, so that the attention over them asks it.

    The name is on this one tensor, which is returned: whatever a model computes from it is read in full, as from any cache.
    The layer has ``attend(module, query, key, value, alpha, options, backend)``, equal to `hf_entmax.ops.attention.attend`.
    """
    setattr(key, _CACHE_LAYER, layer)
    return key


def entmax_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as ``AttentionInterface`` wants it, with the mapping of the module that calls.

    Args:
        module: the attention module; its child ``entmax_norm`` says which mapping and with which numbers.
        query: ``[B, H, T_q, D]``.
        key: ``[B, H_kv, T_k, D]``.
        value: ``[B, H_kv, T_k, D_v]``.
        attention_mask: bool (True = may attend) or additive, broadcastable to ``[B, H, T_q, T_k]``; longer key axes
            (static caches) are cut. It already holds causality and sliding windows where the model has them.
        scaling: factor of the scores; ``D ** -0.5`` if None.
        dropout: probability of dropping a weight; the caller passes 0 outside training.
        position_bias: added to the scores, broadcastable to ``[B, H, T_q, T_k]`` (T5 family).
        softcap: ``softcap * tanh(scores / softcap)`` (Gemma 2).
        sliding_window: used only where there is no mask to hold it.
        is_causal: used only where there is no mask to hold it.
        s_aux: one score per head ``[H]`` of a key without a value (GPT-OSS); ``sinks`` is another name of it.
        sinks: see ``s_aux``.
        cu_seq_lens_q: ``[n + 1]`` bounds of sequences packed into one row; queries see only keys of their sequence.
        cu_seq_lens_k: likewise for keys; the same as ``cu_seq_lens_q`` if None.
        indices: ``[B, T_q, n]`` keys that an indexer chose (DeepSeek-V3.2); a query sees only its own.
        block_indices: ``[B, H_i, T_q, n]`` blocks of keys that an indexer chose (MiniMax-M3), -1 for none; see ``indices``.
        **kwargs: what Transformers passes to every attention function; ``output_attentions`` is read.

    Returns:
        The output ``[B, T_q, H, D_v]`` and the weights ``[B, H, T_q, T_k]``, or None where nobody asked for them.
    """
    heads, observers = heads_in_effect(module), observers_of(module)
    if heads is None and not getattr(module, KEEPS_SOFTMAX, False) and not is_observed(module):
        raise ValueError(
            f"{type(module).__name__} runs with attn_implementation={IMPLEMENTATION!r} but carries no {HEADS_MODULE!r}. Call "
            "hf_entmax.patch_model(model), or load a checkpoint that was saved from a patched model with hf_entmax imported."
        )
    refuse_context_parallel()
    sink = s_aux if s_aux is not None else sinks
    if sink is not None and softcap is not None:
        raise ValueError(
            "Attention sinks together with softcap are not supported: the sink's score must not be capped."
        )
    key_length = key.shape[-2]
    asked: dict[str, Any] = {
        "softcap": softcap,
        "scaling": scaling,
        "dropout": dropout,
        "need_weights": _weights_wanted(module, kwargs, observers),
        "sink": None if sink is None else sink.reshape(-1),
        "alpha_max": _alpha_max(heads),
    }
    if isinstance(attention_mask, PagedMask):
        refused = {"position_bias": position_bias, "indices": indices, "block_indices": block_indices}
        return _attend_paged(
            module, heads, query, key, value, attention_mask, AttentionOptions(**asked), observers, refused
        ), None
    if kwargs.get("write_index") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} is called for continuous batching without the mask that goes with it: this model makes its "
            "own. Use model.generate with a padded batch."
        )
    if attention_mask is not None and attention_mask.shape[-1] > key_length:
        attention_mask = attention_mask[..., :key_length]
    options = AttentionOptions(
        attention_mask=attention_mask,
        position_bias=position_bias,
        is_causal=bool(is_causal) and attention_mask is None and query.shape[-2] > 1,
        sliding_window=sliding_window if attention_mask is None and is_causal else None,
        **asked,
    )
    if isinstance(attention_mask, StructuredMask):
        options = _read_description(options, query.shape[-2], key_length)
    if cu_seq_lens_q is not None:
        bounds_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        options = options.restricted(_same_sequence(query, key, cu_seq_lens_q, bounds_k))
    if indices is not None:
        options = options.restricted(_chosen(indices, key_length)[:, None])
    if block_indices is not None:
        options = options.restricted(_chosen_blocks(module, block_indices, query.shape[1], key_length))
    _warn_of_packing(kwargs.get("position_ids"), options, query.shape[-2], key_length)
    mesh = heads_mesh(module, query.shape[1], _number_of_heads(module, heads))
    query = scaled_query(module, heads, query, key_length, options, mesh)
    if mesh is not None:  # sparse rows cannot be gathered
        options = dataclasses.replace(options, need_weights=bool(options.need_weights))
    out, weights = _attend(module, heads, query, key, value, options, mesh)
    out = out.transpose(1, 2).contiguous()
    if mesh is not None and weights is not None:
        weights = of_all_heads(weights, mesh, 1)  # type: ignore[arg-type]
    if mesh is not None and observers:
        out = of_all_heads(out, mesh, 2)
    for observer in observers:
        out = observer.sees(module, weights, value, out, options)
    if mesh is not None and observers:
        out = of_own_heads(out, mesh, 2)
    # Transformers knows dense weights alone; sparse rows come only where it asked for none.
    return out, weights if isinstance(weights, Tensor) else None


def heads_in_effect(module: nn.Module) -> nn.Module | None:
    """Return the numbers that an attention module computes with now: its child, or alpha 1 inside `softmax_attention`."""
    heads = module._modules.get(HEADS_MODULE)
    if heads is None or not runs_softmax(module):
        return heads
    return FixedAlpha(_unwrapped(heads).num_heads, 1.0)


def _attend(
    module: nn.Module,
    heads: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    mesh: DeviceMesh | None,
) -> tuple[Tensor, Tensor | SparseRows | None]:
    kind = _unwrapped(heads)
    # A softmax on purpose is alpha = 1, on the path that knows every argument.
    numbers: Any = 1.0 if heads is None else heads() if mesh is None else of_own_heads(heads(), mesh)
    backend: Backend = "torch" if heads is None else getattr(kind, "backend", "auto")
    layer = getattr(key, _CACHE_LAYER, None)
    if layer is not None and not isinstance(kind, MappingOptions):
        return layer.attend(module, query, key, value, numbers, options, backend)
    if isinstance(kind, MappingOptions):
        return mapped_attention(kind.mapping, numbers, query, key, value, options, backend)
    return attend(query, key, value, numbers, options, backend)


def _attend_paged(
    module: nn.Module,
    heads: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PagedMask,
    options: AttentionOptions,
    observers: tuple[Observer, ...],
    refused: dict[str, Tensor | None],
) -> Tensor:
    """Return the output ``[1, T_q, H, D_v]`` for the requests of a step of continuous batching."""
    given = [name for name, tensor in refused.items() if tensor is not None]
    if given or options.need_weights:
        what = "weights are not handed out" if options.need_weights else f"{given[0]} is not supported"
        raise NotImplementedError(
            f"{type(module).__name__}: {what} under continuous batching. Use model.generate, or a forward pass of its own."
        )
    kind = _unwrapped(heads)
    mesh = heads_mesh(module, query.shape[1], _number_of_heads(module, heads))
    if mesh is not None:
        raise NotImplementedError(
            "Continuous batching of patched models runs on one process, without tensor parallelism."
        )
    query = scaled_query(module, heads, query, key.shape[-2], options, None, mask.step.visible_keys(module))
    alpha: Any = None
    if not isinstance(kind, MappingOptions):
        alpha = 1.0 if heads is None else heads()
    call = PagedCall(
        module,
        alpha,
        "torch" if heads is None else getattr(kind, "backend", "auto"),
        lambda q, k, v, options: _attend(module, heads, q, k, v, options, None)[0],
    )
    out = mask.step.attend(call, query, key, value, options)
    for observer in observers:
        out = observer.sees(module, None, value, out)
    return out


def _unwrapped(heads: nn.Module | None) -> Any:
    """Return what PEFT may have wrapped; calling the wrapper gives the trained copy."""
    return getattr(heads, "original_module", heads)


def _alpha_max(heads: nn.Module | None) -> float:
    kind = _unwrapped(heads)
    return getattr(getattr(kind, "owner", kind), "bounds", (1.0, math.inf))[1]


def _number_of_heads(module: nn.Module, heads: nn.Module | None) -> int:
    """Count the query heads of a module, on all processes together."""
    return head_count(module) if heads is None else _unwrapped(heads).num_heads


def _weights_wanted(
    module: nn.Module, kwargs: dict[str, Any], observers: tuple[Observer, ...]
) -> bool | Literal["sparse"]:
    """Decide which weights to request from the attention: dense ones, dense or sparse ones, or none."""
    looking = [observer for observer in observers if observer.reads_weights]
    if _returned(module, kwargs) or not all(observer.sparse for observer in looking):
        return True
    return "sparse" if looking else False


def _returned(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    # Most models take output_attentions off the arguments and record what their attention modules return.
    recorded = _active_collector.get() or ()
    return any(name.endswith("attentions") for name in recorded)


def _read_description(options: AttentionOptions, length_q: int, length_k: int) -> AttentionOptions:
    """Hand over what a `StructuredMask` says instead of it; written out where it was made for other lengths."""
    mask: StructuredMask = options.attention_mask  # type: ignore[assignment]
    if tuple(mask.shape[-2:]) != (length_q, length_k):
        return dataclasses.replace(options, attention_mask=mask.dense())
    return dataclasses.replace(
        options,
        attention_mask=None,
        key_padding_mask=mask.key_padding_mask,
        is_causal=mask.limits.causal and length_q > 1,
        sliding_window=mask.limits.window,
    )


def _same_sequence(query: Tensor, key: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Tensor:
    """Mark the pairs of query and key that belong to the same packed sequence: bool ``[1, 1, T_q, T_k]``."""

    def number(length: int, bounds: Tensor) -> Tensor:
        positions = torch.arange(length, device=query.device)
        return torch.bucketize(positions, bounds.to(query.device)[1:-1].to(torch.long), right=True)

    same = number(query.shape[-2], bounds_q)[:, None] == number(key.shape[-2], bounds_k)[None, :]
    return same[None, None]


def _chosen(indices: Tensor, length: int) -> Tensor:
    """Mark the positions in ``indices``, where negative numbers stand for none: bool ``[..., length]``."""
    found = indices.new_zeros((*indices.shape[:-1], length + 1), dtype=torch.bool)
    found.scatter_(-1, indices.long().where(indices >= 0, length), True)
    return found[..., :length]


def _chosen_blocks(module: nn.Module, indices: Tensor, heads: int, length: int) -> Tensor:
    """Mark the keys in blocks that were chosen for the group of heads: bool ``[B, H, T_q, T_k]``."""
    size: int = module.indexer.block_size  # type: ignore[assignment,union-attr]
    blocks = _chosen(indices, -(-length // size))
    return blocks.repeat_interleave(size, -1)[..., :length].repeat_interleave(heads // indices.shape[1], 1)


#: The position ids that were looked at last, and whether beside a mask: all layers of one forward pass get the same.
_seen_positions: tuple[weakref.ref[Tensor], bool] | None = None


def _warn_of_packing(position_ids: Any, options: AttentionOptions, length_q: int, length_k: int) -> None:
    """Say so where positions start again within a row, as packed sequences have them, and the mask does not part them.

    Transformers parts them by itself only where it is given neither a mask nor a cache; a mask is then taken at its
    word, as by its own attention functions.
    """
    global _seen_positions
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or not 2 <= position_ids.shape[1] == length_q:
        return
    masked = options.attention_mask is not None
    seen = _seen_positions is not None and _seen_positions[0]() is position_ids and _seen_positions[1] == masked
    if seen or not values_visible(position_ids):
        return
    _seen_positions = weakref.ref(position_ids), masked
    row, token = (position_ids.diff(dim=-1) < 0).nonzero(as_tuple=True)
    if not row.numel():
        return
    token = token + 1
    visible = options.visible(length_q, length_k, position_ids.device)
    if visible is not None:
        # Padding starts again too: the token before must be seen, and this one be real itself.
        seen = visible.expand(torch.broadcast_shapes(visible.shape, (position_ids.shape[0], 1, length_q, length_k)))
        seen = seen[row, 0, token]
        own = token if length_q == length_k else length_k - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
        both = seen.gather(-1, own[:, None]) & seen.gather(-1, (own[:, None] - 1).clamp(min=0))
        if not bool(both.any()):
            return
    warnings.warn(
        "position_ids start again within a row, as they do for packed sequences, but tokens may attend across that "
        "border: the attention mask allows it. To part the sequences leave out attention_mask and pass use_cache=False, "
        "or pass a mask of four dimensions [B, 1, T_q, T_k] or cu_seq_lens_q.",
        stacklevel=2,
    )
