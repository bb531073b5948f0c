"""From sentences to batches: tokens, words, gold annotation."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_entmax.analysis.reading.alignments import AlignedPair
from hf_entmax.analysis.reading.conllu import UNIVERSAL_RELATIONS, DependencySentence, word_spans
from hf_entmax.analysis.reading.data import TextRecord
from hf_entmax.analysis.reading.words import TokenTable, own_word_ids, token_table
from hf_entmax.batches.prepare import is_encoder_decoder, maximum_length, pad_token_id
from hf_entmax.integration.discovery import attention_sites

Batch = dict[str, Tensor]
_RELATION_IDS = {name: place for place, name in enumerate(UNIVERSAL_RELATIONS)}


class Encoder:
    """Tokenizes sentences for one model and keeps count of what had to be cut or left out.

    Without ``max_length`` a sequence may be as long as tokenizer and model allow.

    Attributes:
        truncated: sentences cut at ``max_length``.
        skipped: sentences left out (nothing left after tokenization, or no way to map tokens to gold words).
        unknown: unknown tokens seen, of ``tokens`` real ones in all.

    Raises:
        ValueError: a batch size or length below 1.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 16, max_length: int | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is {max_length}; it must be at least 1 token.")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        limits = [max_length, maximum_length(model), tokenizer.model_max_length]
        # Tokenizers without a limit of their own report a huge number.
        limits = [limit for limit in limits if limit is not None and limit < 1_000_000]
        self.max_length = min(limits) if limits else None
        self.truncated = self.skipped = self.unknown = self.tokens = 0
        self.encoder_decoder = is_encoder_decoder(model)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._own_words = own_word_ids(tokenizer)

    @functools.cached_property
    def table(self) -> TokenTable:
        """Table of the vocabulary.

        Raises:
            ValueError: the vocabulary does not say where words begin.
        """
        return token_table(self.tokenizer)

    def texts(self, records: Sequence[TextRecord], labels: bool = False) -> Iterator[Batch]:
        """Yield batches of plain text.

        Args:
            records: sentences or pairs.
            labels: language models get ``labels`` too (masked ones: 15 % of the tokens, the same ones every time).
        """
        for chunk in _chunks(records, self.batch_size):
            batch = self._encode([record.source for record in chunk], [record.target for record in chunk])
            if batch is not None:
                yield self._add_labels(batch) if labels else batch

    def dependencies(self, sentences: Sequence[DependencySentence]) -> Iterator[Batch]:
        """Yield batches of treebank sentences with gold heads, mapped to tokens by character positions."""
        for kept, (words,), batch in self._with_gold(sentences, lambda s: [(s.text, s.surface_spans())]):
            gold = [sentence.surface_dependencies() for sentence in kept]
            relations = [[_RELATION_IDS.get(name, -1) for name in names] for _, names, _ in gold]
            batch["word_ids"] = self._place_words(words, batch["attention_mask"])
            batch["dependency_heads"] = _pad([heads for heads, _, _ in gold], -1, "right")
            batch["dependency_relations"] = _pad(relations, -1, "right")
            yield batch

    def alignments(self, pairs: Sequence[AlignedPair]) -> Iterator[Batch]:
        """Yield batches of sentence pairs with gold word alignments."""
        sides = lambda pair: [(" ".join(words), word_spans(words)) for words in (pair.source, pair.target)]  # noqa: E731
        for kept, (source, target), batch in self._with_gold(pairs, sides):
            batch["source_words"] = self._place_words(source, batch["attention_mask"])
            batch["target_words"] = self._place_words(target, batch["labels"] != -100)
            shape = (len(kept), max(len(pair.target) for pair in kept), max(len(pair.source) for pair in kept))
            for name in ("sure", "possible"):
                links = batch[f"{name}_links"] = torch.zeros(shape, dtype=torch.bool)
                for place, pair in enumerate(kept):
                    for source_word, target_word in getattr(pair, name):
                        links[place, target_word, source_word] = True
            yield batch

    def _with_gold(
        self, items: Sequence[Any], sides: Callable[[Any], list[tuple[str, list[tuple[int, int]]]]]
    ) -> Iterator[tuple[list[Any], list[tuple[list[int], ...]], Batch]]:
        """Yield batches of the items whose tokens can be mapped to gold words: items, words of each side, batch.

        ``sides`` gives the text of an item and the spans of its words: of the source and, if there is one, the target.
        """
        for chunk in _chunks(items, self.batch_size):
            kept = []
            for item in chunk:
                mapped = [self._gold_words(*side, target=place == 1) for place, side in enumerate(sides(item))]
                if None in mapped:
                    self.skipped += 1
                else:
                    kept.append((item, mapped, [text for text, _ in sides(item)]))
            if kept:
                found, words, texts = zip(*kept, strict=True)
                targets = [each[1] if len(each) > 1 else None for each in texts]
                batch = self._encode([each[0] for each in texts], targets, filter_empty=False)
                if batch is not None:
                    yield list(found), list(zip(*words, strict=True)), batch

    def _tokenize(self, texts: Sequence[str], target: bool = False, **options: Any) -> Any:
        truncation = {"truncation": True, "max_length": self.max_length} if self.max_length else {}
        named = {"text_target": list(texts)} if target else {"text": list(texts)}
        return self.tokenizer(**named, **truncation, **options)

    def _encode(self, texts: list[str], targets: Sequence[str | None], filter_empty: bool = True) -> Batch | None:
        encoded = self._tokenize(texts)
        ids, kept = encoded["input_ids"], list(range(len(texts)))
        if filter_empty:
            kept = [place for place, row in enumerate(ids) if row]
            self.skipped += len(texts) - len(kept)
            if not kept:
                return None
        ids = [ids[place] for place in kept]
        self._count(ids, [texts[place] for place in kept], encoded, kept)
        side = getattr(self.tokenizer, "padding_side", "right")
        batch = {
            "input_ids": _pad(ids, self._pad, side),
            "attention_mask": _pad([[1] * len(row) for row in ids], 0, side),
        }
        if self._own_words and filter_empty:
            words = [[-1 if number is None else number for number in encoded.word_ids(place)] for place in kept]
            batch["word_ids"] = _pad(words, -1, side)
        if self.encoder_decoder:
            self._encode_targets(batch, [targets[place] for place in kept], filter_empty)
        return batch

    def _encode_targets(self, batch: Batch, targets: list[str | None], own_words: bool) -> None:
        if any(target is None for target in targets):
            # Only the encoder is looked at; the decoder gets the one token it cannot do without.
            batch["decoder_input_ids"] = torch.full((len(targets), 1), _decoder_start(self.model))
            return
        encoded = self._tokenize([target for target in targets if target is not None], target=True)
        labels = encoded["input_ids"]
        batch["labels"] = _pad(labels, -100, "right")
        if self._own_words and own_words:
            # Decoder inputs are the labels one step later, behind a start token.
            words = [
                [-1, *(-1 if number is None else number for number in encoded.word_ids(place))][: len(row)]
                for place, row in enumerate(labels)
            ]
            batch["decoder_word_ids"] = _pad(words, -1, "right")

    def _count(self, ids: list[list[int]], texts: list[str], encoded: Any, kept: list[int]) -> None:
        self.tokens += sum(map(len, ids))
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown != self.tokenizer.eos_token_id:
            self.unknown += sum(row.count(unknown) for row in ids)
        if self.max_length is None:
            return
        for place, row, text in zip(kept, ids, texts, strict=True):
            if len(row) < self.max_length:
                continue
            if getattr(encoded, "encodings", None):
                self.truncated += bool(encoded.encodings[place].overflowing)
            else:
                self.truncated += len(self.tokenizer(text)["input_ids"]) > self.max_length

    def _gold_words(self, text: str, spans: Sequence[tuple[int, int]], target: bool = False) -> list[int] | None:
        """Return the gold word of every token of a sentence, -1 for none; None when tokens cannot be found in the text."""
        starts = [start for start, _ in spans]
        if getattr(self.tokenizer, "is_fast", False):
            encoded = self._tokenize([text], target, return_offsets_mapping=True)
            offsets = encoded["offset_mapping"][0]
        else:
            ids = self._tokenize([text], target)["input_ids"][0]
            special = [bool(self.table.special[index]) for index in ids]
            offsets = find_tokens(text, [self.table.surface[index] for index in ids], special)
            if offsets is None:
                return None
        words = []
        for start, end in offsets:
            while start < end and text[start].isspace():
                start += 1
            place = bisect.bisect_right(starts, start) - 1
            words.append(place if start < end and place >= 0 and start < spans[place][1] else -1)
        return words

    def _place_words(self, words: Sequence[list[int]], mask: Tensor) -> Tensor:
        """Put word ids where the padding side of the batch has put their tokens."""
        placed = torch.full(mask.shape, -1)
        for row, numbers in enumerate(words):
            at = mask[row].bool().nonzero().flatten()
            placed[row, at[: len(numbers)]] = torch.tensor(numbers[: len(at)])
        return placed

    def _add_labels(self, batch: Batch) -> Batch:
        if self.encoder_decoder:
            return batch
        real = batch["attention_mask"].bool()
        mask_token = self.tokenizer.mask_token_id
        # A causal model predicts every next token, also where its tokenizer, that of an encoder, knows a mask.
        if mask_token is None or any(site.site == "decoder_self" for site in attention_sites(self.model)):
            return batch | {"labels": batch["input_ids"].masked_fill(~real, -100)}
        special = torch.isin(batch["input_ids"], torch.tensor(self.tokenizer.all_special_ids, dtype=torch.long))
        labels, inputs = torch.full_like(batch["input_ids"], -100), batch["input_ids"].clone()
        for row in range(len(inputs)):
            candidates = (real[row] & ~special[row]).nonzero().flatten()
            # Every sentence draws for itself: the choice must not depend on the batch it happens to be in.
            generator = torch.Generator().manual_seed(int(inputs[row][real[row]].sum()))
            order = torch.randperm(len(candidates), generator=generator)
            chosen = candidates[order[: max(1, round(0.15 * len(candidates)))]]
            labels[row, chosen] = inputs[row, chosen]
            inputs[row, chosen] = mask_token
        return batch | {"input_ids": inputs, "labels": labels}

    def remarks(self, what: str = "data") -> list[str]:
        """Say which sentences were cut or left out, and whether many tokens are unknown."""
        remarks = []
        if self.truncated:
            remarks.append(
                f"{self.truncated} sentence(s) of the {what} were cut at the maximum of {self.max_length} tokens."
            )
        if self.skipped:
            remarks.append(
                f"{self.skipped} sentence(s) of the {what} were left out: their tokens could not be matched with the text."
            )
        if self.tokens and self.unknown > 0.05 * self.tokens:
            remarks.append(
                f"{100 * self.unknown / self.tokens:.0f} % of the tokens of the {what} are unknown to the tokenizer: do data and "
                "model speak the same language, in the same script and case?"
            )
        return remarks


def find_tokens(text: str, surfaces: Sequence[str], outside: Sequence[bool]) -> list[tuple[int, int]] | None:
    """Find tokens, given without marks, in their text, for tokenizers that do not say where they came from.

    Returns the character span of every token, (0, 0) for those ``outside`` the text; None when one cannot be found.
    """
    spans: list[tuple[int, int]] = []
    position = 0
    for surface, skip in zip(surfaces, outside, strict=True):
        surface = surface.strip()
        if skip or not surface:
            spans.append((0, 0))
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        found = text.lower().find(surface.lower(), position)
        # An unknown or normalized token may hide a word; farther away it would be another occurrence.
        if found < 0 or found > position + 12:
            return None
        spans.append((found, found + len(surface)))
        position = found + len(surface)
    return spans


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _pad(rows: Sequence[Sequence[int]], value: int, side: str) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True, value, padding_side=side)


def _decoder_start(model: Any) -> int:
    for holder in (model.config, getattr(model, "generation_config", None)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return pad_token_id(model) or 0
