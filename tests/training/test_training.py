import json
import math

import pytest
import tiny_models as tiny
import torch
import transformers as tf

import hf_entmax
from hf_entmax import alphas, patch_model
from hf_entmax.training import AlphaLoggingCallback, AlphaScheduleCallback, SmoothedEntmaxLoss, alpha_parameter_groups

ROWS = 24


class Pairs(torch.utils.data.Dataset):
    """Copy the input backwards: learnable, and different for every row."""

    def __init__(self, family):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, tiny.VOCAB, (ROWS, 6), generator=generator)
        self.seq2seq = family in tiny.ENCODER_DECODERS

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        labels = self.ids[i].flip(0) if self.seq2seq else self.ids[i]
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(6, dtype=torch.long), "labels": labels}


def _arguments(tmp_path, cls=tf.TrainingArguments, **extra):
    options = dict(output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, logging_steps=1, learning_rate=1e-2, report_to=[],
                   save_strategy="no", disable_tqdm=True, use_cpu=True, seed=1, weight_decay=0.5)  # fmt: skip
    return cls(**{**options, **extra})


def _trainer(tmp_path, model, family, callbacks=None, optimizers=(None, None), cls=tf.Trainer, args=None, **extra):
    args = args or _arguments(tmp_path, **extra)
    return cls(
        model=model,
        args=args,
        train_dataset=Pairs(family),
        eval_dataset=Pairs(family),
        callbacks=callbacks,
        optimizers=optimizers,
    )


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "gpt2", "llama", "bert"])
def test_the_plain_trainer_moves_alphas_and_lowers_the_loss(family, tmp_path):
    model = patch_model(tiny.build(family), alpha_init=1.3)
    before = alphas(model)
    trainer = _trainer(tmp_path, model, family, max_steps=12)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(x) for x in losses) and losses[-1] < losses[0]
    assert all(not torch.equal(before[site], values) for site, values in alphas(model).items())


def test_the_plain_trainer_does_not_decay_alphas(tmp_path):
    model = patch_model(tiny.build("bart"))
    trainer = _trainer(tmp_path, model, "bart")
    decayed = trainer.get_decay_parameter_names(model)
    assert decayed and not [name for name in decayed if "entmax_norm" in name]


def test_seq2seq_trainer_evaluates_by_generation(tmp_path):
    model = patch_model(tiny.build("t5"), alpha_init=1.3, output_alpha=1.5)
    args = _arguments(tmp_path, tf.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8)
    trainer = tf.Seq2SeqTrainer(model=model, args=args, train_dataset=Pairs("t5"), eval_dataset=Pairs("t5"))
    trainer.train()
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"]) and 1 <= metrics["eval_support_size"] <= tiny.VOCAB
    assert trainer.predict(Pairs("t5")).metrics["test_support_size"] == metrics["eval_support_size"]


def test_support_size_is_the_mean_number_of_possible_classes(tmp_path):
    model = patch_model(tiny.build("bert"), output_alpha=1.5)
    trainer = _trainer(tmp_path, model, "bert", per_device_eval_batch_size=5)
    reported = trainer.evaluate()["eval_support_size"]
    rows = [hf_entmax.ops.entmax(model(input_ids=Pairs("bert")[i]["input_ids"][None]).logits, 1.5) for i in range(ROWS)]
    assert reported == pytest.approx(torch.cat(rows).gt(0).sum(-1).float().mean().item(), rel=1e-6)
    assert "eval_support_size" not in _trainer(tmp_path, patch_model(tiny.build("bert")), "bert").evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "gpt2", "bert"])
