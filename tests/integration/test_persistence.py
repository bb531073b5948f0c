import json
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import safetensors.torch
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax import EntmaxConfig, alphas, is_patched, patch_model, unpatch_model
from hf_entmax.config import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
AUTO = {
    **dict.fromkeys(tiny.ENCODER_DECODERS, tf.AutoModelForSeq2SeqLM),
    **dict.fromkeys(tiny.DECODERS, tf.AutoModelForCausalLM),
    **dict.fromkeys(tiny.ENCODERS, tf.AutoModelForMaskedLM),
}


def _patched(family="bart", **options):
    """A patched model whose alphas all differ, so that no mix-up can hide."""
    model = patch_model(tiny.build(family), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "entmax_norm" in name:
                parameter.normal_()
    return model


def _same(first, second, family):
    with torch.no_grad():
        return torch.equal(first(**tiny.inputs(family)).logits, second(**tiny.inputs(family)).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_save_load_save_load(family, tmp_path):
    model = _patched(family)
    model.save_pretrained(tmp_path / "a")
    again = AUTO[family].from_pretrained(tmp_path / "a")
    assert is_patched(again) and _same(model, again, family)
    again.save_pretrained(tmp_path / "b")
    third = AUTO[family].from_pretrained(tmp_path / "b")
    assert _same(model, third, family)
    assert all(torch.equal(v, alphas(third)[k]) for k, v in alphas(model).items())
    assert json.loads((tmp_path / "b/config.json").read_text())["attn_implementation"] == "hf_entmax"


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1.5},
        {"tie": "layer"},
        {"tie": "site"},
        {"tie": "model"},
        {"sites": ("cross",), "layers": (1,)},
        {"exclude": ("encoder.layers.0.self_attn",)},
        {"alpha_range": (1.0, 3.0), "alpha_init": 2.5},
        {"alpha_dtype": "auto"},
        {"output_alpha": 1.5},
    ],
    ids=str,
)
def test_every_option_survives(options, tmp_path):
    model = _patched("bart", **options)
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert _same(model, again, "bart")
    assert hf_entmax.entmax_config(again) == EntmaxConfig(**options)
    assert set(again.state_dict()) == set(model.state_dict())
    labelled = tiny.inputs("bart", labels=True)
    assert torch.equal(model(**labelled).loss, again(**labelled).loss)


