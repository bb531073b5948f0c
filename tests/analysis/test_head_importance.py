"""Importance of heads: masking and gradients against plain computations."""

from __future__ import annotations

import pytest
import test_collect as shared
import tiny_models as tiny
import tiny_tokenizers
import torch
import transformers as tf

from hf_entmax import patch_model
from hf_entmax.analysis.collecting.importance import head_importance
from hf_entmax.analysis.reading.data import TextRecord
from hf_entmax.analysis.reading.encode import Encoder
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.observe import observe_attention


def silence(model, site, layer, head):
    """Zeroes the rows of the output projection that read a head."""
    module = next(s.module for s in attention_sites(model) if (s.site, s.layer) == (site, layer))
    projection = module.o if hasattr(module, "o") else module.c_proj
    size = 8
    with torch.no_grad():
        if hasattr(module, "o"):
            projection.weight[:, head * size : (head + 1) * size] = 0
        else:
            projection.weight[head * size : (head + 1) * size] = 0


def total_loss(model, batches):
    """Summed loss and number of labels."""
    loss = count = 0
    for batch in batches:
        labels = batch["labels"]
        out = model(**batch)
        logits = out.logits
        if not model.config.is_encoder_decoder:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = loss + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        count += int((labels != -100).sum())
    return loss, count


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_masking_equals_silencing_the_projection(kind, patched):
    make = shared.t5 if kind == "t5" else shared.gpt2

    def build():
        model = make()
        return patch_model(model, alpha=1.5) if patched else model

    pairs = shared.sentences(5)
    data = list(shared.batches(pairs, 2))
    if kind == "gpt2":
        for batch in data:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model = build()
    importance = head_importance(model, data, method="masking")
    with torch.no_grad():
        intact, count = total_loss(model, data)
        for site, layer, head in (
            ("decoder_self", 0, 1),
            ("decoder_self", 1, 0),
            *([("cross", 1, 3), ("encoder_self", 0, 2)] if kind == "t5" else []),
        ):
            other = build()
            silence(other, site, layer, head)
            expected = float(total_loss(other, data)[0] - intact) / count
            assert float(importance[site][layer, head]) == pytest.approx(expected, rel=1e-3, abs=2e-6)
    assert float(total_loss(model, data)[0]) == pytest.approx(float(intact))  # nothing stays masked


def test_gradient_equals_finite_differences():
    model = shared.t5(True)
    pairs = shared.sentences(4)
    importance = head_importance(model, shared.batches(pairs, 2), method="gradient")
    step = 2e-3  # parts of T5 compute in float32
    counted = sum(len(target) for _, target in pairs)
    for site, layer, head in (("encoder_self", 1, 2), ("cross", 0, 0), ("decoder_self", 1, 3)):
        total = 0.0
        for pair in pairs:  # the absolute value is taken sentence by sentence
            losses = []
            for sign in (1, -1):

                def gate(call, sign=sign, site=site, layer=layer, head=head):
                    at = call.site
                    if (at.site, at.layer) != (site, layer):
                        return None
                    factor = torch.ones(1, 1, at.num_heads, 1)
                    factor[:, :, head] += sign * step
                    return factor

                with torch.no_grad(), observe_attention(model, gate=gate):
                    (batch,) = shared.batches([pair], 1)
                    losses.append(float(model(**batch).loss) * len(pair[1]))
            total += abs(losses[0] - losses[1]) / (2 * step)
        assert float(importance[site][layer, head]) == pytest.approx(total / counted, rel=1e-2, abs=3e-4)


@pytest.mark.parametrize("method", ["masking", "gradient"])
def test_batches_do_not_matter(method):
    model, pairs = shared.t5(True), shared.sentences(6)
    one = head_importance(model, shared.batches(pairs, 6), method=method)
    several = head_importance(model, shared.batches(pairs, 2), method=method)
    for site in one:
        torch.testing.assert_close(one[site], several[site], rtol=1e-3, atol=1e-6)


def test_bad_input():
    model = shared.t5()
    with pytest.raises(ValueError, match="method"):
        head_importance(model, [], method="both")
    with pytest.raises(ValueError, match="at least one label"):
        head_importance(model, [])
    (batch,) = shared.batches(shared.sentences(2), 2)
    with pytest.raises(ValueError, match="'labels'"):
        head_importance(model, [{key: value for key, value in batch.items() if key != "labels"}])


@pytest.mark.parametrize("method", ["masking", "gradient"])
def test_a_decoder_that_does_not_shift_its_labels(method):
    config = tf.BartConfig(vocab_size=37, d_model=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=20)
    model = tf.BartForCausalLM(config)
    batches = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(3, 11)[None], torch.arange(3, 6)[None])]
    both = head_importance(model, batches, method=method)["decoder_self"]
    each = [head_importance(model, [batch], method=method)["decoder_self"] for batch in batches]
    torch.testing.assert_close(both, (8 * each[0] + 3 * each[1]) / 11, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family, masked", [("gpt2", False), ("llama", False), ("bert", True)])
def test_only_models_that_see_both_sides_are_asked_for_masked_tokens(family, masked):
    tokenizer = tiny_tokenizers.wordpiece()
    batch = next(Encoder(tiny.build(family), tokenizer).texts([TextRecord("the cat sat")], labels=True))
    real = batch["attention_mask"].bool()
    assert bool((batch["input_ids"] == tokenizer.mask_token_id).any()) is masked
    if not masked:
        assert torch.equal(batch["labels"][real], batch["input_ids"][real])
