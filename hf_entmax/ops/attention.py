"""Entmax attention: one signature for all backends."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hf_entmax.config import check_alpha
from hf_entmax.ops import backends, dense
from hf_entmax.ops.backends import Backend
from hf_entmax.ops.options import AttentionOptions, append_sink
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
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | SparseRows | None]:
    r"""Attend with alpha-entmax in the place of softmax.

    .. math:: O = \mathrm{entmax}_\alpha(\mathrm{cap}(\mathrm{scaling} \cdot Q K^\top) + \mathrm{bias} + \mathrm{mask})V

    Args:
        query: ``[B, H, T_q, D]``, float32, float64, bfloat16 or float16.
        key: ``[B, H_kv, T_k, D]`` with ``H`` a multiple of ``H_kv``; query head ``h`` reads key head ``h // (H //
            H_kv)``.
        value: ``[B, H_kv, T_k, D_v]``.
        alpha: ``>= 1``; a float for all heads or a tensor ``[H]``, one per query head (or with one element). 1 is
            softmax. Beyond ``1 + 18 / log2(T_k)`` (2.29 at 16,384 keys; never below 2) ``"auto"`` takes no CUDA kernel
            and ``"triton"`` refuses; to see that, a tensor on a GPU is waited for. In a captured CUDA graph or a compiled
            one nobody can look, and the rows of such heads are NaN.
        attention_mask: bool (True = may attend) or additive float, broadcastable to ``[B, H, T_q, T_k]``. Entries at
            or below ``finfo.min / 2`` of the mask's dtype (``-inf``, ``finfo.min``) never receive mass.
        key_padding_mask: bool ``[B, T_k]``, True for real keys; combined with the other limits.
        position_bias: float, broadcastable to ``[B, H, T_q, T_k]``, added to the scores (after the cap).
        is_causal: query ``i`` sees key ``j`` only when ``j <= i + T_k - T_q`` (aligned bottom-right).
        sliding_window: query ``i`` sees key ``j`` only when ``j > i + T_k - T_q - sliding_window``; at least 1.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before bias and mask; above 0.
        scaling: factor of the scores; ``D ** -0.5`` if None.
        dropout: probability in ``[0, 1 - 2**-24]`` of dropping a weight; applied whenever it is above 0 (pass 0 in evaluation).
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
        ValueError: if shapes do not fit together, a value is out of range, or ``backend`` is unknown, cannot run here
            or cannot honour an argument.

    Differentiable in query, key, value, alpha, position_bias and a float attention_mask.

    Reference:
        Correia, Niculae, Martins (2019), Adaptively Sparse Transformers, eq. 8-10.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 5, 8)                    # [B, H, T, D] each
        >>> alpha = torch.tensor([1.0, 1.3, 1.5, 2.0])                        # one per head
        >>> out, weights = entmax_attention(query, key, value, alpha, is_causal=True, need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 4, 5, 8]), torch.Size([2, 4, 5, 5]))
        >>> weights.sum(-1).allclose(torch.ones(2, 4, 5)), bool((weights[:, 3] == 0).any())
        (True, True)
    """
    terms = (attention_mask, key_padding_mask, position_bias)
    options = AttentionOptions(*terms, is_causal, sliding_window, softcap, scaling, dropout, need_weights)
    return attend(query, key, value, alpha, options, backend)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    options: AttentionOptions,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | SparseRows | None]:
    """Call `entmax_attention` with its keyword arguments in a record, which may have a sink; weights are those of the keys alone."""
    options.check(query, key, value)
    alpha, keys = head_alpha(alpha, query.shape[1]), key.shape[2]
    key, value, options = append_sink(query, key, value, options)
    module = backends.kernel_module(backend, query, key, value, alpha, options)
    out, weights = (module or dense).attention(query, key, value, alpha, options)
    return out, of_keys(weights, keys)


def of_keys(weights: Tensor | SparseRows | None, keys: int) -> Tensor | SparseRows | None:
    """Return the weights without those of a sink behind the keys."""
    if weights is None or weights.shape[3] == keys:
        return weights
    return weights.first_keys(keys) if isinstance(weights, SparseRows) else weights[..., :keys]


def head_alpha(alpha: float | Tensor, heads: int) -> float | Tensor:
    """Return a checked float, or a tensor ``[H]``."""
    if not isinstance(alpha, Tensor):
        return check_alpha(alpha)
    if alpha.dim() > 1 or (alpha.dim() == 1 and alpha.shape[0] not in (1, heads)):
        raise ValueError(f"alpha has shape {tuple(alpha.shape)}, but must be a float or a tensor [H] = [{heads}].")
    return alpha.expand(heads)
