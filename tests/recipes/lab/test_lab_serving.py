"""Continuous batching, measured, checked and served on a tiny model."""

import csv
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from transformers import AutoModelForCausalLM

import hf_entmax
from hf_entmax.generation import ExactSparseCache
from hf_entmax.generation.serving import hooks
from recipes.lab import serving
from recipes.lab.serving_speed import Engine

if hooks.problem() is not None:
    pytest.skip(hooks.problem(), allow_module_level=True)
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    """A patched model, a tokenizer that knows chats, and a text of 400 words."""
    model = hf_entmax.patch_model(tiny.build("mistral", sliding_window=None, max_position_embeddings=512), alpha=1.5)
    model.save_pretrained(tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    draw = torch.randint(3, tiny.VOCAB, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in draw), encoding="utf-8")
    return tmp_path


def _run(folder, what, *options):
    text = ["--text", str(folder / "text.txt"), "--alpha", "own", "--out", str(folder)]
    serving.main([what, str(folder / "model"), *text, *options])


def _rows(path):
    with path.open(newline="", encoding="utf-8") as lines:
        return {row["engine"]: row for row in csv.DictReader(lines)}


@pytest.mark.parametrize("prompts", [1, 2])
def test_every_engine_has_a_row(folder, prompts):
    options = ["--requests", "4", "--prompts", str(prompts), "--length", "60", "--trials", "1"]
    _run(folder, "speed", *options)
    rows = _rows(folder / "serving.csv")
    assert list(rows) == ["sdpa", "dense", "sparse", "generate"]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows.values())
    assert rows["sparse"]["read"] == "1.0" and not rows["sparse"]["nonzero"]  # few keys: all are read, none is counted


@torch.no_grad()
@pytest.mark.parametrize("share", [True, False])
def test_an_engine_that_was_filled_goes_on_as_one_that_read(folder, share):
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    prompts = torch.randint(3, tiny.VOCAB, (1 if share else 2, 70), generator=torch.Generator().manual_seed(1)).tolist()
    cache = ExactSparseCache(model)
    model(torch.tensor(prompts)[:, :-1], past_key_values=cache)
    first, engine = (Engine(model, 4, 70, 8, share) for _ in range(2))
    first.fill(prompts, 4, cache)
    engine.fill(prompts, 4, cache, first)
    assert len({tuple(table) for table in engine.allocator.block_table.values()}) == 4
    for _ in range(5):
        engine.step()
    found = sorted(state.generated_tokens[1:] for state in engine.active.values())
    ids = torch.tensor(prompts)
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=-1)
    assert found == sorted(alone[:, 70:].tolist() * (4 // len(prompts)))


def test_a_first_token_is_timed_in_every_engine(folder):
    _run(folder, "prefill", "--length", "300")
    rows = _rows(folder / "serving_prefill.csv")
    assert list(rows) == ["sdpa", "sparse", "generate"]
    for row in rows.values():
        assert 0 < float(row["attention_seconds"]) < float(row["seconds"])


def test_requests_that_come_and_go_have_the_tokens_of_generate(folder, capsys):
    _run(folder, "check", "--requests", "12", "--longest", "60", "--new", "3")
    assert "12 of 12 have the tokens of generate; 0 errors" in capsys.readouterr().out


@pytest.mark.works_with(
    "openai", "chat completions from the server with continuous batching, streamed or not; refusals say why"
)
@pytest.mark.skipif(not hooks.has_server(), reason="needs the packages of the server")
def test_the_server_refuses_what_it_has_no_room_for_and_goes_on(folder):
    pytest.importorskip("openai")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = ["--requests", "8", "--clients", "3", "--new", "2", "--blocks", "1", "--port", str(port)]
    command = [sys.executable, "-m", "recipes.lab.serving", "load", str(folder / "model"), "--alpha", "own"]
    # In a process of its own: threads of the server may write after the test, to what pytest has closed by then.
    done = subprocess.run(
        [*command, "--out", str(folder), *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert "BadRequestError" in done.stdout and "send a shorter prompt" in done.stdout, done.stdout
    assert "2 refused" in done.stdout and "afterwards the server answers" in done.stdout, done.stderr[-2000:]
