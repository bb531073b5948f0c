"""The losses in compiled graphs, and on tensors of unusual shapes and dtypes."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from environments import inductor_works
from test_losses import oracle_losses

from hf_entmax.losses import EntmaxLoss, entmax_loss, linear_entmax_loss


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _both(alpha, labels, logits, backend="aot_eager", **options):
    """Loss and gradients, compiled without a break and eager."""
    results = []
    for compiled in (True, False):
        z = logits.detach().clone().requires_grad_()
        a = alpha.detach().clone().requires_grad_() if isinstance(alpha, torch.Tensor) else alpha

        def loss(z, y, a=a):
            return entmax_loss(z, y, a, **options)

        function = torch.compile(loss, fullgraph=True, backend=backend) if compiled else loss
        value = function(z, labels, a)
        weights = torch.linspace(0.5, 2.0, value.numel()).view(value.shape)
        leaves = [z, a] if isinstance(a, torch.Tensor) else [z]
        results.append([value, *torch.autograd.grad((value * weights).sum(), leaves)])
    return results


@pytest.mark.parametrize(
    "alpha",
    [1.0, 1.5, torch.tensor(1.3), torch.tensor([[1.0], [1.4]])],
    ids=str,
)
@pytest.mark.parametrize("classes", [5, 2000])
@pytest.mark.parametrize("options", [{}, {"reduction": "none", "label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
def test_one_graph_gives_what_eager_gives(alpha, classes, options):
    logits = torch.randn(2, 3, classes) * 2
    logits[0, 0, 1:3] = -math.inf
    labels = torch.tensor([[0, 3, -100], [4, 3, 0]])
    for found, expected in zip(*_both(alpha, labels, logits, **options), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_inductor_gives_what_eager_gives():
    if not inductor_works():
        pytest.skip("the inductor of this machine compiles no sum, or there is no C++ compiler")
    labels = torch.tensor([[0, 3, -100], [4, 3, 0]])
    for alpha, options in ((1.5, {}), (torch.tensor([[1.0], [1.4]]), {"reduction": "none", "label_smoothing": 0.1})):
        found, expected = _both(alpha, labels, torch.randn(2, 3, 50) * 2, backend="inductor", **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_one_graph_for_distributions_half_precision_and_the_module():
    target = torch.rand(3, 7).softmax(-1)
    for found, expected in zip(*_both(1.5, target, torch.randn(3, 7)), strict=True):
        torch.testing.assert_close(found, expected)
    labels = torch.tensor([1, 2, -1])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for found, expected in zip(*_both(1.5, labels, torch.randn(3, 7, dtype=dtype), ignore_index=-1), strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected)
    module = EntmaxLoss(torch.nn.Parameter(torch.tensor(1.5)))
    logits = torch.randn(3, 7, requires_grad=True)
    torch.compile(module, fullgraph=True, backend="aot_eager")(logits, labels.clamp(min=0)).backward()
    by_hand = module.alpha.grad.clone()
    module.alpha.grad = None
    module(logits, labels.clamp(min=0)).backward()
    torch.testing.assert_close(by_hand, module.alpha.grad)


def test_one_graph_for_batches_of_any_size_and_no_gradient():
    compiled = torch.compile(lambda z, y: entmax_loss(z, y, 1.5), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 7, 2, 0):
        z, y = torch.randn(rows, 11), torch.randint(11, (rows,))
        torch.testing.assert_close(compiled(z, y), entmax_loss(z, y, 1.5))
    ignored = torch.full((3,), -100)
    assert compiled(torch.randn(3, 11), ignored).item() == 0.0


def test_a_compiled_loss_still_refuses_what_is_wrong():
    with pytest.raises(ValueError, match="labels hold 9"):
        torch.compile(lambda z, y: entmax_loss(z, y, 1.5), fullgraph=True, backend="aot_eager")(
            torch.randn(2, 5), torch.tensor([1, 9])
        )
    with pytest.raises(ValueError, match=r"alpha=0\.5"):
        torch.compile(lambda z, y, a: entmax_loss(z, y, a), fullgraph=True, backend="aot_eager")(
            torch.randn(2, 5), torch.tensor([1, 2]), torch.tensor(0.5)
        )


def test_the_linear_loss_compiles_with_breaks():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels = torch.tensor([0, 8, -100, 3, 3, 1])
    compiled = torch.compile(lambda h, w, y: linear_entmax_loss(h, w, y, 1.5), backend="aot_eager")
    found, expected = compiled(hidden, weight, labels), linear_entmax_loss(hidden, weight, labels, 1.5)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(a, b)


SHAPES = [(1,), (2,), (9,), (3, 1), (3, 2), (0, 5), (2, 0, 5), (2, 1, 3, 4), (1, 2000), (4, 2000)]


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unusual_shapes_and_dtypes(dtype, alpha):
    for shape, label_dtype in zip(SHAPES, itertools.cycle((torch.uint8, torch.int32, torch.int16)), strict=False):
        wide = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)
        logits = wide[..., ::2].detach().requires_grad_()
        assert shape[-1] == 1 or logits.numel() < 2 or not logits.is_contiguous()
        labels = torch.randint(min(shape[-1], 200), shape[:-1]).to(label_dtype)
        losses = entmax_loss(logits, labels, alpha, reduction="none")
        assert losses.shape == shape[:-1] and losses.dtype == (dtype if dtype == torch.float64 else torch.float32)
        expected, residual = oracle_losses(logits, labels.long(), alpha)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=1e-5)
        assert gradient.dtype == dtype and gradient.shape == logits.shape
        slack = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-5)
        torch.testing.assert_close(gradient.double(), residual, atol=slack, rtol=slack)
        mean = entmax_loss(logits.detach(), labels, alpha)
        assert not mean.requires_grad
        assert mean.item() == pytest.approx(float(expected.sum()) / max(losses.numel(), 1), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 1.02, 1.05, 1.08, 1.2, 1.5])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 20.0])
def test_rows_as_long_as_a_vocabulary(scale, alpha):
    """Flat rows, rows with a few leaders, rows that are half impossible: float64 finds their shift to the last digits."""
    for dtype, slack in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        logits = torch.randn(4, 20_000, dtype=dtype) * scale
        logits[0, :9] += 20.0
        logits[1] = torch.linspace(0.0, 1.0, 20_000)
        logits[2, 5000:] = -math.inf
        logits.requires_grad_()
        labels = torch.tensor([3, 4, 5, 19])
        losses = entmax_loss(logits, labels, alpha, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        expected, residual = oracle_losses(logits.detach().clamp(min=-1e30), labels, alpha)
        torch.testing.assert_close(losses.double(), expected, atol=slack, rtol=slack)
        torch.testing.assert_close(gradient.double(), residual, atol=slack, rtol=slack)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_a_linear_loss_of_one_row_one_class_and_nothing(alpha):
    for shape, classes in (((4,), 3), ((0, 4), 3), ((2, 3, 4), 1), ((5, 4), 2)):
        wide = torch.randn(*shape[:-1], 8)
        hidden = wide[..., ::2].detach().requires_grad_()
        weight = torch.randn(4, classes).t().detach().requires_grad_()
        labels = torch.randint(classes, shape[:-1], dtype=torch.int32)
        found = linear_entmax_loss(hidden, weight, labels, alpha)
        expected = entmax_loss(F.linear(hidden, weight), labels, alpha)
        torch.testing.assert_close(found, expected)
        for a, b in zip(
            torch.autograd.grad(found, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
