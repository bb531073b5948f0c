"""The verbs of the quickstart: split, groups, tokenizer, batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_entmax.quickstart import data
from hf_entmax.quickstart.measures import accuracy


@pytest.fixture(scope="module")
def verbs() -> list[data.Verb]:
    return data.read_verbs()


def verb(lemma: str, past: str, participle: str, kind: str) -> data.Verb:
    forms = {
        "third_person": (lemma + "s",),
        "past": (past,),
        "past_participle": (participle,),
        "present_participle": (lemma + "ing",),
    }
    return data.Verb(lemma, forms, kind)


def test_no_lemma_is_in_both_parts_and_none_is_lost(verbs: list[data.Verb]) -> None:
    train, test = data.split_verbs(verbs, seed=3)
    assert not {v.lemma for v in train} & {v.lemma for v in test}
    assert len(train) + len(test) == len(verbs)
    for kind in ("regular", "irregular", "mixed"):
        share = sum(v.kind == kind for v in test) / sum(v.kind == kind for v in verbs)
        assert share == pytest.approx(0.12, abs=0.01)


@pytest.mark.parametrize("seed", range(12))
def test_the_ambiguous_verb_is_always_learned(verbs: list[data.Verb], seed: int) -> None:
    train, _ = data.split_verbs(verbs, seed=seed)
    assert data.AMBIGUOUS_VERB in {v.lemma for v in train}


def test_split_follows_the_seed(verbs: list[data.Verb]) -> None:
    assert data.split_verbs(verbs, 1) == data.split_verbs(verbs, 1)
    assert data.split_verbs(verbs, 1)[1] != data.split_verbs(verbs, 2)[1]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_split_refuses_a_share_outside_its_range(verbs: list[data.Verb], share: float) -> None:
    with pytest.raises(ValueError, match="held_out"):
        data.split_verbs(verbs, held_out=share)


def test_irregular_verbs_are_told_apart_by_their_relatives() -> None:
    known = [verb("withstand", "withstood", "withstood", "irregular"), verb("lead", "led", "led", "irregular")]
    held_out = [
        verb("understand", "understood", "understood", "irregular"),
        verb("stand", "stood", "stood", "irregular"),
        verb("mislead", "misled", "misled", "irregular"),
        verb("plead", "pleaded", "pleaded", "regular"),
        verb("sing", "sang", "sung", "irregular"),
    ]
    groups = {q.lemma: q.groups for q in data.questions(held_out, known) if q.slot == "past"}
    assert groups["understand"] == groups["stand"] == groups["mislead"] == ("irregular", "irregular_like_training")
    assert groups["sing"] == ("irregular", "irregular_unlike_training")
    assert groups["plead"] == ("regular",)


def test_present_forms_of_irregular_verbs_do_not_count_as_irregular() -> None:
    groups = {q.slot: q.groups for q in data.questions([verb("sing", "sang", "sung", "irregular")])}
    assert groups["third_person"] == groups["present_participle"] == ("present",)


def test_tokenizer_reads_characters_and_tags(verbs: list[data.Verb]) -> None:
    tokenizer = data.build_tokenizer(verbs)
    ids = tokenizer("<past> dream")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<past>", "d", "r", "e", "a", "m", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "dream"
    for word in ("quizzes", "jeopardizing"):
        assert tokenizer.unk_token_id not in tokenizer(word)["input_ids"]
        assert tokenizer.decode(tokenizer(word)["input_ids"], skip_special_tokens=True) == word


def test_tokenizer_survives_saving(verbs: list[data.Verb], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = data.build_tokenizer(verbs)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<participle> withdraw"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded("withdrawn")["input_ids"], skip_special_tokens=True) == "withdrawn"


def test_every_variant_is_a_training_pair(verbs: list[data.Verb]) -> None:
    tokenizer = data.build_tokenizer(verbs)
    dream = [v for v in verbs if v.lemma == "dream"]
    pairs = data.training_set(data.questions(dream), tokenizer)
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in pairs["labels"]]
    assert sorted(answers) == ["dreamed", "dreamed", "dreaming", "dreams", "dreamt", "dreamt"]
    assert all(
        length == len(s) + len(t)
        for s, t, length in zip(pairs["input_ids"], pairs["labels"], pairs["length"], strict=True)
    )


def test_a_tokenizer_without_the_tags_gets_words(verbs: list[data.Verb]) -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    question = data.Question("dream", "past", ("dreamed",))
    assert data.source_text(question, Other()) == "past tense: dream"  # type: ignore[arg-type]
    assert data.source_text(question, data.build_tokenizer(verbs)) == "<past> dream"


def test_batches_hold_every_question_once(verbs: list[data.Verb]) -> None:
    tokenizer = data.build_tokenizer(verbs)
    asked = data.questions(verbs[:50])
    seen = []
    for part, inputs in data.batches(asked, tokenizer, batch_size=64):
        assert inputs["input_ids"].shape[0] == len(part) <= 64
        texts = tokenizer.batch_decode(inputs["input_ids"], skip_special_tokens=True)
        assert texts == [question.lemma for question in part]
        seen += part
    assert sorted(seen, key=str) == sorted(asked, key=str)


def test_any_listed_variant_is_right_and_groups_are_counted_apart() -> None:
    regular = data.Question("travel", "past", ("travelled", "traveled"), ("regular",))
    irregular = data.Question("sing", "past", ("sang",), ("irregular", "irregular_unlike_training"))
    scores = accuracy([(regular, "traveled"), (regular, "travelled"), (regular, "travel"), (irregular, "singed")])
    assert scores["regular"] == {"right": 2, "total": 3, "share": 2 / 3}
    assert scores["irregular"] == {"right": 0, "total": 1, "share": 0.0}
    assert scores["mixed"] == {"right": 0, "total": 0, "share": None}


def test_table_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "verbs.tsv"
    path.write_text("lemma\tpast\nsing\tsang\n", encoding="utf-8")
    with pytest.raises(ValueError, match="columns"):
        data.read_verbs(path)
