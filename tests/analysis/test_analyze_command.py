"""`hf-entmax analyze` and the function behind it, on models, files and mistakes."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import test_planted_heads as planted
import tiny_tokenizers
import torch
import typer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from hf_entmax import patch_model
from hf_entmax.analysis.analyze import _names, analyze, infer_task
from hf_entmax.analysis.report.findings import summarize
from hf_entmax.cli import analyze as analyze_command

ROOT = Path(__file__).parents[2]
TEXTS = [*tiny_tokenizers.TEXTS, "the dog walks", "who walks ?", "the unhappy dog barks"]
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(analyze_command)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saved models with tokenizers, data, gold files."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizers.metaspace()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    seq2seq = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes))
    seq2seq.save_pretrained(folder / "softmax")
    patch_model(seq2seq, alpha="learned").save_pretrained(folder / "learned")
    for name in ("softmax", "learned"):
        tokenizer.save_pretrained(folder / name)
    wordpiece = tiny_tokenizers.wordpiece()
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=len(wordpiece), max_position_embeddings=12, **small)).save_pretrained(
        folder / "bert"
    )
    wordpiece.save_pretrained(folder / "bert")
    bytes_ = tiny_tokenizers.byte_level()
    GPT2LMHeadModel(GPT2Config(vocab_size=len(bytes_), n_layer=1, n_head=2, n_embd=16)).save_pretrained(folder / "gpt2")
    bytes_.save_pretrained(folder / "gpt2")
    (folder / "text.txt").write_text("\n".join(TEXTS) + "\n")
    (folder / "pairs.tsv").write_text(
        "".join(f"{text}\t{other}\n" for text, other in zip(TEXTS, TEXTS[::-1], strict=True))
    )
    (folder / "gold.conllu").write_text(
        "\n".join(planted.line_of(i, w, max(i - 1, 0)) for i, w in enumerate(["the", "dog", "barks"], 1)) + "\n"
    )
    links = [{"src": ["the", "dog"], "tgt": ["dog", "the"], "sure": [[0, 1]], "possible": [[1, 0]]}]
    (folder / "gold.jsonl").write_text("".join(json.dumps(link) + "\n" for link in links))
    return folder


@pytest.mark.slow
def test_everything_at_once(folder, tmp_path):
    result = run(
        *(
            folder / "learned",
            "--compare",
            folder / "softmax",
            "--data",
            folder / "pairs.tsv",
            "--conllu",
            folder / "gold.conllu",
        ),
        *("--alignments", folder / "gold.jsonl", "--out", tmp_path, "--importance", "both", "--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    assert "density" in result.output and "report.html" in result.output.replace("\n", "")
    record = json.loads((tmp_path / "report.json").read_text())
    first, second = record["models"]
    assert (first["name"], second["name"]) == ("learned", "softmax")
    assert first["num_sentences"] == len(TEXTS) and not first["notes"]
    head = next(row for row in first["heads"] if row["site"] == "encoder_self")
    assert 0 <= head["dependency_accuracy"] <= 1 and head["importance_masking"] is not None and head["alpha"] > 1
    cross = next(row for row in first["heads"] if row["site"] == "cross")
    assert 0 <= cross["aer_argmax_output"] <= 1 and cross["aer_support_input"] is not None
    assert all(row["density"] == 1 for row in second["heads"]) and "alpha" not in second["heads"][0]
    assert (tmp_path / "statistics-0.safetensors").exists() and (tmp_path / "heads.csv").exists()
    page = (tmp_path / "report.html").read_text()
    assert 'id="figure-diversity"' in page and 'id="figure-importance-masking"' in page


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in the text", "in the importance", "in the second model"])
def test_ctrl_c_leaves_a_report_of_what_was_measured(folder, tmp_path, monkeypatch, place):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    analysis, model_run = (sys.modules[f"hf_entmax.analysis.{name}"] for name in ("analyze", "collecting.model_run"))
    if place == "in the text":
        real = model_run.collect
        monkeypatch.setattr(
            model_run, "collect", lambda model, batches, **options: real(model, _first_then(batches, stop), **options)
        )
    elif place == "in the importance":
        monkeypatch.setattr(model_run, "head_importance", stop)
    else:
        real = analysis._load
        monkeypatch.setattr(
            analysis, "_load", lambda entry, *rest: stop() if "softmax" in str(entry) else real(entry, *rest)
        )
    problems = []
    with pytest.raises(KeyboardInterrupt):
        analyze(
            folder / "learned",
            folder / "pairs.tsv",
            compare=[folder / "softmax"],
            out=tmp_path,
            batch_size=2,
            device="cpu",
            figures=False,
            importance="none" if place == "in the second model" else "gradient",
            progress=False,
            warn=problems.append,
        )
    assert any("interrupted" in problem and "report.html" in problem for problem in problems)
    (only,) = json.loads((tmp_path / "report.json").read_text())["models"]
    assert only["num_sentences"] == (2 if place == "in the text" else len(TEXTS))
    assert any("Interrupted" in note for note in only["notes"]) == (place == "in the text")


def _first_then(batches, stop):
    yield next(iter(batches))
    stop()


@pytest.mark.slow
def test_models_are_called_as_the_user_says_or_by_what_tells_them_apart(folder, tmp_path):
    arguments = ("--data", folder / "pairs.tsv", "--device", "cpu", "--no-figures", "--importance", "none")
    several = (folder / "learned", "--compare", folder / "softmax", *arguments, "--out", tmp_path / "named")
    result = run(*several, "--name", "ours", "--name", "theirs")
    assert result.exit_code == 0, result.output
    models = json.loads((tmp_path / "named" / "report.json").read_text())["models"]
    assert [model["name"] for model in models] == ["ours", "theirs"]
    assert "theirs: " in result.output
    result = run(*several, "--name", "[bold]ours[/]", "--name", "[/x]", "--score", "accuracy=0.91,0.9")
    assert result.exit_code == 0, result.output
    assert "[bold]ours[/]: " in result.output and "[/x]: " in result.output  # names are text, not markup
    models = json.loads((tmp_path / "named" / "report.json").read_text())["models"]
    assert [model["scores"] for model in models] == [{"accuracy": 0.91}, {"accuracy": 0.9}]
    result = run(*several, "--score", "accuracy=good")
    assert result.exit_code == 2 and "NAME=NUMBER" in result.output
    for names in (["one"], ["same", "--name", "same"], ["one", "--name", ""]):
        result = run(*several, "--name", *names)
        assert result.exit_code == 1 and "give 2 different name(s)" in str(result.exception)


def test_path_ends():
    ends = _names
    assert ends(["runs/a/model", Path("runs/b/model")]) == ["a/model", "b/model"]
    assert ends(["a/model", "b/model", "a/model/"]) == ["a/model", "b/model", "a/model (2)"]
    assert ends(["org/name"]) == ["name"] and ends(["model", "model"]) == ["model", "model (2)"]
    assert ends(["model", "other/model"]) == ["model", "other/model"]
    assert ends([".", "/"]) == [".", "/"]
    assert ends([torch.nn.Linear(1, 1), "x/y"]) == ["Linear", "y"]


@pytest.mark.parametrize(("kind", "task"), [("bert", "masked-lm"), ("gpt2", "causal-lm")])
def test_other_kinds_of_model(folder, tmp_path, kind, task):
    result = analyze(
        folder / kind,
        folder / "text.txt",
        conllu=folder / "gold.conllu",
        out=tmp_path,
        progress=False,
        device="cpu",
        figures=False,
    )
    assert result.problems == []
    (statistics,) = result.statistics
    (site,) = statistics.sites
    assert site == {"bert": "encoder_self", "gpt2": "decoder_self"}[kind]
    assert not statistics.sites[site].dependency_accuracy().isnan().any()
    assert not statistics.importance["gradient"][site].isnan().any()
    assert (
        statistics.examples
        and infer_task(type("C", (), {"architectures": [{"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel"}[kind]]}))
        == task
    )


@pytest.mark.slow
def test_several_models_are_the_checkpoints_of_a_training(folder, tmp_path):
    pytest.importorskip("matplotlib")
    models = [folder / "softmax", folder / "learned", folder / "learned"]
    result = run(*models, "--data", folder / "text.txt", "--out", tmp_path, "--importance", "none", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "report.json").read_text())["models"]) == 3
    assert 'id="figure-over-training"' in (tmp_path / "report.html").read_text()


def test_source_only_data_leave_the_decoder_out(folder, tmp_path):
    result = analyze(folder / "learned", folder / "text.txt", out=tmp_path, progress=False, device="cpu", figures=False)
    assert list(result.statistics[0].sites) == ["encoder_self"]
    assert any("no target sentences" in note for note in result.statistics[0].notes)


def test_gold_files_alone_are_data_enough(folder, tmp_path):
    result = analyze(
        folder / "learned", alignments=folder / "gold.jsonl", out=tmp_path, progress=False, device="cpu", figures=False
    )
    assert set(result.statistics[0].sites) == {"encoder_self", "cross", "decoder_self"}


def test_broken_gold_files_are_named_and_the_rest_is_kept(folder, tmp_path):
    (tmp_path / "bad.conllu").write_text("1\tthe\n")
    (tmp_path / "bad.jsonl").write_text('{"src": 1}\n')
    result = run(
        *(
            folder / "learned",
            "--data",
            folder / "pairs.tsv",
            "--conllu",
            tmp_path / "bad.conllu",
            "--alignments",
            tmp_path / "bad.jsonl",
        ),
        *("--out", tmp_path / "report", "--device", "cpu", "--no-figures", "--importance", "none"),
    )
    assert result.exit_code == 1
    output = result.output.replace("\n", " ")
    assert "bad.conllu:1: expected 10" in output and "bad.jsonl:1: 'src' must be" in output
    assert (tmp_path / "report" / "report.html").exists()


def test_long_and_unknown_text_is_reported(folder, tmp_path):
    (tmp_path / "long.txt").write_text("the dog " * 20 + "\nthe zebra xylophone quagga\n")
    result = analyze(folder / "bert", tmp_path / "long.txt", out=tmp_path, progress=False, device="cpu", figures=False)
    notes = " ".join(result.statistics[0].notes)
    assert "1 sentence(s) of the data were cut at the maximum of 12 tokens" in notes
    assert "unknown to the tokenizer" in notes


def test_tokenizer_and_model_that_do_not_belong_together(folder, tmp_path):
    from transformers import AutoTokenizer

    model = BertForMaskedLM(
        BertConfig(vocab_size=12, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    )
    other = AutoTokenizer.from_pretrained(folder / "bert")
    (tmp_path / "data.txt").write_text("the\n" * 16 + "who barks ?\n")
    warnings = []
    result = analyze(
        model,
        tmp_path / "data.txt",
        tokenizer=other,
        out=tmp_path,
        progress=False,
        device="cpu",
        figures=False,
        batch_size=16,
        warn=warnings.append,
    )
    assert any("embedding only 12" in text for text in warnings) and any(
        "outside the model's vocabulary of 12" in text for text in warnings
    )
    assert result.statistics[0].num_sentences == 16 and len(result.problems) >= 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": "nowhere.txt"}, FileNotFoundError, "no such file"),
        ({}, ValueError, "no text to analyse"),
        ({"data": "text.txt", "task": "translation"}, ValueError, "allowed are seq2seq"),
        ({"data": "text.txt", "importance": "all"}, ValueError, "importance"),
        ({"data": "text.txt", "language": "xx"}, ValueError, "language"),
        ({"data": "text.txt", "batch_size": 0}, ValueError, "batch_size"),
        ({"data": "text.txt", "max_sentences": 0}, ValueError, "at least 1"),
    ],
)
def test_bad_options(folder, tmp_path, options, error, message):
    if options.get("data") == "text.txt":
        options = options | {"data": folder / "text.txt"}
    with pytest.raises(error, match=message):
        analyze(folder / "bert", out=tmp_path, progress=False, device="cpu", **options)


@pytest.mark.slow
def test_recipe(folder, tmp_path, monkeypatch, capsys):
    recipe = ROOT / "recipes" / "analyze_heads.py"
    arguments = [recipe, folder / "learned", "--data", folder / "pairs.tsv", "--alignments", folder / "gold.jsonl"]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments), "--out", str(tmp_path)])
    runpy.run_path(str(recipe), run_name="__main__")
    assert (tmp_path / "report.html").exists() and (tmp_path / "density.pdf").exists()
    assert "cross" in capsys.readouterr().out


def _sparse_model():
    """A patched model of 80 positions, and its tokenizer."""
    tokenizer = tiny_tokenizers.byte_level()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_layer=2, n_head=2, n_embd=16, n_positions=80, initializer_range=1.0
    )
    return patch_model(GPT2LMHeadModel(config), alpha=2.0), tokenizer


@pytest.mark.parametrize("tokens", [79, 80, 500])
def test_more_tokens_than_there_are_positions_cost_the_decoding_alone(folder, tmp_path, tokens):
    model, tokenizer = _sparse_model()
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    options = {"out": tmp_path, "importance": "none", "figures": False, "progress": False, "device": "cpu"}
    result = analyze(model, folder / "text.txt", tokenizer=tokenizer, decode=tokens, names=["m"], **options)
    assert [module.training for module in model.modules()] == modes
    assert result.report.exists() and result.statistics[0].density["decoder_self"].shape == (2, 2)
    said = (
        f"m: decode is {tokens} and was left out: with a length of 80 at most 79 tokens can be generated after a text."
    )
    assert result.problems == ([] if tokens < 80 else [said])
    assert ("decoding" in result.statistics[0].info) == (tokens < 80)


def test_what_an_encoder_decoder_can_generate_are_the_positions_of_its_decoder(folder, tmp_path):
    tokenizer = tiny_tokenizers.metaspace()
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 0}
    config = BartConfig(vocab_size=len(tokenizer), max_position_embeddings=24, **sizes)
    model = patch_model(BartForConditionalGeneration(config), alpha=2.0)
    options = {"importance": "none", "figures": False, "progress": False, "device": "cpu", "tokenizer": tokenizer}
    for tokens in (24, 25):
        result = analyze(model, folder / "pairs.tsv", out=tmp_path, decode=tokens, **options)
        assert ("decoding" in result.statistics[0].info) == (tokens == 24), result.statistics[0].notes
        assert any("at most 24 tokens" in problem for problem in result.problems) == (tokens == 25)
        if tokens == 24:
            (sentence,) = [f for f in summarize(result.statistics[0]) if f.topic == "decoding"]
    assert re.search(
        r"least was read by (cross|decoder) 0\.[01] \(.*, most by (cross|decoder) 0\.[01] \(", sentence.text
    )


def test_decoding_says_how_many_keys_are_read(folder, tmp_path):
    model, tokenizer = _sparse_model()
    model.save_pretrained(tmp_path / "sparse")
    tokenizer.save_pretrained(tmp_path / "sparse")
    options = ("--data", folder / "text.txt", "--out", tmp_path / "report", "--importance", "none", "--no-figures")
    result = run(tmp_path / "sparse", "--compare", folder / "gpt2", "--decode", "8", *options)
    assert result.exit_code == 0, result.output
    assert "proved to have weight zero" in result.output
    assert re.search(r"least was read by decoder [01]\.[01] \(", " ".join(result.output.split()))
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    sparse, plain = report["models"]
    found = sparse["info"]["decoding"]
    assert (found["tokens"], found["violations"]) == (8, 0)
    rows = {(row["layer"], row["head"]): row for row in found["heads"]}
    assert set(rows) == {(f"self {layer}", head) for layer in range(2) for head in range(2)}
    start = found["text_tokens"]
    for row in rows.values():
        assert row["keys_total"] == sum(range(start + 1, start + 8)) == row["keys_read"] + row["keys_zero"]
    assert any("Decoding was left out" in note and "not patched" in note for note in plain["notes"])
    with pytest.raises(ValueError, match="decode is -1"):
        analyze(str(tmp_path / "sparse"), folder / "text.txt", decode=-1)
