"""A sample of the model types is checked as the whole table was; the checks see faults; the table has no silent row."""

import csv
from pathlib import Path

import fresh
import pytest
import torch
import transformers
from building import SIZES, attempts, build, tiny_config
from checks import Bench
from inputs import find_runs
from sweep import model_types
from torch import nn

from hf_entmax.integration import interface
from recipes.lab.pages.model_types import CHECKS, NOT_BUILT, faults

TABLE = Path(__file__).parents[2] / "model_cards" / "model_types.csv"
with TABLE.open(newline="", encoding="utf-8") as _file:
    ROWS = {row["model_type"]: row for row in csv.DictReader(_file)}

#: Text, images, sounds, several of these; detection, segmentation; encoders, decoders and both; and refusals. One of each
#: family that shares its attention: `sweep.py` checks them all.
SAMPLE = [
    "albert",
    "audio-spectrogram-transformer",
    "bart",
    "bert",
    "clip",
    "cohere2",
    "deepseek_v3",
    "detr",
    "dinov2",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "groupvit",
    "hubert",
    "llama",
    "mask2former",
    "mixtral",
    "modernbert",
    "moonshine",
    "qwen3_moe",
    "segformer",
    "t5",
    "beit",
    "xlnet",
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The rows of the sample, made now, by the script, in processes that did not import the plugin before."""
    table = tmp_path_factory.mktemp("sample") / "rows.csv"
    script, arguments = Path(__file__).with_name("sweep.py"), ("--only", ",".join(SAMPLE), "--table", table)
    done = fresh.run_file(script, *arguments, timeout=900, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    with table.open(newline="", encoding="utf-8") as file:
        return {row["model_type"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SAMPLE)
def test_sample(sample, model_type):
    known = ROWS[model_type]
    if known["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {known['transformers']}")
    row = sample.get(model_type, {"reason": "took too long"})
    if row["reason"] == "took too long":
        pytest.fail(f"{model_type} took too long on this machine, so that its checks were not made")
    assert row["verdict"] == known["verdict"], row["reason"]
    assert row["verdict"] in ("accepted", "refused")
    if row["verdict"] == "refused":
        assert row["reason"]
    else:
        assert not faults(row)
        assert all(row[name] for name in CHECKS)
        assert row["sites_run"] == known["sites_run"]
        # What says something about a model keeps doing so.
        assert {n for n in CHECKS if row[n] == "ok"} >= {n for n in CHECKS if known[n] == "ok"}


class TestTable:
    def test_every_model_type_has_a_row(self):
        versions = {row["transformers"] for row in ROWS.values() if row["verdict"] != "not checked"}
        assert len(versions) == 1
        if versions != {transformers.__version__}:
            pytest.skip(f"the table is of transformers {versions}")
        assert set(ROWS) == set(model_types())

    def test_enough_is_built_and_nothing_is_silent(self):
        assert sum(row["verdict"] not in ("not built", "not checked") for row in ROWS.values()) >= 350
        for name, row in ROWS.items():
            assert row["verdict"] == "accepted" or not row["no_softmax_in_attention"]
            if row["verdict"] in ("refused", "not built"):
                assert row["reason"], name
            assert "site-packages" not in row["reason"], name  # nor any other folder of one machine
            if row["verdict"] == "not built":
                assert row["reason"].partition(":")[0] in NOT_BUILT, name
            if row["verdict"] == "accepted":
                assert all(row[check] for check in CHECKS), name
                assert row["no_softmax_in_attention"] == "ok", name
                assert row["loud_without_plugin"] in ("ok", "n/a: nor for softmax"), name


def _bench(model_type="llama"):
    cls, config, _ = next(attempts(model_type))
    model = build(cls, config)
    bench = Bench(model, find_runs(model)[0])
    bench.softmax()
    return bench


class TestTheChecksSeeFaults:
    def test_none_where_there_is_none(self):
        bench = _bench()
        assert set(bench.all().values()) == {"ok"}

    @pytest.mark.parametrize("name", ["alpha", "mask", "gradient"])
    def test_faults_of_the_attention(self, name, monkeypatch):
        import dataclasses

        bench, real = _bench(), interface.attend

        def attend(query, key, value, alpha, options, backend):
            if name == "alpha":
                alpha = alpha + 0.2
            elif name == "mask":
                options = dataclasses.replace(options, attention_mask=None, key_padding_mask=None, is_causal=False)
            elif isinstance(alpha, torch.Tensor):
                alpha = alpha.detach() + 0 * alpha
            return real(query, key, value, alpha, options, backend)

        monkeypatch.setattr(interface, "attend", attend)
        found = {check for check, answer in bench.all().items() if answer != "ok"}
        assert (
            found
            >= {
                "alpha": {"alpha_1_equals_eager"},
                "mask": {"alpha_1_equals_eager", "causal", "padding", "cached"},
                "gradient": {"every_alpha_gets_a_gradient"},
            }[name]
        )
        assert found <= {"alpha_1_equals_eager", "causal", "padding", "cached", "every_alpha_gets_a_gradient"}

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_on_one_side_alone(self, side, monkeypatch):
        """An encoder takes padding on both sides: right on one of them is not enough."""
        import dataclasses

        bench, real = _bench("bert"), interface.attend
        assert bench.sides == {"left", "right"}

        def attend(query, key, value, alpha, options, backend):
            given = options.key_padding_mask if options.attention_mask is None else options.attention_mask
            if given is not None and not given[..., 0 if side == "left" else -1].any():
                options = dataclasses.replace(options, attention_mask=None, key_padding_mask=None)
            return real(query, key, value, alpha, options, backend)

        monkeypatch.setattr(interface, "attend", attend)
        found = {check: answer for check, answer in bench.all().items() if answer != "ok" and answer[:3] != "n/a"}
        assert found == {"padding": f"padding on the {side} changes the result"}

    def test_a_softmax_that_nobody_names(self):
        bench = _bench()

        class Hidden(nn.Module):  # discovery reads names in the code: there is none
            def forward(self, x):
                return vars(torch)["soft" + "max"](x, -1) * x

        bench.model.model.layers[1].mlp = Hidden()
        bench.softmax()
        answer = bench.all()["no_softmax_in_attention"]
        assert answer.startswith("silent: _softmax") and "Hidden (model.layers.1.mlp)" in answer

    def test_something_left_behind(self, monkeypatch):
        import hf_entmax

        bench, real = _bench(), hf_entmax.unpatch_model

        def unpatch(model):
            real(model).lm_head.weight.data[0, 0] += 1
            return model

        monkeypatch.setattr(hf_entmax, "unpatch_model", unpatch)
        assert bench.all()["unpatch"] == "its state dict is another one"


def test_tiny_configurations_keep_what_belongs_together():
    small = tiny_config("qwen3_next", SIZES[0])
    assert set(small.layer_types) == {"linear_attention", "full_attention"} and small.num_hidden_layers == 4
    heads = tiny_config("qwen2_vl", SIZES[1]).text_config
    assert heads.hidden_size // heads.num_attention_heads == 128 and heads.num_attention_heads == 8
