"""Words in a sequence of token ids: which tokens form one word, which are special, where the question is asked.

Everything is looked up in tables over the vocabulary, so that a batch of ids is enough (no text) and no loop runs over
its tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import decoders
from torch import Tensor

QUESTION_MARKS = frozenset("?？؟\u037e⸮՞")

#: Words that ask, by ISO 639-1 code. Forms are lower case.
INTERROGATIVE_WORDS: dict[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "cs": "kdo koho komu kým co čeho čemu čím který která které jaký jaká jaké čí kde kam kudy odkud kdy "
        "proč jak kolik",
        "de": "wer wen wem wessen was welche welcher welches welchen welchem wo wohin woher wann warum weshalb "
        "wieso wie wieviel womit wofür worüber woran worauf wozu",
        "en": "who whom whose what which where when why how",
        "es": "quién quiénes qué cuál cuáles dónde adónde cuándo cómo cuánto cuánta cuántos cuántas",
        "fr": "qui que quoi quel quelle quels quelles lequel laquelle où quand pourquoi comment combien",
        "it": "chi che cosa quale quali dove quando perché come quanto quanta quanti quante",
        "ja": "誰 だれ 何 なに なん どこ いつ なぜ どう どの どれ どちら いくら いくつ",
        "nl": "wie wat welke welk waar wanneer waarom hoe hoeveel waarheen",
        "pt": "quem que quê qual quais onde aonde quando porque porquê como quanto quanta quantos quantas",
        "ro": "cine ce care cui unde când cum cât câtă câți câte",
    }.items()
}


@dataclass(frozen=True)
class TokenTable:
    """What every id of a vocabulary tells about words.

    Attributes:
        scheme: "metaspace" (SentencePiece), "byte_level", "wordpiece", "end_of_word" (``</w>``), "continuation"
            (``@@``), "characters" (characters or bytes) or "words".
        starts: bool [V], a word begins here whatever came before.
        ends: bool [V], the next token begins a word.
        outside: bool [V], belongs to no word (special tokens, white space).
        special: bool [V], special tokens other than the unknown token.
        punctuation: bool [V], nothing but punctuation.
        question: bool [V], a question mark.
        first_class: int8 [V], class of the first character where a change of class begins a word; else 0.
        last_class: int8 [V], the same of the last character.
        surface: text of every id without marks of its scheme.
    """

    scheme: str
    starts: Tensor
    ends: Tensor
    outside: Tensor
    special: Tensor
    punctuation: Tensor
    question: Tensor
    first_class: Tensor
    last_class: Tensor
    surface: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.surface)


def token_table(tokenizer: Any) -> TokenTable:
    """Build the table of a tokenizer's vocabulary, of CPU tensors.

    It may be any Hugging Face tokenizer: SentencePiece, WordPiece, byte-level BPE, BPE with ``</w>`` or ``@@``, characters,
    bytes or whole words.

    Raises:
        ValueError: the vocabulary does not say where words begin.
    """
    size = len(tokenizer)
    tokens = [token if isinstance(token, str) else "" for token in tokenizer.convert_ids_to_tokens(list(range(size)))]
    unknown = tokenizer.unk_token_id
    kept_special = {unknown, tokenizer.mask_token_id}
    special = torch.zeros(size, dtype=torch.bool)
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = {index for index, token in added.items() if getattr(token, "special", False)}
    for index in marked.union(tokenizer.all_special_ids) - kept_special:
        if index is not None and 0 <= index < size:
            special[index] = True
    ordinary = [token for index, token in enumerate(tokens) if not special[index] and index not in kept_special]
    scheme = _scheme(tokenizer, ordinary)

    strip, begins, finishes = _MARKS[scheme]
    surface = [strip(token) for token in tokens]
    if scheme == "byte_level":  # token by token, as the bytes of one may be no text without its neighbour
        surface = [decoders.ByteLevel().decode([text]) for text in surface]
    mark = lambda test, texts=surface: torch.tensor([bool(test(text)) for text in texts], dtype=torch.bool)  # noqa: E731
    starts, ends, outside = mark(begins, tokens), mark(finishes, tokens), special.clone()
    for index in kept_special - {None}:
        # A WordPiece or word vocabulary loses a whole word to [UNK]; elsewhere only a piece of one is unknown.
        starts[index] = scheme in ("wordpiece", "words") or index == tokenizer.mask_token_id
    if scheme == "characters":
        outside |= mark(str.isspace)
        # A tag such as <plural> among single characters is a word of its own.
        long_token = mark(lambda text: len(text) > 1)
        starts |= long_token
        ends |= long_token
    classes = [_character_classes(text) if scheme == "byte_level" else (0, 0) for text in surface]
    return TokenTable(
        scheme=scheme,
        starts=starts,
        ends=ends,
        outside=outside,
        special=special,
        punctuation=mark(_is_punctuation) & ~special,
        question=mark(lambda text: text.strip() in QUESTION_MARKS) & ~special,
        first_class=torch.tensor([first for first, _ in classes], dtype=torch.int8),
        last_class=torch.tensor([last for _, last in classes], dtype=torch.int8),
        surface=tuple(surface),
    )


def table_or_note(tokenizer: Any) -> tuple[TokenTable | None, list[str]]:
    """Build the table, or return a note that says why there is none."""
    try:
        return (None if tokenizer is None else token_table(tokenizer)), []
    except ValueError as problem:
        return None, [str(problem)]


def word_ids(table: TokenTable, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Number the words of every sentence: long [B, T], 0, 1, 2, ...; -1 for special tokens, white space and padding.

    ``table`` is of the tokenizer that made the ids [B, T]; ``mask``, bool [B, T], is True for real tokens (default: all).

    Raises:
        ValueError: an id beyond the vocabulary.
    """
    check_ids(table, input_ids)
    ids = input_ids.cpu()
    outside = table.outside[ids]
    if mask is not None:
        outside = outside | ~mask.cpu().bool()
    previous = torch.cat([ids[:, :1], ids[:, :-1]], dim=1)
    after_gap = torch.cat([torch.ones_like(outside[:, :1]), outside[:, :-1]], dim=1)
    begins = table.starts[ids] | table.ends[previous] | after_gap
    first, last = table.first_class[ids], table.last_class[previous]
    begins = begins | ((first != last) & (first > 0) & (last > 0))
    numbers = (begins & ~outside).cumsum(dim=1) - 1
    return numbers.masked_fill(outside, -1).to(input_ids.device)


