"""Heads against gold annotation: dependency heads of a treebank, word alignments of a parallel text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.weights import ratio, result_dtype
from hf_entmax.analysis.metrics.words import check_word_ids, word_attention
from hf_entmax.batches.pairs import as_mask, check_weights

AlignmentMethod = Literal["argmax", "threshold", "support"]
ALIGNMENT_METHODS: tuple[AlignmentMethod, ...] = ("argmax", "threshold", "support")


def dependency_hits(attention: Tensor, heads: Tensor, direction: str = "to_head") -> tuple[Tensor, Tensor]:
    """Mark the words whose largest weight [B, H, W, W] lies on the gold word: ``(hits [B, H, W], counted [B, W])``.

    ``heads`` are long [B, W], -1 = root, unknown or padding. "to_head" reads the row of the dependent, "to_dependent" its
    column: the head word must give the dependent more weight than any other word does.
    """
    counted = heads >= 0
    matrix = attention if direction == "to_head" else attention.transpose(-1, -2)
    largest, argmax = matrix.max(dim=-1)
    # A sparse head may give no word any weight at all; the arg-max of such a row is no answer.
    hits = (argmax == heads.unsqueeze(1)) & (largest > 0) & counted.unsqueeze(1)
    return hits, counted


def dependency_accuracy(
    weights: Tensor,
    heads: Tensor,
    word_ids: Tensor | None = None,
    direction: Literal["to_head", "to_dependent"] = "to_head",
) -> Tensor:
    r"""Return the fraction of the words whose largest attention lies on their gold dependency head, per attention head.

    .. math:: \mathrm{acc}_h = \frac{1}{N} \sum_{w : \mathrm{head}(w) \ge 0} [\arg\max_v A_{h,w,v} = \mathrm{head}(w)]

    A is the attention between words: summed over the tokens of the word looked at, averaged over those of the word
    that looks. Tokens outside words (special tokens, padding) take no part. A word whose row is zero is wrong.

    Args:
        weights: attention weights [B, H, T, T].
        heads: long [B, W], zero-based index of the head word of each word; -1 = root, no annotation or padding.
        word_ids: long [B, T], the word of each token, -1 = none; default: every token is a word (T = W).
        direction: "to_head": dependents look at their heads. "to_dependent": heads look at their dependents (the
            largest weight that a dependent receives comes from its head).

    Returns:
        Tensor [H] in [0, 1]; NaN without an annotated word. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape, a head index beyond W, another direction.

    Reference:
        Clark et al. 2019, section 4.2; Voita et al. 2019, section 5.2; for sparse heads Correia et al. 2019, section 5.
    """
    check_weights(weights)
    if direction not in ("to_head", "to_dependent"):
        raise ValueError(f"direction is {direction!r}; allowed are 'to_head' and 'to_dependent'.")
    batch, _, num_queries, num_keys = weights.shape
    if num_queries != num_keys:
        raise ValueError(f"dependencies need self-attention; these weights have {num_queries} x {num_keys} tokens.")
    if heads.dim() != 2 or heads.shape[0] != batch:
        raise ValueError(f"heads has shape {list(heads.shape)}; these weights need [{batch}, number of words].")
    num_words = heads.shape[1]
    heads = check_word_ids(heads, "heads", (batch, num_words))
    if heads.numel() and int(heads.max()) >= num_words:
        raise ValueError(f"heads names word {int(heads.max())}, but there are only {num_words} words (counted from 0).")
    if word_ids is None:
        if num_words != num_keys:
            raise ValueError(f"heads has {num_words} words for {num_keys} tokens: pass word_ids to map them.")
        steps = torch.arange(num_keys, device=weights.device)
        word_ids = steps.expand(batch, -1)
    attention = word_attention(weights, word_ids, word_ids, num_words, num_words)
    present = word_attention(torch.ones_like(weights[:, :1]), word_ids, word_ids, num_words, num_words)[:, 0].any(-1)
    hits, counted = dependency_hits(attention, heads.masked_fill(~present, -1), direction)
    return ratio(hits.double().sum(dim=(0, 2)), counted.double().sum(), result_dtype(weights))


def alignment_links(attention: Tensor, method: AlignmentMethod = "argmax", threshold: float | None = None) -> Tensor:
    """Predict alignment links from attention.

    Args:
        attention: [..., W_t, W_s], non-negative; rows are target words.
        method: "argmax": each target word to its heaviest source word; "threshold": all source words above
            ``threshold``; "support": all source words with nonzero weight.
        threshold: required for, and only for, "threshold".

    Returns:
        bool, the shape of ``attention``. A row without any weight gets no link.

    Raises:
        ValueError: an unknown method, or a threshold where it has no meaning.

    Reference:
        Argmax alignments from attention as in Peters, Niculae, Martins 2019, figure 5; support alignments are what
        sparse attention adds.
    """
    if method not in ALIGNMENT_METHODS:
        raise ValueError(f"method is {method!r}; allowed are {', '.join(map(repr, ALIGNMENT_METHODS))}.")
    if (method == "threshold") != (threshold is not None):
        raise ValueError("threshold must be given for method='threshold' and for no other.")
    if threshold is not None:
        return attention > threshold
    if method == "support":
        return attention > 0
    if attention.shape[-1] == 0:
        return torch.zeros_like(attention, dtype=torch.bool)
    largest, argmax = attention.max(dim=-1, keepdim=True)
    links = torch.zeros_like(attention, dtype=torch.bool)
    return links.scatter_(-1, argmax, largest > 0)


def alignment_counts(links: Tensor, sure: Tensor, possible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare predicted links, bool [B, H, W_t, W_s], with gold ones, bool [B, W_t, W_s]; ``possible`` contains ``sure``.

    Returns ``(links on sure [B, H], links on possible [B, H], links [B, H], sure [B])``, float64.
    """
    return (
        (links & sure.unsqueeze(1)).sum(dim=(-2, -1)).double(),
        (links & possible.unsqueeze(1)).sum(dim=(-2, -1)).double(),
        links.sum(dim=(-2, -1)).double(),
        sure.sum(dim=(-2, -1)).double(),
    )


