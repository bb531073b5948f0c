"""What models from text to text have in common: examples, generated texts and their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu

from common.batches import answers_of

Pairs = list[tuple[str, str]]


def names_of_sets(places: list[str]) -> list[str]:
    """Return what to call test sets: their files, or the whole paths where these are called alike."""
    short = [Path(where).name.partition(".")[0] for where in places]
    return short if len(set(short)) == len(short) else [where.replace("/", "_") for where in places]


def encode_pairs(pairs: Pairs, tokenizer: Any, longest: int) -> tuple[list[dict[str, list[int]]], int]:
    """Encode pairs, and count how many were left out because a side is too long."""
    sources = tokenizer([source for source, _ in pairs])["input_ids"]
    targets = tokenizer(text_target=[target for _, target in pairs])["input_ids"]
    both = zip(sources, targets, strict=True)
    examples = [{"input_ids": s, "labels": t} for s, t in both if max(len(s), len(t)) <= longest]
    return examples, len(pairs) - len(examples)


def cut_pairs(pairs: Pairs, tokenizer: Any, longest: int, written: int | None = None) -> list[dict[str, list[int]]]:
    """Return the token ids of all pairs, with texts to read cut, and texts to write too where ``written`` bounds them."""
    sources = tokenizer([source for source, _ in pairs], truncation=True, max_length=longest)["input_ids"]
    targets = tokenizer(text_target=[t for _, t in pairs], truncation=written is not None, max_length=written)
    return [{"input_ids": s, "labels": t} for s, t in zip(sources, targets["input_ids"], strict=True)]


def decode(predictions: Any, tokenizer: Any) -> list[str]:
    """Return the texts of what the Seq2SeqTrainer predicts: token ids ``[B, T]``, filled up with -100."""
    return tokenizer.batch_decode(
        np.where(predictions < 0, tokenizer.pad_token_id, predictions), skip_special_tokens=True
    )


def generate(model: Any, sources: list[list[int]], tokenizer: Any, size: int, **options: Any) -> list[str]:
    """Collect what ``generate()`` makes of token ids, in their order, on all processes.

    Args:
        model: not wrapped.
        sources: token ids of each text.
        tokenizer: decodes, without special tokens.
        size: texts in a batch.
        options: of ``generate()``.
    """

    def answer(part: list[list[int]]) -> list[str]:
        inputs = tokenizer.pad({"input_ids": part}, return_tensors="pt").to(model.device)
        output = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
        return tokenizer.batch_decode(output, skip_special_tokens=True)

    return answers_of(sources, answer, len, size)


def translate(model: Any, pairs: Pairs, tokenizer: Any, longest: int, beams: int) -> list[str]:
    """Translate the sources, of at most ``longest`` tokens; sources that are longer are cut, none is left out."""
    sources = tokenizer([source for source, _ in pairs], truncation=True, max_length=longest)["input_ids"]
    return generate(model, sources, tokenizer, 64, num_beams=beams, max_new_tokens=longest)


def bleu_and_chrf(hypotheses: list[str], pairs: Pairs) -> dict[str, float]:
    """Score by sacrebleu, which has their signatures."""
    references = [[target for _, target in pairs]]
    return {
        "bleu": sacrebleu.corpus_bleu(hypotheses, references).score,
        "chrf": sacrebleu.corpus_chrf(hypotheses, references).score,
    }
