"""``ExactSparseCache``: generation with it equals generation without it, token by token, and says what it read."""

import contextlib
import copy
import dataclasses
import pickle

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hf_entmax
from hf_entmax.generation import ExactSparseCache
from hf_entmax.generation.bits import BitChoice
from hf_entmax.generation.exact_layer import ExactSparseLayer, Plan
from hf_entmax.ops.options import AttentionOptions

#: Windows of two pages and a half, so that sketched keys leave them.
_WINDOW = 40


def _build(family):
    """A tiny model: full attention, GQA, sliding windows, softcap, sinks, position bias, encoder-decoder."""
    if family != "gpt_oss":
        return tiny.build(family, **({"sliding_window": _WINDOW} if family in ("gemma2", "mistral") else {}))
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        **tiny._LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=_WINDOW
    )
    model = tf.GptOssForCausalLM(config)
    for parameter in model.parameters():  # its experts are left uninitialised
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


FAMILIES = ["gpt2", "llama", "qwen2", "gpt_neox", "gemma2", "mistral", "gpt_oss", "t5", "bart", "marian", "mbart"]
WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 4, "do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
}


def _prompt(length=44, batch=2, padded=5):
    ids = torch.randint(3, tiny.VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    ids[0, :padded] = tiny.PAD
    return {"input_ids": ids, "attention_mask": mask}


def _generate(model, cache=None, new=18, **call):
    torch.manual_seed(3)
    inputs = {**_prompt(), "max_new_tokens": new, "eos_token_id": None, "pad_token_id": tiny.PAD, **call}
    return model.generate(past_key_values=cache, **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_without(family, way):
    model = hf_entmax.patch_model(_build(family), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16, verify=way == "greedy")
    assert torch.equal(_generate(model, cache, **WAYS[way]), _generate(model, **WAYS[way]))
    found = cache.certificate()
    assert found.keys_total == found.keys_read + found.keys_zero and found.keys_zero > 0.05 * found.keys_total
    assert found.violations == 0 and not found.others
    assert (found.verified_steps > 0) == (way == "greedy")


def test_learned_alphas_of_all_kinds_and_half_precision():
    model = hf_entmax.patch_model(_build("llama"))
    alphas = torch.tensor([[1.002, 1.3, 1.6, 1.95], [1.1, 1.5, 1.02, 1.8]])
    hf_entmax.set_alphas(model, {"decoder_self": alphas})
    for bits in (2, 6, 8):
        cache = ExactSparseCache(model, bits=bits, page_size=16, verify=True)
        assert torch.equal(_generate(model, cache), _generate(model))
    low, high = (layer.read / layer.pairs for layer in cache.certificate().layers)
    assert low[3] < low[0] and high[3] < high[2]  # heads nearer to softmax read more
    model = model.to(torch.bfloat16)
    cache = ExactSparseCache(model, bits=4, page_size=16, verify=True)
    assert _generate(model, cache).shape == (2, 62) and cache.certificate().keys_zero > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "t5"])
def test_tokens_taken_back_and_several_at_a_time(family):
    """Assisted decoding proposes tokens, and crops what was refused at any place of a page."""
    model = hf_entmax.patch_model(_build(family), alpha=1.5)
    call = {"input_ids": torch.arange(44)[None] % 7 + 3, "attention_mask": None, "do_sample": False}
    expected = _generate(model, **call)
    cache = ExactSparseCache(model, bits=4, page_size=16, verify=True)
    assert torch.equal(_generate(model, cache, prompt_lookup_num_tokens=5, **call), expected)
    assert cache.certificate().verified_steps
    if family == "llama":
        cache = ExactSparseCache(model, bits=4, page_size=16)
        assert torch.equal(_generate(model, cache, assistant_model=tiny.build("llama"), **call), expected)


