"""The loss as the constraint: the multiplier, and the callback for the Trainer."""

import copy
import itertools
import math
import threading

import pytest
import tiny_models as tiny
import torch
import transformers as tf

from hf_entmax import alphas, patch_model, set_alphas, softmax_attention
from hf_entmax.training import LossBudget, LossBudgetCallback, soft_density

FAMILY = "llama"


class Rows(torch.utils.data.Dataset):
    def __init__(self, labels=True):
        self.ids = torch.randint(3, tiny.VOCAB, (24, 8), generator=torch.Generator().manual_seed(3))
        self.labels = labels

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], **({"labels": self.ids[i]} if self.labels else {})}


def _train(tmp_path, model, callback, steps=6, data=None, resume=None, **extra):
    arguments = tf.TrainingArguments(
        **{
            **dict(output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=8, logging_steps=1, seed=1),
            **dict(learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True),
            **extra,
        }
    )
    trainer = tf.Trainer(model=model, args=arguments, train_dataset=data or Rows(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _logs(trainer, name):
    return [row[f"loss_budget/{name}"] for row in trainer.state.log_history if f"loss_budget/{name}" in row]


def _alphas_only(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("entmax_norm" in name)
    return model


def test_the_multiplier_falls_by_factors_when_the_budget_is_overshot_and_comes_back():
    constraint = LossBudget(0.02, rate=0.5, memory=0.0)
    assert constraint.multiplier == 0.02
    assert constraint.update(0.05) == pytest.approx(0.02 * math.exp(-0.5))  # more than one scale beyond: the full step
    assert constraint.update(0.03) == pytest.approx(0.02 * math.exp(-0.75))
    assert constraint.update(0.0) == pytest.approx(0.02 * math.exp(-0.25))
    for _ in range(100):
        constraint.update(1.0)
    assert 0 < constraint.multiplier <= 1e-6
    for _ in range(100):
        constraint.update(-1.0)
    assert constraint.multiplier == 1e3


def test_it_goes_by_the_moving_average_and_survives_a_checkpoint():
    constraint = LossBudget(0.0, rate=0.1, start=2.0, memory=0.5)
    constraint.update(0.01)
    constraint.update(0.03)
    assert constraint.rise == pytest.approx(0.02)
    again = LossBudget(0.0, rate=0.1, start=1.0, memory=0.5)
    again.load_state_dict(constraint.state_dict())
    assert again.update(0.1) == constraint.update(0.1) and again.rise == constraint.rise
    fresh = LossBudget(0.1)
    fresh.load_state_dict(LossBudget(0.1).state_dict())
    assert math.isnan(fresh.rise)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(budget=-0.01), "budget=-0.01"),
        (dict(budget=math.inf), "budget=inf"),
        (dict(budget="1"), "budget='1'"),
        (dict(budget=0.1, rate=0), "rate=0"),
        (dict(budget=0.1, start=0.0), "start=0.0"),
        (dict(budget=0.1, memory=1.0), "memory=1.0"),
    ],
)
def test_what_a_budget_cannot_be(options, words):
    for kind in (LossBudget, LossBudgetCallback):
        with pytest.raises(ValueError, match=words):
            kind(**options)
    with pytest.raises(ValueError, match=r"loss of a step is nan"):
        LossBudget(0.1).update(math.nan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(reference="dense"), "reference='dense'"),
        (dict(reference=math.nan), "reference=nan"),
        (dict(tau=0.0), "tau=0.0"),
        (dict(floor=1.0), "floor=1.0"),
    ],
)
def test_what_the_callback_cannot_be_told(options, words):
    with pytest.raises(ValueError, match=words):
        LossBudgetCallback(0.1, **options)


