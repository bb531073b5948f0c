from pathlib import Path

import fresh
import pytest
import tiny_models as tiny
import torch
import transformers as tf

from hf_entmax import alphas, is_patched, patch_model, set_alphas

peft = pytest.importorskip("peft")
ROOT = Path(__file__).parents[2]


def _base(tmp_path):
    if not (tmp_path / "base").exists():
        tiny.build("llama").save_pretrained(tmp_path / "base")
    return tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def _adapter(tmp_path, modules_to_save=("entmax_norm",), **options):
    base = patch_model(_base(tmp_path), **options)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=list(modules_to_save) or None)
    )
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    return model.eval()


def _logits(model):
    with torch.no_grad():
        return model(**tiny.inputs("llama")).logits


@pytest.mark.parametrize("modules_to_save", [("entmax_norm",), ()])
@pytest.mark.parametrize(
    "options",
    [{"alpha_init": 1.5}, {"alpha": 1.5}, {"mapping": "sparsegen_lin", "mapping_options": {"lam": "learned"}}],
    ids=str,
)
def test_adapter_over_a_base_patched_in_memory_comes_back_whole(modules_to_save, options, tmp_path):
    if options.get("alpha") == 1.5 and modules_to_save:
        modules_to_save = ()
    model = _adapter(tmp_path, modules_to_save, **options)
    model.save_pretrained(tmp_path / "adapter")
    over_plain = peft.PeftModel.from_pretrained(_base(tmp_path), tmp_path / "adapter").eval()
    assert is_patched(over_plain) and torch.equal(_logits(over_plain), _logits(model))
    over_patched = peft.PeftModel.from_pretrained(patch_model(_base(tmp_path), **options), tmp_path / "adapter").eval()
    assert torch.equal(_logits(over_patched), _logits(model))
    natively = _base(tmp_path)
    natively.load_adapter(str(tmp_path / "adapter"))
    assert torch.allclose(_logits(natively.eval()), _logits(model), atol=1e-5)


def test_alphas_that_only_the_base_holds_come_back(tmp_path):
    model = _adapter(tmp_path, ())
    set_alphas(model.get_base_model(), {"decoder_self": torch.tensor([[1.2, 1.4, 1.6, 1.8], [1.9, 1.7, 1.5, 1.3]])})
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(_base(tmp_path), tmp_path / "adapter")
    assert torch.equal(alphas(again.get_base_model())["decoder_self"], alphas(model.get_base_model())["decoder_self"])


def test_trained_alphas_are_the_ones_that_are_shown(tmp_path):
    model = _adapter(tmp_path)
    shown = alphas(model.get_base_model())["decoder_self"]
    trained = [p for n, p in model.named_parameters() if "modules_to_save" in n]
    assert torch.allclose(shown, torch.stack([1 + torch.sigmoid(p.detach()) for p in trained]))
    with model.disable_adapter():
        assert torch.allclose(alphas(model.get_base_model())["decoder_self"], torch.tensor(1.01), atol=1e-6)


def test_another_patch_under_the_adapter_is_an_error(tmp_path):
    _adapter(tmp_path).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="plain base"):
        peft.PeftModel.from_pretrained(patch_model(_base(tmp_path), alpha=2.0), tmp_path / "adapter")


def test_merging_gives_an_ordinary_patched_model(tmp_path):
    model = _adapter(tmp_path)
    before = _logits(model)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.allclose(_logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), before, atol=1e-4)


def test_without_the_plugin_the_adapter_does_not_load(tmp_path):
    _adapter(tmp_path).save_pretrained(tmp_path / "adapter")
    code = (
        "import sys, peft, transformers\n"
        "base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "peft.PeftModel.from_pretrained(base, sys.argv[2])"
    )
    run = fresh.run(code, tmp_path / "base", tmp_path / "adapter")
    assert run.returncode != 0 and "import hf_entmax" in run.stderr.splitlines()[-1]


def test_adapters_of_plain_models_are_left_alone(tmp_path):
    model = peft.get_peft_model(_base(tmp_path), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "plain")
    assert "entmax" not in (tmp_path / "plain/adapter_config.json").read_text()
    again = peft.PeftModel.from_pretrained(_base(tmp_path), tmp_path / "plain")
    assert not is_patched(again) and torch.equal(_logits(again), _logits(model))


def test_a_method_that_would_skip_the_output_loss_is_refused(tmp_path):
    base = patch_model(_base(tmp_path), output_alpha=1.5)
    with pytest.raises(ValueError, match="AdaLoraModel"):
        peft.get_peft_model(base, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10))


def test_the_output_loss_works_inside_lora(tmp_path):
    from hf_entmax.losses import entmax_loss

    base = patch_model(_base(tmp_path), output_alpha=1.5)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    batch = {**tiny.inputs("llama"), "labels": tiny.inputs("llama")["input_ids"]}
    out = model(**batch)
    assert torch.allclose(out.loss, entmax_loss(out.logits[:, :-1], batch["labels"][:, 1:], 1.5), atol=1e-6)


def test_alphas_that_peft_froze_are_said_once():
    """They look learned and never move; an adapter over them may be wanted, so that it is a warning."""
    lora = {"r": 2, "target_modules": ["q_proj"]}
    with pytest.warns(UserWarning, match=r"froze all learned alphas.*LoraConfig\(modules_to_save=\['entmax_norm'\]"):
        model = peft.get_peft_model(patch_model(tiny.build("llama")), peft.LoraConfig(**lora))
    assert not any(p.requires_grad for n, p in model.named_parameters() if "entmax_norm" in n)


