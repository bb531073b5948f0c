"""Multilabel losses against the pairs written out, finite differences, their own minima and quadratic programming."""

import itertools
import math

import pytest
import torch

from hf_entmax.losses.multilabel import (
    MULTILABEL_LOSSES,
    MultilabelLoss,
    check_mapping,
    multilabel_loss,
    multilabel_predict,
    multilabel_probabilities,
    parse_mapping,
)
from hf_entmax.ops import controllable as C
from hf_entmax.ops.mapping import entmax, sparsemax

F64 = torch.float64
HINGES = [
    "sparsemax_hinge",
    "sparsegen_lin(lam=0.5)",
    "sparsegen_lin(lam=-2)",
    "sparsehourglass(q=0)",
    "sparsehourglass(q=0.3)",
]
HINGES += ["sparsehourglass", "sparsehourglass(q=inf)"]
SMOOTH = ["softmax", "sparsemax", "entmax", "entmax(alpha=1)", "entmax(alpha=1.2)", "entmax(alpha=2.5)"]
ALL = HINGES + SMOOTH


def random_labels(n, k, p=0.4):
    labels = (torch.rand(n, k) < p).to(F64)
    labels[labels.sum(-1) == 0, 0] = 1
    return labels


def pairs_written_out(z, y, mapping, weight=None, member=None):
    """Eq. 6 and 7 of one row, pair by pair."""
    name, options = parse_mapping(mapping)
    member = torch.ones_like(z, dtype=torch.bool) if member is None else member
    weight = torch.ones_like(z) if weight is None else weight
    on = [i for i in range(len(z)) if member[i] and y[i] == 1]
    off = [i for i in range(len(z)) if member[i] and y[i] == 0]
    eta = 1 / len(on)
    scale, inverse_a = 1.0, 1.0
    if name == "sparsegen_lin":
        scale = 1 / (1 - options["lam"])
    elif name == "sparsehourglass" and math.isfinite(options["q"]):
        k = len(on) + len(off)
        inverse_a = (z[member].sum().abs() + k * options["q"]) / (1 + k * options["q"])
    loss = z.new_zeros(())
    for i, j in itertools.product(on, on):
        loss = loss + weight[i] * scale * (z[i] - z[j]).abs()
    for i, j in itertools.product(on, off):
        loss = loss + weight[i] * torch.relu(eta * inverse_a - scale * (z[i] - z[j]))
    return loss


