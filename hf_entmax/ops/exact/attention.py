"""Entmax attention that reads a few bits of every key, and in full only the keys that may have weight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_entmax.ops import backends
from hf_entmax.ops.attention import attend, head_alpha
from hf_entmax.ops.backends import Backend
from hf_entmax.ops.exact.bounds import candidate_keys
from hf_entmax.ops.exact.sketch import KeySketch
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import transformed, values_visible
from hf_entmax.ops.sparse_rows import SparseRows

# The kernels take queries one by one: with more of them, dense arithmetic on what was gathered for all is faster.
_FEW_QUERIES = 16


class SparseCounts(NamedTuple):
    """What was read, summed over the queries of a call; int64 ``[B, H]`` each.

    Attributes:
        total: keys that a query may attend to.
        read: those of them whose score was computed in full; all others were proved to have weight 0.
        nonzero: those of them with weight above 0.
    """

    total: Tensor
    read: Tensor
    nonzero: Tensor


def exact_sparse_attention(
    query: Tensor,
    sketch: KeySketch,
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
    sink: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, SparseCounts]:
    r"""Attend with one query or a few, and prove from a sketch of the keys that most of them have weight 0.

    The output is that of `hf_entmax.ops.entmax_attention` with the same arguments: nothing is approximated. Where nothing
    can be proved (alpha = 1, keys that are not finite) keys are read in full. What the kernels for the CPU and for CUDA do not
    take (more than 16 queries, float64 and what `entmax_attention` leaves to plain operations) is gathered by plain operations;
    where values cannot be looked at (fake tensors, tracing) every key is read. ``torch.compile`` runs it outside of its graphs.

    Args:
        query: ``[B, H, T_q, D]``, float32, float64, bfloat16 or float16; best with few queries.
        sketch: of the first ``sketch.length`` keys of ``key`` as they are now; the keys after these are read in full.
        key: ``[B, H_kv, T_k, D]`` with ``H`` a multiple of ``H_kv``, any strides.
        value: ``[B, H_kv, T_k, D_v]``.
        alpha: ``>= 1``; a float for all heads or a tensor ``[H]``.
        attention_mask: bool (True = may attend) or additive float, broadcastable to ``[B, H, T_q, T_k]``.
        key_padding_mask: bool ``[B, T_k]``, True for real keys.
        position_bias: float, broadcastable to ``[B, H, T_q, T_k]``, added to the scores (after the cap).
        is_causal: query ``i`` sees key ``j`` only when ``j <= i + T_k - T_q``.
        sliding_window: query ``i`` sees key ``j`` only when ``j > i + T_k - T_q - sliding_window``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before bias and mask.
        scaling: factor of the scores; ``D ** -0.5`` if None.
        sink: ``[H]``, the score of one more key that every query sees, whose value is 0; it is neither capped nor counted.
        backend: ``"auto"``, ``"torch"``, ``"numba"`` or ``"triton"``: what reads the sketch for up to 16 queries, and attends to
            the gathered keys for more; plain operations find those for every backend.

    Returns:
        ``[B, H, T_q, D_v]`` in the dtype of ``value``, and what was read.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if shapes do not fit together, the sketch cannot be one of ``key``, a value is out of range, or
            ``backend`` is unknown or cannot run here.
        RuntimeError: if a gradient or a transform of ``torch.func`` (vmap) is asked for: there is none. Call it under
            ``torch.no_grad()``, or `entmax_attention`.

    Examples:
        >>> query, key, value = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
        >>> out, counts = exact_sparse_attention(4 * query, sketch_keys(key), key, value, 1.5)
        >>> expected, _ = entmax_attention(4 * query, key, value, 1.5)
        >>> out.allclose(expected, atol=1e-6), bool((counts.read < counts.total).all())
        (True, True)
    """
    terms = (attention_mask, key_padding_mask, position_bias)
    options = AttentionOptions(*terms, is_causal, sliding_window, softcap, scaling, sink=sink)
    run = _outside_of_graphs() if torch.compiler.is_dynamo_compiling() else exact_attend
    return run(query, sketch, key, value, alpha, options, backend)


def exact_attend(
    query: Tensor,
    sketch: KeySketch,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    options: AttentionOptions,
    backend: Backend = "auto",
) -> tuple[Tensor, SparseCounts]:
    """Call `exact_sparse_attention` with its keyword arguments in a record, which asks for neither dropout nor weights."""
    if transformed():
        raise RuntimeError(
            "exact_sparse_attention is inside a torch.func transform (vmap, grad, jvp), which it has no rules for: call it "
            "outside, with a batch dimension, or call entmax_attention."
        )
    options.check(query, key, value)
    sketch.check(key)
    alpha = head_alpha(alpha, query.shape[1])
    tensors = [query, key, value, alpha, options.sink, *options.tensors().values()]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(
            "exact_sparse_attention has no gradient, but an argument requires one. Call it under torch.no_grad(), or call "
            "entmax_attention."
        )
    module = backends.kernel_module(backend, query, key, value, alpha, options)
    kernel = getattr(module, "exact_sparse_attention", None)
    if not (backends.plain(query) and values_visible(query)):
        return _dense(query, key, value, alpha, options, backend)
    if kernel is not None and query.shape[2] <= _FEW_QUERIES and 0 not in (query.numel(), key.numel()):
        out, counts = kernel(query, sketch, key, value, alpha, options)
        return out, SparseCounts(*counts)
    return _gathered(query, sketch, key, value, alpha, options, backend)


def _gathered(
    query: Tensor,
    sketch: KeySketch,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    options: AttentionOptions,
    backend: Backend,
) -> tuple[Tensor, SparseCounts]:
    """Attend by plain operations to the candidates, gathered for all heads that share a key head."""
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    u = torch.as_tensor(alpha, device=query.device).double().expand(heads) - 1
    visible, candidates = candidate_keys(query, sketch, key, u, options)
    total, read = visible.sum((-1, -2)), candidates.sum((-1, -2))
    wanted = candidates.reshape(batch, kv_heads, heads // kv_heads * queries, keys).any(2)
    width = int(wanted.sum(-1).max()) if wanted.numel() else 0
    # The wanted keys first, in their order; a row that wants fewer is filled up with some that it does not attend to.
    index = wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    key, value = (t.gather(2, index[..., None].expand(-1, -1, -1, t.shape[-1])) for t in (key, value))
    columns = index.repeat_interleave(heads // kv_heads, 1)[:, :, None].expand(-1, -1, queries, -1)

    def columns_of(term: Tensor | None) -> Tensor | None:
        return None if term is None else term.expand(batch, heads, queries, keys).gather(-1, columns)

    attended = candidates.gather(-1, columns)
    chosen = dataclasses.replace(
        options,
        attention_mask=columns_of(options.attention_mask),
        position_bias=columns_of(options.position_bias),
        key_padding_mask=None,
        is_causal=False,
        sliding_window=None,
        need_weights="sparse",
    ).restricted(attended)
    out, weights = attend(query, key, value, alpha, chosen, backend)
    if isinstance(weights, SparseRows):
        weights = weights.dense()
    assert weights is not None
    # A row of NaN has them at the keys as well that it was filled up with.
    return out, SparseCounts(total, read, ((weights != 0) & attended).sum((-1, -2)))


def _dense(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions, backend: Backend
) -> tuple[Tensor, SparseCounts]:
    """Attend where values cannot be looked at: every visible key is read."""
    visible = options.visible_pairs(query, key)
    out, weights = attend(query, key, value, alpha, dataclasses.replace(options, need_weights=True), backend)
    total = visible.sum((-1, -2))
    return out, SparseCounts(total, total, ((weights != 0) & visible).sum((-1, -2)))  # type: ignore[operator,union-attr]


# A compiler runs this while it traces, and breaks its graph at what is returned; it is no decorator, since that would import
# Dynamo, which takes a second.
@functools.cache
def _outside_of_graphs() -> Callable[..., tuple[Tensor, SparseCounts]]:
    return torch.compiler.disable(exact_attend)  # type: ignore[return-value]


_outside_of_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]
