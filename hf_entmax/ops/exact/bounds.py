r"""Bounds on scores from a sketch of the keys, and which keys may have weight.

With scores ``s_i`` between ``l_i`` and ``h_i``, the threshold ``tau`` of entmax, which never falls when a score rises, is at
least that of the ``l_i``. A key with ``h_i <= tau(l)`` has weight 0, whatever its score is. Of a page with codes

.. math:: s_i = q \cdot k_i = q \cdot (\mathrm{low} + \mathrm{code}_i \, \mathrm{step}) \pm \textstyle\sum_d |q_d| \, \mathrm{step}_d / 2.

The softcap and what is added to the scores apply to both bounds: the one never makes a difference larger, the other leaves it.

Rounding. Let ``A = |q| |k|`` (Euclidean norms, of the page's largest magnitudes for k). Every product and partial sum of
the true, of the dense path's and of the bound's score is below ``4 A``, so their rounding errors are together below
``4 (D + 16) eps A``, with eps of the arithmetic; in half precision the dense path rounds query and score, by ``2 eps A`` of
that type. Scores are rounded again by the softcap and the sum with the bias, relative to their own size: that, and the rounding
of the threshold, is a margin below the threshold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_entmax.ops.exact.sketch import KeySketch
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.sketch_format import HALF_STEP, THRESHOLD_ROUNDINGS
from hf_entmax.ops.solve import compute_dtype, shift_of, solve_centred, weights_at

#: Below this ``u = alpha - 1`` nearly no key has weight 0, and nothing is proved.
LEAST_U = 0.005


def score_rounding(head_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the rounding of a score and of its bound, over ``|q| |k|``."""
    eps = torch.finfo(compute_dtype(dtype)).eps
    if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        eps = max(eps, 2.0**-10)
    own = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    # Ranges and codes are exact to float32.
    return 4 * (head_dim + 16) * eps + 2 * own


def threshold_margin(size: Tensor | float, u: Tensor | float, softcap: float, dtype: torch.dtype) -> Tensor | float:
    """Return how far below the threshold a bound must lie, from the size of the scores there."""
    own = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    return (THRESHOLD_ROUNDINGS * torch.finfo(compute_dtype(dtype)).eps + 4 * own) * (1.0 + size + 1.0 / u + softcap)


def candidate_keys(
    query: Tensor, sketch: KeySketch, key: Tensor, u: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Tell which keys each query may attend to, and which of these may have weight: two bool ``[B, H, T_q, T_k]``.

    ``u`` is ``alpha - 1``, ``[H]``; of ``key`` only what the sketch does not cover is read.
    """
    batch, heads, queries, head_dim = query.shape
    wide, visible = compute_dtype(query.dtype), options.visible_pairs(query, key)
    if not visible.numel():
        return visible, visible
    stacked = (query.to(wide) * options.scale(head_dim)).reshape(batch, key.shape[1], -1, head_dim)
    upper, width = (bound.reshape(visible.shape) for bound in _bounds(stacked, sketch, key, query.dtype))
    unknown = ~(width < math.inf) | upper.isnan()
    softcap = options.softcap or 0.0
    if softcap:
        upper = torch.tanh(upper / softcap) * softcap
    for addend in options.addends():
        upper = upper + addend
    lower = torch.where(visible & ~unknown, upper - width, -math.inf)
    rows = lower.flatten(0, 2)
    u = u.to(wide)[:, None].expand(batch, heads, queries).reshape(-1, 1)
    if options.sink is not None:
        rows = torch.cat((rows, options.sink.to(wide)[:, None].expand(batch, heads, queries).reshape(-1, 1)), -1)
    threshold = threshold_below(rows, u, softcap, query.dtype).view(batch, heads, queries, 1)
    # Not `upper > threshold`, which is False for NaN.
    return visible, visible & (unknown | ~(upper <= threshold))


def threshold_below(scores: Tensor, u: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """Return the value ``[n, 1]`` up to which scores surely have weight 0, or ``-inf``, given lower bounds ``[n, T]`` of all scores.

    ``u`` is ``[n, 1]``, ``softcap`` 0 where there is none, ``dtype`` that of the dense path's scores.
    """
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    centred, u = scores - top, u.clamp(min=LEAST_U)
    shift = shift_of(solve_centred(centred.clone(), u)[0], centred, u).to(scores.dtype)
    margin = threshold_margin(top.abs(), u, softcap, dtype)
    # Weights that sum to 1 or more prove that the threshold does not lie below this.
    proved = weights_at(centred, shift - margin, u).sum(-1, keepdim=True) >= 1
    return torch.where(proved & (u > LEAST_U), top + shift - 1.0 / u - 2 * margin, -math.inf)


def _bounds(stacked: Tensor, sketch: KeySketch, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bound the scores of ``stacked`` ``[B, H_kv, R, D]`` before softcap and addends: from above, and how far below that.

    Returns:
        Two tensors ``[B, H_kv, R, T_k]``; NaN or infinity where there is no bound.
    """
    pages, size, wide = sketch.pages, sketch.page_size, stacked.dtype
    head_dim = stacked.shape[-1]
    low, step = (t[:, :, :pages, None, :head_dim].to(wide) for t in (sketch.low, sketch.step))
    about = (sketch.unpack()[..., :head_dim].to(wide) * step + low).flatten(2, 3)
    rest = key[:, :, sketch.length :].to(wide)
    centre = torch.cat((stacked @ about.mT, stacked @ rest.mT), -1)

    largest = torch.linalg.vector_norm(stacked, dim=-1, keepdim=True)
    slack = score_rounding(head_dim, dtype, stacked.device) * largest.clamp(min=torch.finfo(wide).tiny)
    half = HALF_STEP * (stacked.abs() @ step.squeeze(3).mT)
    half = half + slack * sketch.norm[:, :, None, :pages].to(wide)
    half_rest = slack * torch.linalg.vector_norm(rest, dim=-1)[:, :, None]
    half = torch.cat((half.repeat_interleave(size, -1), half_rest), -1)
    return centre + half, 2 * half