class TestHinge:
    @pytest.mark.slow
    @pytest.mark.parametrize("mapping", HINGES)
    @pytest.mark.parametrize("k", [1, 2, 5, 30])
    def test_equals_the_pairs_written_out_with_gradients(self, mapping, k):
        z = torch.randn(12, k, dtype=F64, requires_grad=True)
        y = random_labels(12, k)
        losses = multilabel_loss(z, y, mapping, reduction="none")
        expected = torch.stack([pairs_written_out(a, b, mapping) for a, b in zip(z, y, strict=True)])
        assert torch.allclose(losses, expected, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(losses.sum(), z)
        (expected_grad,) = torch.autograd.grad(expected.sum(), z)
        assert torch.allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("mapping", HINGES)
    def test_weights_and_masks_equal_the_pairs_written_out(self, mapping):
        z = torch.randn(20, 7, dtype=F64, requires_grad=True)
        y = random_labels(20, 7)
        member = torch.rand(20, 7) > 0.3
        member[:, 0] = True
        y[:, 0] = 1
        weight = torch.rand(7, dtype=F64) * 3
        losses = multilabel_loss(z, y, mapping, class_weight=weight, mask=member, reduction="none")
        expected = torch.stack(
            [pairs_written_out(a, b, mapping, weight, m) for a, b, m in zip(z, y, member, strict=True)]
        )
        assert torch.allclose(losses, expected, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(losses.sum(), z)
        (expected_grad,) = torch.autograd.grad(expected.sum(), z)
        assert torch.allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)
        assert bool((grad[~member] == 0).all())

    @pytest.mark.parametrize("mapping", HINGES)
    def test_ties_take_the_same_subgradient_as_the_pairs(self, mapping):
        # As after a zero initialisation, and with scores on a grid so that many pairs sit on a kink.
        for z in (torch.zeros(4, 6, dtype=F64), torch.randint(-2, 3, (4, 6)).to(F64) / 3):
            y = random_labels(4, 6)
            leaf = z.clone().requires_grad_()
            losses = multilabel_loss(leaf, y, mapping, reduction="none")
            expected = torch.stack([pairs_written_out(a, b, mapping) for a, b in zip(leaf, y, strict=True)])
            assert torch.allclose(losses, expected, atol=1e-12)
            (grad,) = torch.autograd.grad(losses.sum(), leaf)
            assert torch.allclose(grad[y == 1].sum() + grad[y == 0].sum(), torch.zeros((), dtype=F64), atol=1e-9) or (
                "hourglass" in mapping
            )
            if bool((z == 0).all()):
                # Labels of one kind are exchangeable where all scores are equal.
                for row, label in itertools.product(range(4), (0, 1)):
                    values = grad[row][y[row] == label]
                    assert torch.allclose(values, values[:1].expand_as(values)) or len(values) == 0

    def test_memory_is_linear_in_the_labels(self):
        k = 50_000
        z = torch.randn(1, k, requires_grad=True)
        y = (torch.rand(1, k) < 0.5).float()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            loss = multilabel_loss(z, y, "sparsehourglass", reduction="sum")
        loss.backward()
        assert max(sizes) <= k + 1
        assert bool(z.grad.isfinite().all())

    def test_offsets_do_not_cost_digits(self):
        z, y = torch.randn(5, 8), random_labels(5, 8).float()
        near = multilabel_loss(z.double(), y, "sparsemax_hinge")
        far = multilabel_loss(z + 1024.0, y, "sparsemax_hinge")
        assert float(far) == pytest.approx(float(near), rel=1e-3)

    def test_is_convex(self):
        y = random_labels(200, 6)
        for mapping in HINGES:
            a, b = torch.randn(200, 6, dtype=F64) * 2, torch.randn(200, 6, dtype=F64) * 2
            t = torch.rand(200, 1, dtype=F64)
            f = lambda z, m=mapping: multilabel_loss(z, y, m, reduction="none")  # noqa: E731
            chord = t.squeeze(-1) * f(a) + (1 - t.squeeze(-1)) * f(b)
            assert bool((f(t * a + (1 - t) * b) <= chord + 1e-9).all())


class TestFenchelYoung:
    def test_softmax_is_cross_entropy_with_a_distribution(self):
        z, y = torch.randn(9, 5, dtype=F64), random_labels(9, 5)
        eta = y / y.sum(-1, keepdim=True)
        assert torch.allclose(multilabel_loss(z, y, "softmax"), torch.nn.functional.cross_entropy(z, eta))
        weight = torch.rand(5, dtype=F64)
        expected = torch.nn.functional.cross_entropy(z, eta, weight=weight, reduction="none")
        assert torch.allclose(multilabel_loss(z, y, "softmax", class_weight=weight, reduction="none"), expected)

    def test_sparsemax_is_the_multilabel_sparsemax_loss(self):
        z, y = torch.randn(9, 5, dtype=F64, requires_grad=True), random_labels(9, 5)
        eta = y / y.sum(-1, keepdim=True)
        p = sparsemax(z)
        # -eta.z + 1/2 sum over the support of (z^2 - tau^2) + 1/2 |eta|^2
        tau = ((z - p) * (p > 0)).sum(-1, keepdim=True) / (p > 0).sum(-1, keepdim=True)
        expected = -(eta * z).sum(-1) + 0.5 * ((z**2 - tau**2) * (p > 0)).sum(-1) + 0.5 * (eta**2).sum(-1)
        losses = multilabel_loss(z, y, "sparsemax", reduction="none")
        assert torch.allclose(losses, expected, atol=1e-12)
        (grad,) = torch.autograd.grad(losses.sum(), z)
        assert torch.allclose(grad, (p - eta).detach(), atol=1e-12)

    @pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 3.0])
    def test_entmax_gradient_is_p_minus_eta(self, alpha):
        z, y = torch.randn(9, 5, dtype=F64, requires_grad=True), random_labels(9, 5)
        losses = multilabel_loss(z, y, "entmax", alpha=alpha, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), z)
        assert torch.allclose(grad, (entmax(z, alpha) - y / y.sum(-1, keepdim=True)).detach(), atol=1e-9)
        assert bool((losses >= 0).all())

    def test_entmax_reaches_its_neighbours(self):
        z, y = torch.randn(9, 5, dtype=F64), random_labels(9, 5)
        assert torch.allclose(multilabel_loss(z, y, "entmax(alpha=2)"), multilabel_loss(z, y, "sparsemax"))
        entropy = y.sum(-1).log().mean()
        assert torch.allclose(multilabel_loss(z, y, "entmax(alpha=1)"), multilabel_loss(z, y, "softmax") - entropy)

    @pytest.mark.parametrize("mapping", ["sparsemax", "entmax"])
    def test_weights_scale_rows(self, mapping):
        z, y = torch.randn(9, 5, dtype=F64), random_labels(9, 5)
        weight = torch.rand(5, dtype=F64)
        plain = multilabel_loss(z, y, mapping, reduction="none")
        weighted = multilabel_loss(z, y, mapping, class_weight=weight, reduction="none")
        assert torch.allclose(weighted, plain * (y * weight).sum(-1) / y.sum(-1))


