"""What ``verify=True`` does after each step of an exact cache: the same step with dense weights in float64, and how far it may differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hf_entmax.generation.cache_reads import Tally
from hf_entmax.ops.attention import attend
from hf_entmax.ops.exact import KeySketch
from hf_entmax.ops.exact.bounds import candidate_keys
from hf_entmax.ops.options import AttentionOptions

# A weight that float32 may round to zero, at the alphas where weights fall off most steeply.
_TINY_WEIGHT = 1e-5
_EPS = torch.finfo(torch.float32).eps


def verify(tally: Tally, where: str, *call: Any) -> None:
    """Compare a step, the arguments of `compare_with_dense`, with dense weights, and count it.

    Raises:
        RuntimeError: if a key of weight was left out, or the outputs differ by more than rounding explains.
    """
    dropped, error, limit = compare_with_dense(*call)
    tally.verified += 1
    tally.violations += dropped
    if dropped or not error <= limit:
        raise RuntimeError(
            f"{where}: {dropped} keys that were not read have weight, and the output differs from the dense one by {error:.3g} of "
            f"the largest value, where rounding explains {limit:.3g}. This is a fault of hf_entmax: please report it, with the model."
        )


@torch.no_grad()
def compare_with_dense(
    query: Tensor,
    sketch: KeySketch,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    options: AttentionOptions,
    out: Tensor,
    nonzero: Tensor,
) -> tuple[int, float, float]:
    r"""Compare a step with dense weights in float64.

    How far float32 may be off follows from alpha and the scores. Let ``delta`` bound the rounding of a score,
    ``delta = 4 (D + 8) eps max_j (|scaling| sum_d |q_d k_jd| + |bias_j|)``. The threshold then moves by ``delta`` at most, and with
    ``u = alpha - 1`` and ``p = (u x)^(1/u)`` a weight ``p`` falls to ``p max(0, 1 - 2 u delta / p^u)^(1/u)`` at the least. Since both
    rows sum to 1, what is lost is gained elsewhere, and

        |out - expected|  <=  2 max|v| sum_{p > 0} (p - p max(0, 1 - 2 u delta / p^u)^(1/u))

    apart from the rounding of the output itself. A weight of at most ``(2 u delta)^(1/u)`` may round to zero: at alpha 8 that is
    far from tiny.

    Args:
        query: ``[B, H, T_q, D]``.
        sketch: of the whole pages of ``key``.
        key: ``[B, H_kv, T_k, D]``.
        value: ``[B, H_kv, T_k, D_v]``.
        alpha: number or ``[H]``.
        options: of the call.
        out: ``[B, H, T_q, D_v]``, what was computed.
        nonzero: int64 ``[H]``, keys that were found to have weight.

    Returns:
        How many keys of weight the bound excludes or float32 lost, the largest difference in units of the largest value, and
        the largest that rounding explains.
    """
    heads, depth = query.shape[1], query.shape[3]
    u = torch.as_tensor(alpha, device=query.device).double().expand(heads) - 1
    visible, read = candidate_keys(query, sketch, key, u, options)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in options.tensors().items()}
    sink = None if options.sink is None else options.sink.double()
    dense = dataclasses.replace(options, **wide, sink=sink, need_weights=True)
    expected, weights = attend(query.double(), key.double(), value.double(), alpha, dense, "torch")
    assert isinstance(weights, Tensor)
    u = u[:, None, None]
    twice = 2 * u * _score_rounding(query, key, options, visible, depth)
    vanishing = torch.where(u > 0, twice ** (1 / u.clamp(min=1e-12)), 0.0)
    dropped = int(((weights > 0) & visible & ~read).sum())
    lost = (weights > vanishing.clamp(min=_TINY_WEIGHT)).sum((0, 2, 3)) - nonzero
    dropped += int(lost.clamp(min=0).sum())
    least = (1 - twice / weights.clamp(min=1e-300) ** u).clamp(min=0) ** (1 / u.clamp(min=1e-12))
    drift = 2 * torch.where(weights > 0, weights * (1 - least), 0.0).sum(-1).nan_to_num(0.0).max()
    largest = value.double().nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-30)
    error = ((out.double() - expected) / largest).abs()
    # What is not finite comes out of both alike.
    error = error.masked_fill((out.double() == expected) | (out.isnan() & expected.isnan()), 0.0).max()
    return dropped, float(error), float(drift) + 64 * torch.finfo(out.dtype).eps


def _score_rounding(query: Tensor, key: Tensor, options: AttentionOptions, visible: Tensor, depth: int) -> Tensor:
    """Bound the rounding of every score of a row in float32, ``[B, H, T_q, 1]``."""
    group = query.shape[1] // key.shape[1]
    keys = key.double().abs().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(group, 1)
    size = query.double().abs().nan_to_num(0.0, 0.0, 0.0) @ keys.transpose(-1, -2) * abs(options.scale(depth))
    for term in (options.attention_mask, options.position_bias):
        if term is not None and term.is_floating_point():
            size = size + term.double().abs()
    size = torch.where(visible, size, 0.0).amax(-1, keepdim=True)
    if options.sink is not None:
        size = size + options.sink.double().abs()[:, None, None]
    return 4 * (depth + 8) * _EPS * size
