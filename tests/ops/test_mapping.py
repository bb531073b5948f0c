"""entmax and its kin: numbers against the oracle, arguments, differentiation."""

import functools
import math

import pytest
import reference
import torch
from tolerances import ALPHAS, assert_forward, assert_gradient

from hf_entmax.ops import Entmax, Entmax15, Sparsemax, entmax, entmax15, gradients, sparsemax

F64 = torch.float64


def exact_u(alpha, dtype):
    """The alpha a tensor of this dtype really holds: 1.0001 is not a float32."""
    return float(torch.tensor(alpha, dtype=dtype).double())


def hard_rows(dtype=torch.float32):
    """Rows that break naive implementations, by name."""
    low = torch.finfo(dtype).min
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(4, 64, dtype=F64, generator=generator).to(dtype)
    offset = torch.tensor([[0.0, 8, 16, -8, 24, 0, 8, 24]], dtype=dtype)
    holes = normal.clone()
    holes[:, ::3] = -math.inf
    low_holes = normal.clone()
    low_holes[:, 1::2] = low
    return {
        "normal": normal,
        "sharp": 10 * normal,
        "flat": 0.1 * normal,
        "ties": torch.tensor([[1.0, 1, 1, 0.5, 0.5, -3], [2, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, -9]], dtype=dtype),
        "length 1": normal[:, :1],
        "length 2": normal[:, :2],
        "offset 1e8": offset + 1e8,
        "offset -1e8": offset - 1e8,
        "-inf": holes,
        "finfo.min": low_holes,
        "all -inf": torch.full((2, 5), -math.inf, dtype=dtype),
        "all finfo.min": torch.full((2, 5), low, dtype=dtype),
        "one left": torch.tensor([[-math.inf, 3.0, low]], dtype=dtype),
        "length 100000": torch.randn(2, 100_000, dtype=F64, generator=generator).to(dtype)
        * torch.tensor([[1.0], [4.0]]),
        "staircase": -torch.log2(torch.arange(1, 3000, dtype=dtype)).floor()[None] / 12,
    }


HARD = hard_rows()


@functools.cache
def hard_probs(name, alpha):
    return reference.entmax(HARD[name], alpha)


def reference_gradients(scores, alpha, cotangent, probs=None):
    """Closed-form gradients through the oracle, row by row, without a [d, d] Jacobian."""
    probs = reference.entmax(scores, alpha) if probs is None else probs
    s = torch.where(probs > 0, torch.where(probs > 0, probs, 1) ** (2 - alpha), 0)
    total = s.sum(-1, keepdim=True)
    mean = (s * cotangent).sum(-1, keepdim=True) / torch.where(total > 0, total, 1)
    by_alpha = (reference.alpha_derivative(probs, alpha) * cotangent).sum(-1, keepdim=True)
    return probs, s * (cotangent - mean), by_alpha


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", HARD)
def test_float32_against_the_oracle(name, alpha, kind):
    scores = HARD[name].clone().requires_grad_()
    value = exact_u(alpha, torch.float32)
    given = value if kind == "float" else torch.full((scores.shape[0], 1), alpha, requires_grad=True)
    cotangent = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2))
    probs = entmax(scores, given)
    probs.backward(cotangent)
    expected, by_scores, by_alpha = reference_gradients(HARD[name], value, cotangent.double(), hard_probs(name, value))
    assert probs.dtype == torch.float32
    assert_forward(probs, expected)
    assert_gradient(scores.grad, by_scores)
    if kind == "tensor":
        assert_gradient(given.grad, by_alpha)
    masked = HARD[name] <= torch.finfo(torch.float32).min / 2
    assert (probs[masked] == 0).all() and (scores.grad[masked] == 0).all()


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-9, 1.0001, 1.079, 1.081, 1.3, 1.5, 1.9, 2.0, 2.5])
def test_float64_against_the_oracle(alpha):
    scores = torch.randn(30, 50, dtype=F64) * 3
    scores.requires_grad_()
    given = torch.full((30, 1), alpha, dtype=F64, requires_grad=True)
    cotangent = torch.randn(30, 50, dtype=F64)
    probs = entmax(scores, given)
    probs.backward(cotangent)
    expected, by_scores, by_alpha = reference_gradients(scores, alpha, cotangent)
    assert_forward(probs, expected)
    assert_gradient(scores.grad, by_scores)
    assert_gradient(given.grad, by_alpha)


