"""Tiles that each pass of the GPU forward kernel reads, counted in Triton's interpreter."""

import csv
import json
import math

import fresh
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_entmax
from hf_entmax.integration.observe import observe_attention

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

from recipes.lab.gpu import forecast, visits

INTERPRETED = {"TRITON_INTERPRET": "1"}

STEPS = """
import json, torch
from recipes.lab.gpu import visits
place = torch.arange(256)
block = torch.nn.functional.one_hot(place // 64).float()
query = torch.cat([2.5 * block, torch.full((256, 1), -2.5), torch.full((256, 1), 1.5)], 1)
key = torch.cat([block, torch.ones(256, 1), (place == 0).float()[:, None]], 1)
print(json.dumps(visits.count(query.bfloat16()[None, None], key.bfloat16()[None, None], 1.5)))
"""


@pytest.mark.slow
def test_the_tiles_of_each_pass():
    """Scores 0 on the diagonal, -1 at the first key, else -2.5: what lies between is never listed, as the diagonal is read first."""
    run = fresh.run(STEPS, after="torch", environment=INTERPRETED)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert counts.pop("passes") < 3 and counts.pop("threshold") < 2
    assert counts == {"tiles": 10, "maximum": 1.0, "histogram": 0.7, "output": 0.7, "empty": 0.3}


@pytest.mark.slow
def test_rows_of_every_kind_of_scores(tmp_path):
    out = tmp_path / "visits.csv"
    options = ("--out", out, "--length", "64")
    run = fresh.run_module("recipes.lab.gpu.visits", *options, after="torch", environment=INTERPRETED)
    assert run.returncode == 0, run.stderr
    with out.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 10 and {row["maximum"] for row in rows} == {"1.0"}


@pytest.mark.parametrize("saved_sparse", [False, True])
def test_queries_and_keys_are_those_that_the_model_attends_with(tmp_path, saved_sparse):
    """Weights from them are the model's own: at alpha 1.5, or with the alphas and temperatures that it was saved with."""
    torch.manual_seed(0)
    words = [f"w{number}" for number in range(20)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 20
    if saved_sparse:
        hf_entmax.patch_model(model, alpha_init=1.8, length_scaling="constant", length_scaling_init="softmax")
    model.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(words[i] for i in torch.randint(1, 20, (16,))))
    ((_, query, key),) = visits.of_model(str(tmp_path), tmp_path / "text.txt", 12)
    if not saved_sparse:
        hf_entmax.patch_model(model, alpha=1.5)
    calls = []
    ids = PreTrainedTokenizerFast.from_pretrained(tmp_path)((tmp_path / "text.txt").read_text())["input_ids"][:12]
    with torch.no_grad(), observe_attention(model.eval(), calls.append):
        model(torch.tensor([ids]))
    own = calls[2].weights[:, ::2]
    scores = (query.float() @ key.float().transpose(-1, -2)).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    # Both are rounded to bfloat16, and a weight moves by no more than the scores do.
    limit = 2 * 2**-8 * (query.float().abs() @ key.float().abs().transpose(-1, -2)).max()
    found = hf_entmax.ops.entmax(scores, 1.8 if saved_sparse else 1.5)
    assert (own == 0).any() and (own - found).abs().max() <= limit


def test_the_forecast_adds_what_each_pass_costs():
    row = {"maximum": "1.0", "histogram": "0.5", "threshold": "0.5", "output": "0.4", "empty": "0.6"}
    cycles = forecast.CYCLES["1.5"]
    forward = cycles["maximum"] + 0.5 * (cycles["histogram"] + cycles["threshold"]) + 0.4 * cycles["output"]
    assert forecast.ratio(row, "1.5", backward=False) == pytest.approx(forward / 500)
    assert forecast.ratio(row, "1.5") == pytest.approx((forward + 0.4 * cycles["backward"]) / 1500)
    assert forecast.ratio(row, "learned") > forecast.ratio(row, "1.5")
    products = 1 + 0.5 + 0.5 + 3 * 0.4 + 7 * 0.4
    assert forecast.ratio(row, "1.5", hidden=False) == pytest.approx(forecast.ratio(row, "1.5") + products * 128 / 1500)
    assert forecast.adasplash(0.61) == pytest.approx(0.99) and forecast.adasplash(0.2) is None
    row |= {"scores": "recency", "length": "2048", "alpha": "1.5"}
    assert "| recency, 2k | 1.5 | 60% | 0.50 |" in forecast.table([row])
