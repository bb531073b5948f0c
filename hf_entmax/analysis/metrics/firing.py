"""When a head that rests does something: queries with any weight beside the first key and themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.forms import HeadWeights


def firing(weights: HeadWeights, pairs: Tensor) -> Tensor:
    r"""Mark the queries of each head that fire: those with weight on a key that is neither the first nor their own.

        f_i = 1  if  p_ij > 0  for a key  j  other than the first and  i,  else 0

    Many heads of a language model rest: nearly all their weight lies on the first token. With exact zeros one can say when they
    do not. A softmax fires at every query.

    Args:
        weights: [B, H, T_q, T_k] of self-attention.
        pairs: bool [B, T_q, T_k], the possible pairs; the first key is the first that any query may look at.

    Returns:
        0 or 1, [B, H, T_q].
    """
    return (weights.row_sums(elsewhere(pairs)) > 0).to(torch.float32)


def elsewhere(pairs: Tensor) -> Tensor:
    """The possible pairs [B, T_q, T_k] whose key is neither the first of its sentence nor the query itself."""
    queries, keys = pairs.shape[-2:]
    first = torch.arange(keys, device=pairs.device) == pairs.any(-2).long().argmax(-1, keepdim=True)
    itself = torch.ones(queries, keys, dtype=torch.bool, device=pairs.device).tril(keys - queries).triu(keys - queries)
    return pairs & ~first.unsqueeze(1) & ~itself
