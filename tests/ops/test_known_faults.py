"""Faults found in other implementations of entmax and sparse attention; none of them here."""

import math

import pytest
import reference
import torch
from tolerances import assert_forward

from hf_entmax.ops import entmax, entmax_attention

KINDS = {"float": lambda alpha: alpha, "tensor": lambda alpha: torch.tensor(alpha, requires_grad=True)}


@pytest.fixture(params=KINDS)
def make_alpha(request):
    return KINDS[request.param]


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min])
def test_rows_without_entries_are_zero_not_an_error_nor_nan(make_alpha, alpha, fill):
    scores = torch.full((2, 5), fill, requires_grad=True)
    value = make_alpha(alpha)
    probs = entmax(scores, value)
    probs.sum().backward()
    assert (probs == 0).all() and (scores.grad == 0).all()
    if isinstance(value, torch.Tensor):
        assert value.grad == 0


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_huge_offsets_do_not_matter(make_alpha, alpha):
    scores = torch.tensor([[0.0, 8.0, 16.0], [8.0, 8.0, -8.0]])
    for offset in (1e8, -1e8):
        assert_forward(entmax(scores + offset, make_alpha(alpha)), reference.entmax(scores, alpha))


def test_alpha_one_is_softmax_not_uniform(make_alpha):
    scores = torch.tensor([3.0, 1.0, -2.0])
    torch.testing.assert_close(entmax(scores, make_alpha(1.0)), torch.softmax(scores, -1))


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-6, 1.0001, 1.001, 1.01])
def test_the_alpha_gradient_near_one_is_a_number_and_right(alpha):
    scores = torch.randn(40, 30) * 2
    value = torch.tensor(alpha, requires_grad=True)
    exact = float(value.detach().double())
    cotangent = torch.randn(40, 30)
    entmax(scores, value).backward(cotangent)
    expected = (reference.alpha_derivative(reference.entmax(scores, exact), exact) * cotangent).sum()
    assert value.grad.item() == pytest.approx(expected.item(), rel=1e-4)


def test_bfloat16_rows_sum_to_one_within_their_rounding(make_alpha):
    scores = torch.randn(50, 1000).bfloat16()
    for alpha in (1.0, 1.2, 1.5, 2.0):
        total = entmax(scores, make_alpha(alpha)).double().sum(-1)
        assert (total - 1).abs().max() < 4e-3


@pytest.mark.parametrize("alpha", [4.0, 6.0, 20.0])
def test_large_alpha_is_stable(make_alpha, alpha):
    scores = torch.randn(200, 50)
    probs = entmax(scores, make_alpha(alpha))
    torch.testing.assert_close(probs.sum(-1), torch.ones(200), atol=1e-6, rtol=0)
    # Towards argmax: at distance 1/(alpha - 1) from the maximum everything is zero.
    assert (probs[scores < scores.amax(-1, keepdim=True) - 1 / (alpha - 1)] == 0).all()
    # Two entries t apart: p1 + p2 = 1 and p1^u - p2^u = u t. The edge is far too steep here to bisect for it.
    close = torch.tensor([1.0, 0.999, 0.0], dtype=torch.float64)
    p1, p2, p3 = entmax(close, make_alpha(alpha)).tolist()
    u = alpha - 1
    assert p3 == 0 and p1 + p2 == pytest.approx(1, abs=1e-14)
    assert p1**u - p2**u == pytest.approx(u * (close[0] - close[1]).item(), rel=1e-10)


def test_per_head_alpha_needs_no_special_shape():
    query, key, value = (torch.randn(2, 3, 4, 8) for _ in range(3))
    alpha = torch.tensor([1.0, 1.5, 2.0])
    out, _ = entmax_attention(query, key, value, alpha, backend="torch")
    assert_forward(out, reference.attention(query, key, value, alpha)["out"])


def test_masked_keys_get_nothing_whatever_the_scores_are():
    # A mask of -10000, and a maximum that starts at -1000, both fail here.
    query, key = torch.full((1, 1, 2, 4), -300.0), torch.full((1, 1, 3, 4), 300.0)
    key[:, :, 2] = 1.0
    value = torch.eye(3)[None, None]
    real = torch.tensor([[True, True, False]])
    for alpha in (1.0, 1.5, 2.0):
        out, weights = entmax_attention(
            query, key, value, alpha, key_padding_mask=real, need_weights=True, backend="torch"
        )
        torch.testing.assert_close(weights[0, 0], torch.tensor([[0.5, 0.5, 0.0]] * 2))
        torch.testing.assert_close(out[0, 0], weights[0, 0])


def test_left_padding_equals_no_padding():
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    alpha = torch.tensor([1.2, 1.8])
    expected, _ = entmax_attention(query, key, value, alpha, is_causal=True, backend="torch")
    padded = [torch.cat([torch.randn(1, 2, 3, 8), t], 2) for t in (query, key, value)]
    real = torch.tensor([[False] * 3 + [True] * 5])
    out, _ = entmax_attention(*padded, alpha, is_causal=True, key_padding_mask=real, backend="torch")
    torch.testing.assert_close(out[:, :, 3:], expected)
    assert (out[:, :, :3] == 0).all()