def test_gradient_accumulation_gives_the_same_loss(family, tmp_path):
    losses = []
    for size, accumulation in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = patch_model(tiny.build(family), output_alpha=1.5)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        data = Pairs(family)
        if family == "bert":
            data.ids[:, 4:] = data.ids[:, 4:].flip(0)
        trainer = _trainer(
            tmp_path,
            model,
            family,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
        )
        for module in model.modules():
            for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_parameter_groups():
    model = patch_model(tiny.build("bart"))
    groups = {g["name"]: g for g in alpha_parameter_groups(model, lr=1e-3, alpha_lr=1e-1, weight_decay=0.1)}
    assert [(g["lr"], g["weight_decay"]) for g in groups.values()] == [(1e-3, 0.1), (1e-3, 0.0), (1e-1, 0.0)]
    named = {id(p): n for n, p in model.named_parameters()}
    assert {named[id(p)].split(".")[-2] for p in groups["alpha"]["params"]} == {"entmax_norm"}
    assert sum(len(g["params"]) for g in groups.values()) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="alpha_lr=-1"):
        alpha_parameter_groups(model, 1e-3, alpha_lr=-1)
    with pytest.raises(ValueError, match="no trainable alphas"):
        alpha_parameter_groups(patch_model(tiny.build("bart"), alpha=1.5), 1e-3)


def test_alphas_with_a_learning_rate_of_their_own(tmp_path):
    moved = {}
    for alpha_lr in (0.0, 0.5):
        model = patch_model(tiny.build("gpt2"), alpha_init=1.4)
        optimizer = torch.optim.AdamW(alpha_parameter_groups(model, 1e-3, alpha_lr))
        _trainer(tmp_path, model, "gpt2", optimizers=(optimizer, None)).train()
        moved[alpha_lr] = (alphas(model)["decoder_self"] - 1.4).abs().max().item()
    assert moved[0.0] < 1e-6 and moved[0.5] > 0.05


