"""How sparse heads are, how often they fire, and how much they differ from one another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.weights import HeadWeights, keep_pairs, ratio, result_dtype
from hf_entmax.batches.pairs import possible_pairs


def support_counts(weights: HeadWeights, threshold: float = 0.0) -> Tensor:
    """Count the weights [B, H, T_q, T_k] whose size exceeds ``threshold`` (0: every nonzero one): float64 [B, H]."""
    return weights.entry_sums(lambda value: value != 0 if threshold == 0 else value.abs() > threshold)


def entropy_sums(weights: HeadWeights) -> Tensor:
    """Sum the Shannon entropy of the rows of [B, H, T_q, T_k] in nats (0 log 0 = 0): float64 [B, H]."""
    # clamp keeps log finite where the weight is zero; the product is then exactly zero.
    return -weights.entry_sums(lambda value: value * value.clamp(min=torch.finfo(value.dtype).tiny).log())


def largest_sums(weights: HeadWeights) -> Tensor:
    """Sum the largest weight of each row of [B, H, T_q, T_k]: float64 [B, H]."""
    return weights.row_max().double().sum(dim=-1)


def divergence_sums(weights: HeadWeights, head_entropy: Tensor | None = None) -> Tensor:
    """Sum the Jensen-Shannon divergence between the heads over the queries of each sentence, in nats: float64 [B].

    ``head_entropy`` is ``entropy_sums(weights)`` [B, H] when it is known already.
    """
    if head_entropy is None:
        head_entropy = entropy_sums(weights)
    return entropy_sums(weights.mean_head())[:, 0] - head_entropy.mean(dim=1)


def num_queries(pairs: Tensor) -> Tensor:
    """Count the queries of each sentence with at least one possible key: float64 [B]."""
    return pairs.any(dim=-1).sum(dim=-1).double()


def density(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, threshold: float = 0.0
) -> Tensor:
    r"""Return the fraction of the possible weights that are not zero, per head.

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

    Examples:
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
    """Return the density of every head in every sentence of the batch by itself.

    Args and Raises: as :func:`density`.

    Returns:
        Tensor [B, H] in [0, 1], dtype as :func:`density`; NaN for a sentence without a possible pair. Not differentiable.

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
    r"""Measure how much denser than usual a head is in each sentence.

    .. math:: \mathrm{ambiguity}_{bh} = \mathrm{density}_{bh} - \overline{\mathrm{density}}_h

    A head that is sparse on average and turns dense in one sentence does not know where to look there.

    ``mean`` is a Tensor [H], the usual density of each head; default: the mean over the sentences of this batch. Other Args and
    Raises: as :func:`density`.

    Returns:
        Tensor [B, H] in [-1, 1]; positive = denser than usual. Not differentiable.

    Reference:
        Correia, Niculae, Martins 2019, section 5.2 and figure 10.
    """
    densities = sentence_density(weights, key_mask, query_mask, causal)
    if mean is None:
        mean = densities.nanmean(dim=0)
    elif tuple(mean.shape) != (weights.shape[1],):
        raise ValueError(f"mean has shape {list(mean.shape)}; these weights need [{weights.shape[1]}], one per head.")
    return densities - mean.to(densities)


def _mean_over_queries(sums: Callable[[HeadWeights], Tensor], weights: Tensor, *masks: Tensor | bool | None) -> Tensor:
    pairs = possible_pairs(weights, *masks)  # type: ignore[arg-type]
    return ratio(sums(keep_pairs(weights, pairs)).sum(0), num_queries(pairs).sum(), result_dtype(weights))


def mean_support(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, threshold: float = 0.0
) -> Tensor:
    """Return the mean number of keys with nonzero weight per query, per head.

    Args and Raises: as :func:`density`.

    Returns:
        Tensor [H], keys per query, dtype as :func:`density`; NaN when there is no query. Not differentiable.

    Reference:
        Peters, Niculae, Martins 2019, "Sparse Sequence-to-Sequence Models", table 3.
    """
    return _mean_over_queries(lambda kept: support_counts(kept, threshold), weights, key_mask, query_mask, causal)


def entropy(weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    r"""Return the mean Shannon entropy of the rows of a head, in nats.

    .. math:: H_h = \frac{1}{N} \sum_{b,i} -\sum_j p_{bhij} \log p_{bhij}

    Args and Raises: as :func:`density`.

    Returns:
        Tensor [H] in [0, log T_k] nats, dtype as :func:`density`; NaN when there is no query. Not differentiable.

    Reference:
        Shannon 1948; for attention heads, Clark et al. 2019, "What Does BERT Look At?", section 3.3.
    """
    return _mean_over_queries(entropy_sums, weights, key_mask, query_mask, causal)


def max_weight(weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the mean of the largest weight of each row ("confidence" of a head), per head.

    Args and Raises: as :func:`density`.

    Returns:
        Tensor [H] in [0, 1], dtype as :func:`density`; NaN when there is no query. Not differentiable.

    Reference:
        Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 4.
    """
    return _mean_over_queries(largest_sums, weights, key_mask, query_mask, causal)


