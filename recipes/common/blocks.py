"""Running text: blocks of tokens, the words it has, and how well a causal model predicts it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn import functional as F

from common.batches import answers_of
from common.settings import RunSettings, option
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.generation import SamplingMetrics
from hf_entmax.ops import entmax

Block = dict[str, list[int]]
#: A batch that is only measured may have so many logits: half a gigabyte in float32.
LOGITS = 2**27


@dataclasses.dataclass
class TextSettings(RunSettings):
    """The running text of a recipe for causal models, and how much of it there is."""

    data: str = option("lm/wikitext-2/{split}.txt.gz", "running text: {split} is train, dev_split and test")
    dev_split: str = option("valid", "running text: what {split} is for dev")
    column: str = option("text", "running text: which column has it, where the data have columns")
    block: int = option(128, "running text: tokens in a block, how far back a token can see")
    train_tokens: int = option(0, "running text: train on so many tokens; 0 for all")
    skip_tokens: int = option(0, "running text: training begins after so many tokens, those of an earlier training")
    dev_tokens: int = option(0, "running text: tokens of dev; 0 for all")
    test_tokens: int = option(0, "running text: tokens of test; 0 for all")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("block", self.block >= 2, "at least 2")
        enough = self.train_tokens == 0 or self.train_tokens >= self.block
        self.require("train_tokens", enough, f"0 for all, or at least block={self.block}")
        self.require("skip_tokens", self.skip_tokens >= 0, "at least 0")
        for name in ("dev_tokens", "test_tokens"):
            count = getattr(self, name)
            self.require(name, count == 0 or count >= 2, "0 for all, or at least 2: the first is not predicted")


def encode(lines: list[str], tokenizer: Any, limit: int = 0) -> tuple[list[int], int | None]:
    """Join the token ids of lines with their ends, and count their words.

    Args:
        lines: without their ends.
        tokenizer: of the model.
        limit: return at most so many ids; 0 for all.

    Returns:
        The ids, and the words between blanks of the text that they stand for, with one end per line; None where the limit
        cuts a line and the tokenizer cannot say which of its words come before the cut.
    """
    ids: list[int] = []
    words = 0
    for start in range(0, len(lines), 1000):
        part = [line + "\n" for line in lines[start : start + 1000]]
        rows = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        for text, row in zip(part, rows, strict=True):
            if limit and len(ids) + len(row) >= limit:
                kept = limit - len(ids)
                begun = _words_before(text, row, kept, tokenizer)
                return ids + row[:kept], None if begun is None else words + begun
            ids += row
            words += count_words(text)
    return ids, words


def count_words(text: str) -> int:
    """Count words between blanks, and one end per line."""
    return len(text.split()) + text.count("\n")


def _words_before(text: str, row: list[int], kept: int, tokenizer: Any) -> int | None:
    """Count the words of a text up to the end of its first tokens, of all its tokens ``row``."""
    if kept == len(row):
        return count_words(text)
    start = tokenizer.decode(row[:kept])
    if text.startswith(start):
        return count_words(start)
    if not tokenizer.is_fast:
        return None
    places = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    # A tokenizer may drop what stands between two tokens: the cut is exact only if that is no word and no end of a line.
    counts = {count_words(text[: places[kept - 1][1]]), count_words(text[: places[kept][0]])}
    return counts.pop() if len(counts) == 1 else None


def cut(ids: list[int], length: int, full_only: bool = False) -> list[Block]:
    """Cut blocks that overlap by one token; the last may be shorter, or is left out with ``full_only``."""
    blocks = [ids[start : start + length] for start in range(0, len(ids) - 1, length - 1)]
    return [{"input_ids": block} for block in blocks if len(block) == length or not full_only]


def collate(blocks: list[Block]) -> dict[str, Tensor]:
    """Make tensors of blocks; a shorter one is filled up behind with its last token, which nobody sees or predicts."""
    longest = max(len(block["input_ids"]) for block in blocks)
    rows = [(block["input_ids"], longest - len(block["input_ids"])) for block in blocks]
    return {
        "input_ids": torch.tensor([ids + ids[-1:] * missing for ids, missing in rows]),
        "labels": torch.tensor([ids + [-100] * missing for ids, missing in rows]),
    }


def probe(blocks: list[Block], length: int) -> list[dict[str, Tensor]]:
    """Collate the first 32 whole blocks (or the first one, if none is whole), to look at the heads with."""
    whole = [block for block in blocks if len(block["input_ids"]) == length][:32] or blocks[:1]
    return [collate(whole[start : start + 8]) for start in range(0, len(whole), 8)]


def prepare(
    settings: Any, lines: dict[str, list[str]], tokenizer: Any
) -> tuple[dict[str, list[Block]], dict[str, int | None]]:
    """Make blocks of train, dev and test, the training text only in whole ones; and the words of each, as `encode` counts them."""
    limits = {"train": settings.train_tokens, "dev": settings.dev_tokens, "test": settings.test_tokens}
    if settings.smoke:
        limits = dict.fromkeys(limits, 8 * settings.block)
    skipped = {"train": settings.skip_tokens}
    if limits["train"]:
        limits["train"] += settings.skip_tokens
    encoded = {split: encode(text, tokenizer, limits[split]) for split, text in lines.items()}
    blocks = {
        split: cut(ids[skipped.get(split, 0) :], settings.block, full_only=split == "train")
        for split, (ids, _) in encoded.items()
    }
    for split, found in blocks.items():
        if not found:
            left = f" after {settings.skip_tokens} tokens" if skipped.get(split) else ""
            raise ValueError(
                f"{settings.data}: the {split} text{left} is shorter than one block of {settings.block} tokens."
            )
    return blocks, {split: words for split, (_, words) in encoded.items()}


def read_splits(settings: Any) -> dict[str, list[str]]:
    if "{split}" not in settings.data:
        raise ValueError(f"data={settings.data!r} must contain {{split}}: there are three texts, train, dev and test.")
    names = {"train": "train", "dev": settings.dev_split, "test": "test"}
    return {split: read_text(settings.data.replace("{split}", name), settings.column) for split, name in names.items()}


def text_measures(model: Any, blocks: list[Block], words: int | None) -> dict[str, float]:
    """Measure how well a model predicts a text; the processes share the work.

    ``perplexity`` is infinite where the model gives a token that occurs the probability 0; ``ruled_out`` is the share of such
    tokens, and ``epsilon_perplexity`` adds 1e-6 to every probability (see `hf_entmax.generation.epsilon_perplexity`). The two
    per word are also infinite where a float cannot hold them, for text with few blanks.

    Args:
        model: not wrapped.
        blocks: of the text.
        words: of the text, as `encode` counts them; None or 0 leaves out the measures per word.
    """
    row = max((len(block["input_ids"]) for block in blocks), default=1) * model.config.get_text_config().vocab_size
    size = min(16, max(1, LOGITS // row))
    metrics = SamplingMetrics.for_model(model)

    def sums(part: list[Block]) -> Tensor:
        """Sum over each block: tokens, nats, nats with epsilon, sparsemax score, Jensen-Shannon, support size, tokens ruled out."""
        batch = send_to_device(collate(part), model.device)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        kept = labels != -100
        nats = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        nats[kept] = negative_log(logits[kept], labels[kept], metrics.alpha).double()
        rows = metrics.preprocess_logits_for_metrics(logits, batch["labels"]).double()
        columns = [kept.double(), nats, -rows[..., 0], *rows[..., 1:].unbind(-1), nats.isinf().double()]
        return torch.stack(columns, -1).masked_fill(~kept[..., None], 0.0).sum(1).cpu()

    found = answers_of(blocks, sums, lambda block: len(block["input_ids"]), size)
    tokens, nats_sum, epsilon_sum, *others = torch.stack(found).sum(0).tolist()
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
    """Return infinity, no error, where a float cannot hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def negative_log(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Compute ``-log p(label)`` ``[n]`` under entmax of logits ``[n, V]``; infinite where the probability is 0."""
    if alpha == 1.0:
        return F.cross_entropy(logits, labels, reduction="none")
    return -entmax(logits, alpha).gather(1, labels[:, None]).squeeze(1).log()