def test_an_assistant_beside_the_option_of_generate():
    model, assistant = (hf_entmax.patch_model(_build("llama"), alpha=alpha) for alpha in (1.5, 1.6))
    call = {"input_ids": torch.arange(44)[None] % 7 + 3, "attention_mask": None, "do_sample": False}
    expected = _generate(model, **call)
    call.update(
        assistant_model=assistant, cache_implementation="exact_sparse", cache_config={"bits": 4, "page_size": 16}
    )
    out = _generate(model, return_dict_in_generate=True, **call)
    assert torch.equal(out.sequences, expected) and isinstance(out.past_key_values, ExactSparseCache)
    assistant.generation_config.cache_implementation = "exact_sparse"  # as it may be saved with it
    assert torch.equal(_generate(model, **{**call, "cache_implementation": None}), expected)


def test_a_decoder_of_more_layers_than_the_encoder():
    model = hf_entmax.patch_model(tiny.build("t5", num_layers=1, num_decoder_layers=2), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16, verify=True)
    assert torch.equal(_generate(model, cache), _generate(model, use_cache=False))
    assert [layer.name for layer in cache.certificate().layers] == ["self 0", "self 1", "cross 0", "cross 1"]


def test_a_window_is_trimmed_while_the_past_is_recorded():
    """As in assisted decoding: several tokens at a time, some of them taken back."""
    layer = ExactSparseLayer("self 0", Plan(4, 16, None, False), 16)
    layer.update(*torch.randn(2, 1, 2, 60, 8))
    layer.activate_past_recording()
    for _ in range(150):
        layer.update(*torch.randn(2, 1, 2, 4, 8))
        layer.crop(-2)
    assert layer.get_seq_length() == 360 and layer._key.shape[2] < 120 and layer.keys.shape[2] == 15
    for _ in range(150):  # without a crop nothing is forgotten
        layer.update(*torch.randn(2, 1, 2, 1, 8))
    layer.crop(-150)
    assert layer.get_seq_length() == 360 and layer.keys.shape[2] == 15
    layer.reset()
    assert not layer.record_past


