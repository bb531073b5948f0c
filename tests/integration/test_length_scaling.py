"""Length scaling: nothing changes at the start, every number learns, and n is what each query may see."""

import copy
import math
import threading

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model

import hf_entmax
from hf_entmax import length_scalings, patch_model, unpatch_model
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.scaled_query import KEPT_INPUT
from hf_entmax.training import alpha_parameter_groups

KINDS = ("constant", "log", "adaptive")
assert len(tiny.FAMILIES) >= 12
#: An encoder, a decoder and both among the quick tests, all families among the slow ones.
FAMILIES = [f if f in ("bert", "llama", "t5") else pytest.param(f, marks=pytest.mark.slow) for f in tiny.FAMILIES]


def scaled(family, kind, seed=0, **options):
    """A patched model whose length scaling matters, with numbers that differ from head to head."""
    init = "identity" if kind == "constant" else "paper"
    model = patch_model(tiny.build(family), length_scaling=kind, length_scaling_init=init, **{"alpha": 1.5} | options)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".length_scaling." in name:
            with torch.no_grad():
                parameter.add_(torch.rand(parameter.shape, generator=generator) * (0.1 if kind == "adaptive" else 0.5))
    return model


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_patching_changes_nothing_and_every_number_gets_a_gradient(family, kind):
    model = tiny.build(family)
    batch = tiny.inputs(family, labels=True)
    batch["attention_mask"][0, 6:] = 0
    batch["attention_mask"][1, :2] = 0
    plain = logits(model, batch)
    real = batch["attention_mask"].bool() if family in tiny.DECODERS else ...  # padding sees no key there
    for alpha in (1.0, 1.5):
        without = plain if alpha == 1.0 else logits(patch_model(copy.deepcopy(model), alpha=alpha), batch)
        patched = patch_model(copy.deepcopy(model), alpha=alpha, length_scaling=kind)
        out = patched(**batch)
        assert (out.logits - without)[real].abs().max() <= (1e-5 if alpha == 1.0 else 1e-6)  # eager's own rounding
        out.loss.backward()
        own = {name: p for name, p in patched.named_parameters() if ".length_scaling." in name}
        assert set(length_scalings(patched)) == set(tiny.SITES[family])
        assert own and all(p.grad.abs().max() > 0 for p in own.values())
    assert set(vars(unpatch_model(patched).get_submodule(attention_sites(model)[0].name))) == set(
        vars(attention_sites(model)[0].module)
    )
    torch.testing.assert_close(logits(patched, batch), plain, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", list(tiny.DECODERS) + list(tiny.ENCODER_DECODERS))
def test_cache_and_left_padding_count_the_same_keys(family, kind):
    model = scaled(family, kind)
    batch = tiny.inputs(family, batch=2, length=6)
    batch.pop("decoder_input_ids", None)
    batch["attention_mask"][0, :2] = 0
    settings = dict(
        max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    cached = model.generate(**batch, **settings)
    for other in ({"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        again = model.generate(**batch, **settings, **other)
        for one, two in zip(cached.logits, again.logits, strict=True):
            torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4)
    if family in tiny.ENCODER_DECODERS:
        return
    alone = model.generate(input_ids=batch["input_ids"][:1, 2:], **settings)
    for one, two in zip(cached.logits, alone.logits, strict=True):
        torch.testing.assert_close(one[:1], two, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["t5", "bart", "bert", "modernbert", "albert"])
def test_right_padding_and_the_length_of_the_source(family, kind):
    model = scaled(family, kind)
    batch = tiny.inputs(family, batch=1, length=7)
    padded = dict(batch)
    padded["input_ids"] = torch.cat([batch["input_ids"], torch.full((1, 3), tiny.PAD)], 1)
    padded["attention_mask"] = torch.cat([batch["attention_mask"], torch.zeros(1, 3, dtype=torch.long)], 1)
    alone = logits(model, batch)
    torch.testing.assert_close(logits(model, padded)[:, : alone.shape[1]], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_are_those_of_one_row_after_another(kind):
    for family in ("bart", "llama"):
        model = scaled(family, kind)
        batch = tiny.inputs(family, batch=2, length=6)
        batch.pop("decoder_input_ids", None)
        settings = dict(max_new_tokens=5, num_beams=3, do_sample=False)
        both = model.generate(**batch, **settings)
        for row in range(2):
            one = model.generate(**{k: v[row : row + 1] for k, v in batch.items()}, **settings)
            assert torch.equal(one[0], both[row, : one.shape[1]])
        assert torch.equal(both, model.generate(**batch, **settings, use_cache=False))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_count_their_own_keys(kind):
    model = scaled("llama", kind)
    ids = tiny.inputs("llama", batch=1, length=9)["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        parts = [model(input_ids=part).logits for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(packed, torch.cat(parts, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "kind, family, window", [("log", "llama", None), ("log", "mistral", 3), ("constant", "llama", None)]
)
def test_the_equations_by_hand(kind, family, window):
    """Softmax with scalable softmax written out: n is the position from 1, and never more than the window."""
    plain, model = tiny.build(family), scaled(family, kind, alpha=1.0)
    batch = tiny.inputs(family, batch=2, length=8)
    log_n = torch.arange(1, 9).clamp(max=window or 9).float().log()
    for site, s in zip(attention_sites(plain), length_scalings(model)["decoder_self"]["s"], strict=True):
        by_hand = log_n[:, None] * s if kind == "log" else 1 + s.expand(8, 4)

        def scale(module, args, out, factor=by_hand):
            return (out.view(2, 8, 4, -1) * factor[..., None]).view(out.shape)

        site.module.q_proj.register_forward_hook(scale)
    torch.testing.assert_close(logits(model, batch), logits(plain, batch), atol=1e-5, rtol=1e-4)


def test_the_adaptive_factor_by_hand_and_for_chosen_heads():
    model = scaled("llama", "adaptive", alpha=1.0, length_scaling_heads=(1, 3))
    plain = tiny.build("llama")
    batch = tiny.inputs("llama", batch=2, length=8)
    numbers = length_scalings(model)["decoder_self"]
    assert numbers["beta_weight"].shape == (2, 4, 32)
    assert numbers["gamma_weight"][:, [0, 2]].isnan().all() and numbers["beta_weight"][:, [1, 3]].isfinite().all()
    n = torch.arange(1, 9).float()[None, :, None]
    chosen = torch.tensor([False, True, False, True])
    for layer, site in enumerate(attention_sites(plain)):
        beta, gamma = (numbers[f"{name}_weight"][layer].nan_to_num() for name in ("beta", "gamma"))

        def scale(module, args, out, beta=beta, gamma=gamma):
            term = torch.nn.functional.softplus(args[0] @ beta.T) * (n + 1).log() ** (2 * (args[0] @ gamma.T).tanh())
            return (out.view(2, 8, 4, -1) * torch.where(chosen, 1 + term, 1.0)[..., None]).view(out.shape)

        site.module.q_proj.register_forward_hook(scale)
    torch.testing.assert_close(logits(model, batch), logits(plain, batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in KINDS),
        ("adaptive", {"alpha": "learned", "tie": "site"}),
        ("log", {"alpha": "learned", "alpha_dtype": "auto"}),
    ],
)
def test_saved_and_loaded(kind, options, tmp_path):
    model = scaled("bart", kind, length_scaling_heads=[0, 2], **options)
    batch = tiny.inputs("bart")
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    half = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {p.dtype for name, p in half.named_parameters() if ".length_scaling." in name}
    assert kept == ({torch.bfloat16} if options.get("alpha_dtype") == "auto" else {torch.float32})
    assert logits(half, batch).isfinite().all()
    card = (tmp_path / "README.md").read_text()
    assert ("temperature" if kind == "constant" else "scalable") in card and "of the heads [0, 2]" in card
    broken = copy.deepcopy(model)
    next(p for n, p in broken.named_parameters() if ".length_scaling." in n).data.view(-1)[0] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="length_scaling"):
        tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "broken")


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_and_keep_it(kind, tmp_path):
    batch = tiny.inputs("llama", labels=True)
    model = get_peft_model(
        scaled("llama", kind, alpha="learned"),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["entmax_norm"], task_type="CAUSAL_LM"),
    )
    trained = {name: p for name, p in model.named_parameters() if ".length_scaling." in name and p.requires_grad}
    assert trained and all("modules_to_save" in name for name in trained)
    groups = {g["name"]: g for g in alpha_parameter_groups(model, 1e-3, 1e-2, length_lr=0.3)}
    assert {id(p) for p in groups["length_scaling"]["params"]} == {id(p) for p in trained.values()}
    optimizer = torch.optim.SGD(groups.values())
    model(**batch).loss.backward()
    optimizer.step()
    assert all(p.grad.abs().max() > 0 for p in trained.values())
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny.build("llama"), tmp_path)
    torch.testing.assert_close(logits(again, batch), logits(model, batch))
    with again.disable_adapter():
        assert not torch.allclose(logits(again, batch), logits(model, batch), atol=1e-6)
    with hf_entmax.softmax_attention(again.get_base_model()), again.disable_adapter():
        torch.testing.assert_close(logits(again, batch), logits(tiny.build("llama"), batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_and_checkpointing_changes_nothing(kind):
    results = []
    for backend, checkpointing in (("torch", False), ("numba", False), ("torch", True)):
        model = scaled("qwen2", kind, alpha="learned", alpha_init=1.5, backend=backend)
        batch = tiny.inputs("qwen2", labels=True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        model(**batch, use_cache=False).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for other in results[1:]:
        for name, gradient in results[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-5, rtol=1e-3)


def test_threads_do_not_mix_their_hidden_states():
    model = scaled("llama", "adaptive")
    batches = [tiny.inputs("llama", seed=seed, length=12) for seed in range(6)]
    alone, found = [logits(model, batch) for batch in batches], {}
    run = lambda i: found.update({i: [logits(model, batches[i]) for _ in range(5)]})  # noqa: E731
    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(alone):
        assert all(torch.equal(expected, one) for one in found[i])
    assert not any(getattr(module, KEPT_INPUT, None) for module in model.modules())


def test_groups_of_a_fixed_alpha():
    groups = {
        g["name"]: g for g in alpha_parameter_groups(scaled("bert", "log"), 1e-3, weight_decay=0.1, length_lr=0.2)
    }
    assert "alpha" not in groups and len(groups["length_scaling"]["params"]) == 2
    assert groups["length_scaling"]["lr"] == 0.2 and groups["length_scaling"]["weight_decay"] == 0
    with pytest.raises(ValueError, match="length_lr=-1"):
        alpha_parameter_groups(scaled("bert", "log"), 1e-3, length_lr=-1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"length_scaling": "linear"}, "choose from"),
        ({"length_scaling": "log", "length_scaling_init": "zero"}, "choose from"),
        ({"length_scaling_init": "paper"}, "no effect"),
        ({"length_scaling": "constant", "length_scaling_init": "paper"}, "has no start in a paper"),
        ({"length_scaling": "log", "length_scaling_init": "softmax"}, "a start for 'constant', not for 'log'"),
        ({"length_scaling_heads": [0]}, "no effect"),
        ({"length_scaling": "log", "length_scaling_heads": []}, "empty"),
        ({"length_scaling": "log", "length_scaling_heads": [0, 4]}, r"attn.*names \[4\].*heads 0 to 3"),
        ({"length_scaling": "log", "length_scaling_heads": [-1]}, "from 0 on"),
        ({"length_scaling": "log", "length_scaling_heads": [1, 1]}, "different"),
        ({"length_scaling": "log", "mapping": "sparsegen_lin"}, "not available for mapping"),
    ],
)
def test_bad_options_leave_the_model_alone(options, message):
    model = tiny.build("gpt2")
    with pytest.raises(ValueError, match=message):
        patch_model(model, **options)
    assert not hf_entmax.is_patched(model) and not any("entmax" in name for name, _ in model.named_modules())
    with pytest.raises(TypeError, match="length_scaling_heads"):
        patch_model(model, length_scaling="log", length_scaling_heads="all")


