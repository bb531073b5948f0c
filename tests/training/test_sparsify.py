"""Zeros by one call."""

import io
import json

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from rich.console import Console

from hf_entmax import alphas, is_patched, patch_model, softmax_attention, sparsify
from hf_entmax.training import attention_density, attention_pairs, record_attention

FAMILIES = ("llama", "t5", "bert")


def _batches(family, count=6):
    return [tiny.inputs(family, labels=True, seed=seed) for seed in range(count)]


def _loss(model, batch):
    model.eval()
    with torch.no_grad():
        return float(model(**batch).loss)


def _density(model, batch):
    """By the definition, mean over heads."""
    with torch.no_grad(), record_attention(model) as seen:
        model.eval()(**batch)
    pairs = attention_pairs(model, batch, seen)
    return float(torch.stack([attention_density(w, pairs[name]) for name, w in seen.weights.items()]).mean())


def _quiet(model, batches, **options):
    return sparsify(model, batches, progress=None, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_softmax_model_gets_zeros_and_keeps_its_weights(family):
    model, batches = tiny.sharp(family), _batches(family)
    softmax = _loss(model, batches[4])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = _quiet(model, batches, max_loss_increase=0.05)
    assert report.mean_density < 0.9 and report.reached and report.goal == "max_loss_increase"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)
    # The fifth batch is the one that nothing was chosen by.
    assert report.loss_before == pytest.approx(softmax, abs=1e-5)
    assert report.loss == report.loss_after == pytest.approx(_loss(model, batches[4]), abs=1e-5)
    assert all((report.density_before[site] == 1).all() for site in report.density)
    assert all(torch.equal(values, report.alphas[site]) for site, values in alphas(model).items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [None, 6])
def test_a_density_is_reached_on_the_batches_that_judge(family, steps):
    model, batches = tiny.sharp(family), _batches(family)
    lines = []
    options = {} if steps is None else {"train": "alphas", "steps": steps}
    report = sparsify(model, batches, density=0.3, progress=lines.append, **options)
    assert report.reached and report.goal == "density" and report.wanted == 0.3
    judged = _density(model, batches[3])  # the fourth of the five that are not set aside
    assert judged <= 0.3 + 1e-6
    assert any("nonzero at" in line for line in lines)


@pytest.mark.parametrize(
    ("family", "train", "goal"),
    [  # every two of the three meet
        ("llama", "adapters", {"density": 0.35}),
        ("llama", "weights", {"max_loss_increase": 0.03}),
        ("t5", "lora", {"max_loss_increase": 0.03}),
        ("t5", "weights", {"density": 0.35}),
    ],
)
def test_trained_weights_meet_the_goal_and_the_model_is_a_plain_one(family, train, goal):
    model, batches = tiny.sharp(family), _batches(family)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    softmax = _loss(model, batches[3])
    report = _quiet(model, batches, train=train, steps=6, **goal)
    assert report.train == train and report.steps == 6
    after = {name: p for name, p in model.named_parameters() if "entmax_norm" not in name}
    assert {name: p.requires_grad for name, p in after.items()} == flags
    assert any(not torch.equal(p, weights[name]) for name, p in after.items())
    assert not any("lora" in name for name, _ in model.named_modules())
    assert all(p.requires_grad for name, p in model.named_parameters() if "entmax_norm" in name)
    assert report.reached
    if "density" in goal:
        assert _density(model, batches[3]) <= 0.35 + 1e-6
    else:
        assert _loss(model, batches[3]) <= softmax + 0.03 + 1e-5
    assert report.mean_density < 0.9


def test_examples_are_made_batches_of(tmp_path):
    rows = [{"input_ids": torch.randint(5, 37, (8,))} for _ in range(23)]

    def collate(examples):
        ids = torch.stack([e["input_ids"] for e in examples])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    model = tiny.sharp("llama")
    report = _quiet(model, rows, collator=collate, batch_size=4, density=0.4, train="weights", steps=4)
    assert report.tokens == 4 * 7  # the fifth of six batches
    assert report.reached


def test_an_interrupted_training_goes_on_where_it_was(tmp_path):
    batches, options = _batches("llama", 8), {"density": 0.4, "train": "weights", "steps": 8}
    whole = tiny.sharp("llama")
    _quiet(whole, batches, output_dir=tmp_path / "whole", **options)

    class Stop(tf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    model = tiny.sharp("llama")
    add, kept = tf.Trainer.add_callback, tf.Trainer.__init__

    def init(self, *args, **kwargs):
        kept(self, *args, **kwargs)
        add(self, Stop())

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tf.Trainer, "__init__", init)
        _quiet(model, batches, output_dir=tmp_path / "cut", **options)
    assert (tmp_path / "cut" / "checkpoint-4").is_dir()
    again, lines = tiny.sharp("llama"), []
    sparsify(again, batches, output_dir=tmp_path / "cut", progress=lines.append, **options)
    assert not any("estimated cost" in line for line in lines), "the search is not made again"
    own, other = whole.state_dict(), again.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)
    with pytest.raises(ValueError, match="holds another run"):
        _quiet(tiny.sharp("llama"), batches, output_dir=tmp_path / "cut", **(options | {"density": 0.5}))


