import copy

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax import EntmaxConfig, alphas, is_patched, patch_model, set_alphas, unpatch_model
from hf_entmax.integration.discovery import attention_sites

FAMILIES = list(tiny.FAMILIES)
assert FAMILIES


def _logits(model, batch):
    return model(**batch).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_one_is_eager_softmax_in_outputs_and_gradients(family):
    model = tiny.build(family)
    batch = tiny.inputs(family, labels=True)
    batch["attention_mask"][0, 6:] = 0
    plain = copy.deepcopy(model)
    loss = plain(**batch).loss
    loss.backward()
    patched = patch_model(model, alpha=1.0)
    patched_loss = patched(**batch).loss
    patched_loss.backward()
    assert torch.allclose(patched_loss, loss, atol=1e-5)
    gradients = dict(patched.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp_min(1.0)
            assert (gradients[name].grad - parameter.grad).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_alpha_is_sparse_and_gets_a_gradient_everywhere(family):
    model = patch_model(tiny.build(family), alpha_init=1.5)
    batch = tiny.inputs(family, labels=True)
    out = model(**batch, output_attentions=True)
    out.loss.backward()
    attentions = [
        a
        for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        for a in (getattr(out, name, None) or ())
    ]
    assert attentions
    assert any((a == 0).float().mean() > 0.05 for a in attentions)
    for weights in attentions:
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    own = {n: p for n, p in model.named_parameters() if "entmax_norm" in n}
    assert own and all(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_alphas_and_counts(family):
    model = tiny.build(family)
    expected = {s.name: s.num_heads for s in attention_sites(model)}
    patch_model(model, alpha_init=1.3)
    table = alphas(model)
    assert set(table) == set(tiny.SITES[family])
    assert sum(v.numel() for v in table.values()) == sum(expected.values())
    for values in table.values():
        assert torch.allclose(values, torch.full_like(values, 1.3), atol=1e-6)


@pytest.mark.parametrize("family", list(tiny.DECODERS) + list(tiny.ENCODER_DECODERS))
def test_a_changed_future_token_leaves_past_logits_alone(family):
    model = patch_model(tiny.build(family), alpha_init=1.4)
    batch = tiny.inputs(family)
    key = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = {k: v.clone() for k, v in batch.items()}
    changed[key][:, 4:] = (changed[key][:, 4:] + 5) % tiny.VOCAB
    with torch.no_grad():
        before, after = _logits(model, batch), _logits(model, changed)
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-5)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("family", list(tiny.DECODERS))
def test_left_padding_equals_no_padding(family):
    model = patch_model(tiny.build(family), alpha_init=1.4)
    ids = tiny.inputs(family, batch=1, length=7)["input_ids"]
    padded = torch.cat([torch.full((1, 4), tiny.PAD), ids], 1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 7, dtype=torch.long)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        both = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    assert both.isfinite().all()
    assert torch.allclose(both[:, 4:], alone, atol=1e-5)


@pytest.mark.parametrize("family", list(tiny.ENCODERS) + list(tiny.ENCODER_DECODERS))
def test_right_padding_equals_no_padding(family):
    model = patch_model(tiny.build(family), alpha_init=1.4)
    batch = tiny.inputs(family, batch=1, length=7)
    padded = dict(batch)
    padded["input_ids"] = torch.cat([batch["input_ids"], torch.full((1, 3), tiny.PAD)], 1)
    padded["attention_mask"] = torch.cat([batch["attention_mask"], torch.zeros(1, 3, dtype=torch.long)], 1)
    with torch.no_grad():
        alone, both = _logits(model, batch), _logits(model, padded)
    assert torch.allclose(both[:, : alone.shape[1]], alone, atol=1e-5)


@pytest.mark.parametrize("family", list(tiny.DECODERS) + list(tiny.ENCODER_DECODERS))
@pytest.mark.parametrize("cache", [None, "static"])
def test_cached_generation_equals_uncached(family, cache):
    model = patch_model(tiny.build(family), alpha_init=1.5)
    batch = tiny.inputs(family, batch=2, length=6)
    batch.pop("decoder_input_ids", None)
    common = dict(max_new_tokens=8, do_sample=False, num_beams=1, pad_token_id=tiny.PAD)
    if cache is not None:
        common["cache_implementation"] = cache
        common["disable_compile"] = True
    cached = model.generate(**batch, **common)
    uncached = model.generate(
        **batch, max_new_tokens=8, do_sample=False, num_beams=1, pad_token_id=tiny.PAD, use_cache=False
    )
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize(
    "family, implementation", [(f, i) for f in FAMILIES for i in ("eager", "sdpa") if (f, i) != ("gemma2", "sdpa")]
)
def test_unpatch_restores_bit_by_bit(family, implementation):
    model = tiny.build(family, attn_implementation=implementation)
    batch = tiny.inputs(family)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    config, tags, attributes = model.config.to_dict(), model.model_tags, set(model.__dict__)
    with torch.no_grad():
        before = _logits(model, batch)
    unpatch_model(patch_model(model))
    assert not is_patched(model)
    assert set(model.state_dict()) == set(state) and all(
        torch.equal(v, model.state_dict()[k]) for k, v in state.items()
    )
    assert model.config.to_dict() == config and model.model_tags == tags
    assert set(model.__dict__) == attributes
    assert not any(hasattr(m, "_entmax_left_alone") for m in model.modules())
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(_logits(model, batch), before)


def test_fixed_alpha_has_no_parameters():
    model = patch_model(tiny.build("bart"), alpha=1.5)
    assert not [n for n, _ in model.named_parameters() if "entmax_norm" in n]
    assert all((v == 1.5).all() for v in alphas(model).values())


@pytest.mark.parametrize("tie, parameters", [("none", 6 * 4), ("layer", 6), ("site", 3), ("model", 1)])
def test_tied_alphas(tie, parameters):
    model = patch_model(tiny.build("t5"), tie=tie)
    own = [p for n, p in model.named_parameters() if "entmax_norm" in n]
    assert sum(p.numel() for p in own) == parameters
    model(**tiny.inputs("t5", labels=True)).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in own)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for n, p in twin.named_parameters():
            if "entmax_norm" in n:
                p.fill_(1.0)
    assert all((v > 1.7).all() for v in alphas(twin).values())
    assert all((v < 1.2).all() for v in alphas(model).values())