@pytest.mark.parametrize(
    "options, lora",
    [({}, {"modules_to_save": ["entmax_norm"]}), ({"alpha": 1.5}, {}), ({}, {"inference_mode": True})],
    ids=["trained", "fixed", "inference"],
)
def test_no_warning_where_nothing_learned_is_frozen(options, lora, recwarn):
    peft.get_peft_model(
        patch_model(tiny.build("llama"), **options), peft.LoraConfig(r=2, target_modules=["q_proj"], **lora)
    )
    assert not [w for w in recwarn if "froze" in str(w.message)]


def test_saving_touches_only_what_it_wrote(tmp_path):
    plain = peft.get_peft_model(_base(tmp_path), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    plain.save_pretrained(tmp_path / "d/other")
    early = _adapter(tmp_path, (), alpha_init=1.2)
    early.save_pretrained(tmp_path / "d/checkpoint-1")
    before = {path: path.read_bytes() for path in (tmp_path / "d").rglob("adapter_config.json")}
    late = _adapter(tmp_path, (), alpha_init=1.7)
    late.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    late.save_pretrained(tmp_path / "d")
    assert len(before) == 2 and all(path.read_bytes() == text for path, text in before.items())
    for folder in ("d", "d/second"):
        assert "entmax" in (tmp_path / folder / "adapter_config.json").read_text()
    assert not is_patched(peft.PeftModel.from_pretrained(_base(tmp_path), tmp_path / "d/other"))
    again = peft.PeftModel.from_pretrained(_base(tmp_path), tmp_path / "d/checkpoint-1")
    assert torch.allclose(alphas(again.get_base_model())["decoder_self"], torch.tensor(1.2))


def test_a_process_that_is_not_the_main_one_writes_nothing(tmp_path):
    _adapter(tmp_path, ()).save_pretrained(tmp_path / "adapter", is_main_process=False)
    assert not list(tmp_path.rglob("adapter_config.json"))


@pytest.mark.parametrize("native", [False, True])
def test_an_adapter_brings_its_alphas_to_a_base_that_is_patched_alike(tmp_path, native):
    trained = _adapter(tmp_path, ())
    set_alphas(trained.get_base_model(), 1.9)
    trained.save_pretrained(tmp_path / "adapter")
    base = patch_model(_base(tmp_path))
    with pytest.warns(UserWarning, match="replaced by the adapter's"):
        if native:
            base.load_adapter(str(tmp_path / "adapter"))
        else:
            again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.allclose(alphas(base)["decoder_self"], torch.tensor(1.9))
    if not native:
        assert torch.equal(_logits(again), _logits(trained))


def test_two_adapters_that_need_other_alphas_do_not_share_a_base(tmp_path):
    for name, value in (("low", 1.2), ("high", 1.9), ("low-too", 1.2)):
        model = _adapter(tmp_path, ())
        set_alphas(model.get_base_model(), value)
        model.save_pretrained(tmp_path / name)
    model = peft.PeftModel.from_pretrained(_base(tmp_path), tmp_path / "low")
    model.load_adapter(tmp_path / "low-too", "same")
    with pytest.raises(ValueError, match="trained over other alphas"):
        model.load_adapter(tmp_path / "high", "other")
    assert torch.allclose(alphas(model.get_base_model())["decoder_self"], torch.tensor(1.2))


def test_a_sparse_adapter_does_not_join_one_that_needs_softmax(tmp_path):
    plain = peft.get_peft_model(_base(tmp_path), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    _adapter(tmp_path, ()).save_pretrained(tmp_path / "sparse")
    with pytest.raises(ValueError, match="softmax attention"):
        plain.load_adapter(tmp_path / "sparse", "sparse")
    assert not is_patched(plain.get_base_model())


def test_the_card_of_an_adapter_says_how_it_is_loaded(tmp_path):
    model = _adapter(tmp_path)
    for _ in range(2):
        model.save_pretrained(tmp_path / "adapter")
        card = (tmp_path / "adapter/README.md").read_text()
        assert card.count("import hf_entmax") == 1 and "PeftModel.from_pretrained(base" in card
        assert card.startswith("---\n") and "library_name: peft" in card


@pytest.mark.parametrize("modules_to_save", [None, ["entmax_norm"]])
def test_an_adapter_that_transformers_saves_never_runs_over_softmax(tmp_path, modules_to_save):
    model = patch_model(_base(tmp_path))
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=modules_to_save))
    set_alphas(model, 1.9)
    model.save_pretrained(tmp_path / "adapter")
    again = _base(tmp_path)
    again.load_adapter(str(tmp_path / "adapter"))
    assert is_patched(again) and torch.allclose(alphas(again)["decoder_self"], torch.tensor(1.9))
    torch.testing.assert_close(_logits(again.eval()), _logits(model.eval()))
    assert "import hf_entmax" in (tmp_path / "adapter/adapter_config.json").read_text()


def test_an_adapter_over_parts_with_configurations_of_their_own_is_refused(tmp_path):
    for name, alpha in (("one", 1.3), ("two", 1.8)):
        patch_model(tiny.build("bert"), alpha=alpha).save_pretrained(tmp_path / name)
    model = tf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "one", tmp_path / "two")
    with pytest.raises(ValueError, match="patch the whole"):
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
