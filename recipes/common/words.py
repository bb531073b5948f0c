"""The task of inflection: words with their tags, how they are read, encoded and counted."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from common.from_scratch import build_seq2seq, seq2seq_tokenizer, write_at_most
from common.pretrained import check_length
from common.settings import make_sparse
from hf_entmax.analysis.reading.tables import languages_of, read_lists


@dataclasses.dataclass(frozen=True)
class Word:
    """One question: the form of a lemma."""

    language: str
    lemma: str
    form: str
    tags: tuple[str, ...]

    @property
    def source(self) -> str:
        """What the encoder reads; where no tags say which form is asked for, the lemma alone."""
        return "".join(f"<{name}>" for name in (self.language, *self.tags) if self.tags) + self.lemma


def read_words(settings: Any, split: str) -> list[Word]:
    """Read all words of a split (``train``, ``dev``, ``test``) in the chosen languages; for a pretrained model without their tags."""
    where = settings.data
    named = settings.train_split if split == "train" else split
    if "{language}" in where:
        rows = [
            (language, *row)
            for language in settings.languages or languages_of(where)
            for row in read_fields(where.format(language=language, split=named), ("lemma", "form", "tags"))
        ]
    else:
        # One table for all languages; with a column `split` where {split} does not name files of their own.
        columns = ["lang", "lemma", "form", "tags", *([] if "{split}" in where else ["split"])]
        table = read_fields(where.replace("{split}", named), columns)
        rows = [row[:4] for row in table if len(row) == 4 or row[4] == split]
        rows = [row for row in rows if not settings.languages or row[0] in settings.languages]
    words = [
        Word(lang, lemma, form, () if settings.model else tuple(tags.split(";"))) for lang, lemma, form, tags in rows
    ]
    if missing := sorted(set(settings.languages) - {word.language for word in words}):
        raise ValueError(f"languages: {where} has no {split} words of {', '.join(missing)}.")
    if not words:
        raise ValueError(f"{where}: no words for the split {split!r}.")
    return words


def read_fields(where: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Read columns of a table; a list of tags, as JSON may have it, becomes what tables have: ``V;PST``."""
    joined = [";" if column == "tags" else " " for column in columns]
    return [tuple(j.join(texts) for j, texts in zip(joined, row, strict=True)) for row in read_lists(where, columns)]


def first_of_each(words: list[Word], count: int) -> list[Word]:
    """Keep at most ``count`` words per language; 0 keeps all."""
    taken: dict[str, int] = defaultdict(int)
    kept = []
    for word in words:
        taken[word.language] += 1
        if not count or taken[word.language] <= count:
            kept.append(word)
    return kept


def build_tokenizer(words: list[Word]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single characters, and a special token for every language and tag of the training data."""
    special = sorted({f"<{name}>" for word in words for name in (word.language, *word.tags)})
    characters = sorted({character for word in words for character in word.lemma + word.form})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return seq2seq_tokenizer(tokenizer, special)


def load_or_build(settings: Any, train: list[Word], asked: list[Word]) -> tuple[Any, Any]:
    """Return tokenizer and model, patched as the settings say: a pretrained one, or a small BART from scratch.

    Args:
        settings: of the recipe.
        train: the words to learn.
        asked: the words of dev and test.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model) if settings.model else build_tokenizer(train)
    lengths = lambda texts: [len(ids) for ids in tokenizer(texts)["input_ids"]]  # noqa: E731
    longest = max(lengths([side for word in train for side in (word.source, word.form)]))
    read = max(longest, *lengths([word.source for word in asked]))
    if settings.model:
        model = AutoModelForSeq2SeqLM.from_pretrained(settings.model, dtype=torch.float32)
        check_length(model, read, "the longest word")
        model = write_at_most(model, longest)
    else:  # an answer starts with the token that ends it
        shape = {"decoder_start_token_id": 1, "max_position_embeddings": read + 16}
        model = build_seq2seq(settings, len(tokenizer), longest, **shape)
    return tokenizer, make_sparse(model, settings)


def encode(words: list[Word], tokenizer: Any, model: Any = None) -> list[dict[str, list[int]]]:
    """Encode questions and answers; these without a start token that ``model`` puts before the labels itself."""
    sources = tokenizer([word.source for word in words])["input_ids"]
    targets = tokenizer(text_target=[word.form for word in words])["input_ids"]
    start = model.config.decoder_start_token_id if model else None
    return [{"input_ids": s, "labels": t[t[0] == start :]} for s, t in zip(sources, targets, strict=True)]


def accuracy_per_language(words: list[Word], answers: list[str]) -> dict[str, float]:
    """Return the share of words that are wholly right, %: as this row has them or, where the same is asked twice, the other."""
    known, right = defaultdict(set), defaultdict(list)
    for word in words:
        known[word.language, word.source].add(word.form)
    for word, answer in zip(words, answers, strict=True):
        right[word.language].append(answer in known[word.language, word.source])
    return {language: 100 * sum(flags) / len(flags) for language, flags in sorted(right.items())}


def accuracy(words: list[Word], answers: list[str]) -> float:
    """Return the mean over languages, %."""
    return statistics.fmean(accuracy_per_language(words, answers).values())
