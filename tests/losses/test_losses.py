"""Fenchel-Young losses against an oracle that follows the definition in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_entmax.losses import EntmaxLoss, entmax15_loss, entmax_loss, linear_entmax_loss, sparsemax_loss
from hf_entmax.ops.candidates import solve_rows

ALPHAS = (1.0, 1.0001, 1.05, 1.2, 1.5, 1.8, 2.0, 3.0)


def oracle_probs(z, alpha):
    """Bisection on the threshold, in float64: slow and obviously right."""
    z = z.double()
    if alpha == 1.0:
        return z.softmax(-1)
    u = alpha - 1.0
    y = z - z.amax(-1, keepdim=True)
    low, high = torch.zeros_like(y[..., :1]), torch.full_like(y[..., :1], math.log(y.shape[-1]) + 1.0)
    mapping = lambda c: torch.exp(torch.log1p((u * (y - c)).clamp(min=-1.0)) / u)  # noqa: E731
    for _ in range(64):
        middle = (low + high) / 2
        above = mapping(middle).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = mapping(low)
    return p / p.sum(-1, keepdim=True)


def oracle_entropy(p, alpha):
    if alpha == 1.0:
        return -torch.special.xlogy(p, p).sum(-1)
    log_p = torch.where(p > 0, p, 1.0).log()
    return -(p * torch.expm1((alpha - 1) * log_p)).sum(-1) / (alpha * (alpha - 1))


def oracle_losses(logits, labels, alpha, smoothing=0.0):
    """Loss and gradient of each row, by the definition."""
    z = logits.detach().double()
    q = labels.double() if labels.is_floating_point() else F.one_hot(labels.clamp(min=0), z.shape[-1]).double()
    q = (1 - smoothing) * q + smoothing / z.shape[-1]
    p = oracle_probs(z, alpha)
    moved = torch.where((p - q) != 0, (p - q) * z, 0.0).sum(-1)
    return moved + oracle_entropy(p, alpha) - oracle_entropy(q, alpha), p - q


# 3000 classes are solved on candidates where alpha and scale allow it, 7 densely.
@pytest.mark.parametrize("classes", [1, 7, 3000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_loss_and_gradient_equal_the_oracle(classes, scale, smoothing, alpha):
    logits = (torch.randn(2, 3, classes, dtype=torch.float64) * scale).requires_grad_()
    labels = torch.randint(classes, (2, 3))
    losses = entmax_loss(logits, labels, alpha, reduction="none", label_smoothing=smoothing)
    expected, residual = oracle_losses(logits, labels, alpha, smoothing)
    torch.testing.assert_close(losses, expected, atol=1e-9, rtol=1e-9)
    weights = torch.rand(2, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    torch.testing.assert_close(gradient, residual * weights[..., None], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("classes", [11, 2500])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_distributions_as_targets(classes, alpha, smoothing):
    logits = torch.randn(4, classes, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, classes, dtype=torch.float64).softmax(-1)
    target[0] = F.one_hot(torch.tensor(3), classes)
    loss = entmax_loss(logits, target, alpha, label_smoothing=smoothing)
    expected, residual = oracle_losses(logits, target, alpha, smoothing)
    torch.testing.assert_close(loss, expected.mean(), atol=1e-9, rtol=1e-9)
    loss.backward()
    torch.testing.assert_close(logits.grad, residual / 4, atol=1e-9, rtol=1e-9)
    at_minimum = target.clamp(min=1e-30).log()
    assert entmax_loss(at_minimum, target, 1.0).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [5, 4000])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_at_alpha_one_it_is_cross_entropy(dtype, classes, scale):
    logits = (torch.randn(6, 8, classes) * scale).to(dtype).requires_grad_()
    labels = torch.randint(classes, (6, 8))
    labels[::2, 3] = -100
    loss = entmax_loss(logits, labels, 1.0)
    wide = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten())
    expected.backward()
    loss.backward()
    assert loss.dtype == torch.float32 and logits.grad.dtype == dtype
    torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=2e-7)
    torch.testing.assert_close(logits.grad.float(), wide.grad, atol=1e-7, rtol={torch.float32: 1e-5}.get(dtype, 8e-3))
    assert not logits.grad[::2, 3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
@pytest.mark.parametrize("classes", [9, 3000])
def test_narrow_dtypes_compute_in_float32(dtype, alpha, classes):
    logits = (torch.randn(5, classes) * 2).to(dtype).requires_grad_()
    labels = torch.randint(classes, (5,))
    loss = entmax_loss(logits, labels, alpha)
    loss.backward()
    expected, residual = oracle_losses(logits, labels, alpha)
    torch.testing.assert_close(loss.double(), expected.mean(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(
        logits.grad.double(), residual / 5, atol=1e-6, rtol={torch.float32: 1e-4}.get(dtype, 8e-3)
    )


@pytest.mark.parametrize("classes", [5, 1500])
@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck_in_logits_and_alpha(classes, alpha, smoothing):
    logits = torch.randn(2, classes, dtype=torch.float64) * 3
    labels = torch.randint(classes, (2,))
    number = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    rows = torch.full((2,), alpha, dtype=torch.float64, requires_grad=True)
    probe = lambda a: entmax_loss(logits, labels, a, label_smoothing=smoothing, reduction="sum")  # noqa: E731
    if alpha == 1.0:
        # alpha = 1 is the edge of what is allowed: differences on one side only.
        step = 1e-5
        values = [probe(torch.tensor(1.0 + k * step, dtype=torch.float64)).item() for k in range(3)]
        slope = (-3 * values[0] + 4 * values[1] - values[2]) / (2 * step)
        assert torch.autograd.grad(probe(number), number)[0].item() == pytest.approx(slope, rel=1e-4)
        assert torch.autograd.grad(probe(rows), rows)[0].sum().item() == pytest.approx(slope, rel=1e-4)
    else:
        assert torch.autograd.gradcheck(probe, number)
        assert torch.autograd.gradcheck(probe, rows)
    if classes == 5:
        logits.requires_grad_()
        assert torch.autograd.gradcheck(lambda z: entmax_loss(z, labels, alpha, label_smoothing=smoothing), logits)


def test_one_alpha_per_row():
    alphas = torch.tensor([[1.0, 1.5, 2.0], [1.2, 1.001, 3.0]], dtype=torch.float64)
    for classes in (13, 2000):
        logits = torch.randn(2, 3, classes, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(classes, (2, 3))
        losses = entmax_loss(logits, labels, alphas, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        for i in range(2):
            for j in range(3):
                expected, residual = oracle_losses(logits[i, j], labels[i, j], alphas[i, j].item())
                torch.testing.assert_close(losses[i, j], expected, atol=1e-9, rtol=1e-9)
                torch.testing.assert_close(gradient[i, j], residual, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("classes", [5, 3000])
def test_one_alpha_per_row_with_impossible_classes(classes):
    logits = torch.randn(4, classes, dtype=torch.float64)
    logits[:3, 1:3] = -math.inf
    logits.requires_grad_()
    alphas = torch.tensor([1.0, 1.4, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 4, 1])
    losses = entmax_loss(logits, labels, alphas, reduction="none")
    gradient, slopes = torch.autograd.grad(losses.sum(), [logits, alphas])
    for i, alpha in enumerate(alphas.tolist()):
        one = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        row = logits[i : i + 1].detach().requires_grad_()
        loss = entmax_loss(row, labels[i : i + 1], one)
        expected, slope = torch.autograd.grad(loss, [row, one])
        torch.testing.assert_close(losses[i], loss)
        torch.testing.assert_close(gradient[i : i + 1], expected)
        torch.testing.assert_close(slopes[i], slope)


def test_alpha_is_learnable_in_any_shape_it_may_have():
    logits, labels = torch.randn(4, 6), torch.randint(6, (4,))
    for shape in ((), (1,), (1, 1), (4,)):
        alpha = torch.full(shape, 1.4, requires_grad=True)
        entmax_loss(logits, labels, alpha).backward()
        assert alpha.grad.shape == shape and alpha.grad.abs().sum() > 0


def test_named_losses_and_module():
    logits, labels = torch.randn(3, 2, 17), torch.randint(17, (3, 2))
    options = {"ignore_index": 4, "reduction": "sum", "label_smoothing": 0.05}
    assert torch.equal(entmax15_loss(logits, labels, **options), entmax_loss(logits, labels, 1.5, **options))
    assert torch.equal(sparsemax_loss(logits, labels, **options), entmax_loss(logits, labels, 2.0, **options))
    assert torch.equal(EntmaxLoss(1.3, **options)(logits, labels), entmax_loss(logits, labels, 1.3, **options))
    learned = EntmaxLoss(torch.nn.Parameter(torch.tensor(1.3)))
    learned(logits, labels).backward()
    assert [name for name, _ in learned.named_parameters()] == ["alpha"] and learned.alpha.grad is not None
    assert "alpha" in EntmaxLoss(torch.tensor(1.2)).state_dict()
    assert "alpha=1.3" in repr(EntmaxLoss(1.3))


def test_reductions_and_an_accumulated_batch():
    logits, labels = torch.randn(8, 5, 30), torch.randint(30, (8, 5))
    labels[2:4, 1:] = -100
    losses = entmax_loss(logits, labels, reduction="none")
    assert losses.shape == (8, 5) and not losses[2:4, 1:].any()
    count = (labels != -100).sum()
    torch.testing.assert_close(entmax_loss(logits, labels, reduction="sum"), losses.sum())
    torch.testing.assert_close(entmax_loss(logits, labels), losses.sum() / count)
    parts = [entmax_loss(logits[i : i + 2], labels[i : i + 2], reduction="sum") / count for i in range(0, 8, 2)]
    torch.testing.assert_close(sum(parts), entmax_loss(logits, labels))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("classes", [6, 2000])
def test_ignored_rows_and_empty_batches(alpha, classes):
    logits = torch.randn(4, classes, requires_grad=True)
    loss = entmax_loss(logits, torch.full((4,), -100), alpha)
    loss.backward()
    assert loss.item() == 0.0 and not logits.grad.any()
    empty = torch.randn(0, 3, classes, requires_grad=True)
    loss = entmax_loss(empty, torch.empty(0, 3, dtype=torch.long), alpha)
    loss.backward()
    assert loss.item() == 0.0 and empty.grad.shape == (0, 3, classes)
    broken = torch.randn(2, classes)
    broken[1] = math.nan
    broken.requires_grad_()
    loss = entmax_loss(broken, torch.tensor([1, -100]), alpha)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(broken.grad).all()


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, 2.0])
@pytest.mark.parametrize("classes", [6, 2000])
def test_impossible_classes(alpha, classes):
    logits = torch.randn(4, classes, dtype=torch.float64)
    logits[0, 2:] = -math.inf
    logits[1, 0] = -math.inf
    logits[3] = -math.inf
    logits.requires_grad_()
    labels = torch.tensor([1, 0, 2, 0])
    losses = entmax_loss(logits, labels, alpha, reduction="none")
    expected, residual = oracle_losses(logits[:3], labels[:3], alpha)
    torch.testing.assert_close(losses[[0, 2]], expected[[0, 2]], atol=1e-9, rtol=1e-9)
    assert losses[1].item() == math.inf and losses[3].item() == math.inf
    (gradient,) = torch.autograd.grad(losses[:3].sum(), logits)
    torch.testing.assert_close(gradient[:3], residual, atol=1e-9, rtol=1e-9)
    assert not gradient[3].any()


def test_nan_is_seen_and_stays_in_its_row():
    for classes in (6, 2000):
        logits = torch.randn(3, classes)
        logits[1, 4] = math.nan
        losses = entmax_loss(logits, torch.tensor([0, 1, 2]), reduction="none")
        assert torch.isnan(losses).tolist() == [False, True, False]


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_huge_offsets_do_not_matter(alpha):
    logits, labels = torch.randn(5, 40, dtype=torch.float64), torch.randint(40, (5,))
    near, far = logits.clone().requires_grad_(), (logits + 1e8).requires_grad_()
    a, b = entmax_loss(near, labels, alpha), entmax_loss(far, labels, alpha)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(a, near)[0], torch.autograd.grad(b, far)[0], atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.floats(1.0, 3.0),
    st.floats(0.05, 20.0),
    st.integers(0, 10_000),
)
def test_properties(classes, alpha, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(classes, generator=generator, dtype=torch.float64) * scale
    label = torch.randint(classes, (), generator=generator)
    loss = entmax_loss(logits, label, alpha).item()
    assert loss >= 0.0
    assert loss == pytest.approx(entmax_loss(logits + 7.0, label, alpha).item(), abs=1e-9)
    if alpha > 1.001:
        margin = torch.cat((logits[:label], logits[label + 1 :])).max() + 1.0 / (alpha - 1.0)
        separated = logits.clone()
        separated[label] = margin + 1e-9
        separated.requires_grad_()
        zero = entmax_loss(separated, label, alpha)
        zero.backward()
        assert zero.item() == pytest.approx(0.0, abs=1e-12) and separated.grad.abs().max() < 1e-6
        separated = separated.detach()
        separated[label] = margin - 0.5
        if alpha < 1.3:
            return  # positive, but far below the smallest digit
        assert entmax_loss(separated, label, alpha).item() > 0.0


def test_candidates_are_used_where_they_help_and_are_exact():
    scores = torch.randn(3, 40_003, dtype=torch.float64)
    for alpha in (1.2, 1.5, 2.0, 3.0):
        solution = solve_rows(scores, alpha - 1.0)
        assert solution.rows is not None and solution.rows.bincount().max() < 6000
        dense = torch.zeros_like(scores).index_put_((solution.rows, solution.columns), solution.probs)
        torch.testing.assert_close(dense, oracle_probs(scores, alpha), atol=1e-11, rtol=0)
    assert solve_rows(scores, 0.01).columns is None
    # The best entries stand in the tail that does not fill a block.
    scores[:, -2:] = 9.0
    solution = solve_rows(scores, 0.5)
    assert set(solution.columns.tolist()) == {40_001, 40_002}


class _Saved:
    """Counts the elements that autograd keeps."""

    def __init__(self):
        self.elements = 0

    def pack(self, tensor):
        self.elements += tensor.numel()
        return tensor


@pytest.mark.parametrize("alpha, share", [(1.5, 0.05), (2.0, 0.05), (1.02, 1.001), (1.0, 1.001)])
def test_at_most_one_tensor_of_the_size_of_the_logits_is_kept(alpha, share):
    logits = torch.randn(64, 5000, requires_grad=True)
    saved = _Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        loss = entmax_loss(logits, torch.randint(5000, (64,)), alpha)
    loss.backward()
    assert saved.elements <= share * logits.numel() + 64 * 8


def test_under_autocast_nothing_is_rounded():
    logits, labels = torch.randn(4, 300, requires_grad=True), torch.randint(300, (4,))
    plain = entmax_loss(logits, labels, 1.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = entmax_loss(logits, labels, 1.3)
    assert torch.equal(plain, inside)
    assert torch.equal(torch.autograd.grad(plain, logits)[0], torch.autograd.grad(inside, logits)[0])


def test_logits_that_are_a_view_and_second_derivatives():
    base = torch.randn(3, 7, 10, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (3, 9))
    view = base.transpose(1, 2)[:, :-1]
    loss = entmax_loss(view, labels)
    (gradient,) = torch.autograd.grad(loss, base, create_graph=True)
    torch.testing.assert_close(
        gradient.detach().transpose(1, 2)[:, :-1].flatten(0, 1),
        oracle_losses(view.flatten(0, 1), labels.flatten(), 1.5)[1] / 27,
    )
    with pytest.raises(RuntimeError):  # there is no second derivative, and none is made up
        gradient.square().sum().backward()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"alpha": 0.9}, ValueError, "alpha=0.9 .* alpha >= 1"),
        ({"alpha": float("nan")}, ValueError, "alpha=nan"),
        ({"alpha": torch.tensor([1.5, 0.5, 1.5])}, ValueError, "alpha=0.5 .* alpha >= 1"),
        ({"alpha": torch.ones(2)}, ValueError, r"alpha of shape \(2,\)"),
        ({"alpha": "soft"}, TypeError, "alpha='soft' .* or a tensor"),
        ({"alpha": torch.tensor(1)}, TypeError, "floating-point"),
        ({"labels": torch.tensor([0, 7, 1])}, ValueError, "labels hold 7, .* between 0 and 4"),
        ({"labels": torch.tensor([0, -1, 1])}, ValueError, "labels hold -1"),
        ({"labels": torch.tensor([0, 1])}, ValueError, r"labels of shape \(2,\)"),
        ({"labels": torch.zeros(3, 5, dtype=torch.long)}, ValueError, "floating-point tensor"),
        ({"labels": torch.zeros(3, 5)}, ValueError, "sum to 1, but one sums to 0"),
        ({"labels": torch.tensor([[1.5, -0.5, 0, 0, 0]] * 3)}, ValueError, "not be negative"),
        ({"labels": torch.zeros(3)}, ValueError, "Class indices must be integers"),
        ({"labels": torch.zeros(3, dtype=torch.bool)}, TypeError, "torch.bool"),
        ({"labels": torch.full((3, 5), 0.2, requires_grad=True)}, ValueError, "detach"),
        ({"reduction": "average"}, ValueError, "'none', 'mean', 'sum'"),
        ({"label_smoothing": 1.5}, ValueError, "between 0.0 and 1.0"),
        ({"logits": torch.zeros(3, 5, dtype=torch.long)}, TypeError, "floating-point"),
        ({"logits": torch.zeros(3, 0)}, ValueError, "no classes"),
    ],
)
def test_bad_input(changes, error, message):
    given_ = {"logits": torch.randn(3, 5), "labels": torch.tensor([0, 1, 2])} | changes
    with pytest.raises(error, match=message):
        entmax_loss(**given_)


# ---- the loss of a linear layer


@pytest.mark.parametrize("alpha", [1.0, 1.02, 1.5, 2.0, "number", "rows"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, softcap", [(0.0, None), (0.1, None), (0.0, 4.0), (0.1, 4.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_loss_equals_the_loss_of_the_logits(alpha, reduction, smoothing, softcap, bias):
    classes = 1300
    hidden = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, 8, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(classes, dtype=torch.float64, requires_grad=True) if bias else None
    labels = torch.randint(classes, (3, 5))
    labels[1, 2:] = -100
    if alpha == "number":
        alpha = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    elif alpha == "rows":
        alpha = torch.tensor([[1.0], [1.3], [2.0]], dtype=torch.float64, requires_grad=True)
    inputs = [x for x in (hidden, weight, offset, alpha) if isinstance(x, torch.Tensor)]
    chunked = linear_entmax_loss(
        hidden, weight, labels, alpha, bias=offset, reduction=reduction, chunk_size=4, softcap=softcap,
        label_smoothing=smoothing,
    )  # fmt: skip
    logits = F.linear(hidden, weight, offset)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    whole = entmax_loss(logits, labels, alpha, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(chunked, whole, atol=1e-9, rtol=1e-9)
    weights = torch.rand_like(whole)
    for found, expected in zip(
        torch.autograd.grad((chunked * weights).sum(), inputs),
        torch.autograd.grad((whole * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_linear_loss_with_distributions_and_other_ignore_index(alpha):
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = torch.randn(6, 9).softmax(-1)
    chunked = linear_entmax_loss(hidden, weight, target, alpha, chunk_size=5)
    whole = entmax_loss(F.linear(hidden, weight), target, alpha)
    torch.testing.assert_close(chunked, whole)
    for found, expected in zip(
        torch.autograd.grad(chunked, (hidden, weight)), torch.autograd.grad(whole, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    labels = torch.tensor([0, 8, 3, 3, 1, 8])
    torch.testing.assert_close(
        linear_entmax_loss(hidden, weight, labels, alpha, ignore_index=8),
        entmax_loss(F.linear(hidden, weight), labels, alpha, ignore_index=8),
    )


def test_linear_loss_when_all_is_ignored_or_only_some_inputs_learn():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for reduction in ("mean", "sum", "none"):
        loss = linear_entmax_loss(hidden, weight, torch.full((3,), -100), reduction=reduction).sum()
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert loss.item() == 0.0 and not any(g.any() for g in grads)
    labels = torch.tensor([1, 2, 3])
    both = torch.autograd.grad(linear_entmax_loss(hidden, weight, labels), (hidden, weight))
    torch.testing.assert_close(
        torch.autograd.grad(linear_entmax_loss(hidden, weight.detach(), labels), hidden)[0], both[0]
    )
    torch.testing.assert_close(
        torch.autograd.grad(linear_entmax_loss(hidden.detach(), weight, labels), weight)[0], both[1]
    )
    with torch.no_grad():
        assert not linear_entmax_loss(hidden, weight, labels).requires_grad


def test_linear_loss_in_bfloat16_and_under_autocast():
    hidden, weight = torch.randn(20, 16), torch.randn(2000, 16) * 0.5
    labels = torch.randint(2000, (20,))
    reference = linear_entmax_loss(hidden, weight.requires_grad_(), labels)
    (expected,) = torch.autograd.grad(reference, weight)
    narrow = weight.detach().bfloat16().requires_grad_()
    loss = linear_entmax_loss(hidden.bfloat16(), narrow, labels, chunk_size=3)
    loss.backward()
    assert loss.dtype == torch.float32 and narrow.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(reference.item(), rel=2e-2)
    assert F.cosine_similarity(narrow.grad.float().flatten(), expected.flatten(), dim=0) > 0.99
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_entmax_loss(hidden, weight, labels, chunk_size=3)
    assert inside.item() == pytest.approx(loss.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(inside, weight)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, narrow.grad.float(), atol=1e-4, rtol=2e-2)


def test_linear_loss_can_be_run_backward_twice_and_scaled():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    labels = torch.randint(9, (6,))
    loss = linear_entmax_loss(hidden, weight, labels)
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 3, hidden)
    torch.testing.assert_close(scaled, 3 * once)


@pytest.mark.slow
def test_linear_loss_never_holds_all_logits():
    """No allocation on the way is as large as a quarter of the logits."""
    rows, classes, chunk = 512, 4096, 32
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(classes, 8, requires_grad=True)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    for alpha, reduction in ((1.5, "mean"), (1.0, "mean"), (1.5, "none")):
        with Largest():
            linear_entmax_loss(
                hidden, weight, torch.randint(classes, (rows,)), alpha, chunk_size=chunk, reduction=reduction
            ).sum().backward()
    assert 0 < largest <= chunk * classes


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"weight": torch.randn(5, 3)}, ValueError, "do not fit"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias of shape \(4,\)"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"weight": torch.randn(5, 4, dtype=torch.float64)}, TypeError, "one dtype"),
        ({"labels": torch.tensor([0, 5, 0])}, ValueError, "labels hold 5"),
        ({"alpha": 0.0}, ValueError, "alpha=0.0"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "hidden must be"),
    ],
)
def test_linear_loss_bad_input(changes, error, message):
    given_ = {"hidden": torch.randn(3, 4), "weight": torch.randn(5, 4), "labels": torch.tensor([0, 1, 2])} | changes
    with pytest.raises(error, match=message):
        linear_entmax_loss(**given_)