def check_ids(table: TokenTable, input_ids: Tensor) -> None:
    """Raise ``ValueError`` unless every id lies inside the vocabulary of the tokenizer."""
    outside = input_ids[(input_ids >= len(table)) | (input_ids < 0)]
    if outside.numel():
        raise ValueError(
            f"token id {int(outside.max())} is not in the tokenizer's vocabulary of {len(table)} entries: "
            "the data was made with another tokenizer. Pass the tokenizer that made it."
        )


def own_word_ids(tokenizer: Any) -> bool:
    """Check whether the tokenizer's own ``word_ids`` tell words apart.

    Slow tokenizers have none, and some fast ones (a SentencePiece model without a pre-tokenizer) call the whole text
    one word, or (characters) every character a word.
    """
    if not getattr(tokenizer, "is_fast", False):
        return False
    encoding = tokenizer("one two three", add_special_tokens=False)
    try:
        numbers = [number for number in encoding.word_ids(0) if number is not None]
    except (ValueError, IndexError):
        return False
    return len(set(numbers)) == 3


def question_masks(
    table: TokenTable,
    input_ids: Tensor,
    words: Tensor,
    mask: Tensor,
    interrogatives: Iterable[str] = INTERROGATIVE_WORDS["en"],
) -> tuple[Tensor, Tensor]:
    """Find the interrogative words and the sentence-final question mark of every question, each bool [B, T].

    Both are empty for a sentence that does not end in a question mark (closing quotes and brackets may follow it).
    ``words`` are long [B, T], from :func:`word_ids` or the tokenizer itself; ``interrogatives`` are lower case.
    """
    wanted = frozenset(word.lower() for word in interrogatives)
    ids, numbers, real = input_ids.cpu(), words.cpu(), mask.cpu().bool()
    is_question = table.question[ids] & real
    interrogative, question = torch.zeros_like(is_question), torch.zeros_like(is_question)
    for row in is_question.any(dim=1).nonzero().flatten().tolist():
        inside = (real[row] & ~table.outside[ids[row]]).nonzero().flatten().tolist()
        final = _final_question(inside, table, ids[row].tolist())
        if final is None:
            continue
        question[row, final] = True
        spelled: dict[int, str] = {}
        for position in inside:
            number = int(numbers[row, position])
            spelled[number] = spelled.get(number, "") + table.surface[int(ids[row, position])]
        asking = {number for number, text in spelled.items() if text.strip().lower().strip("¿¡\"'“”„«»()[]") in wanted}
        interrogative[row, [at for at in inside if int(numbers[row, at]) in asking - {-1}]] = True
    return interrogative.to(input_ids.device), question.to(input_ids.device)


