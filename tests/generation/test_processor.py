"""``EntmaxLogitsProcessor`` and what ``generate()`` makes of it."""

import copy
import pickle
import types

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from packaging.version import Version

import hf_entmax
from hf_entmax.generation import EntmaxLogitsProcessor, force_decode
from hf_entmax.ops import entmax

FAMILIES = ["gpt2", "llama", "t5", "bart", "marian"]


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
@pytest.mark.parametrize("classes", [10, 4000])
def test_it_returns_the_logarithm_of_entmax(alpha, classes):
    scores = torch.randn(3, classes) * 2
    scores[1, 3:7] = -torch.inf
    process = EntmaxLogitsProcessor(alpha)
    expected = entmax(scores, alpha)
    for given in (scores, scores.log_softmax(-1), scores + 50.0):
        found = process(torch.zeros(3, 1, dtype=torch.long), given)
        torch.testing.assert_close(found.exp(), expected, atol=2e-6, rtol=1e-3)
        assert torch.equal((found == -torch.inf)[1, 3:7], torch.ones(4, dtype=torch.bool))
    if alpha > 1.1:
        assert ((found == -torch.inf) == (expected == 0)).float().mean() > 0.99
    impossible = process(None, torch.full((1, classes), -torch.inf))
    assert (impossible == -torch.inf).all()
    assert process(None, scores.half()).dtype == torch.float16
    assert copy.deepcopy(process).alpha == pickle.loads(pickle.dumps(process)).alpha == alpha


def test_bad_alpha():
    for alpha, error in ((0.5, ValueError), (float("inf"), ValueError), ("1.5", TypeError), (True, TypeError)):
        with pytest.raises(error, match="alpha"):
            EntmaxLogitsProcessor(alpha)


def _inputs(family):
    return {k: v for k, v in tiny.inputs(family, batch=2, length=5).items() if k != "decoder_input_ids"}


def _patched(family, alpha):
    return hf_entmax.patch_model(tiny.build(family), alpha=1.5, output_alpha=alpha)


def _steps(model, out):
    """Raw logits of each step, in the order of ``out.scores``."""
    return list(zip(out.scores, out.logits, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_uses_it_by_itself(family):
    model = _patched(family, 1.5)
    call = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = model.generate(**_inputs(family), do_sample=False, **call)
    for scores, logits in _steps(model, out):
        torch.testing.assert_close(scores.exp(), entmax(logits, 1.5), atol=1e-5, rtol=1e-3)
    out = model.generate(**_inputs(family), do_sample=False, num_beams=3, length_penalty=0.0, **call)
    for scores, logits in _steps(model, out):
        torch.testing.assert_close(scores.exp(), entmax(logits, 1.5), atol=1e-5, rtol=1e-3)
    # The scores of beams are the log-probabilities that forced decoding finds for the same sequences.
    prompt = 1 if model.config.is_encoder_decoder else 5
    rows = [row[: row.index(tiny.EOS) + 1] if tiny.EOS in row else row for row in out.sequences[:, prompt:].tolist()]
    found = [decoding.log_probability for decoding in force_decode(model, _inputs(family), rows)]
    assert found == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"top_k": 3},
        {"top_p": 0.7, "top_k": 0},
        {"temperature": 0.5, "top_k": 0},
        {"typical_p": 0.8, "min_p": 0.05, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    ],
    ids=str,
)
def test_sampling_never_leaves_the_support(family, how):
    model = _patched(family, 2.0)
    call = {"return_dict_in_generate": True, "output_logits": True, "do_sample": True, "max_new_tokens": 4}
    for seed in range(5):
        torch.manual_seed(seed)
        out = model.generate(**_inputs(family), **call, **how)
        if "num_beams" in how:
            continue
        prompt = 1 if model.config.is_encoder_decoder else 5
        alive = torch.ones(2, dtype=torch.bool)
        for step, logits in enumerate(out.logits):
            tokens = out.sequences[:, prompt + step]
            reached = entmax(logits, 2.0).gather(1, tokens[:, None]).squeeze(1)
            assert (reached[alive] > 0).all()
            alive &= tokens != tiny.EOS


