"""Heads that know words: subwords of one word, question marks, special tokens, words made of several tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.weights import DenseWeights, HeadWeights, ratio, result_dtype, word_indicator
from hf_entmax.batches.pairs import as_mask, check_weights, possible_pairs, query_mask_or_default


def check_word_ids(word_ids: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Check word ids: integer, of the given shape, -1 for tokens that belong to no word."""
    if not isinstance(word_ids, Tensor):
        raise TypeError(f"{name} must be an integer tensor of shape {list(shape)}, got {type(word_ids).__name__}.")
    if word_ids.is_floating_point() or word_ids.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers (-1 = no word), got {word_ids.dtype}.")
    if tuple(word_ids.shape) != shape:
        raise ValueError(f"{name} has shape {list(word_ids.shape)}; these weights need {list(shape)}.")
    return word_ids.long()


def word_attention(
    weights: Tensor,
    query_words: Tensor,
    key_words: Tensor | None = None,
    num_query_words: int | None = None,
    num_key_words: int | None = None,
) -> Tensor:
    """Return attention between words: the sum over the tokens of the key word, the mean over those of the query word.

    Args:
        weights: attention weights [B, H, T_q, T_k] between tokens.
        query_words: long [B, T_q], the word of each query token, -1 = none (padding, special tokens).
        key_words: long [B, T_k]; default: ``query_words`` (self-attention).
        num_query_words: W_q; default: one more than the largest id.
        num_key_words: W_k; default likewise.

    Returns:
        Tensor [B, H, W_q, W_k]; rows of words that a sentence does not have are zero. Differentiable in ``weights``.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Clark et al. 2019, "What Does BERT Look At?", section 4.1.
    """
    check_weights(weights)
    batch, _, num_queries, num_keys = weights.shape
    query_words = check_word_ids(query_words, "query_words", (batch, num_queries))
    key_words = query_words if key_words is None else check_word_ids(key_words, "key_words", (batch, num_keys))
    if key_words.shape[1] != num_keys:
        raise ValueError(f"these weights have {num_keys} keys but {num_queries} queries: pass key_words as well.")
    num_query_words = _num_words(query_words) if num_query_words is None else num_query_words
    num_key_words = _num_words(key_words) if num_key_words is None else num_key_words
    dense = DenseWeights(weights.to(result_dtype(weights)))
    return mean_between_words(dense, query_words, key_words, num_query_words, num_key_words)


def _num_words(word_ids: Tensor) -> int:
    return int(word_ids.max()) + 1 if word_ids.numel() else 0


def mean_between_words(
    weights: HeadWeights, query_words: Tensor, key_words: Tensor, num_query_words: int, num_key_words: int
) -> Tensor:
    """Compute :func:`word_attention` for weights in either form and ids that were checked."""
    sums = weights.between_words(query_words, key_words, num_query_words, num_key_words)
    tokens = word_indicator(query_words, num_query_words, sums.dtype).sum(dim=1)
    return sums / tokens.clamp(min=1.0)[:, None, :, None]


