"""Patched models in the continuous-batching engine of Transformers: the same tokens as `generate`, one request at a time."""

import contextlib

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax.generation.serving import hooks, reader
from hf_entmax.generation.serving.step import paged_kernel
from hf_entmax.ops.exact import KeySketch

if hooks.problem() is not None:
    pytest.skip(hooks.problem(), allow_module_level=True)

NEW = 6
# Seconds until the next result: kernels may have to be compiled first.
WAIT = 120
MORE = {
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**tiny._LLAMA, head_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**tiny._LLAMA, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**tiny._LLAMA)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            **tiny._IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=20, max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    ),
    "gpt_oss": lambda: _with_sinks(
        tf.GptOssForCausalLM(
            tf.GptOssConfig(
                **tiny._LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
            )
        )
    ),
    "gemma2, capped": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**tiny._LLAMA, head_dim=8, sliding_window=4, attn_logit_softcapping=1.5)
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**tiny._LLAMA, num_local_experts=2, num_experts_per_tok=1)),
}  # fmt: skip


def _with_sinks(model):
    """Sinks that are as large as scores are."""
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.sinks, 0.5, 2.0)
    return model


def _model(family="llama", **options):
    torch.manual_seed(0)
    model = tiny.enlarged(MORE[family]()) if family in MORE else tiny.build(family)
    return hf_entmax.patch_model(model, **({"alpha": 1.5} | options))


