"""How well a causal language model predicts a text, also where some words get no probability."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common.batches import Batches
from common.blocks import Block, collate
from common.run import Run
from hf_entmax.generation import SamplingMetrics
from hf_entmax.ops import entmax


def text_measures(model: Any, blocks: list[Block], words: int | None, run: Run, size: int = 16) -> dict[str, float]:
    """How well a model predicts a text.

    ``perplexity`` is infinite where the model gives a token that occurs the probability 0; ``ruled_out`` is the share of such
    tokens, and ``epsilon_perplexity`` adds 1e-6 to every probability (see `hf_entmax.generation.epsilon_perplexity`). The two
    per word are also infinite where a float cannot hold them, for text with few blanks.

    Args:
        model: perhaps prepared for the processes.
        blocks: of the text.
        words: of the text, as `encode` counts them; None or 0 leaves out the measures per word.
        run: its processes share the work.
        size: blocks in a batch.
    """
    plain = run.accelerator.unwrap_model(model)
    metrics = SamplingMetrics.for_model(plain)
    # tokens, nats, nats with epsilon, sparsemax score, Jensen-Shannon, support size, tokens ruled out
    sums = torch.zeros(7, dtype=torch.float64)
    for batch in Batches(blocks, collate, lambda block: len(block["input_ids"]), run.accelerator, size).in_order():
        with torch.no_grad(), run.accelerator.autocast():
            logits = plain(input_ids=batch["input_ids"], use_cache=False).logits.float()
        labels = batch["labels"][:, 1:].flatten()
        kept = labels != -100
        labels, logits_kept = labels[kept], logits[:, :-1].flatten(0, 1)[kept]
        nats = negative_log(logits_kept, labels, metrics.alpha)
        rows = metrics.preprocess_logits_for_metrics(logits, batch["labels"])
        measured = rows[:, :-1].flatten(0, 1)[kept].double().sum(0).cpu()
        sums[0] += len(labels)
        sums[1] += nats.double().sum().cpu()
        sums[2:6] += measured * torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
        sums[6] += int(nats.isinf().sum())
    tokens, nats_sum, epsilon_sum, *others = run.accelerator.reduce(sums.to(run.accelerator.device), "sum").tolist()
    per_word = {}
    if words:
        per_word = {"word_perplexity": _exp(nats_sum / words), "word_epsilon_perplexity": _exp(epsilon_sum / words)}
    return {
        "perplexity": _exp(nats_sum / tokens),
        "epsilon_perplexity": _exp(epsilon_sum / tokens),
        **per_word,
        "sparsemax_score": others[0] / tokens,
        "jensen_shannon": others[1] / tokens,
        "support_size": others[2] / tokens,
        "ruled_out": others[3] / tokens,
        "tokens": tokens,
        **({"words": words} if words else {}),
    }


def _exp(nats: float) -> float:
    """Infinite, not an error, where a float cannot hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def negative_log(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """``-log p(label)`` ``[n]`` under entmax of logits ``[n, V]``; infinite where the probability is 0."""
    if alpha == 1.0:
        return F.cross_entropy(logits, labels, reduction="none")
    return -entmax(logits, alpha).gather(1, labels[:, None]).squeeze(1).log()
