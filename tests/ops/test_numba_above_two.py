"""The CPU kernel for alpha above 2, where a weight near the threshold rises like a root: optimality, sums and gradients."""

from __future__ import annotations

import pytest
import reference
import torch
from near_ties import scores_of

pytest.importorskip("numba")

from hf_entmax.ops import numba_cpu
from hf_entmax.ops.options import AttentionOptions

ALPHAS = (2.01, 3.0, 6.0, 10.0, 64.0)


def attend(scores, alphas, value):
    """Attention of one query whose scores are given, a head for each alpha."""
    heads, keys = len(alphas), scores.shape[-1]
    query, key = torch.zeros(1, heads, 1, 16), torch.zeros(1, heads, keys, 16)
    bias = scores.expand(1, heads, 1, keys).clone().requires_grad_()
    options = AttentionOptions(position_bias=bias, need_weights=True)
    out, weights = numba_cpu.attention(query, key, value, torch.tensor(alphas), options)
    return bias, out, weights


@pytest.mark.slow
@pytest.mark.parametrize("keys", [2, 3, 37, 4000, 100_000])
@pytest.mark.parametrize("kind", ["equal", "two values", "one float apart", "one above equal ones", "random", "close"])
def test_weights_are_optimal_and_sum_to_one(kind, keys):
    scores = scores_of(kind, keys)
    bias, out, weights = attend(scores, ALPHAS, torch.ones(1, len(ALPHAS), keys, 1))
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.isfinite().all()
    x = scores.double()
    for alpha, row in zip(ALPHAS, weights[0, :, 0].detach().double(), strict=True):
        u = alpha - 1.0
        assert row.sum().item() == pytest.approx(1.0, abs=1e-5)
        level = x - row**u / u  # the threshold as each entry says it
        threshold = level[row > 0]
        assert (threshold.max() - threshold.min()) < 2e-7, alpha
        if (row == 0).any():
            assert level[row == 0].max() <= threshold.min() + 2e-7, alpha
        if kind == "equal":
            torch.testing.assert_close(row, torch.full_like(row, 1 / keys), rtol=1e-5, atol=0)


def test_gradients_equal_those_in_float64():
    torch.manual_seed(3)
    keys = 37
    scores, value = 0.3 * torch.randn(keys), torch.randn(1, len(ALPHAS), keys, 16)
    bias, out, _ = attend(scores, ALPHAS, value)
    cotangent = torch.randn(out.shape)
    (gradient,) = torch.autograd.grad(out, bias, cotangent)
    zero = torch.zeros(1, len(ALPHAS), 1, 16), torch.zeros(1, len(ALPHAS), keys, 16)
    oracle = reference.attention(*zero, value, torch.tensor(ALPHAS), grad_out=cotangent, position_bias=bias.detach())
    exact = oracle["scores"]
    for ours, wanted in zip(gradient[0, :, 0].double(), exact[0, :, 0], strict=True):
        assert (ours - wanted).norm() <= 2e-6 * wanted.norm().clamp(min=1.0)