class TestAllLosses:
    @pytest.mark.parametrize("mapping", ALL)
    def test_gradcheck(self, mapping):
        z = torch.randn(4, 5, dtype=F64, requires_grad=True)
        y = random_labels(4, 5)
        mask = torch.rand(4, 5) > 0.2
        assert torch.autograd.gradcheck(lambda z: multilabel_loss(z, y, mapping, reduction="none"), (z,))
        assert torch.autograd.gradcheck(lambda z: multilabel_loss(z, y, mapping, mask=mask), (z,))

    @pytest.mark.parametrize(
        ("mapping", "option", "value"),
        [("sparsegen_lin", "lam", 0.3), ("sparsehourglass", "q", 0.4), ("entmax", "alpha", 1.4)],
    )
    def test_options_are_learnable(self, mapping, option, value):
        z, y = torch.randn(4, 5, dtype=F64), random_labels(4, 5)
        x = torch.tensor(value, dtype=F64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: multilabel_loss(z, y, mapping, **{option: x}), (x,), atol=1e-6)

    @pytest.mark.parametrize("mapping", [m for m in ALL if m not in ("softmax", "entmax(alpha=1)")])
    def test_is_zero_exactly_where_the_mapping_gives_the_target(self, mapping):
        torch.manual_seed(3)
        y = random_labels(400, 4)
        eta = y / y.sum(-1, keepdim=True)
        # Around the margin: equal scores on the labels, and the others below by more or less than what is needed.
        z = torch.randn(400, 1, dtype=F64) + y * torch.rand(400, 1, dtype=F64) * 8
        z = z + torch.where(torch.rand(400, 1) < 0.3, torch.rand(400, 4, dtype=F64) * 1e-2, 0.0)
        if mapping == "sparsehourglass(q=0)":
            z = z + 0.5
        defect = (multilabel_probabilities(z, mapping) - eta).abs().amax(-1)
        zero = multilabel_loss(z, y, mapping, reduction="none") < 1e-9
        right = defect < 1e-9
        # For alpha near 1 a label fades in so slowly that a few rows are neither clearly right nor clearly wrong.
        clear = right | (defect > 1e-3)
        assert torch.equal(right[clear], zero[clear])
        assert int(clear.sum()) > 250
        assert 20 < int(right.sum()) < 380

    @pytest.mark.slow
    @pytest.mark.parametrize("mapping", ALL)
    def test_minimising_it_predicts_the_labels(self, mapping):
        y = random_labels(6, 5)
        z = (torch.randn(6, 5, dtype=F64) * 0.5 + 0.3).requires_grad_()
        optimiser = torch.optim.Adam([z], lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.001, 200)
        for _ in range(200):
            optimiser.zero_grad()
            multilabel_loss(z, y, mapping, reduction="sum").backward()
            optimiser.step()
            schedule.step()
        # A hinge loss stops at the margin; support is read a hair inside of it.
        predicted = multilabel_predict(z, mapping, threshold=0.03)
        assert torch.equal(predicted, y.bool())

    @pytest.mark.parametrize("mapping", ALL)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_narrow_types(self, mapping, dtype):
        z = torch.randn(6, 9).to(dtype).requires_grad_()
        y = random_labels(6, 9)
        loss = multilabel_loss(z, y, mapping)
        assert loss.dtype == torch.float32
        expected = multilabel_loss(z.detach().double(), y, mapping)
        assert loss.item() == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        loss.backward()
        assert z.grad.dtype == dtype
        assert bool(z.grad.isfinite().all())

    @pytest.mark.parametrize("mapping", ALL)
    def test_labels_may_be_of_any_type_and_rank(self, mapping):
        z = torch.randn(2, 3, 4, dtype=F64)
        y = random_labels(6, 4).view(2, 3, 4)
        expected = multilabel_loss(z, y, mapping, reduction="none")
        assert expected.shape == (2, 3)
        for dtype in (torch.bool, torch.long, torch.uint8, torch.float32, torch.bfloat16):
            assert torch.equal(multilabel_loss(z, y.to(dtype), mapping, reduction="none"), expected)
        assert torch.allclose(multilabel_loss(z, y, mapping), expected.mean())
        assert torch.allclose(multilabel_loss(z, y, mapping, reduction="sum"), expected.sum())
        assert torch.allclose(multilabel_loss(z[0, 0], y[0, 0], mapping), expected[0, 0])

    @pytest.mark.parametrize("mapping", ALL)
    def test_ignored_labels_are_as_if_left_out(self, mapping):
        z = torch.randn(5, 6, dtype=F64, requires_grad=True)
        y = random_labels(5, 6)
        y[:, 0] = 1
        ignored = y.clone()
        ignored[:, [2, 5]] = -100
        kept = [0, 1, 3, 4]
        expected = multilabel_loss(z[:, kept], y[:, kept], mapping, reduction="none")
        losses = multilabel_loss(z, ignored, mapping, reduction="none")
        assert torch.allclose(losses, expected, atol=1e-12)
        mask = torch.tensor([True, True, False, True, True, False])
        assert torch.equal(multilabel_loss(z, y, mapping, mask=mask, reduction="none"), losses)
        assert torch.equal(
            multilabel_loss(z, torch.where(mask, y, -7), mapping, ignore_index=-7, reduction="none"), losses
        )
        losses.sum().backward()
        assert bool((z.grad[:, [2, 5]] == 0).all())
        probs = multilabel_probabilities(z, mapping, mask=mask)
        assert bool((probs[:, ~mask] == 0).all())
        assert not bool(multilabel_predict(z, mapping, mask=mask)[:, ~mask].any())

    @pytest.mark.parametrize("mapping", ALL)
    def test_rows_without_labels(self, mapping):
        z = torch.randn(4, 5, dtype=F64, requires_grad=True)
        y = random_labels(4, 5)
        y[1] = 0
        y[2] = -100
        kept = multilabel_loss(z[[0, 3]], y[[0, 3]], mapping)
        loss = multilabel_loss(z, y, mapping)
        assert torch.allclose(loss, kept)
        loss.backward()
        assert bool((z.grad[[1, 2]] == 0).all())
        assert bool((z.grad[[0, 3]] != 0).any())
        with pytest.raises(ValueError, match="without any label"):
            multilabel_loss(z, y, mapping, empty="error")
        uniform = multilabel_loss(z, y, mapping, empty="uniform", reduction="none")
        full = y.clone()
        full[1] = 1
        assert torch.allclose(uniform, multilabel_loss(z, full, mapping, reduction="none"))
        assert uniform[1] > 0 and uniform[2] == 0
        nothing = multilabel_loss(z, torch.zeros(4, 5), mapping)
        assert nothing == 0
        (grad,) = torch.autograd.grad(nothing, z)
        assert bool((grad == 0).all())

    @pytest.mark.parametrize("mapping", ALL)
    def test_every_label_present(self, mapping):
        z = torch.randn(3, 4, dtype=F64, requires_grad=True)
        loss = multilabel_loss(z, torch.ones(3, 4), mapping)
        loss.backward()
        assert loss > 0
        assert bool(z.grad.isfinite().all())
        assert float(multilabel_loss(torch.full((3, 4), 0.7), torch.ones(3, 4), mapping)) == pytest.approx(
            math.log(4) if mapping == "softmax" else 0, abs=1e-6
        )


