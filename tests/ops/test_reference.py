"""The oracle against finite differences, against other solutions of the same problem, and against hand calculations."""

import math

import pytest
import reference
import torch

F64 = torch.float64


def _scores(rows=5, length=9, scale=2.0):
    return torch.randn(rows, length, dtype=F64) * scale


def test_bisection_agrees_with_the_sorting_solutions():
    scores = _scores(50, 40)
    torch.testing.assert_close(reference.entmax(scores, 1.5), reference.entmax15(scores), atol=1e-12, rtol=0)
    torch.testing.assert_close(reference.entmax(scores, 2.0), reference.sparsemax(scores), atol=1e-12, rtol=0)
    torch.testing.assert_close(reference.entmax(scores, 1.0), torch.softmax(scores, -1), atol=1e-12, rtol=0)


def test_two_entries_by_hand():
    # entmax([t, 0]) at alpha = 2 is clamp((1 + t)/2, 0, 1); at 1.5 it solves (a + t/2)^2 + a^2 = 1.
    t = torch.linspace(-3, 3, 25, dtype=F64)
    rows = torch.stack([t, torch.zeros_like(t)], -1)
    torch.testing.assert_close(reference.entmax(rows, 2.0)[:, 0], ((1 + t) / 2).clamp(0, 1), atol=1e-12, rtol=0)
    half = t.clamp(-2, 2) / 2
    root = (-half + (2 - half**2).clamp(min=0).sqrt()) / 2
    torch.testing.assert_close(reference.entmax(rows, 1.5)[:, 1], root.clamp(min=0) ** 2, atol=1e-12, rtol=0)


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.2, 1.5, 2.0, 3.0])
def test_it_solves_the_optimisation_problem(alpha):
    # p maximises p.z + H(p) over the simplex: no feasible neighbour does better.
    scores = _scores(1, 6)[0]
    probs = reference.entmax(scores, alpha)

    def objective(p):
        if alpha == 1:
            entropy = -torch.special.xlogy(p, p).sum()
        else:
            entropy = (p - p.clamp(min=0) ** alpha).sum() / (alpha * (alpha - 1))
        return float(p @ scores + entropy)

    best = objective(probs)
    for _ in range(300):
        other = torch.distributions.Dirichlet(torch.ones(6, dtype=F64)).sample()
        for step in (1e-3, 0.1, 1.0):
            assert objective(probs + step * (other - probs)) <= best + 1e-12


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.3, 1.5, 2.0, 2.5])
def test_jacobian_against_finite_differences(alpha):
    scores, step = _scores(1, 7)[0], 1e-6
    expected = torch.stack(
        [
            (reference.entmax(scores + step * unit, alpha) - reference.entmax(scores - step * unit, alpha)) / (2 * step)
            for unit in torch.eye(7, dtype=F64)
        ],
        dim=-1,
    )
    actual = reference.jacobian(reference.entmax(scores, alpha), alpha)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("alpha", [1.001, 1.01, 1.3, 1.5, 2.0, 3.0])
def test_alpha_derivative_against_finite_differences(alpha):
    scores, step = _scores(), 1e-6
    expected = (reference.entmax(scores, alpha + step) - reference.entmax(scores, alpha - step)) / (2 * step)
    actual = reference.alpha_derivative(reference.entmax(scores, alpha), alpha)
    torch.testing.assert_close(actual, expected, atol=2e-8, rtol=1e-6)


def test_alpha_derivative_at_one_is_the_one_sided_limit():
    scores = _scores()
    step = 1e-5
    # Second-order forward difference: alpha below 1 is another problem.
    p0, p1, p2 = (reference.entmax(scores, 1 + k * step) for k in range(3))
    expected = (-3 * p0 + 4 * p1 - p2) / (2 * step)
    actual = reference.alpha_derivative(p0, 1.0)
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(reference.alpha_derivative(p0, 1 + 1e-9), actual, atol=1e-7, rtol=1e-6)


def test_masks_and_rows_without_entries():
    scores = torch.tensor([[1.0, -math.inf, torch.finfo(torch.float32).min], [-math.inf] * 3])
    mask = torch.tensor([[True, True, True], [True, True, True]])
    for function in (
        reference.softmax,
        reference.sparsemax,
        reference.entmax15,
        lambda *a: reference.entmax(a[0], 1.3, *a[1:]),
    ):
        expected = torch.tensor([[1.0, 0, 0], [0, 0, 0]], dtype=F64)
        torch.testing.assert_close(function(scores, -1, mask), expected)


def test_attention_gradients_against_finite_differences():
    shapes = {"query": (1, 2, 3, 4), "key": (1, 1, 5, 4), "value": (1, 1, 5, 3)}
    tensors = {name: torch.randn(shape, dtype=F64) for name, shape in shapes.items()}
    alpha, bias = torch.tensor([1.3, 2.0], dtype=F64), torch.randn(1, 2, 3, 5, dtype=F64)
    grad_out = torch.randn(1, 2, 3, 3, dtype=F64)
    options = {"is_causal": True, "sliding_window": 4, "softcap": 2.0, "scaling": 0.7}

    def value(tensors, alpha, bias):
        return float(
            (reference.attention(**tensors, alpha=alpha, position_bias=bias, **options)["out"] * grad_out).sum()
        )

    result = reference.attention(**tensors, alpha=alpha, position_bias=bias, grad_out=grad_out, **options)
    step = 1e-6
    for name, tensor in [*tensors.items(), ("alpha", alpha), ("scores", bias)]:
        flat = tensor.view(-1)
        for i in range(0, flat.numel(), 3):
            kept = flat[i].item()
            flat[i] = kept + step
            above = value(tensors, alpha, bias)
            flat[i] = kept - step
            below = value(tensors, alpha, bias)
            flat[i] = kept
            assert result[name].reshape(-1)[i].item() == pytest.approx(
                (above - below) / (2 * step), abs=1e-7, rel=1e-5
            ), name