def test_a_module_is_named_by_whole_parts():
    """``n.0.self_attn`` ends the name of a module of "encoder.layers.0", and names none."""
    with pytest.raises(ValueError, match=r"rs\.0\.self_attn"):
        patch_model(tiny.build("bart"), exclude=("rs.0.self_attn",))
    model = patch_model(tiny.build("bart"), alpha=2.0, exclude=("layers.0.self_attn",))
    table = alphas(model)
    assert (table["encoder_self"][0] == 1).all() and (table["decoder_self"][0] == 1).all()
    assert (table["cross"] == 2).all() and (table["encoder_self"][1] == 2).all()


def test_chosen_sites_layers_and_exclusions():
    model = patch_model(
        tiny.build("bart"),
        alpha=2.0,
        sites=("cross", "decoder_self"),
        layers=(-1,),
        exclude=("decoder.layers.1.self_attn",),
    )
    table = alphas(model)
    assert (table["encoder_self"] == 1).all() and (table["decoder_self"] == 1).all()
    assert table["cross"].tolist() == [[1.0] * 4, [2.0] * 4]
    whole = tiny.build("bart")
    patch_model(whole, alpha=1.0)
    batch = tiny.inputs("bart")
    out = model(**batch, output_attentions=True)
    assert torch.allclose(
        out.encoder_attentions[0], whole(**batch, output_attentions=True).encoder_attentions[0], atol=1e-6
    )
    assert (out.cross_attentions[1] == 0).any() and not (out.cross_attentions[0] == 0).any()


def test_what_is_left_alone_equals_the_softmax_model():
    model, batch = tiny.build("llama"), tiny.inputs("llama")
    with torch.no_grad():
        plain = model(**batch, output_hidden_states=True).hidden_states[1]
        patch_model(model, alpha=2.0, layers=1)
        patched = model(**batch, output_hidden_states=True).hidden_states
    assert torch.allclose(patched[1], plain, atol=1e-5)
    assert not torch.allclose(patched[2], plain, atol=1e-2)