class TestPrediction:
    @pytest.mark.parametrize(
        ("mapping", "probs"),
        [
            ("softmax", lambda z: torch.softmax(z, -1)),
            ("sparsemax", sparsemax),
            ("sparsemax_hinge", sparsemax),
            ("entmax(alpha=1.3)", lambda z: entmax(z, 1.3)),
            ("sparsegen_lin(lam=0.4)", lambda z: C.sparsegen_lin(z, 0.4)),
            ("sparsehourglass(q=0.2)", lambda z: C.sparsehourglass(z, 0.2)),
        ],
    )
    def test_is_the_support(self, mapping, probs):
        z = torch.randn(30, 6)
        expected = probs(z)
        assert torch.allclose(multilabel_probabilities(z, mapping), expected, atol=1e-6)
        floor = 1 / 6 if mapping == "softmax" else 0.0
        assert torch.equal(multilabel_predict(z, mapping), expected > floor)
        assert torch.equal(multilabel_predict(z, mapping, threshold=0.25), expected > 0.25)

    def test_softmax_like_mappings_do_not_predict_everything(self):
        z = torch.randn(30, 6)
        assert not bool(multilabel_predict(z, "entmax(alpha=1)").all())
        assert torch.equal(multilabel_predict(z, "entmax", alpha=1.0), multilabel_predict(z, "softmax"))
        mask = torch.tensor([True, True, True, False, False, False])
        expected = torch.softmax(z[:, :3], -1) > 1 / 3
        assert torch.equal(multilabel_predict(z, "softmax", mask=mask)[:, :3], expected)

    @pytest.mark.parametrize("threshold", [-0.1, 1.0, math.nan])
    def test_threshold(self, threshold):
        with pytest.raises(ValueError, match=r"threshold must lie in \[0, 1\)"):
            multilabel_predict(torch.randn(2, 3), "softmax", threshold=threshold)


