"""The language modelling recipe, end to end on a few invented sentences; text read as it is."""

import dataclasses
import math
import os
import random

import pytest
import recipe_runs as runs
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertLMHeadModel, PreTrainedTokenizerFast

import language_modeling as lm
from common import blocks as text_blocks
from common.causal import repetition
from hf_entmax import patch_model
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.generation import sampling_metrics

SUBJECTS, VERBS, PLACES = (
    ("The cat", "A dog", "My <unk>", "The bird"),
    ("sat", "slept", "sang"),
    ("mat", "roof", "tree"),
)


@pytest.fixture
def data(tmp_path):
    lines = [f" {s} {v} on the {p} . " for s in SUBJECTS for v in VERBS for p in PLACES]
    text = "".join(f"{line}\n" + ("\n = Title = \n" if i % 9 == 0 else "") for i, line in enumerate(lines))
    for split, times in (("train", 6), ("valid", 1), ("test", 1)):
        (tmp_path / f"{split}.txt").write_text(text * times, encoding="utf-8")
    return str(tmp_path / "{split}.txt")


def settings(data, out, **changes):
    small = runs.SMALL | {"vocabulary": 320, "block": 24, "prompt": 8, "samples": 4, "warmup": 10, "dropout": None}
    return lm.Settings(data=data, out=str(out), **{**small, **changes})


@pytest.mark.slow
def test_it_learns_and_a_finished_model_can_be_made_sparse(data, tmp_path, forget_processes):
    lm.main(settings(data, tmp_path / "run", epochs=6))
    result = runs.result(tmp_path / "run")
    # After "The" come four words, after a verb one, after "on the" three: far below the vocabulary of over 300.
    assert 1 < result["perplexity"] < 4 < result["word_perplexity"] ** 3
    forget_processes()
    none = dict.fromkeys(("vocabulary", "width", "heads", "layers"))
    again = settings(
        data, tmp_path / "sparse", **none, model=str(tmp_path / "run" / "model"), attention="1.5", lr=0.003
    )
    lm.main(again)
    sparse = runs.result(tmp_path / "sparse")
    assert sparse["density"] < result["density"] == 1 and sparse["perplexity"] < 4