def test_alpha_stays_float32_when_the_model_is_cast():
    model = patch_model(tiny.build("llama"), alpha_init=1.2345678).to(torch.bfloat16)
    own = [p for n, p in model.named_parameters() if "entmax_norm" in n]
    assert all(p.dtype == torch.float32 for p in own)
    assert torch.allclose(alphas(model)["decoder_self"], torch.tensor(1.2345678), atol=1e-6)
    assert model(**tiny.inputs("llama")).logits.dtype == torch.bfloat16
    follows = patch_model(tiny.build("llama"), alpha_dtype="auto").to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for n, p in follows.named_parameters() if "entmax_norm" in n)


def test_alpha_init_normal_draws_and_depends_on_the_seed():
    torch.manual_seed(1)
    first = alphas(patch_model(tiny.build("gpt2", seed=1), alpha_init="normal"))["decoder_self"]
    second = alphas(patch_model(tiny.build("gpt2", seed=2), alpha_init="normal"))["decoder_self"]
    assert first.std() > 0.05 and not torch.equal(first, second)


def test_set_alphas():
    model = patch_model(tiny.build("bart"))
    wanted = torch.tensor([[1.1, 1.2, 1.3, 1.4], [1.5, 1.6, 1.7, 1.8]])
    set_alphas(model, {"cross": wanted, "encoder_self": 1.9})
    table = alphas(model)
    assert torch.allclose(table["cross"], wanted, atol=1e-5)
    assert torch.allclose(table["encoder_self"], torch.tensor(1.9), atol=1e-5)
    with pytest.raises(ValueError, match=r"shape \(3, 4\).*\(2, 4\)"):
        set_alphas(model, {"cross": torch.full((3, 4), 1.5)})
    with pytest.raises(ValueError, match=r"between 1.0 and 2.0"):
        set_alphas(model, 2.5)
    with pytest.raises(ValueError, match="sites"):
        set_alphas(model, {"context": 1.5})
    fixed = patch_model(tiny.build("bart"), alpha=1.5)
    set_alphas(fixed, 2.0)
    assert fixed.config.entmax_config["alpha"] == 2.0 and fixed.model.encoder.config.entmax_config["alpha"] == 2.0


def test_layers_that_differ_in_their_number_of_heads():
    sizes = dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=2)
    model = patch_model(tf.SwinModel(tf.SwinConfig(**sizes)))
    table = alphas(model)["encoder_self"]
    assert table.isnan().tolist() == [[False, False, True, True], [False] * 4]
    set_alphas(model, 1.5)
    assert torch.allclose(alphas(model)["encoder_self"][~table.isnan()], torch.tensor(1.5))
    mapped = patch_model(
        tf.SwinModel(tf.SwinConfig(**sizes)), mapping="sparsegen_lin", mapping_options={"lam": "learned"}
    )
    assert torch.equal(hf_entmax.mapping_options(mapped)["lam"]["encoder_self"].isnan(), table.isnan())


def test_set_alphas_takes_what_alphas_gives():
    sizes = dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1, 1], num_heads=[2, 4, 2], window_size=2)
    model = patch_model(tf.SwinModel(tf.SwinConfig(**sizes)), layers=(0, 1), alpha_range=(1.2, 2.0), alpha_init=1.5)
    table = alphas(model)  # NaN where there is no head, 1 in the layer that keeps its softmax
    set_alphas(model, 1.9)
    set_alphas(model, table)
    assert torch.allclose(alphas(model)["encoder_self"], table["encoder_self"], equal_nan=True)
    table["encoder_self"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"between 1\.2 and 2"):
        set_alphas(model, table)


def test_new_parts_are_in_the_mode_of_the_model():
    model = patch_model(tiny.build("t5").eval(), tie="site")
    assert not any(module.training for module in model.modules())


def test_alphas_in_the_graph():
    model = patch_model(tiny.build("gpt2"))
    sum(v.sum() for v in alphas(model, detach=False).values()).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "entmax_norm" in n)


def test_softmax_attention_for_a_while():
    model = tiny.build("bert")
    batch = tiny.inputs("bert")
    with torch.no_grad():
        plain = _logits(model, batch)
        patch_model(model, alpha_init=1.7)
        sparse = _logits(model, batch)
        with hf_entmax.softmax_attention(model):
            assert torch.allclose(_logits(model, batch), plain, atol=1e-5)
        assert torch.equal(_logits(model, batch), sparse)


