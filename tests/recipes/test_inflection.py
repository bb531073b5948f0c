"""The inflection recipe, end to end on a few invented words."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import recipe_runs as runs
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM

import hf_entmax
import inflection
from common.words import build_tokenizer

LEMMAS = ["lar", "mir", "tol", "sen", "ruk", "pim", "dov", "gal"]
ENDINGS = {"upper": {"PST": "a", "PRS": "i"}, "lower": {"PST": "ot", "PRS": "et"}}


@pytest.fixture
def data(tmp_path):
    """Two languages that inflect by endings; one lemma of each is only tested."""
    for language, endings in ENDINGS.items():
        folder = tmp_path / "data" / language
        folder.mkdir(parents=True)
        rows = [f"{lemma}\t{lemma}{end}\tV;{tag}" for lemma in LEMMAS for tag, end in endings.items()]
        (folder / "train-medium.tsv").write_text("\n".join(rows[:-2]) + "\n", encoding="utf-8")
        for split in ("dev", "test"):
            (folder / f"{split}.tsv").write_text("\n".join(rows[-4:]) + "\n", encoding="utf-8")
    return str(tmp_path / "data" / "{language}" / "{split}.tsv")


def settings(data, out, **changes):
    return inflection.Settings(data=data, out=str(out), **{**runs.SMALL, "batch_size": 14, **changes})


@pytest.mark.slow
def test_it_learns_and_ensembles_agree_with_their_members(data, tmp_path):
    learned = settings(data, tmp_path / "run", attention="learned", output_alpha=1.5, epochs=60, seed=1)
    results = str(tmp_path / "rows.csv")
    inflection.main(dataclasses.replace(learned, results=results))
    model = str(tmp_path / "run" / "model")
    # Averaging a model with itself changes nothing.
    inflection.main(settings(data, tmp_path / "both", ensemble=[model, model], results=results))
    alone, both = runs.rows(results)
    assert float(alone["accuracy"]) >= 50  # half of the words were learned from; the others have an unknown letter
    assert both["ensemble"] == "2"
    for name in ("accuracy", "accuracy_per_language", "optimal", "exhaustive", "single"):
        assert alone[name] == both[name]


def test_ensembles_must_know_the_same_symbols(data, tmp_path):
    inflection.main(settings(data, tmp_path / "a", smoke=True))
    inflection.main(settings(data, tmp_path / "b", smoke=True, attention="1.5", output_alpha=1.5))
    inflection.main(settings(data, tmp_path / "c", smoke=True, languages=["upper"]))
    a, b, c = (str(tmp_path / name / "model") for name in "abc")
    inflection.main(settings(data, tmp_path / "ab", ensemble=[a, b]))
    result = runs.result(tmp_path / "ab")
    assert (result["attention"], result["output_alpha"]) == ("softmax+1.5", "1.0+1.5")
    with pytest.raises(ValueError, match=r"c.model does not have the symbols of .*a.model"):
        inflection.main(settings(data, tmp_path / "ac", ensemble=[a, c]))
    # A vocabulary of the same size is not yet the same one.
    path = tmp_path / "a" / "model" / "tokenizer.json"
    stored = runs.read(path)
    vocabulary = stored["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    names[-1], names[-2] = names[-2], names[-1]
    stored["model"]["vocab"] = {name: place for place, name in enumerate(names)}
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="does not have the symbols"):
        inflection.main(settings(data, tmp_path / "again", ensemble=[b, a]))


def test_answers_are_kept(data, tmp_path):
    inflection.main(settings(data, tmp_path / "run", epochs=4, results=str(tmp_path / "r.csv")))
    rows = [line.split("\t") for line in (tmp_path / "run" / "answers.tsv").read_text().splitlines()]
    assert len(rows) == 8 and {len(row) for row in rows} == {5}
    right = {language: [row[2] == row[4] for row in rows if row[0] == language] for language in ENDINGS}
    shares = [100 * sum(flags) / len(flags) for flags in right.values()]
    assert runs.result(tmp_path / "run")["accuracy"] == sum(shares) / 2


def test_tags_may_be_a_list(tmp_path):
    record = {"lang": "german", "lemma": "sehen", "form": "sah", "tags": ["V", "PST"], "split": "train"}
    (tmp_path / "all.jsonl").write_text(json.dumps(record) + "\n")
    (word,) = inflection.read_words(inflection.Settings(data=str(tmp_path / "all.jsonl")), "train")
    assert word.tags == ("V", "PST")


def test_a_budget_searches_exactly(data, tmp_path, monkeypatch):
    calls, search = [], inflection.exact_map

    def counted(members, batch, budget, **options):
        calls.append((budget, options))
        return search(members, batch, budget, **options)

    monkeypatch.setattr(inflection, "exact_map", counted)
    inflection.main(settings(data, tmp_path / "run", epochs=1, output_alpha=1.5, beams=2))
    assert not calls
    model = str(tmp_path / "run" / "model")
    inflection.main(settings(data, tmp_path / "exact", ensemble=[model], beams=2, budget=300))
    assert calls and all(call == (300, {"num_beams": 2}) for call in calls)
    first, exact = (runs.result(tmp_path / name) for name in ("run", "exact"))
    assert exact["optimal"] >= first["optimal"] and exact["exhaustive"] >= first["exhaustive"]


@pytest.mark.parametrize(
    "wrong", [{"beams": 0}, {"budget": -1}, {"dev_words": -1}, {"heads": 3}, {"layers": 0}, {"data": ""}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{'width' if 'heads' in wrong else next(iter(wrong))}=.* is not allowed"):
        inflection.Settings(**wrong)


def test_one_table_of_all_languages(data, tmp_path):
    rows = ["lang\tsplit\tlemma\tform\ttags"]
    for language, endings in ENDINGS.items():
        for split in ("train", "dev", "test"):
            rows += [f"{language}\t{split}\t{lemma}\t{lemma}{endings['PST']}\tV;PST" for lemma in LEMMAS]
    table = tmp_path / "all.tsv"
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    chosen = inflection.Settings(data=str(table), out=str(tmp_path / "run"), languages=["upper"])
    words = inflection.read_words(chosen, "dev")
    assert [word.lemma for word in words] == LEMMAS
    assert words[0].source == "<upper><V><PST>lar"
    with pytest.raises(ValueError, match="no dev words of middle"):
        inflection.read_words(dataclasses.replace(chosen, languages=["upper", "middle"]), "dev")


def test_forms_with_spaces_come_back(tmp_path):
    words = [inflection.Word("german", "auswandern", "wandert aus", ("V", "PRS"))]
    tokenizer = build_tokenizer(words)
    (example,) = inflection.encode(words, tokenizer)
    assert tokenizer.decode(example["labels"], skip_special_tokens=True) == "wandert aus"
    assert len(example["input_ids"]) == 1 + 2 + len("auswandern") + 1


@pytest.mark.slow
@pytest.mark.parametrize("output_alpha", [1.0, 1.5])
def test_coverage_of_sets_is_measured_on_a_finished_run(data, tmp_path, output_alpha):
    if output_alpha == 1.0:
        pytest.importorskip("mapie", reason="conformal sets of a softmax come from MAPIE")
    for language, endings in ENDINGS.items():
        rows = [f"{a}{b}\t{a}{b}{end}\tV;{tag}" for a in LEMMAS for b in LEMMAS[:3] for tag, end in endings.items()]
        Path(data.format(language=language, split="test")).write_text("\n".join(rows) + "\n", encoding="utf-8")
    run, results = settings(data, tmp_path / "run", output_alpha=output_alpha), tmp_path / "sets.csv"
    inflection.main(run)
    inflection.main(dataclasses.replace(run, resume=True, coverage=[80.0], results=str(results)))
    rows = runs.rows(results)
    assert {(row["unit"], row["calibration"], row["test"]) for row in rows} == {
        ("step", "48", "48"),
        ("answer", "48", "48"),
    }
    answers = [row["method"] for row in rows if row["unit"] == "answer"]
    assert answers == ["entmax 1.5", *(["probability of the answer"] if output_alpha == 1.0 else [])]
    for row in rows:
        assert abs(float(row["coverage"]) - 80) < 20 and float(row["size"]) > 0
    with pytest.raises(ValueError, match="sets are one model's"):
        settings(data, tmp_path / "other", ensemble=[str(tmp_path / "run" / "model")], coverage=[90.0])


def test_a_pretrained_model_is_trained_on_and_reads_lemmas_alone(data, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    inflection.main(settings(data, first, smoke=True))
    model = str(first / "model")
    chosen = settings(data, second, model=model, attention="1.5", lr=0.0, smoke=True)
    assert {word.source for word in inflection.read_words(chosen, "train")} <= set(LEMMAS)
    inflection.main(chosen)
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(run / "model") for run in (first, second))
    assert hf_entmax.entmax_config(after).alpha == 1.5
    for name, weight in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], weight, rtol=0, atol=0)


def test_a_start_that_the_tokenizer_writes_is_no_label(data, tmp_path):
    words = [inflection.Word("english", "ox", "oxen", ())]
    tokenizer = build_tokenizer(words)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )
    model = SimpleNamespace(config=SimpleNamespace(decoder_start_token_id=0))
    (example,) = inflection.encode(words, tokenizer, model)
    assert example["input_ids"][0] == 0 and tokenizer.decode(example["labels"]) == "oxen</s>"


def test_either_form_of_a_word_that_has_two_is_right():
    words = [inflection.Word("english", "octopus", form, ()) for form in ("octopuses", "octopodes")]
    assert inflection.accuracy(words, ["octopodes", "octopodes"]) == 100
    assert inflection.accuracy(words, ["octopodes", "octopi"]) == 50