def _final_question(inside: list[int], table: TokenTable, ids: list[int]) -> int | None:
    for position in reversed(inside):
        if table.question[ids[position]]:
            return position
        if not table.punctuation[ids[position]] and table.surface[ids[position]].strip():
            return None
    return None


# Per scheme: the text without its mark, whether a token begins a word, whether the next one does.
_MARKS = {
    "metaspace": (lambda t: t.replace("▁", ""), lambda t: t.startswith("▁"), lambda t: False),
    "byte_level": (lambda t: t, lambda t: t.startswith(("Ġ", "Ċ")), lambda t: False),
    "wordpiece": (lambda t: t[2:] if t.startswith("##") else t, lambda t: not t.startswith("##"), lambda t: False),
    "end_of_word": (lambda t: t.removesuffix("</w>"), lambda t: False, lambda t: t.endswith("</w>")),
    "continuation": (lambda t: t.removesuffix("@@"), lambda t: False, lambda t: not t.endswith("@@")),
    "characters": (lambda t: t, lambda t: False, lambda t: False),
    "words": (lambda t: t, lambda t: True, lambda t: True),
}


def _scheme(tokenizer: Any, tokens: list[str]) -> str:
    counts = {
        "metaspace": sum("▁" in token for token in tokens),
        "byte_level": sum(token.startswith("Ġ") for token in tokens),
        "wordpiece": sum(token.startswith("##") and len(token) > 2 for token in tokens),
        "end_of_word": sum(token.endswith("</w>") for token in tokens),
        "continuation": sum(token.endswith("@@") for token in tokens),
    }
    best = max(counts, key=counts.__getitem__)
    single = sum(len(token) == 1 for token in tokens)
    # A mark on a handful of entries among single characters (a text that mentions "##") is not a scheme.
    if counts[best] and (single < 0.9 * len(tokens) or counts[best] > 0.05 * len(tokens)):
        return best
    if tokens and single >= 0.5 * len(tokens):
        return "characters"
    if (
        getattr(tokenizer, "is_fast", False)
        and len(tokenizer("one two three", add_special_tokens=False)["input_ids"]) == 3
    ):
        return "words"
    raise ValueError(
        f"{type(tokenizer).__name__} has no word ids and its vocabulary does not mark where words begin "
        "(none of ▁, Ġ, ##, </w>, @@, single characters), so statistics about words cannot be made. Use the fast "
        "tokenizer of this model, or put 'word_ids' (long [B, T], -1 = no word) into the batches yourself."
    )


def _is_punctuation(text: str) -> bool:
    text = text.strip()
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def _character_classes(text: str) -> tuple[int, int]:
    """Classify the first and the last character as byte-level pre-tokenizers do: 1 letter, 2 number, 3 other."""
    text = text.strip()
    if not text:
        return 0, 0

    def kind(character: str) -> int:
        category = unicodedata.category(character)
        if character == "\ufffd" or category[0] in "LM":
            return 1
        return 2 if category[0] == "N" else 3

    return kind(text[0]), kind(text[-1])
