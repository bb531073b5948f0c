"""The loss of a conversion, as the Trainer sees it: its terms by hand, and what moves the multiplier."""

import copy

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from test_loss_budget import Rows, _train

from hf_entmax import alphas, entmax_config, patch_model
from hf_entmax.training import (
    ConversionCallback,
    DensityTarget,
    LossBudget,
    attention_density,
    attention_distillation,
    attention_pairs,
    logit_distillation,
    record_attention,
    soft_density,
    state_distillation,
)

EIGHT = torch.utils.data.Subset(Rows(), range(8))
DISTIL = dict(distill_logits=0.5, temperature=2.0, distill_attention=0.25)


def _by_hand(model, teacher, constraint, task_weight=0.5):
    """The loss of the eight rows and its parts, from the public functions."""
    batch = {
        "input_ids": Rows().ids[:8],
        "labels": Rows().ids[:8],
        "attention_mask": torch.ones(8, 8, dtype=torch.long),
    }
    with torch.no_grad(), record_attention(model) as seen:
        output = model(**batch)
    with torch.no_grad(), record_attention(teacher) as wanted:
        known = teacher(**batch)
    pairs = attention_pairs(model, batch, seen)
    alpha = entmax_config(model).output_alpha or 1.0
    own, other, labels = output.logits[:, :-1], known.logits[:, :-1], batch["labels"][:, 1:]
    parts = {
        "task": output.loss,
        "logits": logit_distillation(own, other, labels, alpha, temperature=2.0),
        "attention": torch.stack(
            [attention_distillation(w, wanted.weights[n], pairs[n]) for n, w in seen.weights.items()]
        ).mean(),
        "density": torch.stack([attention_density(w, pairs[n]) for n, w in seen.weights.items()]).mean(),
    }
    soft = torch.stack([soft_density(w, pairs[n]) for n, w in seen.weights.items()]).mean()
    total = task_weight * parts["task"] + 0.5 * parts["logits"] + 0.25 * parts["attention"]
    return float(total + constraint.multiplier * soft), {name: float(value) for name, value in parts.items()}


@pytest.mark.parametrize("own", [True, False], ids=["own original", "given original"])
@pytest.mark.parametrize("alone", [True, False], ids=["alphas alone", "weights"])
@pytest.mark.parametrize(("size", "parts"), [(8, 1), (4, 2)])
def test_every_term_is_the_one_of_its_function(tmp_path, own, alone, size, parts):
    softmax = tiny.build("llama")
    model = patch_model(copy.deepcopy(softmax), alpha_init=1.5)
    if alone:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("entmax_norm" in name)
    constraint = DensityTarget(0.3)
    constraint.multiplier = 2.0
    total, wanted = _by_hand(model, softmax, constraint)
    callback = ConversionCallback(constraint, "softmax" if own else softmax, task_weight=0.5, **DISTIL)
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
    trainer = _train(tmp_path, model, callback, steps=1, data=EIGHT, learning_rate=0.0, **sizes)
    found = trainer.state.log_history[0]
    assert found["loss"] == pytest.approx(total, rel=1e-4)
    if parts == 1:
        assert {name: found[f"conversion/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert constraint.multiplier == pytest.approx(2.0 + 0.1 * (wanted["density"] - 0.3), rel=1e-4)
    assert softmax.training is False and not model._forward_hooks


def test_a_sparse_output_is_compared_as_one(tmp_path):
    softmax = tiny.build("llama")
    model = patch_model(copy.deepcopy(softmax), alpha_init=1.5, output_alpha=1.5)
    constraint = DensityTarget(0.3)
    total, _ = _by_hand(model, softmax, constraint)
    callback = ConversionCallback(constraint, softmax, task_weight=0.5, **DISTIL)
    trainer = _train(tmp_path, model, callback, steps=1, data=EIGHT, learning_rate=0.0)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total, rel=1e-4)


def test_density_falls_to_its_target(tmp_path):
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    trainer = _train(tmp_path, model, ConversionCallback(DensityTarget(0.3, rate=5.0)), steps=40, data=EIGHT)
    density = [row["conversion/density"] for row in trainer.state.log_history if "conversion/density" in row]
    assert density[0] > 0.4 and min(density) < 0.32


def test_attention_that_keeps_its_softmax_has_no_part_in_the_density(tmp_path):
    model = patch_model(tiny.build("llama"), alpha_init=1.5, layers=(0,))
    with torch.no_grad(), record_attention(model) as seen:
        model(input_ids=Rows().ids[:8], attention_mask=torch.ones(8, 8, dtype=torch.long))
    density = {
        seen.sites[n].layer: attention_density(w, torch.ones(8, 8, 8).tril().bool()) for n, w in seen.weights.items()
    }
    assert density[0] < density[1] == 1
    trainer = _train(tmp_path, model, ConversionCallback(DensityTarget(0.3)), steps=1, data=EIGHT, learning_rate=0.0)
    assert trainer.state.log_history[0]["conversion/density"] == pytest.approx(float(density[0]))


def test_the_multiplier_waits_for_alpha(tmp_path):
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    trainer = _train(tmp_path, model, ConversionCallback(DensityTarget(0.1), after=0.5), steps=4, data=EIGHT)
    moved = [row["conversion/multiplier"] > 0 for row in trainer.state.log_history if "conversion/multiplier" in row]
    assert moved == [False, False, True, True]


def test_where_the_task_is_not_trained_the_budget_is_on_the_distance(tmp_path):
    model = patch_model(tiny.build("llama"), alpha_init=1.9)
    callback = ConversionCallback(LossBudget(0.01, memory=0.0), task_weight=0.0, distill_logits=1.0)
    trainer = _train(tmp_path, model, callback, steps=2, data=EIGHT)
    for row in trainer.state.log_history[:2]:
        assert (
            row["conversion/rise"] == pytest.approx(row["conversion/logits"], rel=1e-5) and row["conversion/rise"] > 0
        )


def test_a_softmax_model_learns_from_another_one_by_a_distance_of_ones_own(tmp_path):
    model, other = tiny.build("llama"), tf.LlamaForCausalLM(tf.LlamaConfig(**tiny._LLAMA))
    distance = lambda own, original, labels: (own - original).square().mean()  # noqa: E731
    callback = ConversionCallback(reference=other, task_weight=0.0, distill_logits=1.0, distance=distance)
    trainer = _train(tmp_path, model, callback, steps=5, data=EIGHT)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] and losses[0] == pytest.approx(trainer.state.log_history[0]["conversion/logits"])


