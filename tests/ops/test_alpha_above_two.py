"""Alpha from 2 to 64 on the dense path: optimality, sums and gradients, in half precision too."""

import math

import pytest
import torch
from near_ties import scores_of

from hf_entmax.losses import entmax_loss
from hf_entmax.ops import entmax

ALPHAS = (2.01, 2.5, 3.0, 6.0, 10.0, 32.0, 64.0)
KINDS = ("equal", "two values", "one float apart", "one above equal ones", "random", "close", "large")


def exact_gradients(scores, alpha, grad):
    """In float64 with logarithms of the weights ``p**(2 - alpha)``: dz without its factor, that as a logarithm, dalpha."""
    p, u = entmax(scores.double(), alpha, backend="torch"), alpha - 1
    logs = torch.where(p > 0, p, 1.0).log()
    weights = torch.where(p > 0, (1 - u) * logs, -math.inf)
    factor = weights.max()
    weights = (weights - factor).exp()
    grad = grad.double() - grad.double()[weights.argmax()]
    tilted = weights / weights.sum()
    mean = (tilted * grad).sum()
    by_alpha = ((p - tilted) / u**2 + (-p * logs + tilted * (p * logs).sum()) / u) * (grad - (p * grad).sum())
    return weights * (grad - mean), float(factor), by_alpha.sum()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", [2, 37, 4000, 100_000])
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_optimal_and_sum_to_one(kind, keys, dtype):
    scores = scores_of(kind, keys).to(dtype)
    exact = scores.double()
    bound = 2e-6 if dtype == torch.float32 else 64 * torch.finfo(dtype).eps * (1 + float(exact.abs().max()))
    for alpha in ALPHAS[:: 3 if keys > 10_000 else 1]:
        p, u = entmax(scores, alpha, backend="torch").double(), alpha - 1
        assert p.sum().item() == pytest.approx(1.0, abs=bound)
        if kind == "equal":
            torch.testing.assert_close(p, torch.full_like(p, 1 / keys), rtol=64 * torch.finfo(dtype).eps, atol=0)
        level = exact - p**u / u  # the threshold as each entry says it
        threshold = level[p > 0]
        assert threshold.max() - threshold.min() < bound, alpha
        assert (p > 0).all() or level[p == 0].max() <= threshold.min() + bound, alpha


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["equal", "two values", "one above equal ones", "random", "close"])
def test_gradients_equal_those_in_float64(kind, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-8}[dtype]
    for keys in (2, 3, 37, 1000):
        for alpha in ALPHAS:
            scores = scores_of(kind, keys).to(dtype).requires_grad_()
            grad = torch.randn(keys, generator=torch.Generator().manual_seed(1)).to(dtype)
            given = torch.tensor(alpha, dtype=wide, requires_grad=True)
            entmax(scores, given, backend="torch").backward(grad)
            by_scores, factor, by_alpha = exact_gradients(scores.detach(), float(given), grad)
            assert (given.grad - by_alpha).abs() <= tolerance * max(1e-2, by_alpha.abs()), (keys, alpha)
            if factor > math.log(torch.finfo(dtype).max) - 9:  # the derivative itself is no float of this type
                assert dtype == torch.float16 or scores.grad.isfinite().all(), (keys, alpha)
                continue
            wanted = by_scores * math.exp(factor)
            assert (scores.grad - wanted).norm() <= tolerance * wanted.norm().clamp(min=1e-3), (keys, alpha)


def test_rows_of_different_alphas_and_second_derivatives():
    alphas = torch.tensor([[1.0], [1.3], [2.0], [3.0], [64.0]], requires_grad=True)
    scores = scores_of("close", 400).expand(5, -1).clone().requires_grad_()
    grad = torch.randn(5, 400, generator=torch.Generator().manual_seed(1))
    together = torch.autograd.grad(entmax(scores, alphas, backend="torch"), (scores, alphas), grad)
    for row in range(5):
        probs = entmax(scores[row], alphas[row], backend="torch")
        alone = torch.autograd.grad(probs, (scores, alphas), grad[row])
        torch.testing.assert_close(together[0][row], alone[0][row], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(together[1][row], alone[1][row], rtol=1e-3, atol=1e-5)
    z = torch.tensor([[0.3, 0.29, 0.1, -0.2]], dtype=torch.float64, requires_grad=True)
    for alpha in (2.5, 6.0):
        u = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda z, u: entmax(z, u, backend="torch"), (z, u), atol=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_losses(alpha):
    for kind in KINDS:
        scores = torch.stack([scores_of(kind, 300), scores_of("random", 300)])
        labels = torch.tensor([1, 150])
        given = scores.clone().requires_grad_()
        loss = entmax_loss(given, labels, alpha, reduction="sum")
        loss.backward()
        p, z, u = entmax(scores.double(), alpha, backend="torch"), scores.double(), alpha - 1
        wanted = (p * z).sum(-1) - z[[0, 1], labels] + (p - p**alpha).sum(-1) / (alpha * u)
        torch.testing.assert_close(loss.double(), wanted.sum(), rtol=1e-5, atol=1e-6)
        p[[0, 1], labels] -= 1
        torch.testing.assert_close(given.grad.double(), p, rtol=0, atol=5e-6)


def test_cuda_kernels_are_asked_only_for_alphas_that_they_are_right_for(monkeypatch):
    from hf_entmax.ops import triton_gpu
    from hf_entmax.ops.options import AttentionOptions

    monkeypatch.setattr(triton_gpu, "_unfit_device", lambda tensor: None)
    monkeypatch.setattr(triton_gpu, "values_visible", lambda tensor: False)  # as on a GPU

    def refused(alpha, keys, **options):
        query, key = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, keys, 8)
        return triton_gpu.unsupported(query, key, key, alpha, AttentionOptions(**options)) is not None

    learned = torch.tensor([1.5, 1.6])
    assert not refused(2.0, 10**6) and not refused(3.0, 500) and refused(3.0, 5000) and refused(64.0, 16)
    assert not refused(learned, 5000) and not refused(learned, 5000, alpha_max=2.0)
    assert not refused(learned, 500, alpha_max=3.0) and refused(learned, 5000, alpha_max=3.0)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize("captured", [False, True])
def test_alphas_on_a_gpu_are_looked_at_unless_there_is_a_promise_or_nobody_can(monkeypatch, captured):
    from hf_entmax.ops import triton_gpu
    from hf_entmax.ops.options import AttentionOptions

    monkeypatch.setattr(triton_gpu, "_unfit_device", lambda tensor: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    query, key = (torch.zeros(1, 2, n, 8).as_subclass(OnGpu) for n in (3, 700))
    looked = []
    monkeypatch.setattr(OnGpu, "max", lambda self: looked.append(True) or torch.Tensor.max(self), raising=False)

    def reason(highest, alpha_max=math.inf):
        alpha = torch.tensor([1.5, highest], requires_grad=True).as_subclass(OnGpu)
        return triton_gpu.unsupported(query, key, key, alpha, AttentionOptions(alpha_max=alpha_max))

    assert reason(2.8) is None and reason(2.0, alpha_max=2.0) is None
    assert len(looked) == (not captured)
    if captured:
        assert reason(3.1) is None
    else:
        assert reason(3.1).startswith("alpha: 3.1 is above 2.905")