def test_a_module_without_its_hidden_states_is_named():
    model = scaled("llama", "adaptive")
    attention = attention_sites(model)[0].module
    attention._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match="LlamaAttention has queries"):
        logits(model, tiny.inputs("llama"))


@pytest.mark.parametrize("family", ["llama", "bart"])
@pytest.mark.parametrize(
    "options", [{"alpha": 1.5}, {"alpha_init": 1.5}, {"alpha_init": "normal", "length_scaling_heads": [0, 2]}]
)
def test_a_start_as_sharp_as_softmax(family, options, tmp_path):
    plain = tiny.build(family)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "q_proj" in name:
                parameter.mul_(8)
    model = patch_model(copy.deepcopy(plain), length_scaling="constant", length_scaling_init="softmax", **options)
    for site, numbers in length_scalings(model).items():
        expected = 1 / (1 + 3 * (hf_entmax.alphas(model)[site] - 1)) - 1
        heads = options.get("length_scaling_heads", range(4))
        torch.testing.assert_close(numbers["s"][:, heads], expected[:, heads])
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "multiplied by 1 + s (a temperature" in card and "it started about as sharp as softmax." in card
    loaded = type(model).from_pretrained(tmp_path)
    assert str(length_scalings(loaded)) == str(length_scalings(model))
    if "length_scaling_heads" in options:
        return
    batch = tiny.inputs(family)
    bare = patch_model(copy.deepcopy(plain), alpha=1.5)
    distance = [(logits(other, batch) - logits(plain, batch)).abs().mean() for other in (model, bare)]
    assert distance[0] < 0.9 * distance[1]