def test_sampling_frequencies_are_the_probabilities():
    model = _patched("gpt2", 1.5)
    ids = _inputs("gpt2")["input_ids"][:1].expand(4000, -1)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=1,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    probs = entmax(out.logits[0][0], 1.5)
    frequencies = torch.bincount(out.sequences[:, -1], minlength=tiny.VOCAB) / 4000
    assert not frequencies[probs == 0].any() and (frequencies - probs).abs().max() < 0.04


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "top_k": 0}, {}], ids=str)
def test_what_constraints_leave_gets_all_the_mass(how):
    model = _patched("llama", 2.0)
    inputs = _inputs("llama")
    with torch.no_grad():
        worst = model(**inputs).logits[:, -1].argsort(-1)[:, :2].tolist()
    out = model.generate(
        **inputs, max_new_tokens=1, prefix_allowed_tokens_fn=lambda i, ids: worst[i], return_dict_in_generate=True,
        output_scores=True, pad_token_id=0, **how,
    )  # fmt: skip
    beams = how.get("num_beams", 1)
    for row, scores in enumerate(out.scores[0]):
        assert scores[worst[row // beams]].exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert all(token in allowed for token, allowed in zip(out.sequences[:, -1].tolist(), worst, strict=True))
    # Minimum length: the end of the sequence is forbidden, also where it would have had all the mass.
    long = model.generate(
        **inputs, min_new_tokens=4, max_new_tokens=4, sequence_bias={(tiny.EOS,): 99.0}, pad_token_id=0, **how
    )
    assert (long[:, 5:8] != tiny.EOS).all()


CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "sliding window": {"cache_implementation": "sliding_window", "disable_compile": True},
    "none": {"use_cache": False},
    "offloaded": {"cache_implementation": "offloaded"},
    "quanto": {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}},
    "hqq": {"cache_implementation": "quantized", "cache_config": {"backend": "hqq", "nbits": 8}},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bart", "mistral"])
def test_every_cache_is_followed_by_entmax(family, cache, how, monkeypatch):
    options = dict(CACHES[cache])
    if cache == "offloaded" and not torch.cuda.is_available():
        pytest.skip("Transformers offloads caches to the CPU from a GPU only")
    if cache in ("quanto", "hqq"):
        pytest.importorskip("optimum.quanto" if cache == "quanto" else "hqq")
        if family in ("t5", "bart", "mistral"):
            pytest.skip("Transformers has no quantized cache for encoder-decoder models and for sliding windows")
        if cache == "quanto":  # else it compiles its extension, once for each installation, which takes a minute
            from optimum.quanto.library.extensions.cpp import ext

            parts = lambda packed, bits: [packed >> place & 2**bits - 1 for place in range(0, 8, bits)]  # noqa: E731
            monkeypatch.setattr(ext, "_lib", types.SimpleNamespace(unpack=lambda *a: torch.cat(parts(*a))))
        options["cache_config"] = options["cache_config"] | {"q_group_size": 8, "residual_length": 4}
        if "num_beams" in how and Version(tf.__version__) < Version("5.20"):
            plain = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            try:  # 5.18 cannot, of a softmax model either
                tiny.build(family).eval().generate(**_inputs(family), **plain, **how, **options)
            except IndexError:
                pytest.skip("this version of Transformers cannot sort its quantized cache by beams")
    if family == "mistral":
        # Windows of three positions: shorter than the prompt.
        config = tf.MistralConfig(**tiny.build("llama").config.to_diff_dict() | {"sliding_window": 3})
        torch.manual_seed(0)
        model, inputs = tf.MistralForCausalLM(config).eval(), _inputs("llama")
        model = hf_entmax.patch_model(model, alpha=1.5, output_alpha=1.5)
    else:
        model, inputs = _patched(family, 1.5), _inputs(family)
    call = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    keep = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    torch.manual_seed(1)
    out = model.generate(**inputs, **call, **keep, **options)
    if cache not in ("quanto", "hqq"):
        # These round the past away, so that the logits themselves may differ.
        torch.manual_seed(1)
        assert torch.equal(out.sequences, model.generate(**inputs, **call))
    for scores, logits in _steps(model, out):
        if "num_beams" in how:
            # Scores of beams add the log-probability of the prefix.
            scores = scores - scores.logsumexp(-1, keepdim=True)
        torch.testing.assert_close(scores.exp(), entmax(logits.float(), 1.5), atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_decoding_by_guesses_keeps_to_the_support():
    """Prompt lookup, an assistant (of another alpha), and the model's own first layer as assistant."""
    model, assistant = _patched("llama", 2.0), _patched("llama", 1.0)
    inputs = {k: v[:1] for k, v in _inputs("llama").items()}
    call = {"max_new_tokens": 6, "pad_token_id": 0}
    plain = model.generate(**inputs, **call, do_sample=False)
    for guesses in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": assistant}, {"assistant_early_exit": 1}):
        assert torch.equal(model.generate(**inputs, **call, **guesses, do_sample=False), plain)
        firsts = []
        for seed in range(60):
            torch.manual_seed(seed)
            out = model.generate(**inputs, **call, **guesses, do_sample=True, top_k=0)
            new = out[:, inputs["input_ids"].shape[1] :].tolist()
            firsts.append(new[0][0])
            (forced,) = force_decode(model, inputs, new)
            assert forced.log_probability > -torch.inf, f"{guesses} drew a token without probability"
        with torch.no_grad():
            probs = entmax(model(**inputs).logits[0, -1], 2.0)
        frequencies = torch.bincount(torch.tensor(firsts), minlength=tiny.VOCAB) / len(firsts)
        # Four standard deviations of the largest of the frequencies.
        assert (frequencies - probs).abs().max() < 4 * 0.5 / len(firsts) ** 0.5


def test_decoding_that_goes_round_the_probabilities_is_refused():
    model = _patched("llama", 1.5)
    with pytest.raises(ValueError, match="dola_layers"):
        model.generate(
            **_inputs("llama"), max_new_tokens=2, dola_layers="high", custom_generate=lambda model, **k: None
        )
    for gone in ({"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}):
        with pytest.raises(Exception, match=r"dola_layers|custom_generate|trust_remote_code|Contrastive"):
            model.generate(**_inputs("llama"), max_new_tokens=2, **gone)


def test_a_processor_given_by_the_caller_takes_precedence_and_assistants_work():
    model = _patched("gpt2", 2.0)
    inputs = {k: v[:1] for k, v in _inputs("gpt2").items()}
    call = {
        "max_new_tokens": 3,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    out = model.generate(**inputs, **call, logits_processor=tf.LogitsProcessorList([EntmaxLogitsProcessor(1.2)]))
    for scores, logits in _steps(model, out):
        torch.testing.assert_close(scores.exp(), entmax(logits, 1.2), atol=1e-5, rtol=1e-3)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=6, do_sample=False, assistant_model=_patched("gpt2", 2.0)), plain
    )
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(**inputs, max_new_tokens=6, do_sample=False), plain)
    hf_entmax.unpatch_model(twin)
    out = twin.generate(**inputs, **call)
    assert (out.scores[0] > -torch.inf).all()