def test_a_cache_that_outlives_inference_mode():
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    caches = ExactSparseCache(model, bits=4, page_size=16), tf.DynamicCache(config=model.config)
    tokens, outputs = torch.arange(80).view(2, 40) % 30 + 3, []
    for cache in caches:
        with torch.inference_mode():
            model(tokens, past_key_values=cache)
            model(tokens[:, :1], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            model(tokens[:, :1].repeat(2, 1), past_key_values=cache)
        with torch.no_grad():
            for _ in range(40):
                last = model(tokens[:, 1:2].repeat(2, 1), past_key_values=cache).logits
        outputs.append(last)
    assert torch.allclose(*outputs, atol=1e-4) and caches[0].certificate().layers[0].steps == 42


def test_offloaded_weights():
    accelerate = pytest.importorskip("accelerate")
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    expected = _generate(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    cache = ExactSparseCache(model, bits=4, page_size=16)
    assert torch.equal(_generate(model, cache), expected) and cache.certificate().keys_zero > 0


def test_dropout_is_not_left_out():
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    layer = ExactSparseLayer("self 0", Plan(4, 16, None, False))
    value = torch.ones(1, 2, 40, 8)
    given = (
        model.model.layers[0].self_attn,
        torch.randn(1, 4, 1, 8),
        *layer.update(torch.randn(value.shape), value),
        1.5,
    )
    out, _ = layer.attend(*given, AttentionOptions(), "auto")
    assert torch.allclose(out, torch.ones(()))
    out, _ = layer.attend(*given, AttentionOptions(dropout=0.9), "auto")
    assert float((out - 1).abs().min()) > 0.01 and layer.tally.dense_steps == {"dropout": 1}


def _feed(layer, like, key, value):
    """Give both layers the same; what they return and say must be the same."""
    new = key.shape[2]
    assert layer.get_mask_sizes(new) == like.get_mask_sizes(new)
    found, expected = layer.update(key, value), like.update(key, value)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert layer.get_seq_length() == like.get_seq_length()


@pytest.mark.parametrize("window", [None, 20])
def test_the_buffers_hold_what_transformers_own_layers_hold(window):
    draw = torch.Generator().manual_seed(0)
    number = lambda *limits: int(torch.randint(*limits, (1,), generator=draw))  # noqa: E731
    for record in (False, True):
        like = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
        layer = ExactSparseLayer("self 0", Plan("auto", 16, None, False), window)
        batch, places = 3, set()
        for step in range(120):
            if record and window is not None:
                layer.record_past = like.record_past = True
            new = number(1, 4) if step % 17 else number(1, 60)
            _feed(layer, like, *(torch.randn(batch, 2, new, d) for d in (8, 5)))
            places.add(layer._key.data_ptr())
            if record:
                back = number(0, new + 1)
                layer.crop(-back), like.crop(-back)
            if step % 11 == 3:
                index = torch.randint(0, batch, (batch,), generator=draw)
                layer.reorder_cache(index), like.reorder_cache(index)
            if step == 50:
                layer.batch_repeat_interleave(2), like.batch_repeat_interleave(2)
            if step == 70:
                kept = torch.tensor([0, 2, 5])
                layer.batch_select_indices(kept), like.batch_select_indices(kept)
            batch = layer._key.shape[0]
        if window is None:
            assert len(places) < 12  # not one for each step
        else:
            assert layer._key.shape[2] < 400
        layer.reset(), like.reset()
        _feed(layer, like, torch.randn(1, 4, 3, 6), torch.randn(1, 4, 3, 6))


def test_room_for_a_given_length():
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16, max_cache_len=61)
    expected = _generate(model)
    assert torch.equal(_generate(model, cache), expected) and cache.get_max_length() == 61
    places = [layer._key.data_ptr() for layer in cache.layers]
    assert [layer._key.shape[2] for layer in cache.layers] == [61, 61]
    cache.reset()
    assert torch.equal(_generate(model, cache), expected)
    assert len(places) == len(cache.layers)
    with pytest.raises(ValueError, match="max_cache_len=61: give a larger one"):
        cache.reset()
        _generate(model, cache, new=19)


def test_an_option_of_generate():
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    call = {"cache_implementation": "exact_sparse", "return_dict_in_generate": True}
    out = _generate(model, cache_config={"bits": 4, "page_size": 16}, **call)
    assert isinstance(out.past_key_values, ExactSparseCache)
    assert torch.equal(out.sequences, _generate(model)) and out.past_key_values.certificate().keys_zero > 0
    seq2seq = hf_entmax.patch_model(_build("t5"), alpha=1.5)
    out = _generate(seq2seq, num_beams=2, **call)
    assert isinstance(out.past_key_values, ExactSparseCache) and isinstance(out.past_key_values, tf.EncoderDecoderCache)
    with pytest.raises(ValueError, match="not patched"):
        _generate(_build("llama"), **call)
    with pytest.raises(ValueError, match="It takes bits, page_size"):
        _generate(model, cache_config={"nbits": 4}, **call)
    with pytest.raises(ValueError, match="use only one of the two"):
        _generate(model, ExactSparseCache(model), **call)
    assert _generate(model, use_cache=False, **call).past_key_values is None


def test_the_option_is_kept_in_a_checkpoint(tmp_path):
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    model.generation_config.cache_implementation = "exact_sparse"
    model.generation_config.cache_config = {"bits": 6, "page_size": 16}
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    cache = _generate(loaded, return_dict_in_generate=True).past_key_values
    assert [layer.bits for layer in cache.certificate().layers] == [6, 6]


def test_a_prompt_read_once_and_used_again():
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16)
    inputs = {"input_ids": torch.randint(3, tiny.VOCAB, (1, 40)), "attention_mask": None}
    with torch.no_grad():
        model(inputs["input_ids"], past_key_values=cache)
    longer = torch.cat([inputs["input_ids"], torch.tensor([[5, 6, 7]])], -1)
    expected = _generate(model, **{**inputs, "input_ids": longer})
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert torch.equal(_generate(model, again, **{**inputs, "input_ids": longer}), expected)
        assert again.certificate().keys_zero > 0


