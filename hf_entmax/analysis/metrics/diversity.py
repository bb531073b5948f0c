"""How different the heads of one layer are from one another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.forms import HeadWeights, keep_pairs, result_dtype
from hf_entmax.analysis.metrics.sparsity import entropy_sums, num_queries
from hf_entmax.batches.pairs import possible_pairs


def divergence_sums(weights: HeadWeights, head_entropy: Tensor | None = None) -> Tensor:
    """Sums the Jensen-Shannon divergence between the heads over the queries of each sentence, in nats: float64 [B].

    ``head_entropy`` is ``entropy_sums(weights)`` [B, H] when it is known already.
    """
    if head_entropy is None:
        head_entropy = entropy_sums(weights)
    return entropy_sums(weights.mean_head())[:, 0] - head_entropy.mean(dim=1)


def head_diversity(
    weights: Tensor, key_mask: Tensor, query_mask: Tensor | None = None, causal: bool = False, normalize: bool = True
) -> Tensor:
    r"""Jensen-Shannon divergence between the heads of a layer, averaged over all real queries.

    .. math:: JS = H\Big(\frac{1}{H}\sum_h p_h\Big) - \frac{1}{H}\sum_h H(p_h)

    with the Shannon entropy H. 0 when all heads agree; log(number of heads) when no two share a key.

    Args:
        weights: attention weights [B, H, T_q, T_k] of one layer.
        key_mask: bool [B, T_k], True = real key.
        query_mask: bool [B, T_q], True = real query. Default: ``key_mask`` for square weights, otherwise all queries.
        causal: the site is causal.
        normalize: divide by log(number of heads), so that the result is at most 1; False gives nats.

    Returns:
        Scalar tensor, in the dtype of ``weights`` (float32 for half precision); 0 for a single head, NaN when there
        is no query. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Correia, Niculae, Martins 2019, equation 11 and figure 6.

    Example:
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
    """Turns nats into units of log(number of heads); one head has nothing to differ from and gives 0."""
    if not normalize:
        return value
    if num_heads == 1:
        return torch.where(value.isnan(), value, torch.zeros_like(value))
    return value / math.log(num_heads)