def test_heads_below_the_floor_are_not_pushed():
    scores = torch.tensor([[[[4.0, 0.0, 0.0, 0.0]], [[0.1, 0.0, 0.0, 0.0]]]], requires_grad=True)
    weights = scores.softmax(-1)
    pairs = torch.ones(1, 1, 4, dtype=torch.bool)
    each = [float(soft_density(weights[:, h : h + 1], pairs, 0.1)) for h in range(2)]
    assert each[0] < 0.6 < each[1]
    value = soft_density(weights, pairs, 0.1, floor=0.6)
    assert float(value) == pytest.approx((0.6 + each[1]) / 2)
    value.backward()
    assert (scores.grad[0, 0] == 0).all() and (scores.grad[0, 1] != 0).any()


def test_within_the_budget_attention_gets_sparser_and_the_rise_is_the_one_measured(tmp_path):
    model = _alphas_only(patch_model(tiny.build(FAMILY), alpha_init=1.3))
    weights = {n: p.clone() for n, p in model.named_parameters() if "entmax_norm" not in n}
    before = alphas(model)["decoder_self"]
    with torch.no_grad():
        batch = {"input_ids": Rows().ids[:8], "labels": Rows().ids[:8]}
        rise = float(model(**batch).loss)
        with softmax_attention(model):
            rise -= float(model(**batch).loss)
    trainer = _train(
        tmp_path, model, LossBudgetCallback(5.0, start=10.0), steps=8, learning_rate=0.1, data=torch.utils.data.Subset(Rows(), range(8))
    )  # fmt: skip
    assert _logs(trainer, "rise")[0] == pytest.approx(rise, abs=1e-5)
    assert _logs(trainer, "density")[-1] < _logs(trainer, "density")[0]
    assert (alphas(model)["decoder_self"] > before).all()
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)
    multipliers = _logs(trainer, "multiplier")
    assert all(later > earlier for earlier, later in itertools.pairwise(multipliers))


class Classes(Rows):
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": torch.tensor(i % 3)}


def test_gradient_accumulation_changes_no_rise_of_a_classifier(tmp_path):
    rises = []
    for accumulated in (1, 4):
        torch.manual_seed(0)
        config = tf.LlamaConfig(**tiny._LLAMA, num_labels=3)
        model = patch_model(tiny.enlarged(tf.LlamaForSequenceClassification(config)), alpha_init=1.9)
        sizes = dict(per_device_train_batch_size=8 // accumulated, gradient_accumulation_steps=accumulated)
        trainer = _train(tmp_path, model, LossBudgetCallback(0.05), 1, Classes(), learning_rate=0.0, **sizes)
        rises += _logs(trainer, "rise")
    assert abs(rises[0]) > 1e-4 and rises[1] == pytest.approx(rises[0], rel=1e-4)


def test_beyond_the_budget_the_pressure_goes(tmp_path):
    model = patch_model(tiny.build(FAMILY), alpha_init=1.5)
    trainer = _train(tmp_path, model, LossBudgetCallback(0.01, reference=0.0, start=1.0, memory=0.0, rate=0.1), steps=3)
    assert _logs(trainer, "multiplier") == pytest.approx([math.exp(-0.1 * step) for step in (1, 2, 3)])
    assert _logs(trainer, "task")[0] == pytest.approx(_logs(trainer, "rise")[0])


def test_the_original_stays_the_original_while_weights_are_trained(tmp_path):
    model = patch_model(tiny.build(FAMILY), alpha_init=1.01)
    data = torch.utils.data.Subset(Rows(), range(8))
    with softmax_attention(model), torch.no_grad():
        start = float(model(input_ids=Rows().ids[:8], labels=Rows().ids[:8]).loss)
    trainer = _train(tmp_path, model, LossBudgetCallback(0.5, memory=0.0), steps=10, data=data)
    task, rise = _logs(trainer, "task"), _logs(trainer, "rise")
    assert task[-1] < task[0] - 0.05
    assert [t - r for t, r in zip(task, rise, strict=True)] == pytest.approx([start] * len(task), abs=1e-4)


def test_gradient_accumulation_changes_neither_the_rise_nor_the_step(tmp_path):
    found = []
    for size, parts in ((8, 1), (4, 2)):
        model = patch_model(tiny.build(FAMILY), alpha_init=1.3)
        trainer = _train(
            tmp_path, model, LossBudgetCallback(1.0, start=2.0), steps=3, data=torch.utils.data.Subset(Rows(), range(8)),
            per_device_train_batch_size=size, gradient_accumulation_steps=parts,
        )  # fmt: skip
        found.append((_logs(trainer, "rise"), alphas(model)["decoder_self"]))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-3)


