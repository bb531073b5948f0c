"""What zeros cost without training: rows of the calibration recipe, on models made for the purpose."""

import gzip
import json
import math
import sys

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from recipe_runs import rows

import calibrate
import hf_entmax


def _run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["recipes/calibrate.py", *map(str, words)])
    calibrate.main(tf.HfArgumentParser(calibrate.Arguments).parse_args_into_dataclasses()[0])


@pytest.mark.slow
def test_a_causal_model_within_its_budgets_and_no_row_twice(tmp_path, monkeypatch):
    model = tiny.save(tiny.build("llama"), tmp_path / "model")
    for split in ("train", "test"):
        with gzip.open(tmp_path / f"{split}.txt.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(tiny.texts(8, 12)) + "\n")
    words = ["--model", model, "--data", tmp_path / "{split}.txt.gz", "--out", tmp_path / "out", "--block", 16]
    words += ["--size", 2, "--heldout", 2, "--steps", 2]
    _run(monkeypatch, *words, "--budgets", 1)
    _run(monkeypatch, *words, "--budgets", 1, 5)
    found = rows(tmp_path / "out" / "calibration.csv")
    assert [row["budget"] for row in found] == ["1.0", "5.0"]
    for row in found:
        assert float(row["loss_after"]) - float(row["loss_before"]) <= math.log1p(float(row["budget"]) / 100) + 2e-5
        assert 0 < float(row["density"]) <= 1 and row["cosine"] == "" and "--budgets" not in row["command"]
        saved = tf.AutoConfig.from_pretrained(tmp_path / "out" / f"{float(row['budget']):g}").entmax_calibration
        densities = [density for layers in saved["density"].values() for layer in layers for density in layer]
        assert int(row["heads"]) == len(densities)
        assert int(row["heads_sparse"]) == sum(density < 0.1 for density in densities)
        assert int(row["heads_full"]) == sum(density >= 0.95 for density in densities)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "5")
    assert again.config.entmax_calibration["tokens"] == int(found[1]["calibration_tokens"]) == 30
    batches = calibrate.text_batches(_arguments(tmp_path), tf.AutoTokenizer.from_pretrained(model), "test", 2)
    assert calibrate.heldout(again, batches, False)["heldout_after"] == pytest.approx(float(found[1]["heldout_after"]), abs=1e-4)  # fmt: skip


def _arguments(tmp_path):
    return type("Arguments", (), {"data": str(tmp_path / "{split}.txt.gz"), "block": 16, "batch": 0})()


def test_blocks_come_from_all_over_the_text(tmp_path):
    model = tiny.save(tiny.build("llama"), tmp_path / "model")
    with gzip.open(tmp_path / "train.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(tiny.texts(60, 12)) + "\n")
    tokenizer = tf.AutoTokenizer.from_pretrained(model)
    first, second = calibrate.text_batches(_arguments(tmp_path), tokenizer, "train", 2)
    every = calibrate.text_batches(_arguments(tmp_path), tokenizer, "train", 10_000)
    assert len(every) > 10 and torch.equal(first["input_ids"], every[0]["input_ids"])
    assert torch.equal(second["input_ids"], every[len(every) // 2]["input_ids"])


def test_a_sentence_encoder_by_pairs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = tiny.save(tf.BertModel(tiny.build("bert").config), tmp_path / "model")
    for split in ("train", "test"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for text in tiny.texts(8, 6):
                file.write(json.dumps({"source": [text], "target": [text[: len(text) // 2]]}) + "\n")
    _run(
        monkeypatch, "--model", model, "--pairs", tmp_path / "{split}.jsonl.gz", "--out", tmp_path / "out", "--budgets", 2,
        "--batch", 4, "--size", 2, "--heldout", 2, "--steps", 2, "--block", 16,
    )  # fmt: skip
    (row,) = rows(tmp_path / "out" / "calibration.csv")
    assert float(row["loss_after"]) - float(row["loss_before"]) <= math.log1p(0.02) + 2e-5
    assert row["heldout_tokens"] == "8" and -1 <= float(row["similarity_correlation"]) <= 1
    assert float(row["cosine"]) > 0.5 and 0 <= float(row["accuracy"]) <= 1
    assert hf_entmax.is_patched(tf.AutoModel.from_pretrained(tmp_path / "out" / "2"))