@pytest.mark.parametrize("last", [1.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_alphas_on_both_sides_of_the_seam_in_one_tensor(dtype, last):
    """Below a seam the gradient in alpha is a series in alpha - 1, above it closed: rows of both must not share one form."""
    seam = gradients._SERIES_BELOW[dtype]
    u = torch.tensor([seam / 100, seam / 50, seam / 4, 0.99 * seam, 1.01 * seam, 4 * seam, last - 1], dtype=F64)
    alpha = (1 + u).to(dtype).unsqueeze(-1).requires_grad_()
    generator = torch.Generator().manual_seed(5)
    scores = (3 * torch.randn(len(u), 50, dtype=F64, generator=generator)).to(dtype)
    cotangent = torch.randn(scores.shape, dtype=F64, generator=generator).to(dtype)
    probs = entmax(scores, alpha)
    probs.backward(cotangent)
    for row in range(len(u)):
        given = float(alpha[row].double())
        _, _, by_alpha = reference_gradients(scores[row : row + 1], given, cotangent[row : row + 1].double())
        assert_gradient(alpha.grad[row : row + 1], by_alpha)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.2, 1.5, 1.8, 2.0, 3.0])
def test_gradcheck(alpha):
    scores = torch.randn(3, 6, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: entmax(z, alpha), (scores,))
    # A little off 1, so that the difference quotient stays where entmax is defined.
    given = torch.tensor([[alpha + 1e-5]], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(entmax, (scores, given), atol=1e-5)
    assert torch.autograd.gradgradcheck(entmax, (scores, given), atol=1e-4)


def test_the_jacobian_written_out_by_hand():
    # alpha = 2 with two of three entries in the support: the projection onto their difference, halved.
    scores = torch.tensor([0.3, 0.1, -2.0], dtype=F64)
    expected = torch.tensor([[0.5, -0.5, 0], [-0.5, 0.5, 0], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(torch.func.jacrev(sparsemax)(scores), expected)
    # alpha = 1.5: p = (0.64, 0.36) has s = sqrt(p) = (0.8, 0.6), so J = 0.48/1.4 [[1, -1], [-1, 1]].
    scores = torch.tensor([0.4, 0.0], dtype=F64)
    torch.testing.assert_close(entmax15(scores), torch.tensor([0.64, 0.36], dtype=F64))
    expected = 0.48 / 1.4 * torch.tensor([[1.0, -1], [-1, 1]], dtype=F64)
    torch.testing.assert_close(torch.func.jacrev(entmax15)(scores), expected)
    # alpha = 1: diag(p) - p p^T.
    p = torch.softmax(scores, -1)
    torch.testing.assert_close(torch.func.jacrev(lambda z: entmax(z, 1.0))(scores), torch.diag(p) - torch.outer(p, p))


def test_alpha_gradient_written_out_by_hand():
    # Two entries at alpha = 2 keep their difference t: p1 - p2 = t for every alpha only at alpha = 2, where
    # d(p1)/d(alpha) follows from expq: with w = p, dp/dalpha = p (1 - log p) - 1 + const on the support, sum zero.
    p = torch.tensor([0.7, 0.3], dtype=F64)
    scores = torch.tensor([0.4, 0.0], dtype=F64)
    free = -(p * torch.log(p))
    expected = p + free
    expected = expected - expected.mean()
    actual = torch.func.jacrev(lambda a: entmax(scores, a))(torch.tensor(2.0, dtype=F64))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0, 3.0])
def test_alpha_one_and_more_in_one_tensor(alpha):
    scores = torch.randn(2, 4, 5, 9)
    alphas = torch.tensor([1.0, alpha, 1.7, 4.0])
    together = entmax(scores, alphas.view(4, 1, 1))
    for head, value in enumerate(alphas.tolist()):
        assert_forward(together[:, head], reference.entmax(scores[:, head], value))
    torch.testing.assert_close(together[:, 0], torch.softmax(scores[:, 0], -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_any_dim_and_layout(dim, alpha):
    scores = torch.randn(4, 5, 6)
    expected = reference.entmax(scores, alpha, dim)
    assert_forward(entmax(scores, alpha, dim), expected)
    assert_forward(entmax(scores.transpose(0, 2).contiguous().transpose(0, 2), alpha, dim), expected)
    assert_forward(
        entmax(scores[:, :1].expand(4, 5, 6), alpha, dim), reference.entmax(scores[:, :1].expand(4, 5, 6), alpha, dim)
    )
    strided = torch.randn(8, 10, 12)[::2, ::2, ::2]
    assert_forward(entmax(strided, alpha, dim), reference.entmax(strided, alpha, dim))


def test_tensor_alpha_along_any_dim():
    scores = torch.randn(4, 5, 6)
    alphas = 1 + torch.rand(1, 5, 6)
    assert_forward(entmax(scores, alphas, dim=0), reference.entmax(scores, alphas, 0))
    assert_forward(entmax(scores, torch.tensor(1.7), dim=1), reference.entmax(scores, torch.tensor(1.7), 1))
    assert_forward(entmax(scores, torch.tensor([1.7]), dim=1), reference.entmax(scores, torch.tensor([1.7]), 1))


def test_alpha_gradient_has_the_shape_of_alpha():
    scores = torch.randn(2, 3, 4, 5, dtype=F64)
    cotangent = torch.randn(2, 3, 4, 5, dtype=F64)
    for shape in [(), (1,), (3, 1, 1), (2, 1, 1, 1), (1, 3, 4, 1)]:
        alphas = torch.full(shape, 1.4, dtype=F64, requires_grad=True)
        entmax(scores, alphas).backward(cotangent)
        full = reference.alpha_derivative(reference.entmax(scores, 1.4), 1.4) * cotangent
        torch.testing.assert_close(alphas.grad, full.sum_to_size(shape))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty(shape):
    scores = torch.randn(shape, requires_grad=True)
    probs = entmax(scores, 1.5)
    assert probs.shape == scores.shape
    probs.sum().backward()
    assert scores.grad.shape == scores.shape
    assert entmax(scores, torch.tensor(1.5)).shape == scores.shape


def test_a_single_number():
    assert entmax(torch.tensor(-3.0), 1.5).item() == 1.0
    assert entmax(torch.tensor(-math.inf), 1.5).item() == 0.0


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_mask(alpha):
    scores = torch.randn(2, 3, 4, 7, requires_grad=True)
    mask = torch.rand(2, 1, 4, 7) > 0.4
    mask[0, 0, 1] = False
    probs = entmax(scores, alpha, mask=mask)
    assert_forward(probs, reference.entmax(scores, alpha, mask=mask))
    assert (probs[0, :, 1] == 0).all()
    probs.square().sum().backward()
    assert (scores.grad[~mask.expand_as(scores)] == 0).all()
    assert torch.isfinite(scores.grad).all()


def test_masked_entries_may_hold_anything():
    mask = torch.tensor([True, True, False, False])
    expected = entmax(torch.tensor([1.0, 0.3]), 1.3)
    for value in (math.nan, math.inf, 1e30):
        probs = entmax(torch.tensor([1.0, 0.3, value, value]), 1.3, mask=mask)
        torch.testing.assert_close(probs, torch.cat([expected, torch.zeros(2)]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_nan_and_infinity_spoil_their_row_only(alpha, bad):
    scores = torch.randn(3, 6)
    scores[1, 2] = bad
    for given in (alpha, torch.tensor(alpha)):
        probs = entmax(scores, given)
        assert torch.isnan(probs[1]).all()
        assert_forward(probs[[0, 2]], reference.entmax(scores[[0, 2]], alpha))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.5, 1.7, 2.0])
def test_half_types(dtype, alpha):
    scores = (torch.randn(20, 200) * 2).to(dtype).requires_grad_()
    alphas = torch.tensor(alpha, requires_grad=True)
    probs = entmax(scores, alphas)
    assert probs.dtype == dtype
    expected = reference.entmax(scores, exact_u(alpha, torch.float32))
    eps = torch.finfo(dtype).eps
    # Rounding once at the end: half an ulp of the largest entry, and sums that are right to that.
    assert (probs.double() - expected).abs().max() <= eps * expected.max() / 2 + 1e-6
    assert (probs.double().sum(-1) - 1).abs().max() <= eps
    cotangent = torch.randn(20, 200).to(dtype)
    probs.backward(cotangent)
    _, by_scores, by_alpha = reference_gradients(scores, exact_u(alpha, torch.float32), cotangent.double())
    assert scores.grad.dtype == dtype and alphas.grad.dtype == torch.float32
    assert (scores.grad.double() - by_scores).abs().max() <= 4 * eps * by_scores.abs().max()
    assert abs(alphas.grad.item() - by_alpha.sum().item()) <= 20 * eps * by_alpha.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_masks(dtype):
    low = torch.finfo(dtype).min
    scores = torch.tensor([[1.0, low, -math.inf, 0.5], [low, low, low, -math.inf]], dtype=dtype)
    for alpha in (1.0, 1.5, 1.3, 2.0):
        probs = entmax(scores, alpha)
        assert (probs[1] == 0).all() and probs[0, 1] == 0 and probs[0, 2] == 0
        assert (probs.sum(-1) - torch.tensor([1, 0])).abs().max() < 0.01


def test_half_alpha_and_integer_alpha():
    scores = torch.randn(3, 8)
    expected = reference.entmax(scores, 1.5)
    assert_forward(entmax(scores, torch.tensor(1.5, dtype=torch.bfloat16)), expected)
    assert_forward(entmax(scores, 2), reference.sparsemax(scores))
    assert_forward(entmax(scores, torch.tensor(2)), reference.sparsemax(scores))


@pytest.mark.parametrize("alpha", [0.99, 0, -1.0, math.nan, math.inf])
def test_alpha_out_of_range(alpha):
    scores = torch.randn(3, 4)
    with pytest.raises(ValueError, match="alpha"):
        entmax(scores, alpha)
    with pytest.raises(ValueError, match="alpha >= 1"):
        entmax(scores, torch.tensor([[1.5], [alpha], [2.0]]))


def test_wrong_arguments():
    scores = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"alpha of shape \(5,\)"):
        entmax(scores, torch.full((5,), 1.5))
    with pytest.raises(ValueError, match="varies along dim"):
        entmax(scores, torch.full((4,), 1.5))
    with pytest.raises(ValueError, match="cannot be broadcast"):
        entmax(scores, torch.full((1, 2, 3, 1), 1.5))
    with pytest.raises(ValueError, match="mask of shape"):
        entmax(scores, 1.5, mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="bool"):
        entmax(scores, 1.5, mask=torch.ones(4))
    with pytest.raises(TypeError, match="floating"):
        entmax(torch.arange(4), 1.5)
    with pytest.raises(TypeError, match="floating"):
        entmax([1.0, 2.0], 1.5)
    with pytest.raises(ValueError, match="dim is 3"):
        entmax(scores, 1.5, dim=3)


def test_modules():
    scores = torch.randn(2, 3, 4)
    mask = torch.rand(2, 3, 4) > 0.3
    assert torch.equal(Sparsemax(dim=1)(scores), sparsemax(scores, dim=1))
    assert torch.equal(Entmax15()(scores, mask), entmax15(scores, mask=mask))
    assert torch.equal(Entmax(1.3, dim=0)(scores), entmax(scores, 1.3, dim=0))
    learned = Entmax(torch.nn.Parameter(torch.tensor(1.4)))
    assert [name for name, _ in learned.named_parameters()] == ["alpha"]
    learned(scores).square().sum().backward()
    assert learned.alpha.grad.abs() > 0
    fixed = Entmax(torch.tensor([[1.4]]))
    assert list(fixed.state_dict()) == ["alpha"] and not list(fixed.parameters())
    assert "1.3" in repr(Entmax(1.3))
    with pytest.raises(ValueError, match="alpha"):
        Entmax(0.5)


def test_rows_do_not_depend_on_their_chunk(monkeypatch):
    from hf_entmax.ops import solve

    scores, alphas = torch.randn(40, 16), 1 + 2 * torch.rand(40, 1)
    whole = entmax(scores, alphas)
    monkeypatch.setattr(solve, "CPU_CHUNK_ELEMENTS", 3 * 16)
    assert_forward(entmax(scores, alphas), whole)


def test_inputs_are_left_alone():
    scores = torch.randn(4, 9)
    kept, mask = scores.clone(), torch.rand(4, 9) > 0.5
    for alpha in (1.0, 1.3, 1.5, 2.0, 3.0):
        entmax(scores, alpha, mask=mask)
        entmax(scores.requires_grad_(), torch.tensor(alpha)).sum().backward()
        scores.requires_grad_(False)
    assert torch.equal(scores, kept)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_alpha_stays_in_the_graph_of_empty_scores(shape):
    scores, alpha = torch.randn(shape, requires_grad=True), torch.tensor(1.5, requires_grad=True)
    entmax(scores, alpha).sum().backward()
    assert float(alpha.grad) == 0 and scores.grad.shape == shape