def test_the_report_says_it():
    from hf_entmax.analysis import collect
    from hf_entmax.analysis.report.findings import summarize

    statistics = collect(scaled("llama", "log"), [tiny.inputs("llama")])
    assert "s * log(n)" in next(finding.text for finding in summarize(statistics) if finding.topic == "length scaling")
    said = summarize(collect(scaled("llama", "constant"), [tiny.inputs("llama")]))
    assert "1 + s (a temperature per head" in next(f.text for f in said if f.topic == "length scaling")
    plain = collect(patch_model(tiny.build("llama")), [tiny.inputs("llama")])
    assert not any(finding.topic == "length scaling" for finding in summarize(plain))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_traced_and_exported(kind, monkeypatch):
    monkeypatch.setitem(tiny._LLAMA, "num_hidden_layers", 1)
    model = scaled("llama", kind, alpha="learned", backend="torch")
    model.config.use_cache = False
    batch = tiny.inputs("llama")
    expected = logits(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled, batch), expected, atol=2e-5, rtol=1e-4)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask).logits

    with torch.no_grad():
        program = torch.export.export(Logits(), tuple(batch.values()))
        torch.testing.assert_close(program.module()(*batch.values()), expected, atol=2e-5, rtol=1e-4)
        traced = torch.jit.trace(Logits(), tuple(batch.values()), check_trace=False)
        torch.testing.assert_close(traced(*batch.values()), expected, atol=2e-5, rtol=1e-4)
    assert not any(getattr(module, KEPT_INPUT, None) for module in model.modules())