def test_counts():
    model = hf_entmax.patch_model(_build("t5"), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16)
    _generate(model, cache, new=21)
    found = cache.certificate()
    names = ["self 0", "self 1", "cross 0", "cross 1"]
    assert [layer.name for layer in found.layers] == names
    own, cross = found.layers[0], found.layers[2]
    # Two sequences; the prompt of the decoder is one token. Cross-attention does not see 5 padded keys of the first.
    assert own.pairs.tolist() == [2 * sum(range(1, 22))] * 4 and cross.pairs.tolist() == [21 * (44 + 39)] * 4
    assert own.dense_steps == {"few keys": 15} and own.steps == 6 and cross.steps == 21
    assert own.dense.tolist() == [2 * sum(range(1, 16))] * 4
    assert (cross.nonzero <= cross.read).all() and (cross.read <= cross.pairs).all()
    assert cross.last_steps.shape == (21, 3, 4) and torch.equal(cross.last_steps.sum(0)[1], cross.read)
    assert own.last_steps[:15, 2].eq(-1).all()
    assert cross.sketch_bytes > 0 and cross.cache_bytes == 2 * 2 * 4 * 44 * 4 * 4
    assert sum(row["keys_read"] for row in found.rows()) == found.keys_read and len(found.rows()) == 16
    text = str(found)
    assert f"{found.keys_zero:,} proved zero" in text and "0 violations" in text and "15 dense (few keys)" in text
    assert all(name in text for name in names)
    cache.reset()
    assert cache.certificate().keys_total == 0 and str(cache.certificate())


def test_bits_are_chosen_by_what_is_read(monkeypatch):
    monkeypatch.setattr("hf_entmax.generation.exact_layer._SHORTEST", 16)
    model = hf_entmax.patch_model(_build("llama"))
    for alpha, bits in ((1.01, None), (1.1, 6), (1.9, 4)):
        hf_entmax.set_alphas(model, alpha)
        cache = ExactSparseCache(model, page_size=16)
        assert torch.equal(_generate(model, cache, new=3), _generate(model, new=3))
        assert [layer.bits for layer in cache.certificate().layers] == [bits, bits]
    hf_entmax.set_alphas(model, 1.03)
    cache = ExactSparseCache(model, page_size=16)
    assert torch.equal(_generate(model, cache, new=19), _generate(model, new=19))
    for layer in cache.certificate().layers:  # nearly all keys have weight: 8 steps with 6 bits, 8 with 8, then none
        assert layer.steps == 16 and layer.dense_steps == {"cheaper": 2}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "t5"])
def test_bits_of_each_key_head(family, monkeypatch):
    """Sinks, masks and position bias go with their heads; one key head near softmax leaves the others their sketch."""
    monkeypatch.setattr("hf_entmax.generation.exact_layer._SHORTEST", 16)
    model = hf_entmax.patch_model(_build(family))
    alphas = torch.tensor([1.01, 1.5, 1.3, 2.0])
    hf_entmax.set_alphas(model, {site: alphas.expand_as(own) for site, own in hf_entmax.alphas(model).items()})
    cache = ExactSparseCache(model, page_size=16, verify=True)
    assert torch.equal(_generate(model, cache, new=20), _generate(model, new=20))
    found = cache.certificate()
    # T5 has a key head for each query head, the others one for two: the lowest alpha of both decides at first.
    start = (None, 4, 4, 4) if family == "t5" else (None, None, 4, 4)
    for layer in found.layers:
        assert layer.steps > 0 and layer.bits in (4, 6, 8)
        assert all(
            bits == was or (was == 4 and bits in (6, 8)) for bits, was in zip(layer.head_bits, start, strict=True)
        )
        assert layer.dense[0] == layer.read[0] == layer.pairs[0] and layer.nonzero[0] == 0
        assert 0 < layer.nonzero[3] <= layer.read[3] - layer.dense[3] < layer.pairs[3] - layer.dense[3]
        assert layer.last_steps[-1, 2, 0] == -1 and layer.last_steps[-1, 2, 3] > 0
    assert found.violations == 0 and found.verified_steps > 0
    assert {row["bits"] for row in found.rows()} == {bits or 0 for layer in found.layers for bits in layer.head_bits}


