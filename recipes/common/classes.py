"""Texts with classes: reading them, a tokenizer for models from scratch, and how well they are told."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.metrics import f1_score
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.batches import evenly
from hf_entmax.analysis.reading.tables import read_splits
from hf_entmax.ops import entmax

Texts = list[tuple[str, str]]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SPLITS = ("train", "dev", "test")


def read_texts(settings: Any) -> tuple[dict[str, Texts], list[str]]:
    """Read texts and labels of train, dev and test, and the classes, sorted; a table that holds all splits is read once.

    Raises:
        ValueError: if a split has no rows, or labels that training does not have; if there is only one class.
    """
    columns = [settings.text, settings.label, *([settings.split_column] if settings.split_column else [])]
    tables = read_splits({split: getattr(settings, split) for split in SPLITS}, columns)
    texts: dict[str, Texts] = {}
    for split in SPLITS:
        texts[split] = [(row[0], row[1]) for row in tables[split] if len(row) == 2 or row[2] == split]
        if not texts[split]:
            where = getattr(settings, split)
            raise ValueError(f"{where}: no row has {split!r} in its column {settings.split_column}.")
    classes = check_labels(**texts)
    if settings.dev_texts:
        texts["dev"] = evenly(texts["dev"], settings.dev_texts)  # files are sorted by language, by class, ...
    if settings.smoke:
        texts = {split: evenly(rows, 64) for split, rows in texts.items()}
    return texts, classes


def check_labels(train: Texts, **others: Texts) -> list[str]:
    """Return the classes, sorted; ``ValueError`` if there is only one, or another split has more."""
    classes = sorted({label for _, label in train})
    if len(classes) < 2:
        raise ValueError(f"all training texts have the label {classes[0]!r}: there is nothing to learn.")
    for split, texts in others.items():
        if unknown := sorted({label for _, label in texts} - set(classes)):
            raise ValueError(f"{split} has labels that training does not have: {', '.join(unknown)}.")
    return classes


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Make a WordPiece of that size, or single characters (0), between ``[CLS]`` and ``[SEP]`` as BERT wants it."""
    if size:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    else:
        characters = sorted({character for text in texts for character in text})
        vocabulary = {token: place for place, token in enumerate([*SPECIAL, *characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        clean_up_tokenization_spaces=False,
    )


def percent(flags: torch.Tensor) -> float | str:
    """Return the share of true ones, %; nothing where there are none."""
    return round(100 * float(flags.double().mean()), 2) if len(flags) else ""


def scores(logits: torch.Tensor, labels: torch.Tensor, alpha: float) -> dict[str, Any]:
    """Compute accuracy, macro-F1 of the classes that occur and, for sparse outputs, what is said with certainty; all but labels in %."""
    guesses, certain = logits.argmax(-1), torch.zeros_like(labels) > 0
    possible = torch.full_like(labels, logits.shape[1])
    if alpha > 1:
        possible = (entmax(logits, alpha) > 0).sum(-1)
        certain = possible == 1
    return {
        "accuracy": percent(guesses == labels),
        "macro_f1": round(100 * float(f1_score(labels, guesses, average="macro", zero_division=0)), 2),
        "possible_labels": round(float(possible.double().mean()), 3),
        "certain": percent(certain),
        "certain_accuracy": percent((guesses == labels)[certain]),
    }