def head_diversity(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, normalize: bool = True
) -> Tensor:
    r"""Return the Jensen-Shannon divergence between the heads of a layer, averaged over all real queries.

    .. math:: JS = H\Big(\frac{1}{H}\sum_h p_h\Big) - \frac{1}{H}\sum_h H(p_h)

    with the Shannon entropy H. 0 when all heads agree; log(number of heads) when no two share a key.

    ``normalize`` divides by log(number of heads), so that the result is at most 1; without it the unit is nats. Other Args and
    Raises: as :func:`density`.

    Returns:
        Scalar tensor, dtype as :func:`density`; 0 for a single head, NaN when there is no query. Not differentiable.

    Reference:
        Correia, Niculae, Martins 2019, equation 11 and figure 6.

    Examples:
        >>> import torch
        >>> from hf_entmax.analysis import head_diversity
        >>> apart = torch.eye(2).expand(1, 2, 2).clone().view(1, 2, 1, 2)  # two heads that share no key
        >>> head_diversity(apart, torch.ones(1, 2, dtype=torch.bool))
        tensor(1.)
    """
    pairs = possible_pairs(weights, key_mask, query_mask, causal)
    total = divergence_sums(keep_pairs(weights, pairs)).sum()
    # Rounding may leave a tiny negative number where all heads agree.
    value = (total / num_queries(pairs).sum()).clamp(min=0.0)
    return normalize_divergence(value, weights.shape[1], normalize).to(result_dtype(weights))


def normalize_divergence(value: Tensor, num_heads: int, normalize: bool = True) -> Tensor:
    """Turn nats into units of log(number of heads); one head has nothing to differ from and gives 0."""
    if not normalize:
        return value
    if num_heads == 1:
        return torch.where(value.isnan(), value, torch.zeros_like(value))
    return value / math.log(num_heads)


def firing(weights: HeadWeights, pairs: Tensor) -> Tensor:
    r"""Mark the queries of each head that fire: those with weight on a key that is neither the first nor their own.

        f_i = 1  if  p_ij > 0  for a key  j  other than the first and  i,  else 0

    Many heads of a language model rest: nearly all their weight lies on the first token. Exact zeros tell when they do not.
    A softmax fires at every query.

    Args:
        weights: [B, H, T_q, T_k] of self-attention.
        pairs: bool [B, T_q, T_k], the possible pairs; the first key is the first that any query may look at.

    Returns:
        0 or 1, [B, H, T_q].
    """
    queries, keys = pairs.shape[-2:]
    first = torch.arange(keys, device=pairs.device) == pairs.any(-2).long().argmax(-1, keepdim=True)
    itself = torch.ones(queries, keys, dtype=torch.bool, device=pairs.device).tril(keys - queries).triu(keys - queries)
    return (weights.row_sums(pairs & ~first.unsqueeze(1) & ~itself) > 0).to(torch.float32)