def test_bits_by_alpha_and_by_what_was_read():
    choice = BitChoice("auto")
    choice.start(torch.tensor([1.05, 1.1, 1.001, 1.9, 1.3, 1.3, 1.2, 2.0, 1.08, 1.1]), 5)
    assert choice.bits == [6, None, 4, 4, 6]
    assert choice.runs() == [(0, 1, 6), (1, 2, None), (2, 4, 4), (4, 5, 6)]
    # Of two query heads that share keys the one that reads more counts; a key out of order costs one and a half.
    pairs, read = torch.full((10,), 1000), torch.tensor([900, 300, 1000, 1000, 400, 40, 300, 500, 390, 100])
    for step in range(8):
        assert choice.bits == [6, None, 4, 4, 6], step
        choice.saw(torch.stack([pairs, read]), 32)
    assert choice.bits == [8, None, 4, 6, 6]  # 0.19 + 1, -, 0.13 + 0.6, 0.13 + 0.75, 0.19 + 0.585
    for _ in range(8):
        choice.saw(torch.stack([pairs, read]), 32)
    assert choice.bits == [None, None, 4, 8, 6] and choice.runs()[0] == (0, 2, None)
    for _ in range(8):
        choice.saw(torch.stack([pairs, read]), 16)  # codes weigh more beside keys of half precision
    assert choice.bits == [None, None, 6, None, 8]
    given = BitChoice(2)
    given.start(1.5, 3)
    given.saw(torch.stack([pairs, pairs]), 32)
    assert given.runs() == [(0, 3, 2)]


@pytest.mark.parametrize(("low", "high"), [(1.05, 1.2), (1.05, 2.0), (1.6, 2.0)])
def test_bits_for_learned_alphas(low, high, monkeypatch):
    monkeypatch.setattr("hf_entmax.generation.exact_layer._SHORTEST", 16)
    model = hf_entmax.patch_model(_build("llama"))
    hf_entmax.set_alphas(model, {"decoder_self": torch.linspace(low, high, 8).view(2, 4)})
    cache = ExactSparseCache(model, page_size=16, verify=True)
    assert torch.equal(_generate(model, cache, new=30), _generate(model, new=30))
    found = cache.certificate()
    assert found.violations == 0 and all(layer.steps >= 8 for layer in found.layers)
    assert (found.keys_zero > 0.2 * found.keys_total) == (high == 2.0)