@pytest.mark.parametrize("output_alpha", [None, 1.0])
def test_a_decoder_that_does_not_shift_its_labels(tmp_path, output_alpha):
    """Its own loss is the mean of each batch; with ``output_alpha`` it is divided by the labels that the Trainer counts."""
    config = tf.BartConfig(vocab_size=37, d_model=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=20)
    model = patch_model(tf.BartForCausalLM(config).eval(), alpha_init=1.3, output_alpha=output_alpha)
    with torch.no_grad(), softmax_attention(model):
        reference = float(model(input_ids=Rows().ids[:8], labels=Rows().ids[:8]).loss)
    callback = LossBudgetCallback(0.5, memory=0.0)
    model.config.dropout = 0.0
    for module in model.modules():
        module.dropout = 0.0
    trainer = _train(tmp_path, model, callback, steps=1, data=torch.utils.data.Subset(Rows(), range(8)))
    assert _logs(trainer, "task")[0] - _logs(trainer, "rise")[0] == pytest.approx(reference, abs=1e-4)


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    def model():
        return patch_model(tiny.build(FAMILY), alpha_init=1.3)

    whole, halves = model(), model()
    straight = _train(tmp_path / "a", whole, LossBudgetCallback(0.02), steps=6)
    _train(tmp_path / "b", model(), LossBudgetCallback(0.02), steps=6, save_strategy="steps", save_steps=3)
    again = _train(
        tmp_path / "b", halves, LossBudgetCallback(0.02), steps=6, resume=str(tmp_path / "b" / "checkpoint-3")
    )
    assert _logs(again, "multiplier")[3:] == pytest.approx(_logs(straight, "multiplier")[3:], rel=1e-6)
    assert _logs(again, "rise")[3:] == pytest.approx(_logs(straight, "rise")[3:], rel=1e-5)
    assert torch.allclose(alphas(whole)["decoder_self"], alphas(halves)["decoder_self"], atol=1e-7)


def test_adapters_and_alphas_against_the_base_model(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = patch_model(tiny.build(FAMILY), alpha_init=1.3)
    with softmax_attention(base), torch.no_grad():
        start = float(base(input_ids=Rows().ids[:8], labels=Rows().ids[:8]).loss)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", modules_to_save=["entmax_norm"])
    model = peft.get_peft_model(base, config)
    data = torch.utils.data.Subset(Rows(), range(8))
    trainer = _train(tmp_path, model, LossBudgetCallback(0.5, memory=0.0), steps=5, data=data)
    task, rise = _logs(trainer, "task"), _logs(trainer, "rise")
    assert [t - r for t, r in zip(task, rise, strict=True)] == pytest.approx([start] * len(task), abs=1e-4)
    alone = peft.get_peft_model(patch_model(tiny.build(FAMILY)), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))  # fmt: skip
    with pytest.raises(ValueError, match=r"none is trained here.*modules_to_save"):
        _train(tmp_path, alone, LossBudgetCallback(0.5), steps=1)


def test_what_the_callback_needs_is_said_before_training(tmp_path):
    with pytest.raises(ValueError, match="not patched"):
        _train(tmp_path, tiny.build(FAMILY), LossBudgetCallback(0.1))
    with pytest.raises(ValueError, match="none is trained here"):
        _train(tmp_path, patch_model(tiny.build(FAMILY), alpha=1.5), LossBudgetCallback(0.1))
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        _train(tmp_path, patch_model(tiny.build(FAMILY)), LossBudgetCallback(0.1), gradient_checkpointing=True)
    with pytest.raises(ValueError, match="compute_loss_func or label_smoothing_factor"):
        _train(tmp_path, patch_model(tiny.build(FAMILY)), LossBudgetCallback(0.1), label_smoothing_factor=0.1)