def error_rate(on_sure: Tensor, on_possible: Tensor, num_links: Tensor, num_sure: Tensor) -> Tensor:
    """Return ``1 - (|A & S| + |A & P|) / (|A| + |S|)`` from counts."""
    return 1.0 - (on_sure + on_possible) / (num_links + num_sure)


def alignment_error_rate(
    weights: Tensor,
    sure: Tensor,
    possible: Tensor | None = None,
    method: AlignmentMethod = "argmax",
    threshold: float | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    r"""Return the alignment error rate of cross-attention against gold word alignments, per head.

    .. math:: \mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}, \qquad S \subseteq P

    with the links A read off the attention. Without possible links it equals 1 - F1.

    Args:
        weights: attention [B, H, W_t, W_s] between words, rows = target words (see :func:`word_attention` for tokens).
        sure: bool [B, W_t, W_s], gold links that must be found.
        possible: bool [B, W_t, W_s], gold links that may be found; sure links are added. Default: ``sure``.
        method: "argmax", "threshold" or "support"; see :func:`alignment_links`.
        threshold: weight in [0, 1) for "threshold".
        key_mask: bool [B, W_s], True = real source word; default: all.
        query_mask: bool [B, W_t], True = real target word; default: all.

    Returns:
        Tensor [H] in [0, 1], lower is better; NaN when neither gold nor predicted links exist. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape or method.

    Reference:
        Och and Ney 2003, "A Systematic Comparison of Various Statistical Alignment Models", section 6.
    """
    check_weights(weights)
    batch, _, num_targets, num_sources = weights.shape
    shape = (batch, num_targets, num_sources)
    sure = as_mask(sure, "sure", shape)
    possible = sure if possible is None else as_mask(possible, "possible", shape) | sure
    attention = weights.to(result_dtype(weights))
    real = torch.ones(shape, dtype=torch.bool, device=weights.device)
    if key_mask is not None:
        real = real & as_mask(key_mask, "key_mask", (batch, num_sources)).unsqueeze(-2)
    if query_mask is not None:
        real = real & as_mask(query_mask, "query_mask", (batch, num_targets)).unsqueeze(-1)
    links = alignment_links(attention.masked_fill(~real.unsqueeze(1), 0.0), method, threshold)
    on_sure, on_possible, num_links, num_sure = alignment_counts(links, sure & real, possible & real)
    return error_rate(on_sure.sum(0), on_possible.sum(0), num_links.sum(0), num_sure.sum()).to(result_dtype(weights))