def test_a_model_that_changes_its_keys_after_the_cache():
    torch.manual_seed(0)
    config = {k: v for k, v in tiny._LLAMA.items() if k != "num_attention_heads"}
    config |= {"kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
    model = hf_entmax.patch_model(tiny.enlarged(tf.JetMoeForCausalLM(tf.JetMoeConfig(**config))), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16)
    assert torch.equal(_generate(model, cache), _generate(model))
    found = cache.certificate()
    assert set(found.others) == {"self 0", "self 1"} and "changes after the cache" in str(found)


def test_other_states_keep_their_own_layers():
    config = tf.Qwen3NextConfig(
        **{**tiny._LLAMA, "num_hidden_layers": 2},
        layer_types=["linear_attention", "full_attention"],
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    torch.manual_seed(0)
    model = hf_entmax.patch_model(tiny.enlarged(tf.Qwen3NextForCausalLM(config)), alpha=1.5)
    cache = ExactSparseCache(model, bits=4, page_size=16)
    assert torch.equal(_generate(model, cache), _generate(model))
    found = cache.certificate()
    assert found.others == {"self 0": "LinearAttentionLayer"} and [layer.name for layer in found.layers] == ["self 1"]


def _filled(model, **options):
    cache = ExactSparseCache(model, bits=4, page_size=16, **options)
    with torch.no_grad():
        model(torch.arange(40)[None] % 30 + 3, past_key_values=cache)
    return cache


def _step(model, cache, batch=1):
    with torch.no_grad():
        return model(torch.full((batch, 1), 5), past_key_values=cache)


def test_bad_input():
    model = hf_entmax.patch_model(_build("llama"))
    for options, message in (
        ({"bits": 3}, "bits=3 is not allowed"),
        ({"bits": True}, "bits=True"),
        ({"bits": 4.0}, r"bits=4\.0"),
        ({"page_size": 20}, "page_size is 20"),
        ({"page_size": 32.0}, r"page_size is 32\.0"),
        ({"max_cache_len": 0}, "max_cache_len=0"),
    ):
        with pytest.raises(ValueError, match=message):
            ExactSparseCache(model, **options)
    with pytest.raises(TypeError, match="not str"):
        ExactSparseCache("llama")
    with pytest.raises(ValueError, match="is not patched"):
        ExactSparseCache(_build("llama").config)
    mapped = hf_entmax.patch_model(_build("llama"), mapping="sparsegen_lin", mapping_options={"lam": 0.2})
    with pytest.raises(ValueError, match="mapping='sparsegen_lin'"):
        ExactSparseCache(mapped)

    cache = _filled(model)
    other = hf_entmax.patch_model(tiny.build("llama", seed=1))
    with pytest.raises(ValueError, match="filled by another model"):
        _step(other, cache)
    cache = _filled(other)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(1.5)  # an optimizer's step while the cache is in use
    with pytest.raises(ValueError, match="weights of the model"):
        _step(other, cache)
    with pytest.raises(ValueError, match=r"torch.float32 .* torch.bfloat16"):
        _step(copy.deepcopy(model).bfloat16(), _filled(model))
    with pytest.raises(ValueError, match="another model or batch"):
        _step(model, _filled(model), batch=2)
    deeper = hf_entmax.patch_model(tiny.build("mistral", num_hidden_layers=3))
    with pytest.raises(ValueError, match="2 layers and is asked for layer 2"):
        _step(deeper, ExactSparseCache(model))

    cache = _filled(model)
    hf_entmax.set_alphas(model, 1.7)
    with pytest.raises(ValueError, match="alpha changed while"):
        _step(model, cache)
    with pytest.raises(ValueError, match="alpha changed while"), hf_entmax.softmax_attention(model):
        _step(model, cache)

    cache = ExactSparseCache(model)
    with torch.no_grad():
        tiny.build("llama")(torch.arange(40)[None] % 30 + 3, past_key_values=cache)
    with pytest.raises(ValueError, match="40 keys that were not computed with this model's entmax"):
        _step(model, cache)

    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        _step(model.train(), ExactSparseCache(model))
    model.eval()
    with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
        model(torch.arange(40)[None] % 30, past_key_values=ExactSparseCache(model))

    cache = _filled(model)
    for number in (3, -41):
        with pytest.raises(ValueError, match=r"holds 40 tokens: give minus"):
            cache.crop(number)
    windowed = hf_entmax.patch_model(_build("mistral"))
    cache = ExactSparseCache(windowed, bits=4, page_size=16)
    _generate(windowed, cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_that_are_not_numbers_propagate_as_without(bad):
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    caches = ExactSparseCache(model, bits=4, page_size=16), tf.DynamicCache(config=model.config)
    outputs = []
    for cache in caches:
        with torch.no_grad():
            model(torch.arange(40)[None] % 30 + 3, past_key_values=cache)
            cache.layers[1].keys[0, 1, 7, 3] = bad
            outputs.append(model(torch.tensor([[5]]), past_key_values=cache).logits)
    assert not outputs[1].isfinite().all()
    assert torch.equal(outputs[0].isnan(), outputs[1].isnan())


@pytest.mark.parametrize("change", [float("nan"), 60.0])
def test_keys_that_are_written_over_after_they_were_sketched(change):
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    caches = ExactSparseCache(model, bits=4, page_size=16), tf.DynamicCache(config=model.config)
    outputs = []
    for cache in caches:
        with torch.no_grad():
            model(torch.arange(40)[None] % 30 + 3, past_key_values=cache)
            before = model(torch.tensor([[5]]), past_key_values=cache).logits
            cache.layers[0].keys[0, :, 2:9] *= change
            outputs.append(model(torch.tensor([[5]]), past_key_values=cache).logits)
    assert not torch.allclose(outputs[1], before, atol=1e-3)
    assert torch.allclose(*outputs, atol=1e-4, equal_nan=True)


def test_under_inference_mode():
    """Whose tensors do not count what is written to them."""
    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    with torch.inference_mode():
        cache = ExactSparseCache(model, bits=4, page_size=16)
        assert torch.equal(_generate(model, cache, num_beams=2), _generate(model, num_beams=2))
        cache = _filled(model)
        cache.batch_repeat_interleave(3)
        expected = _step(model, _filled(model)).logits
        assert torch.allclose(_step(model, cache, batch=3).logits, expected.expand(3, -1, -1), atol=1e-5)


def test_a_wrong_zero_is_seen(monkeypatch):
    """What ``verify`` is for: a bound that drops a key of weight."""
    from hf_entmax.generation import exact_layer

    model = hf_entmax.patch_model(_build("llama"), alpha=1.5)
    right = exact_layer.exact_attend

    def drops_one(query, sketch, key, value, alpha, options, *args):
        mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool)
        mask[:, -1] = False
        return right(query, sketch, key, value, alpha, dataclasses.replace(options, key_padding_mask=mask), *args)

    monkeypatch.setattr(exact_layer, "exact_attend", drops_one)
    cache = ExactSparseCache(model, bits=4, page_size=16, verify=True)
    with pytest.raises(RuntimeError, match="This is a fault of hf_entmax"):
        _generate(model, cache)
    assert cache.certificate().violations > 0


@pytest.mark.parametrize("alpha", [1.5, 2.0, 4.0, 8.0, 32.0])
@pytest.mark.parametrize("steep", [1.0, 64.0])
def test_rounding_is_no_fault(alpha, steep):
    """Steep scores, and alphas at which a weight may fall from a tenth to nothing within the rounding of its score."""
    model = _build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(steep)
    hf_entmax.patch_model(model, alpha=alpha)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        cache = ExactSparseCache(model, bits=4, page_size=16, verify=True)
        with torch.no_grad():
            for length in (200, *[1] * 6):
                model(torch.randint(3, tiny.VOCAB, (2, length), generator=generator), past_key_values=cache)
        assert cache.certificate().verified_steps > 0 == cache.certificate().violations


@pytest.mark.parametrize("alpha", [1.5, 8.0])
def test_an_output_that_is_off_by_more_is_a_fault(alpha, monkeypatch):
    from hf_entmax.generation import exact_layer

    right = exact_layer.exact_attend

    def off(*args):
        out, counts = right(*args)
        return out * (1 + 0.02), counts

    monkeypatch.setattr(exact_layer, "exact_attend", off)
    model = hf_entmax.patch_model(_build("llama"), alpha=alpha)
    with pytest.raises(RuntimeError, match="where rounding explains"):
        _generate(model, ExactSparseCache(model, bits=4, page_size=16, verify=True))


def _later_rows(model):
    model.model.layers[1].self_attn.k_proj.weight[-1].mul_(1.5)


def _mlp(model):
    model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def _embeddings(model):
    model.get_input_embeddings().weight.add_(0.1)


def _replaced(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()


def _loaded(model):
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("change", [_later_rows, _mlp, _embeddings, _replaced, _loaded])
def test_weights_that_change_while_the_cache_is_in_use_are_noticed(change):
    model = hf_entmax.patch_model(_build("llama"))
    cache = _filled(model)
    twin = pickle.loads(pickle.dumps(cache))  # made anew in another process: it watches no model
    copied = copy.deepcopy(cache)
    with torch.no_grad():
        change(model)
    for held in (cache, copied):
        with pytest.raises(ValueError, match=r"reset\(\)"):
            _step(model, held)
    cache.reset()
    with torch.no_grad():
        model(torch.arange(40)[None] % 30 + 3, past_key_values=cache)
    _step(model, cache)
    assert twin.get_seq_length() == 40


@pytest.mark.parametrize("change", ["switched off", "merged", "another"])
def test_adapters_that_change_while_the_cache_is_in_use_are_noticed(change):
    peft = pytest.importorskip("peft")
    base = hf_entmax.patch_model(_build("llama"))
    lora = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    model.add_adapter("second", lora)
    cache = _filled(model)
    _step(model, cache)
    if change == "merged":
        model.merge_adapter()
    elif change == "another":
        model.set_adapter("second")
    state = model.disable_adapter() if change == "switched off" else contextlib.nullcontext()
    with state, pytest.raises(ValueError, match="or its adapters"):
        _step(model, cache)
