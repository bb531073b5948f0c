"""Best-first search with keys and values kept: the same results as without, every prefix read once, all inputs together."""

import functools
import random

import pytest
import torch
import transformers as tf
from test_search import FAMILIES, VOCAB, batch_of, build

from hf_entmax.generation import enumerate_hypotheses, exact_map


def _same(found, others):
    for one, other in zip(found, others, strict=True):
        assert one.sequences == other.sequences and one.finished == other.finished
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)
        assert (one.optimal, one.exhaustive) == (other.optimal, other.exhaustive)
        assert one.pruned_mass == pytest.approx(other.pruned_mass, abs=1e-9)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_cache_changes_nothing_and_every_token_is_read_once(family, monkeypatch):
    model = build(family, 11)
    batch, _ = batch_of(model, [3, 5, 2, 4], random.Random(0))
    options = {"max_new_tokens": 4, "output_alpha": 1.5}
    plain = enumerate_hypotheses(model, batch, 10_000, use_cache=False, **options)
    read, rows = 0, []
    forward = type(model).forward

    @functools.wraps(forward)  # its parameters are looked at
    def counting(self, *args, **kwargs):
        nonlocal read
        tokens = kwargs["decoder_input_ids"] if model.config.is_encoder_decoder else kwargs["input_ids"]
        read += tokens.numel()
        rows.append(len(tokens))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    found = enumerate_hypotheses(model, batch, 10_000, **options)
    _same(found, plain)
    prefixes = sum(result.expansions for result in found)
    prompts = 4 if model.config.is_encoder_decoder else batch["input_ids"].numel()
    # The empty prefixes are read with their prompts, every other one is one token.
    assert read == prompts + prefixes - 4 and sum(rows) == prefixes
    assert len(rows) < prefixes / 2  # several at a time


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_inputs_side_by_side_are_as_inputs_alone(family):
    model = build(family, 12)
    batch, _ = batch_of(model, [3, 5, 2, 4], random.Random(1))
    options = {"max_new_tokens": 4, "output_alpha": 1.5}
    for search, more in ((enumerate_hypotheses, {"max_hypotheses": 3}), (exact_map, {"num_beams": 1})):
        together = search(model, batch, **more, **options)
        alone = []
        for index in range(4):
            one = {name: value[index : index + 1] for name, value in batch.items()}
            alone += search(model, one, batch_size=1, **more, **options)
        for one, other in zip(together, alone, strict=True):
            assert one.sequences[0] == other.sequences[0] and one.optimal == other.optimal
            assert one.log_probabilities[0] == pytest.approx(other.log_probabilities[0], abs=1e-9)


def test_processors_and_caches_of_other_kinds_are_read_whole_or_alone():
    model = build("bart", 13)
    batch, _ = batch_of(model, [3, 4], random.Random(2))
    options = {"max_new_tokens": 3, "output_alpha": 1.5, "min_new_tokens": 2}
    _same(
        enumerate_hypotheses(model, batch, 100, **options),
        enumerate_hypotheses(model, batch, 100, use_cache=False, **options),
    )

    torch.manual_seed(5)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = tf.MistralConfig(**shape, **ids, intermediate_size=16, sliding_window=3)
    windowed = tf.MistralForCausalLM(config).double().eval()
    with torch.no_grad():
        windowed.lm_head.weight.mul_(20)
    batch, _ = batch_of(windowed, [4, 5], random.Random(3))
    options = {"max_new_tokens": 3, "output_alpha": 2.0}
    kept = enumerate_hypotheses(windowed, batch, 10_000, **options)
    _same(kept, enumerate_hypotheses(windowed, batch, 10_000, use_cache=False, **options))
    assert max(len(result) for result in kept) > 2