def test_alphas_and_temperatures_train_at_one_rate_above_that_of_the_weights(tmp_path):
    _quiet(
        tiny.sharp("llama"), _batches("llama"), train="weights", max_loss_increase=0.03, steps=2, output_dir=tmp_path
    )
    groups = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt")["param_groups"]
    rates = {group["name"]: group["initial_lr"] for group in groups}
    assert rates["alpha"] == rates["length_scaling"] == 0.01 > rates["weights"] == rates["no_decay"] == 2e-4


def test_alphas_rise_above_two_where_a_density_asks_for_it(tmp_path):
    """Two is too dense here for every head; and whoever goes on finds the same range."""
    lines, options = [], {"density": 0.33, "train": "weights", "steps": 2, "output_dir": tmp_path}
    first, batches = tiny.sharp("llama"), _batches("llama")
    report = sparsify(first, batches, progress=lines.append, **options)
    assert any("may rise to 4" in line for line in lines)
    highest = max(float(values.max()) for values in report.alphas.values())
    assert highest > 2 and report.reached and _density(first, batches[3]) <= 0.33 + 1e-6
    lines.clear()
    again = tiny.sharp("llama")
    sparsify(again, batches, progress=lines.append, **options)
    assert not any("may rise" in line for line in lines)
    assert all(torch.allclose(report.alphas[site], values) for site, values in alphas(again).items())


def test_the_model_is_as_it_was_when_the_goal_is_out_of_reach():
    model, batches = tiny.sharp("bert"), _batches("bert")
    with pytest.raises(ValueError, match="cannot be reached"):
        _quiet(model, batches, density=0.01)
    assert not is_patched(model)
    patched = patch_model(tiny.sharp("bert"), alpha_init=1.3)
    start = {site: values.clone() for site, values in alphas(patched).items()}
    with pytest.raises(ValueError, match="cannot be reached"):
        _quiet(patched, batches, density=0.01)
    assert all(torch.equal(values, start[site]) for site, values in alphas(patched).items())


def test_the_report_is_shown_and_kept(tmp_path):
    report = _quiet(tiny.sharp("t5"), _batches("t5"), max_loss_increase=0.05)
    assert f"{1 - report.mean_density:.1%} of the attention weights are exactly zero" in str(report)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(report)
    assert "sparsest" in console.export_text()
    assert json.loads(json.dumps(report.to_dict()))["mean_density"] == pytest.approx(report.mean_density)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"density": 0.2, "max_loss_increase": 0.1}, "not both"),
        ({"density": 0.0}, "density=0.0"),
        ({"density": True}, "density=True"),
        ({"max_loss_increase": -1}, "max_loss_increase=-1"),
        ({"train": "everything"}, "train='everything'"),
        ({"steps": 5}, "would have no effect"),
        ({"learning_rate": 0.1}, "would have no effect"),
        ({"train": "alphas", "steps": 0}, "steps=0"),
        ({"train": "alphas", "learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"output_dir": "x"}, "output_dir would have no effect"),
        ({"trainer_arguments": {"bf16": True}}, "trainer_arguments would have no effect"),
        ({"train": "weights", "trainer_arguments": {"max_steps": 3}}, "max_steps: sparsify sets them itself"),
        ({"train": "weights", "loss": lambda model, batch: model(**batch).loss}, "loss= cannot be used"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    model = tiny.sharp("llama")
    with pytest.raises(ValueError, match=message):
        _quiet(model, _batches("llama", 3), **options)
    assert not is_patched(model)


def test_bad_data_and_models_are_refused():
    model, batches = tiny.sharp("llama"), _batches("llama", 3)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        _quiet(torch.nn.Linear(2, 2), batches)
    with pytest.raises(ValueError, match="makes 2 batches"):
        _quiet(model, batches[:2])
    with pytest.raises(TypeError, match="one batch"):
        _quiet(model, batches[0])
    with pytest.raises(TypeError, match="collator="):
        _quiet(model, [{"input_ids": [1, 2, 3]}] * 3)
    with pytest.raises(ValueError, match="learned alphas are needed"):
        _quiet(patch_model(tiny.sharp("llama"), alpha=1.5), batches)
    patched = patch_model(tiny.sharp("llama"))
    with softmax_attention(patched), pytest.raises(ValueError, match="outside the block"):
        _quiet(patched, batches)
