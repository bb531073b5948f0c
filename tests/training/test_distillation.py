"""Distances to a teacher, the stand-in for density, schedules."""

import math

import pytest
import tiny_models as tiny
import torch

from hf_entmax import patch_model, set_alphas
from hf_entmax.analysis import collect
from hf_entmax.ops import entmax
from hf_entmax.training import (
    AlphaSchedule,
    DensityTarget,
    attention_density,
    attention_distillation,
    attention_pairs,
    logit_distillation,
    record_attention,
    soft_density,
    state_distillation,
)


def test_logits_at_alpha_one_are_the_divergence_of_the_teacher():
    student, teacher = torch.randn(3, 5, 11, requires_grad=True), torch.randn(3, 5, 11)
    labels = torch.randint(0, 11, (3, 5))
    labels[0, 2:] = -100
    kept = labels != -100
    for temperature in (1.0, 2.5):
        own, other = ((x[kept] / temperature).softmax(-1) for x in (student, teacher))
        wanted = temperature**2 * (other * (other / own).log()).sum(-1).mean()
        given = logit_distillation(student, teacher, labels, temperature=temperature)
        assert given.item() == pytest.approx(wanted.item(), rel=1e-5)
        gradients = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (given, wanted)]
        assert torch.allclose(*gradients, atol=1e-7)
        near = logit_distillation(student, teacher, labels, 1.0 + 1e-6, temperature=temperature)  # the other branch
        assert near.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_logits_of_a_sparse_output():
    student = (3 * torch.randn(6, 9)).requires_grad_()
    teacher, labels = torch.randn(6, 9), torch.zeros(6, dtype=torch.long)
    loss = logit_distillation(student, teacher, labels, 1.5)
    p, q = entmax(student, 1.5), teacher.softmax(-1)
    entropy = lambda x: (x - x**1.5).sum(-1) / 0.75  # noqa: E731
    assert (p == 0).any()  # where the divergence is infinite
    assert loss.item() == pytest.approx((((p - q) * student).sum(-1) + entropy(p) - entropy(q)).mean().item(), rel=1e-5)
    assert torch.allclose(torch.autograd.grad(loss, student)[0], ((p - q) / 6).detach(), atol=1e-6)
    nothing = logit_distillation(student, teacher, torch.full((6,), -100))
    assert nothing.item() == 0 and not torch.autograd.grad(nothing, student)[0].any()


