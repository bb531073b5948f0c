"""Words from token ids, for every kind of tokenizer."""

from __future__ import annotations

import pytest
import tiny_tokenizers
import torch

from hf_entmax.analysis.reading.words import own_word_ids, question_masks, token_table, word_ids

KINDS = {
    "metaspace": tiny_tokenizers.metaspace,
    "wordpiece": tiny_tokenizers.wordpiece,
    "byte_level": tiny_tokenizers.byte_level,
    "end_of_word": tiny_tokenizers.end_of_word,
    "words": tiny_tokenizers.whole_words,
    "characters": tiny_tokenizers.characters,
}


def encode(tokenizer, texts):
    rows = tokenizer(texts)["input_ids"]
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    return ids, mask


def partition(numbers) -> list[tuple[int, ...]]:
    """Word ids up to renaming: positions that belong together."""
    groups: dict[int, list[int]] = {}
    for position, number in enumerate(numbers):
        if number is not None and number >= 0:
            groups.setdefault(number, []).append(position)
    return sorted(map(tuple, groups.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_scheme_is_recognised(kind):
    assert token_table(KINDS[kind]()).scheme == kind


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "characters"])
def test_tables_agree_with_the_tokenizers_own_word_ids(kind):
    tokenizer = KINDS[kind]()
    assert own_word_ids(tokenizer)
    texts = [text for text in tiny_tokenizers.TEXTS if kind != "words" or "," not in text]
    ids, mask = encode(tokenizer, texts)
    numbers = word_ids(token_table(tokenizer), ids, mask)
    for row, text in enumerate(texts):
        own = tokenizer(text).word_ids(0)
        assert partition(numbers[row].tolist()) == partition(own), (
            text,
            tokenizer.convert_ids_to_tokens(ids[row].tolist()),
        )
        assert (numbers[row][~mask[row]] == -1).all()


def test_llama_like_tokenizer_calls_everything_one_word_and_is_not_trusted():
    tokenizer = tiny_tokenizers.metaspace(pre_tokenizer=False)
    assert not own_word_ids(tokenizer)
    ids, mask = encode(tokenizer, ["the unhappy dog"])
    assert len(partition(word_ids(token_table(tokenizer), ids, mask)[0].tolist())) == 3


def test_characters_form_words_between_spaces():
    tokenizer = tiny_tokenizers.characters()
    assert not own_word_ids(tokenizer)
    ids, mask = encode(tokenizer, ["a dog<plural> barks"])
    words = word_ids(token_table(tokenizer), ids, mask)[0].tolist()
    #                a  _   d  o  g <pl> _   b  a  r  k  s  </s>
    assert words == [0, -1, 1, 1, 1, 2, -1, 3, 3, 3, 3, 3, -1]


def test_unknown_words_are_words():
    tokenizer = tiny_tokenizers.wordpiece()
    ids, mask = encode(tokenizer, ["the zebra barks"])
    assert word_ids(token_table(tokenizer), ids, mask)[0].tolist() == [-1, 0, 1, 2, 2, -1]


def test_special_tokens_do_not_belong_to_words():
    tokenizer = tiny_tokenizers.wordpiece()
    table = token_table(tokenizer)
    assert table.special.nonzero().flatten().tolist() == [0, 2, 3]
    assert table.question[tokenizer.convert_tokens_to_ids("?")]
    assert not table.punctuation[tokenizer.convert_tokens_to_ids("dog")]
    assert table.punctuation[tokenizer.convert_tokens_to_ids(",")]


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "byte_level", "words"])
def test_questions(kind):
    tokenizer = KINDS[kind]()
    table = token_table(tokenizer)
    ids, mask = encode(tokenizer, ["who walks the dog ?", "the dog barks .", "what is happening ?"])
    asks, mark = question_masks(table, ids, word_ids(table, ids, mask), mask)
    for row, (word, question) in enumerate([("who", True), (None, False), ("what", True)]):
        spelled = "".join(table.surface[i] for i in ids[row][asks[row]].tolist()).strip()
        assert spelled == (word or "")
        assert int(mark[row].sum()) == question
        assert not (mark[row] & ~mask[row]).any()


def test_question_mark_inside_a_sentence_does_not_count():
    tokenizer = tiny_tokenizers.wordpiece()
    table = token_table(tokenizer)
    ids, mask = encode(tokenizer, ["who ? the dog"])
    asks, mark = question_masks(table, ids, word_ids(table, ids, mask), mask)
    assert not asks.any() and not mark.any()


def test_a_vocabulary_without_marks_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "ab": 1, "cd": 2, "ef": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("o", "isolated")
    with pytest.raises(ValueError, match="no word ids"):
        token_table(tiny_tokenizers.wrap(tokenizer, unk_token="<unk>"))


def test_ids_of_another_tokenizer():
    table = token_table(tiny_tokenizers.wordpiece())
    with pytest.raises(ValueError, match="token id 999 is not in the tokenizer's vocabulary"):
        word_ids(table, torch.tensor([[1, 999]]))