class Pairs(Rows):
    """Rows whose last tokens are padding, as an encoder-decoder reads them."""

    def __getitem__(self, i):
        return super().__getitem__(i) | {"attention_mask": (torch.arange(8) < 8 - i % 4).long()}


def test_an_encoder_is_kept_near_the_original_one(tmp_path):
    softmax = tiny.build("bart")
    data = torch.utils.data.Subset(Pairs(), range(8))
    batch = torch.utils.data.default_collate([data[i] for i in range(8)])
    found = {}
    for weight in (0.0, 3.0):
        model = patch_model(copy.deepcopy(softmax), alpha_init=1.7)
        with torch.no_grad():
            states = [m(**batch).encoder_last_hidden_state for m in (model, softmax)]
        wanted = float(state_distillation(*states, batch["attention_mask"]))
        callback = ConversionCallback(task_weight=0.5, distill_encoder=weight, dropout=False)
        trainer = _train(tmp_path, model, callback, steps=20, data=data, learning_rate=2e-3)
        if weight:
            first = trainer.state.log_history[0]
            assert first["conversion/encoder"] == pytest.approx(wanted, rel=1e-4) and wanted > 0.01
            assert first["loss"] == pytest.approx(0.5 * first["conversion/task"] + weight * wanted, rel=1e-4)
        with torch.no_grad():
            states = model.eval()(**batch).encoder_last_hidden_state
        found[weight] = float(
            state_distillation(states, softmax(**batch).encoder_last_hidden_state, batch["attention_mask"])
        )
    assert found[3.0] < 0.5 * found[0.0]


def test_an_encoder_that_is_not_there_or_has_run_already_cannot_be_kept_near(tmp_path):
    callback = ConversionCallback(distill_encoder=1.0)
    with pytest.raises(ValueError, match="distill_encoder is for encoder-decoder models, LlamaForCausalLM is not one"):
        _train(tmp_path, patch_model(tiny.build("llama")), callback, steps=1)
    model = tiny.build("bart")
    states = model.get_encoder()(input_ids=Rows().ids[:8]).last_hidden_state.detach()

    class Run(Rows):
        def __getitem__(self, i):
            return {"labels": self.ids[i], "encoder_outputs": states[i % 8]}

    collate = lambda rows: {**torch.utils.data.default_collate(rows), "encoder_outputs": (states,)}  # noqa: E731
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, remove_unused_columns=False
    )
    trainer = tf.Trainer(
        patch_model(model), arguments, collate, Run(), callbacks=[ConversionCallback(distill_encoder=1.0)]
    )
    with pytest.raises(ValueError, match="the batch brings encoder_outputs"):
        trainer.train()


def test_without_dropout_two_steps_on_the_same_rows_have_the_same_loss(tmp_path):
    model = patch_model(tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=tiny.VOCAB, n_embd=16, n_layer=1, n_head=2)))
    losses = {}
    for dropout in (True, False):
        callback = ConversionCallback(DensityTarget(1.0), dropout=dropout)
        trainer = _train(tmp_path, model, callback, steps=2, data=EIGHT, learning_rate=0.0)
        losses[dropout] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[False][0] == pytest.approx(losses[False][1], rel=1e-6)
    assert losses[True][0] != pytest.approx(losses[True][1], rel=1e-4) and model.training


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    def run(folder, resume=None, **extra):
        model = patch_model(tiny.build("llama"), alpha_init=1.3)
        callback = ConversionCallback(DensityTarget(0.2), **DISTIL)
        return model, _train(tmp_path / folder, model, callback, steps=6, resume=resume, **extra)

    whole, straight = run("a")
    run("b", save_strategy="steps", save_steps=3)
    halves, again = run("b", resume=str(tmp_path / "b" / "checkpoint-3"))
    rows = [trainer.state.log_history[-2]["conversion/multiplier"] for trainer in (straight, again)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-6) and rows[0] > 0.1
    assert torch.allclose(alphas(whole)["decoder_self"], alphas(halves)["decoder_self"], atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(constraint="restored"), "constraint='restored' .*cannot make this callback again"),
        (dict(task_weight=-1.0), "task_weight=-1.0"),
        (dict(task_weight=0.0), "the model would learn nothing"),
        (dict(distill_logits=float("nan")), "distill_logits=nan"),
        (dict(reference=1.0, distill_logits=1.0), "to distil give 'softmax' or a model"),
        (dict(distill_encoder=-1.0), "distill_encoder=-1.0"),
        (dict(reference=1.0, distill_encoder=1.0), "to distil give 'softmax' or a model"),
        (dict(temperature=0.0), "temperature=0.0"),
        (dict(attention_loss="l1"), "attention_loss='l1'"),
        (dict(after=1.5), "after=1.5"),
    ],
)
def test_what_it_cannot_be_told(options, words):
    with pytest.raises(ValueError, match=words):
        ConversionCallback(**options)
