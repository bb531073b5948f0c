"""No attribute, argument or missing import turns a sparse model into a softmax without an error."""

import copy
import json
from pathlib import Path

import fresh
import pytest
import safetensors.torch
import tiny_models as tiny
import torch
import transformers as tf
from tolerances import absolute_error, rounding_of_sums

import hf_entmax
from hf_entmax import EntmaxConfig, alphas, patch_model, unpatch_model
from hf_entmax.integration.config_hook import FILE_MARK
from hf_entmax.integration.discovery import attention_sites

CHECKPOINTS = sorted((Path(__file__).parent / "checkpoints").iterdir())
assert len(CHECKPOINTS) == 3


@pytest.mark.parametrize("implementation", ["eager", "sdpa", None])
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_the_attribute_of_the_configuration(family, implementation):
    model, batch = patch_model(tiny.build(family), alpha=1.5), tiny.inputs(family)
    with torch.no_grad():
        before = model(**batch).logits
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=f"attn_implementation={implementation!r}.*unpatch_model.*softmax_attention"):
        model(**batch)
    model.config._attn_implementation = "hf_entmax"
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, before)
        with hf_entmax.softmax_attention(model):
            assert not torch.equal(model(**batch).logits, before)


def test_the_attribute_of_a_part_of_the_configuration():
    pair, batch = tiny.bert_pair(), tiny.pair_inputs()
    patch_model(pair)
    pair(**batch)
    pair.encoder.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="'sdpa' would silently"):
        pair(**batch)


def test_an_attention_module_called_by_itself():
    """Tools that take a model apart call its modules one by one."""
    model = patch_model(tiny.build("bert"))
    attention = attention_sites(model)[0].module
    states = torch.randn(1, 5, 32)
    attention(states)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="BertSelfAttention is patched"):
        attention(states)
    with pytest.raises(ValueError, match="BertSelfAttention is patched"):
        copy.deepcopy(attention)(states)


@pytest.mark.slow
def test_a_compiled_and_an_exported_model_keep_the_check():
    model, batch = patch_model(tiny.build("gpt2"), alpha=1.5), tiny.inputs("gpt2")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        eager = model(**batch).logits
        few_roundings = 64 * torch.finfo(torch.float32).eps * float(eager.abs().max())
        assert torch.allclose(compiled(**batch).logits, eager, atol=few_roundings)
        exported = torch.export.export(model, (), {**batch, "use_cache": False})
        plain = patch_model(tiny.build("gpt2"), alpha=1.5, backend="torch")  # what an exported program holds
        plain.load_state_dict(model.state_dict())
        assert torch.allclose(
            exported.module()(**batch, use_cache=False).logits, plain(**batch).logits, atol=few_roundings
        )
    model.config._attn_implementation = "eager"
    with pytest.raises(Exception, match=r"would silently turn it back|Observed exception"):
        compiled(**batch)
    with pytest.raises(ValueError, match="would silently turn it back"):
        torch.export.export(model, (), {**batch, "use_cache": False})


def test_the_check_goes_with_the_patch():
    model = unpatch_model(patch_model(tiny.build("bart"), sites=("cross",)))
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.config._attn_implementation = "eager"
    model(**tiny.inputs("bart"))


_WITHOUT = """
import json, sys
import transformers
transformers.logging.set_verbosity_error()
outcome = {}
for path in sys.argv[2:]:
    config = json.load(open(path + "/config.json"))
    for loader in ("AutoModel", config["architectures"][0], "AutoConfig"):
        for implementation in (None, "eager", "sdpa"):
            options = {} if implementation is None else {"attn_implementation": implementation}
            try:
                getattr(transformers, loader).from_pretrained(path, **options)
                outcome[f"{path} {loader} {implementation}"] = "loaded"
            except Exception as error:
                outcome[f"{path} {loader} {implementation}"] = f"{type(error).__name__}: {error}"
assert "hf_entmax" not in sys.modules
json.dump(outcome, open(sys.argv[1], "w"))
"""


def _encoder_of_two(path):
    """A composite model of which only the encoder is patched."""
    pair = tiny.bert_pair()
    patch_model(pair.encoder)
    pair.save_pretrained(path)