def test_patching_twice_is_an_error_and_changes_nothing():
    model = patch_model(tiny.build("gpt2"), alpha_init=1.3)
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model, alpha=2.0)
    assert torch.allclose(alphas(model)["decoder_self"], torch.tensor(1.3), atol=1e-6)
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(tiny.build("gpt2"))


@pytest.mark.parametrize("name", ["longt5", "gptj", "bloom", "gpt_neo", "deberta-v2", "xlnet", "pegasus_x"])
def test_models_that_bypass_the_interface_are_refused_and_left_as_they_were(name):
    with torch.device("meta"):  # their code is looked at, not what they compute
        model = tf.AutoModel.from_config(tf.AutoConfig.for_model(name))
    before = model.config.to_dict(), set(model.state_dict()), model.config._attn_implementation
    with pytest.raises(ValueError, match=f"model_type '{name}'.*cannot be patched"):
        patch_model(model)
    assert (model.config.to_dict(), set(model.state_dict()), model.config._attn_implementation) == before


def test_wrappers_and_strangers_are_told_what_to_do():
    with pytest.raises(TypeError, match=r"torch\.compile\(patch_model"):
        patch_model(torch.compile(tiny.build("gpt2")))
    with pytest.raises(TypeError, match="PreTrainedModel"):
        patch_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"alpha": 0.5}, ValueError, r"alpha=0\.5.*>= 1"),
        ({"alpha": float("nan")}, ValueError, "finite"),
        ({"alpha": [1.5, 1.2]}, ValueError, "alpha="),
        ({"alpha": "leanred"}, ValueError, "learned"),
        ({"alpha_init": 2.0}, ValueError, "strictly between"),
        ({"alpha_range": (2.0, 1.0)}, ValueError, "lo < hi"),
        ({"alpha_range": (0.5, 2.0)}, ValueError, "1 <= lo"),
        ({"tie": "heads"}, ValueError, "'none', 'layer', 'site', 'model'"),
        ({"sites": ("context",)}, ValueError, "encoder_self"),
        ({"sites": ()}, ValueError, "empty"),
        ({"layers": (7,)}, ValueError, r"\[7\].*0 to 1"),
        ({"layers": "all"}, TypeError, "integer"),
        ({"exclude": "encoder.layers.9"}, ValueError, r"encoder\.layers\.9"),
        ({"output_alpha": 0.9}, ValueError, "output_alpha"),
        ({"backend": "cuda"}, ValueError, "'auto', 'torch', 'numba', 'triton'"),
        ({"mapping": "sparsegen_linn"}, ValueError, "sparsegen_lin"),
        ({"mapping_options": {"lam": 0.5}}, ValueError, "mapping='entmax'"),
        ({"alpha_dtype": "float16"}, ValueError, "float32"),
        ({"alpah": 1.5}, ValueError, "alpah"),
        ({"config": 3}, TypeError, "EntmaxConfig"),
    ],
)
def test_bad_options_leave_the_model_as_it_was(options, error, match):
    model = tiny.build("bart")
    before = model.config.to_dict(), set(model.state_dict()), set(model.__dict__)
    with pytest.raises(error, match=match):
        patch_model(model, **options)
    assert (model.config.to_dict(), set(model.state_dict()), set(model.__dict__)) == before
    assert not is_patched(model)


def test_a_site_that_the_model_does_not_have():
    with pytest.raises(ValueError, match=r"\['cross'\].*only \['decoder_self'\]"):
        patch_model(tiny.build("gpt2"), sites=("cross",))


def test_config_and_keywords_together():
    config = EntmaxConfig(alpha=1.5, sites=("cross",))
    model = patch_model(tiny.build("t5"), config, alpha=2.0)
    assert hf_entmax.entmax_config(model) == config.replace(alpha=2.0)
    as_dict = patch_model(tiny.build("t5"), {"alpha": 1.5, "sites": ["cross"]})
    assert hf_entmax.entmax_config(as_dict) == config


def test_a_module_without_numbers_never_runs_as_softmax():
    model = patch_model(tiny.build("gpt2"))
    del model.transformer.h[0].attn._modules["entmax_norm"]
    with pytest.raises(ValueError, match="carries no 'entmax_norm'"):
        model(**tiny.inputs("gpt2"))


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_another_implementation_on_a_patched_model_is_an_error(name):
    model = patch_model(tiny.build("llama"))
    with pytest.raises(ValueError, match="unpatch_model"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "hf_entmax"
