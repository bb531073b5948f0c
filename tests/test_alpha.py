"""Alpha stays inside its range, learnable, and finite."""

import math

import pytest
import torch

import hf_entmax
from hf_entmax.alpha import LearnedAlpha, TiedAlpha
from hf_entmax.generation.processor import EntmaxLogitsProcessor
from hf_entmax.training import AlphaSchedule


@pytest.mark.parametrize("bounds", [(1.0, 2.0), (1.0, 3.0), (1.5, 1.75)])
@pytest.mark.parametrize("end", [0, 1])
def test_alpha_at_a_bound_stays_learnable(bounds, end):
    """A value at a bound would need an infinite raw number, which has no gradient and never moves again."""
    heads = LearnedAlpha(3, init=sum(bounds) / 2, bounds=bounds)
    heads.set_(bounds[end])
    value = heads()
    width = bounds[1] - bounds[0]
    assert heads.a.isfinite().all()
    assert ((value - bounds[end]).abs() < 2e-4 * width).all()
    assert (value > bounds[0]).all() and (value < bounds[1]).all()
    value.sum().backward()
    assert heads.a.grad.isfinite().all() and (heads.a.grad > 0).all()
    with torch.no_grad():
        heads.a.sub_(heads.a.grad * (1e5 if end else -1e5) / width)
    assert ((heads() - bounds[end]).abs() > 0.1 * width).all()


def test_alpha_is_set_per_head_and_for_all():
    heads = LearnedAlpha(3)
    heads.set_(torch.tensor([1.0, 1.25, 2.0]))
    assert torch.allclose(heads(), torch.tensor([1.0, 1.25, 2.0]), atol=2e-4)
    shared = LearnedAlpha(3, shared=True)
    tied = TiedAlpha(2, shared)
    tied.set_(1.75)
    assert torch.allclose(shared(), torch.full((3,), 1.75)) and torch.equal(tied(), shared()[:2])
    tied().sum().backward()
    assert shared.a.grad.shape == (1,)


def _attend(backend):
    def call(alpha):
        query = torch.randn(1, 2, 3, 16)
        return hf_entmax.ops.entmax_attention(query, query, query, alpha, backend=backend)

    return call


DOORS = {
    "entmax": lambda alpha: hf_entmax.ops.entmax(torch.randn(2, 5), alpha),
    "entmax_loss": lambda alpha: hf_entmax.losses.entmax_loss(torch.randn(2, 5), torch.tensor([0, 1]), alpha),
    "attention, torch": _attend("torch"),
    "attention, numba": _attend("numba"),
    "config": lambda alpha: hf_entmax.EntmaxConfig(alpha=float(alpha)),
    "generation": lambda alpha: EntmaxLogitsProcessor(float(alpha)),
    "schedule": lambda alpha: AlphaSchedule(float(alpha), 2.0),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_the_same_alphas_in_the_same_words(door):
    if door.endswith("numba"):
        pytest.importorskip("numba")
    for wrong in (0.5, 0.9999999, math.nan, math.inf, -math.inf):
        for given in (wrong, torch.tensor(wrong)):
            with pytest.raises(
                ValueError, match=r"=\S+ is not allowed: entmax is defined for finite alpha >= 1 \(1 is"
            ):
                DOORS[door](given)
    DOORS[door](1.0)