@pytest.mark.slow
def test_without_the_plugin_no_argument_loads_a_softmax(tmp_path):
    patch_model(tiny.build("bert")).save_pretrained(tmp_path / "encoder")
    patch_model(tiny.build("llama")).save_pretrained(tmp_path / "sharded_decoder", max_shard_size="10KB")
    patch_model(tiny.build("gpt2"), alpha=1.5).save_pretrained(tmp_path / "fixed_decoder")
    patch_model(tiny.build("bart")).save_pretrained(tmp_path / "encoder_decoder")
    patch_model(tiny.build("t5"), sites=("cross",)).save_pretrained(tmp_path / "one_site")
    _encoder_of_two(tmp_path / "part")
    assert len(list((tmp_path / "sharded_decoder").glob("*.safetensors"))) > 1
    paths = sorted(map(str, tmp_path.iterdir()))
    run = fresh.run(_WITHOUT, tmp_path / "outcome.json", *paths, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert len(outcome) == 6 * 9
    assert {v for v in outcome.values() if "Error: " not in v or "import hf_entmax" not in v} == set()
    assert not any("invalid literal" in v for v in outcome.values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa", {"": "eager"}])
def test_with_the_plugin_another_implementation_says_how_to_unpatch(implementation, tmp_path):
    patch_model(tiny.build("bert")).save_pretrained(tmp_path)
    for load in (tf.AutoModel, tf.BertForMaskedLM):
        with pytest.raises(ValueError, match="unpatch_model"):
            load.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ValueError, match="unpatch_model"):
        tf.AutoModelForMaskedLM.from_config(tf.AutoConfig.from_pretrained(tmp_path), attn_implementation=implementation)
    assert hf_entmax.is_patched(tf.AutoModel.from_pretrained(tmp_path, attn_implementation="hf_entmax"))


def test_a_part_that_is_patched_refuses_another_implementation_too(tmp_path):
    _encoder_of_two(tmp_path)
    with pytest.raises(ValueError, match="unpatch_model"):
        tf.EncoderDecoderModel.from_pretrained(tmp_path, attn_implementation="eager")


def test_what_the_mark_in_the_file_uses_comes_back(tmp_path):
    labels = {0: "noun", 1: "verb", 2: "other"}
    config = tf.BertConfig(
        **{**tiny.build("bert").config.to_dict(), "id2label": labels, "problem_type": "multi_label_classification"}
    )
    model = patch_model(tf.BertForSequenceClassification(config))
    assert model.config.id2label == labels
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.id2label == labels and again.num_labels == 3
    assert again.config.problem_type == "multi_label_classification"
    assert "sparse attention" not in str(again.config) and "sparse attention" not in str(again.config.to_dict())
    unpatch_model(again).save_pretrained(tmp_path / "plain")
    assert "entmax" not in (tmp_path / "plain/config.json").read_text()


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_the_mark_is_gone_from_memory(family, tmp_path):
    before = tiny.build(family).config
    patch_model(tiny.build(family)).save_pretrained(tmp_path)
    after = tf.AutoConfig.from_pretrained(tmp_path)
    for name in ("layer_types", "problem_type", "id2label"):
        assert getattr(after, name, None) == getattr(before, name, None)


class _OtherCount(tf.PreTrainedConfig):
    """A configuration that says how many layers it has under a name of its own."""

    model_type = "other_count"
    depth: int = 2


def test_a_configuration_whose_layers_are_not_checked_is_refused_too(tmp_path):
    config = _OtherCount()
    config.entmax_config = EntmaxConfig().to_dict()
    config.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="pip install hf_entmax"):
        _OtherCount.from_dict(record)
    assert _OtherCount.from_pretrained(tmp_path).id2label == _OtherCount().id2label


def test_checkpoints_with_the_mark_of_version_1_load(tmp_path):
    patch_model(tiny.build("bert")).save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    del record["layer_types"], record["problem_type"]
    record["id2label"] = {FILE_MARK: "", **record.get("id2label", {})}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert hf_entmax.is_patched(tf.AutoModel.from_pretrained(tmp_path))


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_checkpoints_of_earlier_versions(path):
    """Saved by version 0.1.0, before the file had its mark; float64 says how far two machines may lie apart."""
    record = json.loads((path / "config.json").read_text())
    assert "sparse attention" not in str(record) and record["attn_implementation"] == "hf_entmax"
    auto = {"bart": tf.AutoModelForSeq2SeqLM, "bert": tf.AutoModelForMaskedLM, "llama": tf.AutoModelForCausalLM}
    model = auto[path.name].from_pretrained(path)
    saved = EntmaxConfig.from_dict(record["entmax_config"])
    assert hf_entmax.entmax_config(model) == saved
    assert all(value.isfinite().all() for value in alphas(model).values())
    batch = safetensors.torch.load_file(path / "expected.safetensors")
    expected = batch.pop("logits")
    with torch.no_grad():
        exact = auto[path.name].from_pretrained(path, dtype=torch.float64)(**batch).logits
        bound = rounding_of_sums(model, exact)
        assert bound < 1e-3
        for found in (expected, model(**batch).logits):
            assert absolute_error(found, exact) <= bound
        with hf_entmax.softmax_attention(model):
            assert (model(**batch).logits - expected).abs().max() > 10 * bound