class TestBadInput:
    @pytest.mark.parametrize("value", [2, -1, 0.5, math.nan, math.inf])
    def test_labels_outside_zero_and_one(self, value):
        y = torch.tensor([[1.0, 0.0, value]])
        for mapping in MULTILABEL_LOSSES:
            with pytest.raises(ValueError, match="must be 0 or 1"):
                multilabel_loss(torch.randn(1, 3), y, mapping)

    def test_ignore_index_can_be_switched_off(self):
        with pytest.raises(ValueError, match="labels hold -100, but each must be 0 or 1: "):
            multilabel_loss(torch.randn(1, 3), torch.tensor([[1, 0, -100]]), ignore_index=None)

    @pytest.mark.parametrize(
        "mapping",
        ["sparsest", "sparsegen_lin(q=1)", "sparsegen_lin(lam)", "sparsegen_lin(lam=x)", "softmax(alpha=2)", "", "a b"],
    )
    def test_names(self, mapping):
        with pytest.raises(ValueError, match=r"choose from|has no options|cannot be read"):
            check_mapping(mapping)
        with pytest.raises(ValueError, match=r"choose from|has no options|cannot be read"):
            MultilabelLoss(mapping)

    @pytest.mark.parametrize(
        ("mapping", "options", "message"),
        [
            ("sparsegen_lin", {"lam": 1.0}, "lam must lie"),
            ("sparsegen_lin(lam=1)", {}, "lam must lie"),
            ("sparsehourglass", {"q": -0.5}, "q must lie"),
            ("sparsehourglass", {"q": torch.tensor(-0.5)}, "q must lie"),
            ("entmax", {"alpha": 0.9}, "alpha must lie"),
            ("entmax(alpha=1.2)", {"alpha": 1.2}, "second time"),
            ("sparsemax", {"lam": 0.1}, "has no options"),
        ],
    )
    def test_options(self, mapping, options, message):
        with pytest.raises(ValueError, match=message):
            multilabel_loss(torch.randn(2, 3), torch.ones(2, 3), mapping, **options)

    def test_shapes_and_types(self):
        z, y = torch.randn(2, 3), torch.ones(2, 3)
        with pytest.raises(ValueError, match="do not fit logits"):
            multilabel_loss(z, torch.ones(2, 4))
        with pytest.raises(ValueError, match="do not fit logits"):
            multilabel_loss(z, torch.ones(2))
        with pytest.raises(TypeError, match="logits must be"):
            multilabel_loss(z.long(), y)
        with pytest.raises(TypeError, match="labels must be"):
            multilabel_loss(z, y.to(torch.complex64))
        with pytest.raises(TypeError, match="bool"):
            multilabel_loss(z, y, mask=y)
        with pytest.raises(ValueError, match="cannot be broadcast"):
            multilabel_loss(z, y, mask=torch.ones(3, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"one weight per label is needed, \[3\]"):
            multilabel_loss(z, y, class_weight=torch.ones(2))
        with pytest.raises(ValueError, match="at least 0"):
            multilabel_loss(z, y, class_weight=torch.tensor([1.0, -1.0, 1.0]))
        with pytest.raises(TypeError, match="float tensor"):
            multilabel_loss(z, y, class_weight=torch.tensor([1, 1, 1]))
        with pytest.raises(ValueError, match="reduction"):
            multilabel_loss(z, y, reduction="average")
        with pytest.raises(ValueError, match="empty"):
            multilabel_loss(z, y, empty="drop")
        with pytest.raises(TypeError, match="string"):
            parse_mapping(None)
        with pytest.raises(TypeError, match="one element"):
            multilabel_loss(z, y, "sparsegen_lin", lam=torch.zeros(2))
        with pytest.raises(TypeError, match="real number"):
            multilabel_loss(z, y, "sparsegen_lin", lam="0.5")


class TestModule:
    def test_equals_the_function(self):
        z, y = torch.randn(6, 4), random_labels(6, 4)
        weight = torch.rand(4)
        loss = MultilabelLoss("sparsehourglass(q=0.5)", class_weight=weight, reduction="sum")
        assert torch.equal(
            loss(z, y), multilabel_loss(z, y, "sparsehourglass", q=0.5, class_weight=weight, reduction="sum")
        )
        assert torch.equal(loss.predict(z), multilabel_predict(z, "sparsehourglass(q=0.5)"))
        assert set(loss.state_dict()) == {"class_weight"}
        assert "sparsehourglass(q=0.5)" in repr(loss)

    def test_learns_an_option(self):
        z, y = torch.randn(6, 4), random_labels(6, 4)
        alpha = torch.nn.Parameter(torch.tensor(1.5))
        loss = MultilabelLoss("entmax", alpha=alpha)
        loss(z, y).backward()
        assert [name for name, _ in loss.named_parameters()] == ["options.alpha"]
        assert float(alpha.grad) != 0


def test_the_former_name_works_and_says_where_it_went():
    import hf_entmax
    from hf_entmax.losses import multilabel

    with pytest.warns(FutureWarning, match=r"import multilabel_loss from hf_entmax\.losses\.multilabel"):
        from hf_entmax.multilabel import multilabel_loss as former
    assert former is multilabel.multilabel_loss
    with pytest.warns(FutureWarning, match="has moved"):
        assert hf_entmax.multilabel.check_mapping is multilabel.check_mapping