def test_nothing_is_left_on_the_model_and_evaluation_is_not_touched(tmp_path):
    model = patch_model(tiny.build(FAMILY), alpha_init=1.3)
    hooks = dict(model._forward_hooks), dict(model._forward_pre_hooks)
    _train(tmp_path, model, LossBudgetCallback(0.1, start=100.0), steps=2)
    assert (dict(model._forward_hooks), dict(model._forward_pre_hooks)) == hooks
    set_alphas(model, 1.5)
    batch = {"input_ids": Rows().ids[:8], "labels": Rows().ids[:8]}
    logits = model(**batch).logits[:, :-1]
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), Rows().ids[:8, 1:].flatten())
    assert float(model(**batch).loss) == pytest.approx(float(plain), abs=1e-5)


class _Stop(tf.TrainerCallback):
    def __init__(self, error):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        raise self.error


def _budget_trainer(tmp_path, model, *callbacks):
    arguments = tf.TrainingArguments(
        str(tmp_path), max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1
    )
    return tf.Trainer(model, arguments, train_dataset=Rows(), callbacks=list(callbacks))


def _training_loss(model):
    ids = Rows().ids[:4]
    return float(model.train()(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
def test_whatever_ends_a_training_leaves_the_model_as_any_other(tmp_path, error):
    model = patch_model(tiny.build(FAMILY), alpha_init=1.5)
    with pytest.raises(type(error)):
        _budget_trainer(tmp_path, model, LossBudgetCallback(0.1, start=10.0), _Stop(error)).train()
    assert not any("LossBudget" in repr(hook) for m in model.modules() for hook in m._forward_hooks.values())
    plain = patch_model(tiny.build(FAMILY), alpha_init=1.5)
    plain.load_state_dict(model.state_dict())
    assert _training_loss(model) == _training_loss(plain)
    copy.deepcopy(model)


def test_a_copy_made_in_training_is_another_model(tmp_path):
    copies = []

    class Copy(tf.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            copies.append(copy.deepcopy(model))

    model = patch_model(tiny.build(FAMILY), alpha_init=1.5)
    trainer = _budget_trainer(tmp_path, model, LossBudgetCallback(0.1, start=10.0), Copy())
    trainer.train()
    plain = patch_model(tiny.build(FAMILY))
    plain.load_state_dict(copies[0].state_dict())
    assert _training_loss(copies[0]) == _training_loss(plain)
    assert not copies[0]._forward_pre_hooks or all(
        "LossBudget" not in repr(h) for h in copies[0]._forward_pre_hooks.values()
    )
    assert len(_logs(trainer, "rise")) == 3


def test_what_a_dead_trainer_left_is_said_and_removed(tmp_path):
    model = patch_model(tiny.build(FAMILY), alpha_init=1.5)
    dead = LossBudgetCallback(0.1, start=10.0)
    trainer = _budget_trainer(tmp_path, model, dead)
    dead.on_train_begin(
        trainer.args, trainer.state, trainer.control, model=model
    )  # a loop of one's own that never ended
    with pytest.warns(UserWarning, match="did not end"):
        _budget_trainer(tmp_path, model).train()
    assert not any("LossBudget" in repr(hook) for hook in model._forward_hooks.values())


def test_the_reference_is_softmax_in_a_thread_of_its_own(tmp_path):
    """The callback is made in one thread, and trains in another."""
    found = []
    for threaded in (False, True):
        model = patch_model(tiny.build(FAMILY), alpha_init=1.9)
        trainer = _budget_trainer(tmp_path, model, LossBudgetCallback(0.1))
        if threaded:
            thread = threading.Thread(target=trainer.train)
            thread.start()
            thread.join()
        else:
            trainer.train()
        found.append(_logs(trainer, "rise"))
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1], rel=1e-4)