class Reporter(tf.TrainerCallback):
    """Stands where TensorBoard stands: in the Trainer's own list, before the callbacks of the user."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


@pytest.mark.parametrize("family", ["t5", "llama", "bert"])
def test_alpha_density_and_diversity_reach_the_reporters(family, tmp_path):
    model = patch_model(tiny.build(family), alpha_init=1.5)
    hooks = dict(model._forward_pre_hooks)
    reporter = Reporter()
    trainer = _trainer(tmp_path, model, family, callbacks=[reporter, AlphaLoggingCallback()])
    trainer.train()
    training = [logs for logs in reporter.seen if "loss" in logs]
    assert len(training) == 4
    for logs in training:
        for site in tiny.SITES[family]:
            assert 1 < logs[f"alpha/{site}/min"] <= logs[f"alpha/{site}/mean"] <= logs[f"alpha/{site}/max"] < 2
            assert 0 < logs[f"density/{site}"] <= 1 and 0 <= logs[f"js/{site}"] <= 1
    assert (
        trainer.state.log_history[0]["alpha/" + tiny.SITES[family][0] + "/mean"]
        == training[0]["alpha/" + tiny.SITES[family][0] + "/mean"]
    )
    records = [json.loads(line) for line in (tmp_path / "alphas.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    for site in tiny.SITES[family]:
        assert torch.allclose(torch.tensor(records[-1]["alpha"][site]), alphas(model)[site], atol=1e-4)
    assert dict(model._forward_pre_hooks) == hooks


def test_the_callback_does_not_change_training(tmp_path):
    final = []
    for callbacks in ([], [AlphaLoggingCallback()]):
        torch.manual_seed(0)
        model = patch_model(tiny.build("bart"), alpha_init=1.5)
        _trainer(tmp_path, model, "bart", callbacks=callbacks).train()
        final.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(final[0], final[1])


def test_the_log_of_a_resumed_run_continues(tmp_path):
    path = tmp_path / "alphas.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "al')
    model = patch_model(tiny.build("bart"))
    trainer = _trainer(
        tmp_path, model, "bart", callbacks=[AlphaLoggingCallback(statistics=False)], save_strategy="steps", save_steps=2
    )
    trainer.train()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    again = patch_model(tiny.build("bart"))
    trainer = _trainer(tmp_path, again, "bart", callbacks=[AlphaLoggingCallback(statistics=False)], max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_callbacks_want_a_patched_model(tmp_path):
    for callback in (AlphaLoggingCallback(), AlphaScheduleCallback(1.0, 1.5)):
        with pytest.raises(ValueError, match="not patched"):
            _trainer(tmp_path, tiny.build("gpt2"), "gpt2", callbacks=[callback]).train()


@pytest.mark.parametrize("shape, middle", [("linear", 1.25), ("cosine", 1.25), (lambda x: x * x, 1.125)])
def test_schedule_of_a_fixed_alpha(shape, middle, tmp_path):
    model = patch_model(tiny.build("gpt2"), alpha=1.0)
    schedule = AlphaScheduleCallback(1.0, 1.5, over=1.0, shape=shape)
    assert [schedule.value(s, 8) for s in (0, 4, 8, 20)] == pytest.approx([1.0, middle, 1.5, 1.5])
    seen = []

    class Look(tf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(alphas(kwargs["model"])["decoder_self"][0, 0].item())

    _trainer(tmp_path, model, "gpt2", callbacks=[schedule, Look()], max_steps=8).train()
    assert seen == pytest.approx([schedule.value(s, 8) for s in range(8)], abs=1e-6)
    assert model.config.entmax_config["alpha"] == 1.5 and (alphas(model)["decoder_self"] == 1.5).all()


def test_schedule_hands_over_to_learning(tmp_path):
    model = patch_model(tiny.build("gpt2"))
    _trainer(
        tmp_path, model, "gpt2", callbacks=[AlphaScheduleCallback(1.01, 1.4, over=0.5)], max_steps=8, learning_rate=0.05
    ).train()
    table = alphas(model)["decoder_self"]
    assert (table > 1.2).all() and table.std() > 1e-4


@pytest.mark.parametrize(
    "arguments, match",
    [((0.5, 1.5), "start"), ((1.0, 0.9), "end"), ((1.0, 1.5, 0.0), "over"), ((1.0, 1.5, 0.5, "cubic"), "shape")],
)
def test_bad_schedules(arguments, match):
    with pytest.raises(ValueError, match=match):
        AlphaScheduleCallback(*arguments)


def test_label_smoothing_of_the_trainer_is_refused_with_an_entmax_output(tmp_path):
    with pytest.raises(ValueError, match="SmoothedEntmaxLoss"):
        _trainer(tmp_path, patch_model(tiny.build("bart"), output_alpha=1.5), "bart", label_smoothing_factor=0.1)
    _trainer(tmp_path, patch_model(tiny.build("bart")), "bart", label_smoothing_factor=0.1)


def test_smoothed_loss_in_the_trainer(tmp_path):
    model = patch_model(tiny.build("bart"), output_alpha=1.5)
    args = _arguments(tmp_path)
    trainer = tf.Trainer(
        model=model, args=args, train_dataset=Pairs("bart"), compute_loss_func=SmoothedEntmaxLoss(1.5, 0.1)
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(x) for x in losses) and losses[-1] < losses[0]
    with pytest.raises(ValueError, match="label_smoothing"):
        SmoothedEntmaxLoss(1.5, 1.0)


def test_gradient_checkpointing_gives_the_same_gradients():
    batch = tiny.inputs("llama")
    batch["labels"] = batch["input_ids"]
    gradients = []
    for checkpointing in (False, True):
        model = patch_model(tiny.build("llama"), alpha_init=1.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**batch).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(alpha="learned"), "length_lr"),
        (dict(alpha=1.5, length_scaling="log"), "alpha_lr"),
    ],
)
def test_rates_for_what_is_not_learned_are_refused(options, named):
    model = patch_model(tiny.build("gpt2"), **options)
    assert alpha_parameter_groups(model, 1e-3)
    with pytest.raises(ValueError, match=f"{named}=5.0 would have no effect"):
        alpha_parameter_groups(model, 1e-3, **{named: 5.0})


@pytest.mark.parametrize("start, said", [(1.01, 1), (1.5, 0)])
def test_a_model_that_stays_dense_is_told_what_to_do_once(tmp_path, caplog, start, said):
    model = patch_model(tiny.build("llama"), alpha_init=start)
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)}] * 4
    arguments = tf.TrainingArguments(
        str(tmp_path), max_steps=120, per_device_train_batch_size=1, logging_steps=10, learning_rate=1e-4, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    with caplog.at_level("WARNING"):
        tf.Trainer(model, arguments, train_dataset=rows).train()
    assert caplog.text.count("attention is as good as dense") == said
    assert ("hf_entmax.sparsify" in caplog.text) == bool(said)