_FRESH = """
import sys, torch
{plugin}
import transformers
transformers.logging.set_verbosity_error()
model = transformers.{auto}.from_pretrained(sys.argv[1])
batch = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save((model.state_dict(), model(**batch).logits), sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("family, order", [("t5", "before"), ("llama", "after")])
def test_a_fresh_process_loads_the_same_model(family, order, tmp_path):
    model = _patched(family)
    model.save_pretrained(tmp_path / "model")
    batch = tiny.inputs(family)
    torch.save(batch, tmp_path / "batch.pt")
    plugin = "import hf_entmax" if order == "before" else "import transformers.modeling_utils; import hf_entmax"
    code = _FRESH.format(plugin=plugin, auto=AUTO[family].__name__)
    files = [tmp_path / name for name in ("model", "batch.pt", "out.pt")]
    run = fresh.run(code, *files, after="torch" if order == "before" else "transformers")
    assert run.returncode == 0, run.stderr
    states, found = torch.load(tmp_path / "out.pt")
    assert set(states) == set(model.state_dict())
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())
    # Another process may share its sums out among its threads in another way.
    with torch.no_grad():
        expected = model(**batch).logits
    few_roundings = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=few_roundings)


@pytest.mark.parametrize("options", [{}, {"alpha": 1.5}], ids=str)
def test_without_the_plugin_loading_raises(options, tmp_path):
    _patched("bart", **options).save_pretrained(tmp_path)
    run = fresh.run(_FRESH.format(plugin="", auto="AutoModelForSeq2SeqLM"), tmp_path, "-", "-")
    assert run.returncode != 0
    assert "pip install hf_entmax" in run.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_new_interpreter_loads_it_only_with_the_plugin(tmp_path):
    """Nothing that this process holds, or those that are forked from it, has a part in that."""
    _patched("bart").save_pretrained(tmp_path)
    code = (
        "import sys, transformers\n"
        "try: transformers.AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])\n"
        "except Exception as error: print('refused:', 'hf_entmax' in str(error), 'hf_entmax' in sys.modules)\n"
        "import hf_entmax\n"
        "print(hf_entmax.is_patched(transformers.AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert run.stdout.split("\n")[:2] == ["refused: True False", "True"], run.stdout + run.stderr


def test_base_model_and_other_heads_load_from_the_same_checkpoint(tmp_path):
    model = _patched("bert")
    model.save_pretrained(tmp_path)
    base = tf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(alphas(base)["encoder_self"], alphas(model)["encoder_self"])
    classifier = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(alphas(classifier)["encoder_self"], alphas(model)["encoder_self"])
    t5 = _patched("t5")
    t5.save_pretrained(tmp_path / "t5")
    encoder = tf.T5EncoderModel.from_pretrained(tmp_path / "t5")
    assert torch.equal(alphas(encoder)["encoder_self"], alphas(t5)["encoder_self"])


def test_half_precision_load_keeps_alpha_in_float32(tmp_path):
    model = _patched("llama")
    model.save_pretrained(tmp_path)
    half = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(alphas(half)["decoder_self"], alphas(model)["decoder_self"])


def test_sharded_checkpoints_and_from_config(tmp_path):
    model = _patched("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert _same(model, tf.AutoModelForCausalLM.from_pretrained(tmp_path), "llama")
    new = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(tmp_path))
    assert is_patched(new) and torch.allclose(alphas(new)["decoder_self"], torch.tensor(1.01), atol=1e-6)
    assert new(**tiny.inputs("llama")).logits.isfinite().all()


def test_a_configuration_saved_alone_keeps_the_key(tmp_path):
    _patched("gpt2").save_pretrained(tmp_path / "model")
    code = "import hf_entmax, sys\nfrom transformers import AutoConfig\nAutoConfig.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    run = fresh.run(code, tmp_path / "model", tmp_path / "config")
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "config/config.json").read_text())["attn_implementation"] == "hf_entmax"


def test_only_a_submodel_patched(tmp_path):
    encoder, decoder = tiny.build("bert"), tiny.build("gpt2")
    pair = tf.EncoderDecoderModel(
        encoder=encoder.bert,
        decoder=tf.GPT2LMHeadModel(
            tf.GPT2Config(**{**decoder.config.to_dict(), "add_cross_attention": True, "is_decoder": True})
        ),
    )
    pair.config.decoder_start_token_id, pair.config.pad_token_id = tiny.BOS, tiny.PAD
    patch_model(pair.encoder, alpha_init=1.6)
    pair.save_pretrained(tmp_path)
    again = tf.EncoderDecoderModel.from_pretrained(tmp_path)
    assert is_patched(again.encoder) and not is_patched(again.decoder)
    batch = tiny.pair_inputs()
    with torch.no_grad():
        assert torch.allclose(again.eval()(**batch).logits, pair.eval()(**batch).logits, atol=1e-6)


def test_composite_models_patch_as_one(tmp_path):
    pair = tiny.bert_pair()
    patch_model(pair, alpha_init=1.6)
    sites = ("encoder_self", "decoder_self", "cross")
    assert {k: tuple(v.shape) for k, v in alphas(pair).items()} == dict.fromkeys(sites, (2, 4))
    pair.save_pretrained(tmp_path)
    again = tf.EncoderDecoderModel.from_pretrained(tmp_path)
    batch = tiny.pair_inputs()
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, pair.eval()(**batch).logits)


def test_loaded_then_unpatched_is_the_softmax_model(tmp_path):
    plain = tiny.build("bart")
    _patched("bart").save_pretrained(tmp_path)
    model = unpatch_model(tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path))
    with torch.no_grad():
        assert torch.allclose(model(**tiny.inputs("bart")).logits, plain(**tiny.inputs("bart")).logits, atol=1e-4)
    model.save_pretrained(tmp_path / "plain")
    text = (tmp_path / "plain/config.json").read_text()
    assert "entmax" not in text


def _edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config["entmax_config"].update(changes)
    (path / "config.json").write_text(json.dumps(config))


def test_checkpoint_without_alphas(tmp_path):
    _patched("bart").save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in weights.items() if "entmax_norm" not in k}
    safetensors.torch.save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="6 of its entmax parameters are missing"):
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_checkpoint_with_the_wrong_number_of_heads(tmp_path):
    _patched("bart").save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    wrong = {k: v[:3].clone() if "entmax_norm" in k else v for k, v in weights.items()}
    safetensors.torch.save_file(wrong, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        RuntimeError, match="ignore_mismatched_sizes"
    ):  # the library's own error, its report names the keys
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="wrong shape"):
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_raw_alpha_that_is_not_finite(value, tmp_path):
    """It would run as the upper or the lower bound, or as NaN, and never move again."""
    model = _patched("bart")
    model.save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    key = next(k for k in weights if "decoder" in k and "entmax_norm" in k)
    weights[key][2] = value
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{key}.*must be finite"):
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    # As the Trainer does when it goes on, or takes the best checkpoint.
    with pytest.raises(ValueError, match=rf"{key}.*must be finite"):
        model.load_state_dict(weights, strict=False)


def test_parameters_drawn_on_the_cpu_while_the_model_is_on_meta(tmp_path):
    """DiffLlama draws some of its own where the model is built, whatever the device."""
    config = tf.DiffLlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20
    )
    torch.manual_seed(0)
    model = patch_model(tf.DiffLlamaForCausalLM(config), alpha_init=1.4).eval()
    model.save_pretrained(tmp_path)
    assert _same(model, tf.AutoModelForCausalLM.from_pretrained(tmp_path), "llama")


@pytest.mark.parametrize("kind", ["folder", "binary", "link"])
def test_a_readme_that_is_no_text_is_left_alone(kind, tmp_path):
    path = tmp_path / "README.md"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere" / "README.md")
    else:
        path.write_bytes(b"\xff\xfe\x00\x81")
    _patched("gpt2").save_pretrained(tmp_path)
    assert is_patched(tf.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert path.is_dir() if kind == "folder" else kind == "link" or path.read_bytes() == b"\xff\xfe\x00\x81"
    assert path.is_symlink() == (kind == "link")


def test_newer_schema_unknown_field_and_damaged_record(tmp_path):
    _patched("gpt2").save_pretrained(tmp_path)
    original = (tmp_path / "config.json").read_text()
    for version in (SCHEMA_VERSION + 1, 99):
        _edit_config(tmp_path, schema_version=version)
        with pytest.raises(ValueError, match=rf"schema version {version}.*pip install -U"):
            tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(original)
    _edit_config(tmp_path, gamma=1)
    with pytest.raises(ValueError, match=r"unknown fields.*gamma"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(original)
    _edit_config(tmp_path, schema_version="one")
    with pytest.raises(ValueError, match="schema_version"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_truncated_checkpoint(tmp_path):
    _patched("gpt2").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(Exception, match=r"(?i)header|incomplete|truncat|invalid"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_another_implementation_at_load_time_is_an_error(tmp_path):
    _patched("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unpatch_model"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_a_plain_configuration_over_patched_weights_is_an_error(tmp_path):
    _patched("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no place for"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path, config=tiny.build("gpt2").config)


def test_card_is_written_from_the_model_and_kept_when_edited(tmp_path):
    model = _patched("t5", alpha_init=1.4)
    hf_entmax.set_alphas(model, {"cross": 1.75})
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "- hf_entmax" in card
    assert "T5ForConditionalGeneration" in card and "import hf_entmax" in card
    assert "| cross | 2 | 4 | all layers | 1.750 / 1.750 / 1.750 |" in card
    part = patch_model(tiny.build("t5"), layers=(0,), exclude=("decoder.block.0.layer.1.EncDecAttention",))
    part.save_pretrained(tmp_path / "part")
    assert "| encoder_self | 2 | 4 | 1 of 2 layers |" in (tmp_path / "part/README.md").read_text()
    assert "| cross | 2 | 4 | 0 of 2 layers | 1.000 / 1.000 / 1.000 |" in (tmp_path / "part/README.md").read_text()
    (tmp_path / "README.md").write_text("my own words")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"


def test_push_to_hub_uploads_weights_configuration_and_card(tmp_path, monkeypatch):
    """Everything up to the network is real; the two calls that would reach the Hub keep what they were given."""
    import transformers.utils.hub as hub

    uploaded = {}

    class FakeApi:
        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": f"someone/{repo_id}"})()

        def create_commit(self, repo_id, operations, **kwargs):
            for operation in operations:
                source = operation.path_or_fileobj
                uploaded[operation.path_in_repo] = Path(source).read_bytes()
            return "done"

        def create_branch(self, *args, **kwargs):
            raise AssertionError("no branch was asked for")

    def no_card(*args, **kwargs):
        from huggingface_hub.errors import EntryNotFoundError

        raise EntryNotFoundError.__new__(EntryNotFoundError)

    monkeypatch.setattr(hub, "hf_api", lambda *a, **k: FakeApi())
    for name in ("create_commit", "create_repo"):
        if hasattr(hub, name):
            monkeypatch.setattr(hub, name, getattr(FakeApi(), name))
    monkeypatch.setattr(hub.ModelCard, "load", no_card)
    model = _patched("bart")
    model.push_to_hub("my-sparse-bart")
    assert {"config.json", "model.safetensors", "README.md"} <= set(uploaded)
    assert json.loads(uploaded["config.json"])["attn_implementation"] == "hf_entmax"
    weights = safetensors.torch.load(uploaded["model.safetensors"])
    assert sum("entmax_norm" in k for k in weights) == 6
    card = uploaded["README.md"].decode()
    assert "| encoder_self | 2 | 4 | all layers |" in card and 'from_pretrained("someone/my-sparse-bart")' in card


def test_the_card_of_a_sharded_model_does_not_read_its_alphas():
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    from hf_entmax.integration.card import _range_in_words

    values = torch.tensor([[1.1, float("nan")], [1.5, 1.3]])
    assert _range_in_words(values) == "1.100 / 1.300 / 1.500"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = distribute_tensor(values, DeviceMesh("cpu", [0]), [Replicate()])
        assert "sharded" in _range_in_words(sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_the_card_drops_a_calibration_that_is_no_longer_true(tmp_path):
    model = _patched("llama")
    hf_entmax.calibrate_alphas(model, [tiny.inputs("llama", labels=True, seed=seed) for seed in (0, 1)], 0.05)
    model.save_pretrained(tmp_path)
    assert "the alphas were calibrated on" in (tmp_path / "README.md").read_text()
    hf_entmax.set_alphas(model, 1.9)
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "calibrated once and have changed since" in card and "the alphas were calibrated on" not in card


def test_the_card_says_what_a_stranger_needs(tmp_path):
    model = patch_model(tiny.build("llama"))
    model.save_pretrained(tmp_path / "first")
    card = (tmp_path / "first/README.md").read_text()
    assert "pipeline_tag: text-generation" in card and "nothing was learned yet" in card
    assert "AutoTokenizer.from_pretrained" in card and "model.generate(" in card
    (tmp_path / "first/README.md").write_text("---\nlicense: apache-2.0\n---\nwords")
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    hf_entmax.set_alphas(again, 1.5)
    again.save_pretrained(tmp_path / "second")
    card = (tmp_path / "second/README.md").read_text()
    assert "license: apache-2.0" in card and "nothing was learned yet" not in card
    batches = [tiny.inputs("llama", labels=True, seed=seed) for seed in range(3)]
    report = hf_entmax.sparsify(again, batches, max_loss_increase=0.1, progress=None)
    again.save_pretrained(tmp_path / "third")
    card = (tmp_path / "third/README.md").read_text()
    assert f"{100 * report.mean_density:.1f} % of the attention weights are not zero" in card
    assert f"{report.loss_before:.4f} with softmax" in card
    # The weights may change where the alphas rest, and these figures do not follow.
    assert "before any further training" in card
    reloaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "third")
    assert reloaded.config.entmax_sparsity["tokens"] == report.tokens


def test_the_card_of_a_trainer_says_how_the_model_is_loaded(tmp_path):
    model = _patched("llama")
    trainer = tf.Trainer(model, tf.TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True))
    trainer.hub_model_id = "someone/sparse"
    for _ in range(2):
        trainer.save_model()
        trainer.create_model_card(model_name="sparse")
        card = (tmp_path / "run/README.md").read_text()
        assert card.count("import hf_entmax") == 1 and 'from_pretrained("someone/sparse")' in card
        assert "automatically" in card and "## Training procedure" in card  # the Trainer's own words stay
    plain = tf.Trainer(tiny.build("llama"), tf.TrainingArguments(str(tmp_path / "plain"), report_to=[], use_cpu=True))
    plain.create_model_card()
    assert "hf_entmax" not in (tmp_path / "plain/README.md").read_text()


def test_the_card_of_a_trainer_that_writes_its_own_says_how_the_model_is_loaded(tmp_path):
    class Own(tf.Trainer):
        def create_model_card(self, *args, **kwargs):
            (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Own\n\n## About\n\nwords\n")

    trainer = Own(_patched("llama"), tf.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert card.count("import hf_entmax") == 1 and "license: mit" in card and "## About" in card


@pytest.mark.parametrize("options", [{"alpha_init": 1.4}, {"alpha": 1.5}, {"alpha": 1.5, "layers": (0,)}], ids=str)
def test_a_composite_of_patched_parts_is_a_patched_model(tmp_path, options):
    patch_model(tiny.build("bert"), **options).save_pretrained(tmp_path / "part")
    model = tf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "part", tmp_path / "part").eval()
    assert is_patched(model) and hf_entmax.entmax_config(model).alpha == options.get("alpha", "learned")
    assert set(hf_entmax.alphas(model)) == {"encoder_self", "decoder_self", "cross"}
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    ids = torch.randint(5, 30, (2, 6))
    model.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole/README.md").is_file()
    arguments = tf.TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True)
    tf.Trainer(model, arguments).create_model_card()
    assert "import hf_entmax" in (tmp_path / "run/README.md").read_text()
    again = tf.EncoderDecoderModel.from_pretrained(tmp_path / "whole").eval()
    sparse = model(input_ids=ids, labels=ids).logits
    assert is_patched(again) and torch.equal(again(input_ids=ids, labels=ids).logits, sparse)
    with hf_entmax.softmax_attention(model):
        softmax = model(input_ids=ids, labels=ids).logits
    hf_entmax.unpatch_model(model)
    assert not is_patched(model) and not is_patched(model.encoder) and not is_patched(model.decoder)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).logits, softmax)
    assert not torch.equal(softmax, sparse)


def test_a_composite_does_not_lose_the_output_loss_of_its_parts(tmp_path):
    patch_model(tiny.build("bert"), alpha=1.5, output_alpha=1.5).save_pretrained(tmp_path / "part")
    model = tf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "part", tmp_path / "part")
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    ids = torch.randint(5, 30, (2, 6))
    output = model(input_ids=ids, labels=ids)
    plain = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())
    assert abs(float(output.loss) - float(plain)) > 1e-3
    patch_model(tiny.build("bert"), alpha=1.5, layers=(0,), output_alpha=1.5).save_pretrained(tmp_path / "selected")
    with pytest.raises(ValueError, match="silently replace"):
        tf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "selected", tmp_path / "selected")


def test_parts_that_are_patched_differently_say_so(tmp_path):
    for name, alpha in (("one", 1.3), ("two", 1.8)):
        patch_model(tiny.build("bert"), alpha=alpha).save_pretrained(tmp_path / name)
    model = tf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "one", tmp_path / "two")
    assert is_patched(model)
    with pytest.raises(ValueError, match="patched differently"):
        hf_entmax.entmax_config(model)
    assert float(hf_entmax.alphas(model.decoder)["cross"].max()) == pytest.approx(1.8)
    assert not is_patched(hf_entmax.unpatch_model(model))