def test_bad_logits():
    with pytest.raises(ValueError, match="share one vocabulary"):
        logit_distillation(torch.randn(2, 5), torch.randn(2, 6), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        logit_distillation(torch.randn(2, 5), torch.randn(2, 5), torch.zeros(2, dtype=torch.long), temperature=0.0)


def test_states_are_compared_by_the_variance_that_is_not_explained():
    teacher, mask = 5 + torch.randn(2, 7, 3), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    kept = teacher[mask == 1]
    mean = kept.mean(0).expand_as(teacher).clone().requires_grad_()
    loss = state_distillation(mean, teacher, mask)
    assert loss.item() == pytest.approx(1.0, rel=1e-5) and state_distillation(teacher, teacher, mask) == 0
    (gradient,) = torch.autograd.grad(loss, mean)
    spread = (kept - kept.mean(0)).square().sum()
    assert (
        torch.allclose(gradient[0], 2 * (mean - teacher)[0].detach() / spread, atol=1e-6) and not gradient[1, 4:].any()
    )
    assert state_distillation(teacher + 1, teacher) == pytest.approx(
        42 / float((teacher - teacher.mean((0, 1))).square().sum())
    )
    with pytest.raises(ValueError, match=r"mask \(2, 6\) do not fit"):
        state_distillation(teacher, teacher, mask[:, :6])


@pytest.mark.parametrize("kind", ["kl", "mse"])
def test_attention_of_sparse_heads_and_padded_queries(kind):
    scores = (2 * torch.randn(2, 3, 4, 5, dtype=torch.float64)).requires_grad_()
    pairs = torch.ones(2, 4, 5, dtype=torch.bool)
    pairs[1, :, 3:] = False
    pairs[1, 2:] = False
    own = entmax(scores, 1.5, mask=pairs[:, None].expand(2, 3, 4, 5))
    other = torch.randn(2, 3, 4, 5).masked_fill(~pairs[:, None], -1e9).softmax(-1)
    loss = attention_distillation(own, other, pairs, kind)
    total, count = 0.0, 0
    for b, i in pairs.any(-1).nonzero().tolist():
        for h in range(3):
            count += 1
            for p, q in zip(own[b, h, i].tolist(), other[b, h, i].tolist(), strict=True):
                total += (p - q) ** 2 if kind == "mse" else (p * math.log(p / q) if p > 0 else 0.0)
    assert (own[0] == 0).any()
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.isfinite().all() and gradient[0].any() and not gradient[1, :, 2:].any()
    assert attention_distillation(other, other, pairs, kind).item() == pytest.approx(0, abs=1e-7)
    with pytest.raises(ValueError, match="choose one of"):
        attention_distillation(own, other, pairs, "js")
    with pytest.raises(ValueError, match="do not fit"):
        attention_distillation(own, other, pairs[:1], kind)


@pytest.mark.parametrize("density", [attention_density, lambda weights, pairs: soft_density(weights, pairs, 1e-9)])
def test_padded_queries_and_keys_do_not_count(density):
    pairs = torch.zeros(2, 4, 4, dtype=torch.bool)
    pairs[0, :4, :4] = pairs[1, :2, :2] = True  # the second sentence has two tokens
    weights = torch.full((2, 3, 4, 4), 0.25)  # what stands in padded rows is arbitrary: here it is never zero
    weights[0, :, :, 2:] = 0.0
    weights[1, :, 0, 1] = 0.0
    assert density(weights, pairs).item() == pytest.approx((8 + 3) / (16 + 4), abs=1e-6)
    weights[1, :, 2:] = 0.0
    assert density(weights, pairs).item() == pytest.approx((8 + 3) / (16 + 4), abs=1e-6)


def test_the_stand_in_for_density():
    weights = torch.tensor([[[[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.99, 0.0, 0.01]]]], dtype=torch.float64)
    pairs = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    assert attention_density(weights, pairs).item() == pytest.approx(5 / 6)
    wanted = sum(p / (p + 0.01) for p in (1.0, 0.9, 0.1, 0.99, 0.01)) / 6
    assert soft_density(weights, pairs).item() == pytest.approx(wanted, rel=1e-6)
    limits = [soft_density(weights, pairs, tau).item() for tau in (0.1, 0.01, 1e-3, 1e-6)]
    assert limits == sorted(limits) and limits[-1] == pytest.approx(5 / 6, abs=1e-4)
    for bad in (pairs.long(), pairs[:, :2]):
        with pytest.raises(ValueError, match="do not fit"):
            soft_density(weights, bad)
    with pytest.raises(ValueError, match="tau=0"):
        soft_density(weights, pairs, 0.0)


def test_pressure_moves_alpha_and_scores_towards_fewer_keys():
    scores, alpha = torch.randn(1, 2, 6, 6, requires_grad=True), torch.full((2,), 1.4, requires_grad=True)
    weights = lambda: entmax(scores, alpha.view(1, 2, 1, 1))  # noqa: E731
    pairs = torch.ones(1, 6, 6, dtype=torch.bool)
    before = attention_density(weights(), pairs).item()
    optimizer = torch.optim.SGD([scores, alpha], lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        soft_density(weights(), pairs, 0.05).backward()
        optimizer.step()
        alpha.data.clamp_(1.0, 2.0)
    assert attention_density(weights(), pairs).item() < 0.7 * before
    assert (alpha > 1.4).all()


def test_the_multiplier_rises_until_the_target_is_met():
    target = DensityTarget(0.2, rate=0.5)
    assert target.update(0.6) == pytest.approx(0.2)
    assert target.update(0.2) == pytest.approx(0.2)
    assert target.update(0.1) == pytest.approx(0.15)
    again = DensityTarget(0.2, rate=0.5)
    again.load_state_dict(target.state_dict())
    assert again.update(0.0) == target.update(0.0) == pytest.approx(0.05)
    assert target.update(0.0) == 0.0
    for arguments, match in [((0.0,), "target=0"), ((1.5,), "target=1.5"), ((0.2, 0.0), "rate=0")]:
        with pytest.raises(ValueError, match=match):
            DensityTarget(*arguments)
    with pytest.raises(ValueError, match="NaN"):
        target.update(float("nan"))


@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_densities_of_a_recorded_pass_are_those_of_the_analysis(kind):
    model = patch_model(tiny.build(kind), alpha=1.7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # scores that differ, so that something is sparse
    batch = dict(tiny.inputs(kind))
    batch["attention_mask"][1, 5:] = 0  # padding, which counts neither as a query nor as a key
    with torch.no_grad(), record_attention(model) as record:
        model(**batch)
    pairs = attention_pairs(model, batch, record)
    found = collect(model, [batch], groups=["sparsity"]).density
    for site, wanted in found.items():
        names = [name for name, module in record.sites.items() if module.site == site]
        densities = [attention_density(record.weights[name], pairs[name]).item() for name in names]
        assert len(names) == len(wanted) and densities == pytest.approx(wanted.mean(-1).tolist(), abs=1e-6)
    assert min(float(values.min()) for values in found.values()) < 0.9


def test_recorded_weights_carry_gradients_to_alpha():
    model = patch_model(tiny.build("gpt2"), alpha_init=1.5).eval()
    batch = tiny.inputs("gpt2")
    with record_attention(model) as record:
        model(**batch)
    pairs = attention_pairs(model, batch, record)
    torch.stack([soft_density(w, pairs[name]) for name, w in record.weights.items()]).mean().backward()
    learned = [p.grad for name, p in model.named_parameters() if ".entmax_norm." in name]
    assert len(learned) == len(record.weights) and all(g is not None and g.any() for g in learned)


def test_schedules():
    linear, cosine = AlphaSchedule(1.0, 1.5, 0.5), AlphaSchedule(1.0, 1.5, 0.5, "cosine")
    assert [linear(s) for s in (0, 0.125, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 1.125, 1.25, 1.5, 1.5])
    assert [cosine(s) for s in (0, 0.125, 0.25, 0.5, 1.0)] == pytest.approx(
        [1.0, 1.25 - 0.25 * math.cos(math.pi / 4), 1.25, 1.5, 1.5]
    )
    assert AlphaSchedule(2.0, 1.0, 1.0, lambda x: x * x)(0.5) == pytest.approx(1.75)
    assert [linear.arrived(s) for s in (0.0, 0.49, 0.5, 1.0)] == [False, False, True, True]
    model = patch_model(tiny.build("gpt2"))
    set_alphas(model, linear(0.3))  # what a loop does with it
    for arguments, match in [((0.9, 1.5), "start=0.9"), ((1.0, 1.5, 1.1), "over=1.1"), ((1.0, 1.5, 0.5, "x"), "'x'")]:
        with pytest.raises(ValueError, match=match):
            AlphaSchedule(*arguments)