def test_half_precision_and_autocast():
    for kind in KINDS:
        model, batch = scaled("llama", kind, alpha="learned"), tiny.inputs("llama", labels=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch).loss.backward()
        own = [p for name, p in model.named_parameters() if ".length_scaling." in name]
        assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in own)
        identity = patch_model(tiny.build("llama").bfloat16(), alpha=1.5, length_scaling=kind)
        plain = patch_model(tiny.build("llama").bfloat16(), alpha=1.5)
        assert torch.equal(logits(identity, batch), logits(plain, batch))


def test_starts_and_heads_that_there_are_not():
    from hf_entmax.length import AdaptiveScaling, LogScaling

    with pytest.raises(ValueError, match="length_scaling_init='foo'"):
        LogScaling(2, init="foo")
    with pytest.raises(ValueError, match="names a head twice"):
        AdaptiveScaling(2, 8, [0, 0])


@pytest.mark.parametrize("tie", ["site", "model"])
def test_a_softened_start_follows_the_alpha_that_is_shared(tie):
    torch.manual_seed(0)
    model = patch_model(
        tiny.build("t5"), alpha_init="normal", tie=tie, length_scaling="constant", length_scaling_init="softmax"
    )
    for site, values in hf_entmax.alphas(model).items():
        found = 1 + length_scalings(model)[site]["s"]
        torch.testing.assert_close(found, 1 / (1 + 3 * (values - 1)))