def merging_sums(weights: HeadWeights, word_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum the subword-merging scores, words of several tokens apart from words of one.

    The weights [B, H, T, T] must be finite where both tokens belong to a word, ``word_ids`` are long [B, T], -1 = none.
    Returns ``(several, num_several, single, num_single)``: summed scores [B, H] and numbers of words [B], float64.
    """
    num_words = _num_words(word_ids)
    same = (word_ids.unsqueeze(-1) == word_ids.unsqueeze(-2)) & (word_ids >= 0).unsqueeze(-1)
    own = weights.diagonal(0)
    to_rest = weights.row_sums(same) - own.masked_fill((word_ids < 0).unsqueeze(1), 0.0)
    pieces = same.sum(-1)
    score = torch.where((pieces == 1).unsqueeze(1), own, to_rest)
    # Slot 0 collects the tokens that belong to no word and is dropped.
    slots = (word_ids + 1).unsqueeze(1).expand_as(score)
    best = score.new_zeros(*score.shape[:2], num_words + 1).scatter_reduce_(-1, slots, score, "amax")[..., 1:]
    size = torch.zeros(word_ids.shape[0], num_words + 1, dtype=torch.long, device=word_ids.device)
    size = size.scatter_add_(1, word_ids + 1, torch.ones_like(word_ids))[:, 1:]
    several, single = size > 1, size == 1
    return (
        best.masked_fill(~several.unsqueeze(1), 0.0).double().sum(-1),
        several.sum(-1).double(),
        best.masked_fill(~single.unsqueeze(1), 0.0).double().sum(-1),
        single.sum(-1).double(),
    )


def subword_merging(weights: Tensor, word_ids: Tensor, key_mask: Tensor | None = None, min_pieces: int = 1) -> Tensor:
    r"""Measure how strongly a head binds the subwords of one word together (BPE-merging score).

    For a word of several tokens: the largest mass that any of its tokens gives to the others,
    :math:`\max_{i \in w} \sum_{j \in w, j \ne i} p_{ij}`; for a word of one token: the weight on itself, :math:`p_{ii}`.
    Averaged over all words.

    Args:
        weights: attention weights [B, H, T, T].
        word_ids: long [B, T], the word each token belongs to; -1 = none (padding, special tokens).
        key_mask: bool [B, T], True = real token; default: the tokens with a word.
        min_pieces: count only words of at least this many tokens, 1 or 2. With 2, a head that merely looks at itself
            does not pass for a merging head.

    Returns:
        Tensor [H] in [0, 1]; NaN without such words. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape, weights that are not square, another ``min_pieces``.

    Reference:
        Correia, Niculae, Martins 2019, section 5.2 and figure 8.
    """
    check_weights(weights)
    batch, _, num_queries, num_keys = weights.shape
    if num_queries != num_keys:
        raise ValueError(f"subword merging needs self-attention; these weights have {num_queries} x {num_keys} tokens.")
    if min_pieces not in (1, 2):
        raise ValueError(f"min_pieces is {min_pieces}; allowed are 1 (all words) and 2 (words of several tokens).")
    word_ids = check_word_ids(word_ids, "word_ids", (batch, num_keys))
    if key_mask is not None:
        word_ids = word_ids.masked_fill(~as_mask(key_mask, "key_mask", (batch, num_keys)), -1)
    several, num_several, single, num_single = merging_sums(DenseWeights(weights.to(result_dtype(weights))), word_ids)
    if min_pieces == 2:
        return ratio(several.sum(0), num_several.sum(), result_dtype(weights))
    return ratio((several + single).sum(0), (num_several + num_single).sum(), result_dtype(weights))


def interrogation(weights: Tensor, interrogative_mask: Tensor, question_mask: Tensor) -> Tensor:
    """Return the mean weight on the question mark of a sentence from its interrogative words.

    Args:
        weights: attention weights [B, H, T, T].
        interrogative_mask: bool [B, T], True = token of an interrogative word (who, what, how, ...).
        question_mask: bool [B, T], True = token of the sentence-final question mark.

    Returns:
        Tensor [H] in [0, 1], averaged over the interrogative tokens of sentences that have a question mark; NaN
        without any. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Correia, Niculae, Martins 2019, section 5.2 and figure 9.
    """
    check_weights(weights)
    batch, _, num_queries, num_keys = weights.shape
    queries = as_mask(interrogative_mask, "interrogative_mask", (batch, num_queries))
    keys = as_mask(question_mask, "question_mask", (batch, num_keys))
    pairs = queries.unsqueeze(-1) & keys.unsqueeze(-2)
    mass = DenseWeights(weights.to(result_dtype(weights))).row_sums(pairs)
    return ratio(mass.double().sum(dim=(0, 2)), pairs.any(-1).sum().double(), result_dtype(weights))


def sink_mass(
    weights: Tensor,
    sink_mask: Tensor,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return the mean mass that a head drops on certain keys: special tokens, the first token, punctuation.

    Args:
        weights: attention weights [B, H, T_q, T_k].
        sink_mask: bool [B, T_k], True = the keys asked about.
        key_mask: bool [B, T_k], True = real key; default: all.
        query_mask: bool [B, T_q]; default: ``key_mask`` for square weights, otherwise all queries.
        causal: the site is causal.

    Returns:
        Tensor [H] in [0, 1], averaged over the real queries; NaN when there is none. Not differentiable.

    Raises:
        TypeError: a wrong type. ValueError: a wrong shape.

    Reference:
        Clark et al. 2019, section 3.2 (special tokens); Xiao et al. 2023, "Attention Sinks".
    """
    check_weights(weights)
    batch, _, _, num_keys = weights.shape
    sinks = as_mask(sink_mask, "sink_mask", (batch, num_keys))
    keys = torch.ones_like(sinks) if key_mask is None else as_mask(key_mask, "key_mask", (batch, num_keys))
    pairs = possible_pairs(weights, keys, query_mask_or_default(weights, keys, query_mask), causal)
    on_sinks = weights.to(result_dtype(weights)).masked_fill(~(pairs & sinks.unsqueeze(-2)).unsqueeze(1), 0.0)
    return ratio(on_sinks.double().sum(dim=(0, 2, 3)), pairs.any(-1).sum().double(), result_dtype(weights))
