"""Heads that look at a fixed distance: confidence, share of the arg-max, distance profile, census."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.weights import keep_pairs, ratio, result_dtype
from hf_entmax.batches.pairs import possible_pairs


def argmax_counts(argmax: Tensor, pairs: Tensor, offset: int) -> Tensor:
    """Count the queries whose largest weight lies exactly at ``offset``, key minus query position: float64 [B, H].

    ``argmax`` is long [B, H, T_q], the key with the largest weight, -1 where a row has none; ``pairs`` bool [B, T_q, T_k].
    """
    num_queries, num_keys = pairs.shape[-2:]
    target = torch.arange(num_queries, device=pairs.device) + offset
    inside = (target >= 0) & (target < num_keys)
    exists = inside & pairs.gather(-1, target.clamp(0, num_keys - 1).expand(pairs.shape[0], -1).unsqueeze(-1))[..., 0]
    return ((argmax == target) & exists.unsqueeze(1)).sum(dim=-1).double()


def _check_offset(offset: int) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset must be an integer (-1 previous, 0 current, +1 next), got {offset!r}.")
    return offset


def positional_confidence(
    weights: Tensor, key_mask: Tensor, offset: int = -1, query_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    r"""Return the mean weight that a head puts on the key at a fixed distance from the query.

    .. math:: c_h(o) = \frac{1}{N_o} \sum_{b,t} p_{b,h,t,t+o}

    over the N_o real queries t for which the real key t + o exists.

    Args:
        weights: attention weights [B, H, T_q, T_k].
        key_mask: bool [B, T_k], True = real key.
        offset: key position minus query position; -1 previous, 0 current, +1 next token.
        query_mask: bool [B, T_q], True = real query. Default: ``key_mask`` for square weights, otherwise all queries.
        causal: keys after the query do not exist.

    Returns:
        Tensor [H] in [0, 1]; NaN when no query has such a key. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Correia, Niculae, Martins 2019, section 5.2 and figure 7.

    Examples:
        >>> import torch
        >>> from hf_entmax.analysis import positional_confidence
        >>> weights = torch.tensor([[[[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.5, 0.5]]]])  # one head, three tokens
        >>> positional_confidence(weights, torch.ones(1, 3, dtype=torch.bool), offset=-1)  # of 0.9 and 0.5
        tensor([0.7000])
    """
    _check_offset(offset)
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    on_offset = keep_pairs(weights, pairs).diagonal(offset)
    count = pairs.diagonal(offset, dim1=-2, dim2=-1).sum().double()
    return ratio(on_offset.double().sum(dim=(0, -1)), count, result_dtype(weights))


def positional_share(
    weights: Tensor, key_mask: Tensor, offset: int = -1, query_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return the fraction of the queries whose largest weight lies at a fixed distance.

    A head is called positional for ``offset`` when this exceeds one half.

    Args:
        weights: [B, H, T_q, T_k], non-negative, any floating dtype.
        key_mask: bool [B, T_k], True = real key.
        offset: key position minus query position.
        query_mask: bool [B, T_q]; default as in :func:`positional_confidence`.
        causal: keys after the query do not exist.

    Returns:
        [H] in [0, 1], over the real queries for which the real key exists; NaN when there are none. A row without any
        weight agrees with no offset. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Voita et al. 2019, section 5.1; Correia, Niculae, Martins 2019, section 5.2.
    """
    _check_offset(offset)
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    counts = argmax_counts(keep_pairs(weights, pairs).row_argmax(), pairs, offset)
    count = pairs.diagonal(offset, dim1=-2, dim2=-1).sum().double()
    return ratio(counts.sum(0), count, result_dtype(weights))


def distance_profile(
    weights: Tensor, key_mask: Tensor, max_distance: int = 10, query_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    r"""Return the share of a head's mass at every distance between key and query.

    .. math:: m_h(o) = \frac{\sum_{b,t} p_{b,h,t,t+o}}{\sum_{b,t,j} p_{b,h,t,j}}

    Args:
        weights: attention weights [B, H, T_q, T_k].
        key_mask: bool [B, T_k], True = real key.
        max_distance: D >= 1; distances beyond it are gathered in the first and the last entry.
        query_mask: bool [B, T_q]; default as in :func:`positional_confidence`.
        causal: the site is causal.

    Returns:
        Tensor [H, 2 D + 3]: mass at o < -D, at o = -D .. D, at o > D (tokens); rows sum to 1. NaN for a head without
        mass. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape, or ``max_distance`` below 1.

    Reference:
        Distances as in Correia, Niculae, Martins 2019, section 5.2, extended from -1, 0, +1 to all.
    """
    if max_distance < 1:
        raise ValueError(f"max_distance is {max_distance}; it must be at least 1 token.")
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    mass, distances = keep_pairs(weights, pairs).offset_sums()
    profile = fold_distances(mass, distances, max_distance)
    return ratio(profile, mass.sum(-1, keepdim=True), result_dtype(weights))


def fold_distances(mass: Tensor, distances: Tensor, max_distance: int) -> Tensor:
    """Fold mass [H, n] by distance, as ``offset_sums`` returns it, into ``2 * max_distance + 3`` bins with open ends."""
    bins = distances.clamp(-max_distance - 1, max_distance + 1) + max_distance + 1
    return mass.new_zeros(*mass.shape[:-1], 2 * max_distance + 3).index_add_(-1, bins, mass)


def positional_census(confidence: Tensor, share: Tensor) -> dict[str, Any]:
    """List the heads that are positional for one offset, with medians.

    Args:
        confidence: [..., heads], :func:`positional_confidence` of many heads (for example [layers, heads]).
        share: the same shape, :func:`positional_share`.

    Returns:
        A dict: ``heads`` (index tuples, most confident first), ``confidences`` (one per head listed), ``median``
        (their median, NaN without such a head), ``median_all`` (of all heads).

    Raises:
        ValueError: the shapes differ.

    Reference:
        Correia, Niculae, Martins 2019, figure 7 (medians over the positional heads of a model).
    """
    if confidence.shape != share.shape:
        raise ValueError(f"confidence has shape {list(confidence.shape)}, share {list(share.shape)}; both must agree.")
    indices = (share > 0.5).nonzero()
    values = confidence[tuple(indices.T)] if len(indices) else confidence.new_zeros(0)
    order = values.argsort(descending=True)
    known = confidence[~confidence.isnan()]
    return {
        "heads": [tuple(int(i) for i in row) for row in indices[order]],
        "confidences": [float(value) for value in values[order]],
        "median": float(values.double().quantile(0.5)) if len(values) else float("nan"),
        "median_all": float(known.double().quantile(0.5)) if len(known) else float("nan"),
    }