def _prompts(lengths, seed=0, vocabulary=tiny.VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def _settings(**options):
    return tf.GenerationConfig(
        **({"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options)
    )


def _engine(**options):
    """Blocks of 4 tokens; prompts are read in pieces of 16 tokens at most."""
    return tf.ContinuousBatchingConfig(**({"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16} | options))


def _alone(model, prompt, new=NEW):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        generation_config=_settings(max_new_tokens=new),
    )
    return out[0, len(prompt) :].tolist()


def _same(model, prompts, **engine):
    found = model.generate_batch(prompts, generation_config=_settings(), continuous_batching_config=_engine(**engine))
    assert [out.error for out in found.values()] == [None] * len(prompts)
    assert [out.generated_tokens for out in found.values()] == [_alone(model, prompt) for prompt in prompts]
    return list(found.values())


@contextlib.contextmanager
def _manager(model, poison=False, settings=None, **engine):
    manager = model.init_continuous_batching(
        generation_config=_settings(**settings or {}), continuous_batching_config=_engine(**engine)
    )
    if poison:  # bytes of ones are NaN in every floating type
        manager.batch_processor = manager._create_batch_processor()
        manager.batch_processor.cache.cache_tensor.fill_(255)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()


def _results(manager, names):
    found = {}
    while len(found) < len(names):
        out = manager.get_result(timeout=WAIT)
        assert out is not None, manager.background_thread_status.fatal_error
        if out.is_finished():
            found[out.request_id] = out
    return [found[name] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*tiny.DECODERS, *MORE])
def test_generate_batch_is_generate_for_every_family(family):
    # Pieces of prompts, windows that slide, and more tokens in all than the cache holds.
    _same(_model(family), _prompts([5, 9, 1, 20, 3, 13, 30]), num_blocks=24)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": "learned", "alpha_init": "normal"},
        {"alpha": 1},
        {"alpha": 2, "backend": "torch"},
        {"mapping": "sparsehourglass"},
        {"mapping": "softmax"},
        {"length_scaling": "log", "length_scaling_init": "paper"},
        {"length_scaling": "adaptive", "length_scaling_init": "paper"},
        {"length_scaling": "constant", "length_scaling_init": "softmax"},
        {"output_alpha": 1.5},
        {"layers": [1]},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_mapping_and_length_scaling(options):
    # A mapping of `mapping=` has no alpha.
    alpha = {} if "mapping" not in options else {"alpha": "learned"}
    _same(_model(**alpha, **options), _prompts([5, 18, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2, capped", "gpt_oss", "mistral"])
@pytest.mark.parametrize(
    "options", [{"mapping": "sparsehourglass"}, {"alpha": 1.3, "length_scaling": "log", "length_scaling_init": "paper"}]
)
def test_mappings_and_length_scaling_with_windows_caps_and_sinks(family, options):
    alpha = {} if "mapping" not in options else {"alpha": "learned"}
    _same(_model(family, **alpha, **options), _prompts([5, 18, 2]))


def test_half_precision_and_a_single_block():
    _same(_model().bfloat16(), _prompts([5, 9]), page_size=16, num_blocks=2)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_many_requests_that_come_and_go(family):
    model = _model(family)
    lengths = torch.randint(1, 40, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = _prompts(lengths)
    with _manager(model, num_blocks=48) as manager:
        names, cancelled, early = [], 0, []
        for number, prompt in enumerate(prompts):
            names.append(manager.add_request(prompt, max_new_tokens=1 + number % NEW))
            if number % 7 == 3:
                unwanted = manager.add_request(prompt, max_new_tokens=20, streaming=True)
                # Until its first token, or for a while.
                while (out := manager.get_result(timeout=1)) is not None and out.request_id != unwanted:
                    early.append(out)
                cancelled += out is not None
                manager.cancel_request(unwanted)
        early = {out.request_id: out for out in early if out.is_finished()}
        found = early | {
            out.request_id: out for out in _results(manager, [name for name in names if name not in early])
        }
    assert cancelled > 3
    for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        assert found[name].generated_tokens == _alone(model, prompt, 1 + number % NEW)


def test_shared_prefixes_and_forks():
    model, prefix = _model(), _prompts([21])[0]
    prompts = [prefix + more for more in _prompts([3, 8, 1], seed=1)]
    with _manager(model) as manager:
        first = _results(manager, [manager.add_request(prompts[0], max_new_tokens=NEW)])
        cache = manager.batch_processor.cache
        assert cache.allow_block_sharing and cache.use_prefix_sharing
        matched, search = [], cache.search_prefix_match
        cache.search_prefix_match = lambda *call: matched.append(search(*call)) or matched[-1]
        rest = _results(manager, [manager.add_request(prompt, max_new_tokens=NEW) for prompt in prompts[1:]])
    assert matched == [20, 20]
    assert [out.generated_tokens for out in first + rest] == [_alone(model, prompt) for prompt in prompts]
    forked = model.generate_batch(
        prompts[:1],
        generation_config=_settings(num_return_sequences=3, do_sample=True, top_k=1),
        continuous_batching_config=_engine(),
    )
    assert [out.generated_tokens for out in forked.values()] == [_alone(model, prompts[0])] * 3


#: Blocks of 16 tokens have sketches, which are read from the first block on.
SKETCHED = {"settings": {"cache_config": {"bits": 4, "shortest": 16}}, "page_size": 16, "num_blocks": 32}


@pytest.mark.parametrize("engine", [{}, SKETCHED], ids=["dense", "sketched"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_requests_see_neither_each_other_nor_what_is_left_in_blocks(family, engine):
    model, poison = _model(family), tiny.VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    healthy = _prompts([7, 22, 3, 12], vocabulary=poison)
    poisoned = [[*prompt, poison, *prompt] for prompt in healthy]
    with _manager(model, poison=True, **engine) as manager:
        names = []
        for good, bad in zip(healthy, poisoned, strict=True):
            manager.add_request(bad, max_new_tokens=NEW)
            names.append(manager.add_request(good, max_new_tokens=NEW))
        found = dict.fromkeys(names)
        while any(out is None for out in found.values()):
            out = manager.get_result(timeout=WAIT)
            if out.is_finished():
                found[out.request_id] = out
        # The blocks that the poisoned requests leave behind are taken again.
        names += [manager.add_request(good, max_new_tokens=NEW) for good in healthy]
        again = _results(manager, names[len(healthy) :])
    for prompt, out in zip(healthy * 2, [*(found[name] for name in names[: len(healthy)]), *again], strict=True):
        clean = _alone(model, prompt)
        assert out.generated_tokens == clean


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_no_query_sees_the_future(family):
    model, poison = _model(family), tiny.VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    prompt = [*_prompts([25], vocabulary=poison)[0], poison, 5, 6, 7, 8]
    seen, states = [], []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].clone()), with_kwargs=True
    )
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: states.append(out[0][0]))
    model.generate_batch([prompt], generation_config=_settings(max_new_tokens=1), continuous_batching_config=_engine())
    position, bad = torch.cat(seen), torch.cat(states).isnan().any(-1)
    assert position.tolist() == list(range(30)) and len(seen) == 2
    assert not bad[:25].any() and bad[25:27].all()


needs_kernel = pytest.mark.skipif(not paged_kernel("auto"), reason="needs the CPU kernel")
VERIFIED = SKETCHED | {"settings": {"cache_config": {"bits": 4, "shortest": 16, "verify": True}}}


@needs_kernel
def test_a_wrong_zero_of_one_request_is_seen(monkeypatch):
    right = reader.paged_attention

    def leaves_out(query, key, value, alpha, blocks, sketch, *more):
        out, counts = right(query, key, value, alpha, blocks, sketch, *more)
        return (torch.cat([out[:-1], 0 * out[-1:]]) if len(out) > 1 else out), counts

    monkeypatch.setattr(reader, "paged_attention", leaves_out)
    with _manager(_model("llama", alpha=1.5), **VERIFIED) as manager:
        outs = _results(manager, [manager.add_request(prompt, max_new_tokens=4) for prompt in _prompts([50, 41])])
    assert any("fault of hf_entmax" in str(out.error) for out in outs), [out.error for out in outs]


@needs_kernel
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_reads_sketches_and_every_request_has_its_certificate(family, dtype):
    model = _model(family, alpha="learned", alpha_init="normal").to(dtype)
    prompts = _prompts([50, 3, 41, 17])
    with _manager(model, **VERIFIED) as manager:
        outs = _results(manager, [manager.add_request(prompt, max_new_tokens=1 + NEW) for prompt in prompts])
        whole = manager.certificate()
    assert [out.error for out in outs] == [None] * 4 and whole.violations == 0 < whole.verified_steps
    if dtype == torch.float32:
        assert [out.generated_tokens for out in outs] == [_alone(model, prompt, 1 + NEW) for prompt in prompts]
    full = len(whole.layers) - (family == "gemma2")  # its first layer has a window of four
    for out, prompt in zip(outs, prompts, strict=True):
        read, n = out.certificate, len(prompt)
        by_layer = [sum(n + 1 + step for step in range(NEW)), sum(min(4, n + 1 + step) for step in range(NEW))]
        assert read.keys_total == 4 * (full * by_layer[0] + (len(read.layers) - full) * by_layer[1])
    assert whole.keys_total == sum(out.certificate.keys_total for out in outs)
    assert whole.keys_read == sum(out.certificate.keys_read for out in outs) < whole.keys_total
    assert outs[0].certificate.keys_zero > 0 and sum(layer.sketch_bytes for layer in whole.layers) > 0
    assert "proved zero" in str(outs[0].certificate)


@needs_kernel
def test_a_page_is_sketched_once_and_shared_with_its_block(monkeypatch):
    pages = []
    put = KeySketch.put
    monkeypatch.setattr(
        KeySketch, "put", lambda self, key, places: pages.extend(places.tolist()) or put(self, key, places)
    )
    model, prefix = _model(), _prompts([48])[0]
    prompts = [prefix + more for more in _prompts([3, 8, 1], seed=1)]
    with _manager(model, **VERIFIED) as manager:
        first = _results(manager, [manager.add_request(prompts[0], max_new_tokens=NEW)])
        assert sorted(pages) == sorted(pages[:3] * 2)  # two layers
        rest = _results(manager, [manager.add_request(prompt, max_new_tokens=NEW) for prompt in prompts[1:]])
        assert len(pages) == 6
        # What is taken again is sketched again.
        manager.batch_processor.scheduler.cache.evict_cached_blocks()
        again = _results(
            manager, [manager.add_request(prompt, max_new_tokens=NEW) for prompt in _prompts([60] * 8, seed=2)]
        )
        assert len(pages) > 12
    expected = [_alone(model, prompt) for prompt in [*prompts, *_prompts([60] * 8, seed=2)]]
    assert [out.generated_tokens for out in first + rest + again] == expected


@needs_kernel
def test_copied_blocks_are_sketched_anew():
    model, prompt = _model(), _prompts([39])[0]
    settings = _settings(num_return_sequences=3, do_sample=True, top_k=1, **VERIFIED["settings"])
    engine = _engine(page_size=16, num_blocks=32, allow_block_sharing=False)
    found = model.generate_batch([prompt], generation_config=settings, continuous_batching_config=engine)
    assert [out.error for out in found.values()] == [None] * 3
    assert [out.generated_tokens for out in found.values()] == [_alone(model, prompt)] * 3


def test_what_a_server_is_asked_for_is_checked():
    model = _model()
    with _manager(model, **SKETCHED | {"settings": {"cache_config": {"bits": None}}}) as manager:
        out = _results(manager, [manager.add_request(_prompts([40])[0], max_new_tokens=NEW)])[0]
    assert out.certificate.keys_read == out.certificate.keys_total > 0
    for options, message in ({"bits": 3}, "bits=3"), ({"page_size": 8}, "page_size"):
        with pytest.raises(ValueError, match=message):
            model.init_continuous_batching(_settings(cache_config=options), _engine())


def test_a_request_that_never_fits_is_refused_and_others_go_on():
    model = _model()
    with _manager(model, num_blocks=6) as manager:
        prompts = _prompts([9, 40, 10])
        good = [manager.add_request(prompts[0], max_new_tokens=NEW)]
        long = [
            manager.add_request(prompts[1], max_new_tokens=NEW),
            manager.add_request(prompts[0], max_new_tokens=100),
        ]
        good.append(manager.add_request(prompts[2], max_new_tokens=NEW))
        out = _results(manager, good + long)
        most = hooks.capacity(manager.batch_processor.cache)
        assert most >= 24
        for refused in out[2:]:
            assert f"the cache holds {most} in all" in refused.error and refused.status.name == "FAILED"
        full = manager.add_request(prompts[1][: most - NEW + 1], max_new_tokens=NEW)
        out = out[:2] + _results(manager, [full])
    assert [o.generated_tokens for o in out] == [
        _alone(model, prompt) for prompt in (prompts[0], prompts[2], prompts[1][: most - NEW + 1])
    ]


def test_what_the_engine_offers_and_attention_cannot_do_is_refused():
    model = _model()
    for options in (
        {"use_async_batching": True},
        {"default_compile_level": 1},
        {"varlen_compile_config": tf.CompileConfig()},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            model.init_continuous_batching(_settings(), _engine(**options))
    out = model.generate_batch([[3, 4, 5]], _settings(), _engine())
    assert out and model.config._attn_implementation == "hf_entmax"
    # Softmax models are as they were.
    plain = tiny.build("llama", attn_implementation="sdpa")
    assert [o.generated_tokens for o in plain.generate_batch([[3, 4, 5]], _settings(), _engine()).values()] == [
        _alone(plain, [3, 4, 5])
    ]


def test_another_engine_is_refused_by_name(monkeypatch):
    model = _model()
    expected = [*hooks._EXPECTED, ("cache", "PagedAttentionCache", "gone", ["self"])]
    monkeypatch.setattr(hooks, "_EXPECTED", expected)
    for start in (lambda: model.generate_batch([[3, 4, 5]]), model.init_continuous_batching):
        with pytest.raises(NotImplementedError, match=r"PagedAttentionCache.gone"):
            start()
