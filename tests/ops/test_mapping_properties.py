"""Properties that hold for every row, every alpha: checked on rows that hypothesis makes up."""

import math

import hypothesis.extra.numpy as npst
import numpy as np
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_entmax.ops import entmax

rows = npst.arrays(
    np.float64,
    npst.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.one_of(st.floats(-30, 30), st.sampled_from([0.0, 1.0, -math.inf, -1e300])),
).map(torch.from_numpy)
alphas = st.one_of(st.floats(1.0, 4.0), st.sampled_from([1.0, 1 + 1e-7, 1.5, 2.0]))
many = settings(max_examples=150, deadline=None)


def alive(scores):
    return ~torch.isneginf(scores).all(-1)


@many
@given(rows, alphas)
def test_it_is_a_distribution(scores, alpha):
    for given_alpha in (alpha, torch.tensor(alpha, dtype=torch.float64)):
        probs = entmax(scores, given_alpha)
        assert (probs >= 0).all() and (probs <= 1 + 1e-12).all()
        torch.testing.assert_close(probs.sum(-1), alive(scores).double(), atol=1e-12, rtol=0)
        assert (probs[torch.isneginf(scores)] == 0).all()


@many
@given(rows, alphas)
def test_it_agrees_with_the_oracle(scores, alpha):
    torch.testing.assert_close(entmax(scores, alpha), reference.entmax(scores, alpha), atol=1e-8, rtol=0)


@many
@given(rows, alphas, st.floats(-1e6, 1e6))
def test_shift_invariance(scores, alpha, shift):
    torch.testing.assert_close(entmax(scores + shift, alpha), entmax(scores, alpha), atol=1e-5, rtol=0)


@many
@given(rows, alphas, st.randoms(use_true_random=False))
def test_permutation_equivariance(scores, alpha, random):
    order = list(range(scores.shape[-1]))
    random.shuffle(order)
    torch.testing.assert_close(entmax(scores[:, order], alpha), entmax(scores, alpha)[:, order], atol=1e-11, rtol=0)


@many
@given(rows, alphas)
def test_order_and_ties_are_kept(scores, alpha):
    probs = entmax(scores, alpha)
    larger = scores[:, :, None] > scores[:, None, :]
    equal = scores[:, :, None] == scores[:, None, :]
    difference = probs[:, :, None] - probs[:, None, :]
    # Not exactly: the last entries of a row may go through scalar instead of vector instructions.
    assert (difference[larger] >= -1e-14).all() and (difference[equal].abs() <= 1e-14).all()


@many
@given(rows, st.floats(1.05, 3.0), st.floats(0.05, 1.0))
def test_the_support_shrinks_as_alpha_grows(scores, alpha, more):
    wide, narrow = entmax(scores, alpha), entmax(scores, alpha + more)
    assert (narrow.gt(1e-9).sum(-1) <= wide.gt(0).sum(-1)).all()
    # The largest entry, for its part, never loses mass.
    assert (narrow.amax(-1) >= wide.amax(-1) - 1e-12).all()


@many
@given(rows, st.floats(1.05, 3.0))
def test_what_is_certainly_zero_is_zero(scores, alpha):
    probs = entmax(scores, alpha)
    maximum = scores.amax(-1, keepdim=True)
    # At exactly one point below the maximum sits the limit 1/(alpha - 1).
    out = scores < maximum - 1 / (alpha - 1)
    assert (probs[out] == 0).all()
    margin = scores.shape[-1] == 1 or (
        torch.sort(scores, -1, descending=True).values[:, 1] < maximum[:, 0] - 1 / (alpha - 1)
    )
    assert (probs.amax(-1)[torch.as_tensor(margin).expand(len(scores)) & alive(scores)] == 1).all()


@many
@given(rows, alphas)
def test_gradients_stay_on_the_simplex_and_the_support(scores, alpha):
    scores = scores.clone().requires_grad_()
    tensor_alpha = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    probs = entmax(scores, tensor_alpha)
    cotangent = torch.linspace(-1, 1, scores.numel(), dtype=torch.float64).view_as(scores)
    by_scores, by_alpha = torch.autograd.grad((probs * cotangent).sum(), (scores, tensor_alpha))
    assert torch.isfinite(by_scores).all() and torch.isfinite(by_alpha).all()
    assert (by_scores[probs == 0] == 0).all()
    # Probabilities sum to 1 whatever the scores: a constant cotangent has no gradient.
    scale = 1 + float(by_scores.abs().max())
    assert (by_scores.sum(-1).abs() <= 1e-9 * scale).all()
