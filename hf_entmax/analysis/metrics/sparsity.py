"""How sparse a head is: density, support, entropy, largest weight, and how they change from sentence to sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.forms import HeadWeights, keep_pairs, ratio, result_dtype
from hf_entmax.batches.pairs import possible_pairs


def support_counts(weights: HeadWeights, threshold: float = 0.0) -> Tensor:
    """Counts the weights [B, H, T_q, T_k] whose size exceeds ``threshold`` (0: every nonzero one): float64 [B, H]."""
    return weights.entry_sums(lambda value: value != 0 if threshold == 0 else value.abs() > threshold)


def entropy_sums(weights: HeadWeights) -> Tensor:
    """Sums the Shannon entropy of the rows of [B, H, T_q, T_k] in nats (0 log 0 = 0): float64 [B, H]."""
    # clamp keeps log finite where the weight is zero; the product is then exactly zero.
    return -weights.entry_sums(lambda value: value * value.clamp(min=torch.finfo(value.dtype).tiny).log())


def density(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, threshold: float = 0.0
) -> Tensor:
    r"""Fraction of the possible weights that are not zero, per head.

    .. math:: \mathrm{density}_h = \frac{\sum_{b,i,j} [\,p_{bhij} > 0\,]}{\sum_b \#\text{possible pairs}_b}

    Sums come first, the ratio last, so that long sentences count by their pairs. Softmax has density 1 except where
    a weight underflows to zero in its dtype (float32: a score more than about 103 nats below the largest).

    Args:
        weights: attention weights [B, H, T_q, T_k], non-negative, any floating dtype.
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q], True = real query. Default: ``key_mask`` for square weights, otherwise all queries.
            Pass it for cross-attention, where equal lengths would otherwise pass for self-attention.
        causal: count only the ``t (t + 1) / 2`` pairs that a causal site allows.
        threshold: count weights above this value in [0, 1) instead of above zero.

    Returns:
        Tensor [H] in [0, 1], in the dtype of ``weights`` (float32 for half precision); NaN when no pair is possible.
        Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Correia, Niculae, Martins 2019, "Adaptively Sparse Transformers", section 5.1 and figures 4 and 5.

    Example:
        >>> import torch
        >>> from hf_entmax.analysis import density
        >>> weights = torch.tensor([[[[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.5, 0.5]]]])  # one head, three tokens
        >>> density(weights, torch.ones(1, 3, dtype=torch.bool), causal=True)  # 5 of 6 weights
        tensor([0.8333])
    """
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    counts = support_counts(keep_pairs(weights, pairs), threshold)
    return ratio(counts.sum(0), pairs.sum().double(), result_dtype(weights))


def sentence_density(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, threshold: float = 0.0
) -> Tensor:
    """Density of every head in every sentence of the batch by itself.

    Args:
        weights: [B, H, T_q, T_k], non-negative, any floating dtype.
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q]; default as in :func:`density`.
        causal: the site is causal.
        threshold: count weights above this value instead of above zero.

    Returns:
        [B, H] in [0, 1], dtype as in :func:`density`; NaN for a sentence without a possible pair. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Correia, Niculae, Martins 2019, figure 10.
    """
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    counts = support_counts(keep_pairs(weights, pairs), threshold)
    return ratio(counts, pairs.sum(dim=(-2, -1)).double().unsqueeze(-1), result_dtype(weights))


def ambiguity(
    weights: Tensor,
    key_mask: Tensor,
    query_mask: Tensor | None = None,
    causal: bool = False,
    mean: Tensor | None = None,
) -> Tensor:
    r"""How much denser than usual a head is in each sentence.

    .. math:: \mathrm{ambiguity}_{bh} = \mathrm{density}_{bh} - \overline{\mathrm{density}}_h

    A head that is sparse on average and turns dense in one sentence does not know there where to look.

    Args:
        weights: attention weights [B, H, T_q, T_k].
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q]; default as in :func:`density`.
        causal: count only the pairs that a causal site allows.
        mean: Tensor [H], the usual density of each head; default: the mean over the sentences of this batch.

    Returns:
        Tensor [B, H] in [-1, 1]; positive = denser than usual. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Correia, Niculae, Martins 2019, section 5.2 and figure 10.
    """
    densities = sentence_density(weights, key_mask, query_mask, causal)
    if mean is None:
        mean = densities.nanmean(dim=0)
    elif tuple(mean.shape) != (weights.shape[1],):
        raise ValueError(f"mean has shape {list(mean.shape)}; these weights need [{weights.shape[1]}], one per head.")
    return densities - mean.to(densities)


def mean_support(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, threshold: float = 0.0
) -> Tensor:
    """Mean number of keys with nonzero weight per query, per head.

    Args:
        weights: [B, H, T_q, T_k], non-negative, any floating dtype.
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q]; default as in :func:`density`.
        causal: the site is causal.
        threshold: count weights above this value instead of above zero.

    Returns:
        [H], keys per query, dtype as in :func:`density`; NaN when there is no query. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Peters, Niculae, Martins 2019, "Sparse Sequence-to-Sequence Models", table 3.
    """
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    counts = support_counts(keep_pairs(weights, pairs), threshold)
    return ratio(counts.sum(0), num_queries(pairs).sum(), result_dtype(weights))


def entropy(weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    r"""Mean Shannon entropy of the rows of a head, in nats.

    .. math:: H_h = \frac{1}{N} \sum_{b,i} -\sum_j p_{bhij} \log p_{bhij}

    Args:
        weights: [B, H, T_q, T_k], non-negative, any floating dtype.
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q]; default as in :func:`density`.
        causal: the site is causal.

    Returns:
        [H] in [0, log T_k] nats, dtype as in :func:`density`; NaN when there is no query. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Shannon 1948; for attention heads, Clark et al. 2019, "What Does BERT Look At?", section 3.3.
    """
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    sums = entropy_sums(keep_pairs(weights, pairs))
    return ratio(sums.sum(0), num_queries(pairs).sum(), result_dtype(weights))


def max_weight(weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Mean of the largest weight of each row ("confidence" of a head), per head.

    Args:
        weights: [B, H, T_q, T_k], non-negative, any floating dtype.
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q]; default as in :func:`density`.
        causal: the site is causal.

    Returns:
        [H] in [0, 1], dtype as in :func:`density`; NaN when there is no query. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 4.
    """
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    sums = keep_pairs(weights, pairs).row_max().double().sum(dim=-1)
    return ratio(sums.sum(0), num_queries(pairs).sum(), result_dtype(weights))


def num_queries(pairs: Tensor) -> Tensor:
    """Number of queries with at least one possible key, per sentence: float64 [B]."""
    return pairs.any(dim=-1).sum(dim=-1).double()
