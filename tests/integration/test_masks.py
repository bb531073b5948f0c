import copy
import dataclasses

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    or_masks,
    padding_mask_function,
    sliding_window_causal_mask_function,
)

import hf_entmax.integration.interface as interface
from hf_entmax import patch_model
from hf_entmax.integration.masks import Limits, StructuredMask, entmax_mask, limits_of
from hf_entmax.ops import entmax_attention
from hf_entmax.ops.attention import attend
from hf_entmax.ops.options import AttentionOptions

FUNCTIONS = {
    "causal": (causal_mask_function, Limits(True, None)),
    "bidirectional": (bidirectional_mask_function, Limits(False, None)),
    "window": (sliding_window_causal_mask_function(3), Limits(True, 3)),
    "window twice": (
        and_masks(sliding_window_causal_mask_function(3), sliding_window_causal_mask_function(2)),
        Limits(True, 2),
    ),
    "or": (or_masks(causal_mask_function, bidirectional_mask_function), None),
    "and something else": (and_masks(causal_mask_function, lambda b, h, q, k: k != 1), None),
    "padding inside": (
        and_masks(causal_mask_function, padding_mask_function(torch.ones(2, 9, dtype=torch.bool))),
        None,
    ),
    "mine": (lambda b, h, q, k: k <= q, None),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_only_what_is_understood_is_described(name):
    function, limits = FUNCTIONS[name]
    assert limits_of(function) == limits


def _paddings():
    left, right = torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)
    left[0, :3], right[1, 5:] = 0, 0
    return {"none": None, "ones": torch.ones(2, 9, dtype=torch.bool), "left": left, "right": right}


@pytest.mark.parametrize("name", [n for n, (_, limits) in FUNCTIONS.items() if limits is not None])
@pytest.mark.parametrize("padding", ["none", "ones", "left", "right"])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_description_and_dense_mask_say_the_same(name, padding, queries):
    """As a user of the mask: attention with the description equals attention with eager's mask written out."""
    function, limits = FUNCTIONS[name]
    given = _paddings()[padding]
    arguments = dict(
        batch_size=2, q_length=queries, kv_length=9, q_offset=9 - queries, mask_function=function, attention_mask=given
    )
    mask = entmax_mask(**arguments)
    dense = eager_mask(**arguments)
    assert isinstance(mask, StructuredMask) and mask.limits == limits
    assert (mask.key_padding_mask is None) == (padding in ("none", "ones"))
    assert (
        torch.equal(mask + 0, dense)
        and torch.equal(mask[..., 2:5], dense[..., 2:5])
        and torch.equal(mask.to(torch.float64), dense.double())
    )
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    options = interface._read_description(AttentionOptions(attention_mask=mask), queries, 9)
    assert options.attention_mask is None
    described, _ = attend(q, k, v, 1.5, options, "torch")
    written, _ = entmax_attention(q, k, v, 1.5, attention_mask=dense, backend="torch")
    assert torch.allclose(described, written, atol=1e-6)


