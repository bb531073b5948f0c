"""A sparse model beside its original on tasks: figures against known answers, rows of tiny models."""

import csv
import gzip
import json
import sys

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from recipes.lab import pretrained_tasks


def _run(monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["pretrained_tasks", *map(str, words), "--out", str(folder / "rows.csv")])
    pretrained_tasks.main()
    with open(folder / "rows.csv", newline="", encoding="utf-8") as lines:
        return {(row["task"], row["measure"], row["model"]): row for row in csv.DictReader(lines)}


def _treebank(folder):
    for split in ("train", "dev"):
        with gzip.open(folder / f"{split}.conllu.gz", "wt", encoding="utf-8") as file:
            for number, text in enumerate(tiny.texts(12, 5)):
                file.write(f"# sent_id = {'email' if number % 2 else 'review'}-{number}\n")
                for place, word in enumerate(text.split(), 1):
                    file.write(
                        f"{place}\t{word}\t{word}\tX\t_\t_\t{place - 1}\t{'dep' if place > 1 else 'root'}\t_\t_\n"
                    )
                file.write("\n")
    return folder / "{split}.conllu.gz"


def test_calibration_error_of_known_tokens():
    # Two bins: 0.9 said and half right, 0.5 said and half right.
    tokens = torch.tensor([[0.0] * 4, [1, 0, 1, 0], [0.9, 0.9, 0.5, 0.5]])
    assert pretrained_tasks.calibration_error(tokens) == pytest.approx(0.2)
    assert pretrained_tasks.calibration_error(torch.tensor([[0.0], [1.0], [1.0]])) == 0


def test_figures_of_known_values():
    assert pretrained_tasks.spearman(torch.tensor([[1.0, 2, 3, 4], [10, 20, 40, 80]])) == pytest.approx(1)
    assert pretrained_tasks.spearman(torch.tensor([[1.0, 2, 3], [3, 2, 1]])) == pytest.approx(-1)
    before = [torch.tensor([[float(i)]]) for i in range(50)]
    after = [unit + 2 for unit in before]
    assert pretrained_tasks.interval(before, after, lambda v: float(v.mean()), 50) == pytest.approx((2, 2))


@pytest.mark.slow
def test_a_causal_model_beside_its_original(tmp_path, monkeypatch):
    model = tiny.build("llama")
    original = tiny.save(model, tmp_path / "original")
    sparse = tmp_path / "sparse"
    hf_entmax.patch_model(model, alpha=1.9).save_pretrained(sparse)
    text = tmp_path / "text.txt.gz"
    with gzip.open(text, "wt", encoding="utf-8") as file:
        file.write("\n".join(tiny.texts(8, 12)) + "\n")
    words = ["--reference", original, "--text", text, "--treebank", _treebank(tmp_path), "--block", 16]
    same = _run(monkeypatch, tmp_path, "--model", original, *words)
    rows = _run(monkeypatch, tmp_path, "--model", sparse, *words)
    assert len(same) == 7 and len(rows) == 14
    assert {(float(row["difference"]), float(row["low"]), float(row["high"])) for row in same.values()} == {(0, 0, 0)}
    row = rows["text", "perplexity", f"{tmp_path.name}/sparse"]
    tokenizer = tf.AutoTokenizer.from_pretrained(original)
    ids = pretrained_tasks.encode(tiny.texts(8, 12), tokenizer, 1000)
    parts = [torch.tensor([ids[start : start + 16]]) for start in range(0, len(ids) - 1, 15)]
    model = tf.AutoModelForCausalLM.from_pretrained(sparse)
    nats = sum(float(model(input_ids=part, labels=part).loss) * (part.shape[1] - 1) for part in parts)
    assert float(row["after"]) == pytest.approx(2.718281828 ** (nats / (len(ids) - 1)), rel=1e-3)
    assert float(row["low"]) <= float(row["difference"]) <= float(row["high"]) and float(row["difference"]) != 0
    with pytest.raises(SystemExit, match="already"):
        _run(monkeypatch, tmp_path, "--model", sparse, *words)
    # A run that broke off is completed, row by row.
    book = tmp_path / "rows.csv"
    book.write_text("".join(book.read_text().splitlines(True)[:-3]))
    again = _run(monkeypatch, tmp_path, "--model", sparse, *words)
    assert again == rows and len(book.read_text().splitlines()) == 15


def test_a_sentence_encoder_beside_its_original(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = tf.BertModel(tiny.build("bert").config)
    with torch.no_grad():  # an attention that matters
        for name, parameter in model.named_parameters():
            if "attention" in name and parameter.dim() == 2:
                parameter.mul_(20)
    original = tiny.save(model, tmp_path / "original")
    sparse = tmp_path / "sparse"
    hf_entmax.patch_model(model, alpha=2.0).save_pretrained(sparse)
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        for text in tiny.texts(70, 6):
            file.write(json.dumps({"source": [text], "target": [text]}) + "\n")
    words = ["--reference", original, "--pairs", tmp_path / "pairs.jsonl.gz", "--treebank", _treebank(tmp_path)]
    words += ["--block", 16, "--sentences", 9]
    rows = _run(monkeypatch, tmp_path, "--model", sparse, *words)
    name = f"{tmp_path.name}/sparse"
    # Every text is its own partner; the last 6 would have been sought among 6.
    assert float(rows["partner", "accuracy", name]["after"]) == 1 and rows["partner", "accuracy", name]["units"] == "64"
    assert float(rows["similarity", "spearman", name]["before"]) == 1
    assert 0.5 < float(rows["similarity", "spearman", name]["after"]) < 1
    assert (
        0 <= float(rows["genre", "accuracy", name]["after"]) <= 1 and rows["genre", "accuracy", name]["units"] == "12"
    )
    book = tmp_path / "rows.csv"
    book.write_text("".join(line for line in book.read_text().splitlines(True) if ",similarity," not in line))
    assert _run(monkeypatch, tmp_path, "--model", sparse, *words) == rows