def test_the_loss_of_a_step_is_the_mean_over_its_labels(data, tmp_path):
    given = settings(data, tmp_path / "run", lr=0.0, dropout=0.0, batch_size=8, gradient_accumulation=2, samples=0)
    lm.main(dataclasses.replace(given, train_tokens=8 * 23 + 1))  # one step of eight blocks
    history = runs.history(tmp_path / "run")
    model = lm.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = lm.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids, _ = text_blocks.encode(read_text(data.replace("{split}", "train")), tokenizer, 8 * 23 + 1)
    batch = text_blocks.collate(text_blocks.cut(ids, 24))
    with torch.no_grad():
        assert history[0]["loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)


def test_training_may_begin_behind_what_an_earlier_one_has_read(data):
    given = settings(data, "", train_tokens=70)
    lines = {split: read_text(data.replace("{split}", split)) for split in ("train", "valid", "test")}
    lines["dev"] = lines.pop("valid")
    tokenizer = lm.train_tokenizer(lines["train"], 320)
    ids, _ = text_blocks.encode(lines["train"], tokenizer)
    whole = text_blocks.prepare(given, lines, tokenizer)[0]
    later = text_blocks.prepare(dataclasses.replace(given, skip_tokens=69), lines, tokenizer)[0]
    both = text_blocks.prepare(dataclasses.replace(given, train_tokens=139), lines, tokenizer)[0]
    assert whole["train"] + later["train"] == both["train"] and later["train"][0]["input_ids"] == ids[69:93]
    assert later["dev"] == whole["dev"] and later["test"] == whole["test"]
    with pytest.raises(ValueError, match=r"train text after 1000000 tokens is shorter than one block of 24"):
        text_blocks.prepare(dataclasses.replace(given, skip_tokens=10**6), lines, tokenizer)


def test_text_comes_back_and_every_token_is_predicted_once(data):
    lines = read_text(data.replace("{split}", "train"))
    assert "" in lines and lines[0].startswith(" The cat")
    tokenizer = lm.train_tokenizer(lines, 320)
    ids, words = text_blocks.encode(lines, tokenizer)
    assert tokenizer.decode(ids) == "\n".join(lines) + "\n"
    assert tokenizer.tokenize("<unk>") == ["<unk>"]
    blocks = text_blocks.cut(ids, 50)
    assert [i for block in blocks for i in block["input_ids"][1:]] == ids[1:]
    assert words == sum(len(line.split()) + 1 for line in lines)
    whole = text_blocks.cut(ids, 50, full_only=True)
    assert {len(block["input_ids"]) for block in whole} == {50} and len(blocks) - len(whole) in (0, 1)
    for limit in range(1, 90):
        start = tokenizer.decode(ids[:limit])
        assert text_blocks.encode(lines, tokenizer, limit=limit) == (
            ids[:limit],
            len(start.split()) + start.count("\n"),
        )


def dropping_tokenizer(lines):
    """Lower-cased words and signs: blanks and line ends are gone."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def test_words_are_those_of_the_text():
    lines = ["The cat's mat .", "", "A dog", " sat", "One .\nTwo ."]
    tokenizer = dropping_tokenizer(lines)
    ids, words = text_blocks.encode(lines, tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == ["the", "cat", "'", "s", "mat"]
    assert words == sum(len(line.split()) + line.count("\n") + 1 for line in lines) == 17
    # The, cat, cat', cat's, mat, the full stop that ends the line, A, dog and the line ends before and after, sat, ...
    counts = [text_blocks.encode(lines, tokenizer, limit)[1] for limit in range(1, len(ids) + 1)]
    assert counts == [1, 2, 2, 2, 3, 5, 7, 9, 11, 12, None, 15, 17]
    with pytest.MonkeyPatch.context() as patch:  # as of a tokenizer without offsets
        patch.setattr(type(tokenizer), "is_fast", False)
        assert text_blocks.encode(lines, tokenizer, limit=1)[1] is None


def test_unknown_words_leave_the_column_empty(data, tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "train_tokenizer", lambda lines, size: dropping_tokenizer(lines))
    monkeypatch.setattr(text_blocks, "_words_before", lambda *_: None)
    book = tmp_path / "r.csv"
    given = settings(data, tmp_path / "run", test_tokens=50, dev_tokens=50, train_tokens=200, results=str(book))
    lm.main(given)
    (row,) = runs.rows(book)
    assert row["word_perplexity"] == row["word_epsilon_perplexity"] == row["test_words"] == ""
    assert float(row["perplexity"]) > 1
    assert (tmp_path / "run" / "samples.txt").read_text().count(">>>") == 2  # of the two whole blocks


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_measures_are_those_of_the_library(data, tmp_path, alpha, monkeypatch):
    given = settings(data, tmp_path / "run", output_alpha=alpha)
    tokenizer = lm.train_tokenizer(read_text(data.replace("{split}", "train")), 320)
    ids, words = text_blocks.encode(read_text(data.replace("{split}", "test")), tokenizer)
    blocks = text_blocks.cut(ids, 24)
    model = lm.build_model(given, len(tokenizer)).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(5)  # so that 1.5-entmax rules words out
    if alpha != 1.0:
        patch_model(model, alpha=1.0, output_alpha=alpha)
    sizes = []
    model.register_forward_hook(lambda module, args, output: sizes.append(output.logits.numel()))
    monkeypatch.setattr(text_blocks, "LOGITS", 5 * 24 * model.config.vocab_size)
    found = lm.text_measures(model, blocks, words)
    assert max(sizes) == text_blocks.LOGITS and len(sizes) == -(-len(blocks) // 5)
    logits, labels = [], []
    for block in blocks:
        ids = torch.tensor([block["input_ids"]])
        logits.append(model(ids).logits[0, :-1].detach())
        labels.append(ids[0, 1:])
    logits, labels = torch.cat(logits), torch.cat(labels)
    assert found["tokens"] == len(labels)
    for name, value in sampling_metrics(logits, labels, alpha).items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    if alpha == 1.0:
        assert found["perplexity"] == pytest.approx(
            math.exp(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-4
        )
        assert math.log(found["word_perplexity"]) * found["words"] == pytest.approx(
            math.log(found["perplexity"]) * found["tokens"], rel=1e-6
        )
    else:
        assert found["perplexity"] == math.inf and 0 < found["ruled_out"] < 1


def test_a_text_with_few_blanks_has_an_infinite_perplexity_per_word(tmp_path):
    text = "".join(random.Random(0).choices("abcdefgh", k=1000)) + "\n"
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(text)
    given = settings(str(tmp_path / "{split}.txt"), tmp_path / "run", lr=0.0, results=str(tmp_path / "r.csv"))
    lm.main(dataclasses.replace(given, vocabulary=300, samples=0))
    result = runs.result(tmp_path / "run")
    assert result["not_finite"] == {"word_perplexity": "inf", "word_epsilon_perplexity": "inf"}
    assert result["word_perplexity"] is result["word_epsilon_perplexity"] is None and result["perplexity"] > 1
    (row,) = runs.rows(tmp_path / "r.csv")
    assert float(row["word_perplexity"]) == math.inf


def test_a_diverged_model_has_a_result_without_samples(data, tmp_path, capsys, monkeypatch):
    def diverge(*arguments):
        model = build(*arguments)
        with torch.no_grad():
            model.transformer.ln_f.weight.fill_(math.inf)
        return model

    build = lm.build_model
    monkeypatch.setattr(lm, "build_model", diverge)
    lm.main(settings(data, tmp_path / "run", smoke=True))
    result = runs.result(tmp_path / "run")
    assert (
        result["perplexity"] is None
        and result["not_finite"]["perplexity"] == "nan"
        and "distinct_1" not in result
        and result["test_words"] > 0
    )
    assert "No samples: the model has diverged" in capsys.readouterr().out


def test_samples_come_from_all_over_the_text(data, tmp_path, monkeypatch):
    given = settings(data, tmp_path / "run", samples=3)
    tokenizer = lm.train_tokenizer(read_text(data.replace("{split}", "train")), 320)
    model = lm.build_model(given, len(tokenizer)).eval()
    seen = []
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: seen.append(input_ids) or input_ids)
    blocks = [{"input_ids": [place] * 24} for place in range(5)] + [{"input_ids": [9]}]
    lm.sample(given, model, blocks, tokenizer, tmp_path / "samples.txt")
    assert seen[0][:, 0].tolist() == [0, 1, 3] and seen[0].shape == (3, 8)


def save_bert(folder, tokenizer, **changes):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), **small, max_position_embeddings=64, pad_token_id=0, **changes)
    BertLMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pretrained(data, out, model, **changes):
    left_out = dict.fromkeys(("vocabulary", "width", "heads", "layers"))
    return settings(data, out, **left_out, model=model, **changes)


def test_a_pretrained_model_must_be_causal_and_long_enough(data, tmp_path):
    tokenizer = lm.train_tokenizer(read_text(data.replace("{split}", "train")), 320)
    encoder = save_bert(tmp_path / "encoder", tokenizer)
    with pytest.raises(ValueError, match=r"encoder' \(bert\) sees later tokens.*is_decoder=true"):
        lm.main(pretrained(data, tmp_path / "run", encoder))
    decoder = save_bert(tmp_path / "decoder", tokenizer, is_decoder=True)
    with pytest.raises(ValueError, match=r"block=65 .*at most 64, all that the model can see"):
        lm.main(pretrained(data, tmp_path / "run", decoder, block=65))
    assert not (tmp_path / "run" / "trainer_state.json").exists()


def test_a_half_precision_checkpoint_is_trained_in_full_precision(data, tmp_path):
    tokenizer = lm.train_tokenizer(read_text(data.replace("{split}", "train")), 320)
    model = lm.build_model(settings(data, "x"), len(tokenizer))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lm.main(pretrained(data, tmp_path / "run", str(tmp_path / "model"), smoke=True, samples=0))
    assert runs.config(tmp_path / "run")["dtype"] == "float32"


def test_repetition():
    measures = repetition([[9, 9, 1, 2, 1, 2], [9, 9, 3, 4, 5, 6]], context=2)
    assert measures["distinct_1"] == 6 / 8 and measures["distinct_2"] == 5 / 6
    assert measures["rep_16"] == measures["rep_128"] == 2 / 8
    far = [7, *range(20, 40), 7]
    assert repetition([far], context=1)["rep_16"] == 0 and repetition([far], context=1)["rep_128"] == 1 / 21


def test_wrong_values_name_the_setting(data, tmp_path):
    for changes, message in [
        ({"architecture": "t5"}, "architecture='t5'.*gpt2 or llama"),
        ({"heads": 3}, "heads=3 .*divisor of width=32"),
        ({"architecture": "llama", "dropout": 0.1}, "llama has no dropout"),
        ({"model": "x"}, "vocabulary=320.*left out with a pretrained model"),
        ({"prompt": 24}, "prompt=24.*block - 1 = 23"),
        ({"prompt": 0}, "prompt=0.*between 1 and"),
        ({"samples": -1}, "samples=-1.*at least 0"),
        ({"block": 1}, "block=1.*at least 2"),
        ({"train_tokens": 23}, "train_tokens=23.*0 for all, or at least block=24"),
        ({"train_tokens": -300}, "train_tokens=-300.*0 for all"),
        ({"dev_tokens": -300}, "dev_tokens=-300.*0 for all"),
        ({"skip_tokens": -1}, "skip_tokens=-1.*at least 0"),
        ({"test_tokens": 1}, "test_tokens=1 .*0 for all, or at least 2"),
        ({"heads": 0}, "heads=0.*at least 1"),
        ({"layers": 0}, "layers=0.*at least 1"),
        ({"width": 0}, "width=0.*at least 1"),
        ({"dropout": 1.0}, r"dropout=1\.0.*below 1"),
        ({"dropout": -0.1}, r"dropout=-0\.1.*at least 0"),
        ({"architecture": "llama", "width": 6}, "heads=2.*even share of width=6"),
    ]:
        with pytest.raises(ValueError, match=message):
            settings(data, tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=r"must contain \{split\}"):
        lm.main(settings("text.txt", tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match="HF_ENTMAX_DATA"):
        lm.main(settings("no/{split}.txt", tmp_path / "run"))
    (tmp_path / "valid.txt").write_bytes(b"fine\nb\xffd\n")
    with pytest.raises(ValueError, match=r"valid\.txt:2: not UTF-8"):
        lm.main(settings(data, tmp_path / "run"))
    (tmp_path / "valid.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"valid\.txt: there is nothing in it"):
        lm.main(settings(data, tmp_path / "run"))
    (tmp_path / "valid.txt").write_text("A dog sat .\n")
    (tmp_path / "train.txt").write_text("A dog sat .\n")
    with pytest.raises(ValueError, match="shorter than one block of 24"):
        lm.main(settings(data, tmp_path / "run"))
    assert not (tmp_path / "run" / "trainer_state.json").exists()


def test_records_with_text(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "One.\\nTwo."}\n{"text": "Three."}\n')
    assert read_text(str(tmp_path / "t.jsonl")) == ["One.\nTwo.", "Three."]
    with pytest.raises(ValueError, match="no story; it has text"):
        read_text(str(tmp_path / "t.jsonl"), "story")


@pytest.mark.skipif("HF_ENTMAX_DATA" not in os.environ, reason="needs the real WikiText-2: set HF_ENTMAX_DATA")
def test_wikitext_has_the_words_that_everybody_counts():
    lines = read_text("lm/wikitext-2/test.txt.gz")
    assert len(lines) == 4358 and sum(len(line.split()) + 1 for line in lines) == 245_569