def test_masks_that_are_not_aligned_are_written_out():
    """A static cache has more keys than have been seen: the causal limit is then not at the last key."""
    mask = entmax_mask(2, 1, 16, q_offset=4, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    assert not isinstance(mask, StructuredMask) and mask.shape == (2, 1, 1, 16)
    for seen in (None, torch.ones(2, 16, dtype=torch.bool)):
        mask = entmax_mask(2, 1, 16, q_offset=4, attention_mask=seen, allow_is_causal_skip=False)
        assert not isinstance(mask, StructuredMask)
        assert ((mask > -1).flatten() == torch.arange(16).lt(5).repeat(2)).all()
    assert entmax_mask(2, 4, 4, mask_function=bidirectional_mask_function, allow_is_bidirectional_skip=True) is None


@pytest.mark.parametrize("family", ["t5", "bart", "llama", "gemma2", "gpt2", "bert", "modernbert", "mistral", "marian"])
def test_models_hand_over_descriptions_and_compute_the_same(family, monkeypatch):
    model = patch_model(tiny.build(family), alpha_init=1.5)
    batch = tiny.inputs(family)
    batch["attention_mask"][0, 6:] = 0
    seen = []
    original = interface._read_description

    def spied(options, *lengths):
        seen.append(options.attention_mask.limits)
        return original(options, *lengths)

    def written_out(options, *lengths):
        return dataclasses.replace(options, attention_mask=options.attention_mask.dense())

    monkeypatch.setattr(interface, "_read_description", spied)
    with torch.no_grad():
        described = model(**batch).logits
        assert seen
        monkeypatch.setattr(interface, "_read_description", written_out)
        written = model(**batch).logits
    assert torch.allclose(described, written, atol=2e-5)
    if family in ("gemma2", "mistral"):
        assert {limits.window for limits in seen} >= {4 if family == "gemma2" else 3}


def test_packed_sequences_do_not_see_each_other():
    """Positions that start again mean several sequences in one row: Transformers masks them, and so does the patched model."""
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    ids = tiny.inputs("llama", batch=1, length=8)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        first, second = model(input_ids=ids[:, :3]).logits, model(input_ids=ids[:, 3:]).logits
        assert torch.allclose(packed, torch.cat([first, second], 1), atol=1e-5)
        bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
        flat = model(
            input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
        ).logits
        assert torch.allclose(flat, packed, atol=1e-5)


@pytest.mark.parametrize("case", ["ones", "cache", "ones in a batch", "static cache"])
def test_packed_sequences_that_see_each_other_are_spoken_of(case):
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    batch = tiny.inputs("llama", batch=2 if "batch" in case else 1, length=8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    arguments = {"input_ids": batch["input_ids"], "position_ids": positions, "use_cache": "cache" in case}
    if "ones" in case:
        arguments["attention_mask"] = torch.ones_like(batch["input_ids"])
    if case == "static cache":
        arguments["past_key_values"] = tf.StaticCache(model.config, max_cache_len=12)
    with torch.no_grad(), pytest.warns(UserWarning, match="position_ids start again") as caught:
        model(**arguments)
    assert len(caught) == 1  # not once per layer


def test_the_same_positions_with_another_mask_are_looked_at_again():
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    arguments = {"input_ids": tiny.inputs("llama", batch=1, length=8)["input_ids"]}
    arguments["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with torch.no_grad(), pytest.warns(UserWarning, match="position_ids start again"):
        model(**arguments, use_cache=False)  # parted
        model(**arguments, use_cache=True)


@pytest.mark.parametrize(
    "case", ["parted by Transformers", "cu_seq_lens", "mask", "left padding", "right padding", "cache"]
)
def test_what_is_parted_or_padded_is_not_spoken_of(case, recwarn):
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    ids = tiny.inputs("llama", batch=2, length=8)["input_ids"]
    arguments = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2), "use_cache": False}
    if case == "cu_seq_lens":
        arguments |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 3, 8], dtype=torch.int32))
    elif case == "mask":
        part = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
        allowed = (part[:, None] == part) & torch.ones(8, 8, dtype=torch.bool).tril()
        arguments["attention_mask"] = torch.zeros(2, 1, 8, 8).masked_fill(~allowed, torch.finfo(torch.float32).min)
    elif "padding" in case:
        real = torch.ones(2, 8, dtype=torch.long)
        real[0, slice(3) if case == "left padding" else slice(5, None)] = 0
        arguments |= {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).masked_fill(real == 0, 1)}
    elif case == "cache":
        arguments |= {"position_ids": torch.arange(8)[None], "use_cache": True}
    with torch.no_grad():
        model(**arguments)
        if case == "left padding":
            model.generate(ids, attention_mask=arguments["attention_mask"], max_new_tokens=2, do_sample=False)
    assert not [w for w in recwarn if "position_ids" in str(w.message)]


def test_attention_sinks_take_mass_without_a_value():
    config = tf.GptOssConfig(
        **tiny._LLAMA,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = tf.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
        plain = copy.deepcopy(model)
        batch = tiny.inputs("llama")
        patched = patch_model(model, alpha=1.0)
        assert torch.allclose(patched(**batch).logits, plain(**batch).logits, atol=1e-5)
        sparse = patch_model(copy.deepcopy(plain), alpha=1.5)
        weights = sparse(**batch, output_attentions=True).attentions[0]
    assert weights.shape[-1] == batch["input_ids"].shape[1] and (weights.sum(-1) < 1 - 1e-3).any()
