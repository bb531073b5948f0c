"""The quickstart from end to end with a handful of steps; its accuracy is that of the full run, which is not a test."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSeq2SeqLM

import hf_entmax
from hf_entmax.quickstart import data, measures, run
from hf_entmax.quickstart.models import check_reload, learning_rate, pretrained_bart, small_bart, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("quickstart")
    console = Console(file=io.StringIO(), width=200)
    results = run(out, seed=5, steps=4, questions=40, batch_size=32, console=console)
    return out, results, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the quickstart runs in a fresh process costs no start: that is seen where it is run to its end."""

    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        _, _, code, *arguments = command
        return fresh.run(code, *arguments, environment=options["env"])

    monkeypatch.setattr("hf_entmax.quickstart.models.subprocess.run", start)


@pytest.mark.slow
def test_everything_promised_is_written(finished: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = finished
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == json.loads(json.dumps(results))
    for name in ("alpha_per_head", "attention_maps", "alpha_over_training", "hypothesis_tree"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 2000
    assert (out / "report.html").stat().st_size > 5000
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {path.name for path in (out / "model").iterdir()}


@pytest.mark.slow
def test_saved_model_is_the_patched_one(finished: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = finished
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "model")
    assert hf_entmax.is_patched(model)
    assert hf_entmax.entmax_config(model).output_alpha == 1.5
    for site, alpha in hf_entmax.alphas(model).items():
        torch.testing.assert_close(torch.tensor(results["alpha"][site]), alpha)
    assert not hf_entmax.is_patched(AutoModelForSeq2SeqLM.from_pretrained(out / "base"))


@pytest.mark.slow
def test_numbers_are_possible(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = finished
    assert results["reload"]["largest_difference_of_a_logit"] <= 1e-4
    for model in ("before", "after"):
        groups = results["accuracy"][model]
        assert (
            groups["regular"]["total"]
            + groups["irregular"]["total"]
            + groups["mixed"]["total"]
            + groups["present"]["total"]
            == 40
        )
        parts = [groups[name]["total"] for name in ("irregular_like_training", "irregular_unlike_training")]
        assert groups["irregular"]["total"] == sum(parts)
    density = torch.tensor(list(results["density"].values()))
    assert density.shape == (3, 2, 4) and bool(((density > 0) & (density <= 1)).all()) and bool((density < 1).any())
    assert 0 <= results["output"]["exhaustive"] <= results["output"]["optimal"] + 1e-9 <= 1 + 1e-9
    assert results["output"]["support"] >= 1
    assert any("dream" in question for question in results["output"]["hypotheses_of"])


@pytest.mark.slow
def test_tables_are_printed(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, _, printed = finished
    for text in (
        "regular verbs, all four forms",
        "irregular verbs, past and participle",
        "decoder self",
        "certified",
        "in a fresh process",
    ):
        assert text in printed


@pytest.mark.slow
def test_a_given_model_takes_the_place_of_the_small_one(
    finished: tuple[Path, dict[str, Any], str], forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _, _ = finished
    console, tmp_path = Console(file=io.StringIO(), width=400), tmp_path / "a[b]"
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # not installed
    results = run(tmp_path, str(out / "base"), output_alpha=None, seed=5, steps=2, questions=12, console=console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "No figures were drawn" in printed and "pip install 'hf_entmax[figures]'" in printed
    assert str(tmp_path / "results.json") in printed
    assert 'pip install "hf_entmax[figures]"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert results["settings"]["model"] == str(out / "base")
    assert "output" not in results
    assert not (tmp_path / "base").exists()
    assert hf_entmax.entmax_config(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")).output_alpha is None


@pytest.mark.slow
def test_a_patched_model_is_refused(finished: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    out, _, _ = finished
    with pytest.raises(ValueError, match="patched already"):
        run(tmp_path, str(out / "model"), steps=1, questions=4, console=Console(file=io.StringIO()))


def test_a_decoder_only_model_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=1, n_embd=8).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="encoder-decoder"):
        run(tmp_path / "out", str(tmp_path / "gpt2"), console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_model_that_differs_from_its_file_is_found_out(
    finished: tuple[Path, dict[str, Any], str], forked: None
) -> None:
    out, _, _ = finished
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    ids = torch.tensor([[7, 8, 9, 1]])
    with pytest.raises(RuntimeError, match="other logits"):
        check_reload(model, out / "model", {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": -1}, "batch_size"),
        ({"max_minutes": 0.0}, "max_minutes"),
        ({"output_alpha": 0.5}, "output_alpha"),
        ({"questions": -3}, "questions"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **arguments)


def test_the_learning_rate_rises_and_falls_with_the_steps() -> None:
    rates = [learning_rate(step, 10) for step in range(11)]
    assert rates[1] == pytest.approx(1.0) and rates[10] == 0.0
    assert max(rates) <= 1.0 and min(rates) == 0.0 and rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.slow
def test_all_steps_are_done_and_counted(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, results, printed = finished
    assert results["steps_done"] == {"entmax": 4}
    assert "4 of 4 steps with entmax" in " ".join(printed.split())
    assert "stopped after" not in printed


def test_a_training_that_is_cut_short_says_so(tmp_path: Path) -> None:
    verbs = data.read_verbs()
    tokenizer = data.build_tokenizer(verbs)
    model = hf_entmax.patch_model(small_bart(tokenizer))
    console = Console(file=io.StringIO(), width=300)
    done = train(
        model,
        tokenizer,
        data.training_set(data.questions(verbs[:20]), tokenizer),
        torch.optim.SGD(model.parameters(), lr=0.1),
        title="training",
        out_dir=tmp_path,
        steps=100,
        max_seconds=1e-9,
        batch_size=4,
        seed=0,
        console=console,
        callbacks=[hf_entmax.training.AlphaLoggingCallback()],
    )
    assert done == 1
    assert "training stopped after 1 of 100 steps" in console.file.getvalue()  # type: ignore[attr-defined]
    assert len((tmp_path / "alphas.jsonl").read_text(encoding="utf-8").splitlines()) == 1  # what figures are drawn from


def test_the_small_model_of_the_package_answers_verbs_that_it_has_not_seen() -> None:
    verbs = data.read_verbs()
    known, unknown = data.split_verbs(verbs)
    tokenizer = data.build_tokenizer(verbs)
    model = pretrained_bart(tokenizer)
    assert not hf_entmax.is_patched(model) and sum(p.numel() for p in model.parameters()) < 300_000
    asked = [q for q in data.questions(unknown, known) if q.groups[0] == "regular"][:100]
    found = measures.accuracy(measures.answers(model, tokenizer, asked, Console(file=io.StringIO())))["regular"]
    # Right answers to 96 % of all regular questions were counted when it was made: chance would be 0.
    assert found["total"] == 100 and found["right"] > 80
