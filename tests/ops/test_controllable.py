"""The controllable mappings against brute force, quadratic programming, geometry, written-out Jacobians and limits."""

import functools
import inspect
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from simplex_oracles import minimise_on_simplex, project_by_enumeration

from hf_entmax.ops import controllable as C
from hf_entmax.ops.mapping import sparsemax

F64 = torch.float64

# name -> (option, its values, scores in the domain from any scores)
FAMILY = {
    "sparsegen_lin": ("lam", (-3.0, 0.0, 0.6), lambda z: z),
    "sparsegen_exp": ("lam", (-3.0, 0.0, 0.6), lambda z: z),
    "sparsegen_sq": ("lam", (-3.0, 0.0, 0.6), lambda z: z),
    "sparsegen_log": ("lam", (-3.0, 0.0, 0.6), lambda z: z.abs() + 0.1),
    "sparsecone": ("q", (0.2, 1.0, 7.0), lambda z: z - z.mean(-1, keepdim=True) + 0.3),
    "sparsehourglass": ("q", (0.2, 1.0, 7.0), lambda z: z),
    "softmax": ("temperature", (0.3, 1.0, 2.5), lambda z: z),
}
PLAIN = {
    "sum_normalization": lambda z: z.abs() + 0.1,
    "sum_normalization_pp": lambda z: z - z.mean(-1, keepdim=True) - 0.2,
    "spherical_softmax": lambda z: z,
}
WITH_OPTION = [(name, value) for name, (_, values, _) in FAMILY.items() for value in values]
ALL = [(name, value) for name, value in WITH_OPTION] + [(name, None) for name in PLAIN]


def mapping(name, value=None):
    function = getattr(C, name)
    return function if value is None else functools.partial(function, **{FAMILY[name][0]: value})


def in_domain(name, z):
    return FAMILY[name][2](z) if name in FAMILY else PLAIN[name](z)


@pytest.mark.parametrize("kind", ["lin", "exp", "sq", "log"])
@pytest.mark.parametrize("lam", [-2.0, 0.0, 0.5, 0.95])
def test_sparsegen_minimises_its_objective(kind, lam):
    g = {"lin": lambda z: z, "exp": np.exp, "sq": np.square, "log": np.log}[kind]
    for row in torch.randn(4, 5, dtype=F64).abs() + 0.1:
        y = g(row.numpy())
        p = C.sparsegen(row, kind, lam).numpy()
        expected = minimise_on_simplex(lambda p, y=y: ((p - y) ** 2).sum() - lam * (p**2).sum(), 5)
        assert np.abs(p - expected).max() < 2e-5
        assert np.abs(p - project_by_enumeration(y / (1 - lam))).max() < 1e-12
        assert torch.equal(C.sparsegen(row, kind, lam), getattr(C, f"sparsegen_{kind}")(row, lam))


def test_sparsegen_of_any_transformation_and_its_gradient():
    z = torch.randn(6, 5, dtype=F64, requires_grad=True)
    lam = torch.tensor(0.3, dtype=F64, requires_grad=True)
    expected = np.stack([project_by_enumeration(np.tanh(row) / 0.7) for row in z.detach().numpy()])
    assert np.abs(C.sparsegen(z, torch.tanh, 0.3).detach().numpy() - expected).max() < 1e-12
    assert torch.autograd.gradcheck(lambda z, lam: C.sparsegen(z, torch.tanh, lam), (z, lam))
    # A masked entry outside the domain of g is none of g's business.
    z = torch.tensor([[0.5, -1.0, 2.0]], dtype=F64, requires_grad=True)
    probs = C.sparsegen(z, torch.log, 0.0, mask=torch.tensor([True, False, True]))
    probs[0, 0].backward()
    assert torch.equal(probs, C.sparsegen_log(z, mask=torch.tensor([True, False, True])))
    assert bool(z.grad.isfinite().all()) and z.grad[0, 1] == 0


def test_sparsegen_contains_the_other_mappings():
    z = torch.randn(9, 6, dtype=F64)
    positive = z.abs() + 0.1
    total = lambda y: 1 - y.sum(-1, keepdim=True)  # noqa: E731
    assert torch.allclose(C.sparsegen_lin(positive, lam=total(positive)), C.sum_normalization(positive), atol=1e-12)
    assert torch.allclose(C.sparsegen_exp(z, lam=total(z.exp())), C.softmax(z), atol=1e-12)
    assert torch.allclose(C.sparsegen_sq(z, lam=total(z.square())), C.spherical_softmax(z), atol=1e-12)
    assert torch.equal(C.sparsegen_lin(z), sparsemax(z))
    assert torch.allclose(C.sparsehourglass(positive, q=0.0), C.sum_normalization(positive), atol=1e-12)
    assert torch.allclose(C.sparsecone(positive, q=0.8), C.sparsehourglass(positive, q=0.8), atol=1e-14)


@pytest.mark.parametrize("q", [0.0, 0.3, 2.0])
def test_sparsecone_is_the_projection_of_a_point_on_a_line(q):
    for row in torch.randn(8, 5, dtype=F64):
        z = (row - row.mean() + 0.4).numpy()
        apex = np.full(5, -q)
        # Walk from the apex through z until the coordinates sum to 1.
        t = (1 - apex.sum()) / (z.sum() - apex.sum())
        expected = project_by_enumeration(apex + t * (z - apex))
        assert np.abs(C.sparsecone(torch.from_numpy(z), q).numpy() - expected).max() < 1e-11


@pytest.mark.parametrize("q", [0.1, 1.0])
def test_sparsehourglass_is_sparsecone_of_the_mirror_point(q):
    z = torch.randn(20, 5, dtype=F64) * 3
    mirrored = torch.where(z.sum(-1, keepdim=True) < 0, z - 2 * z.mean(-1, keepdim=True), z)
    assert torch.allclose(mirrored.diff(dim=-1), z.diff(dim=-1))
    assert torch.allclose(C.sparsehourglass(z, q), C.sparsecone(mirrored, q), atol=1e-12)


class TestLimits:
    def test_lam_to_one_is_the_argmax(self):
        z = torch.randn(50, 7, dtype=F64)
        one_hot = torch.nn.functional.one_hot(z.argmax(-1), 7).to(F64)
        for k in range(1, 15):
            wrong = (C.sparsegen_lin(z, lam=1 - 10.0**-k) - one_hot).abs().amax(-1) > 0
            gap = z.topk(2).values.diff().abs().squeeze(-1)
            assert torch.equal(wrong, gap < 10.0**-k)
        tie = C.sparsegen_lin(torch.tensor([1.0, 1.0, 0.0], dtype=F64), lam=1 - 1e-12)
        assert torch.allclose(tie, torch.tensor([0.5, 0.5, 0.0], dtype=F64))

    @pytest.mark.parametrize("name", ["sparsegen_lin", "sparsegen_exp", "sparsegen_sq", "sparsegen_log"])
    def test_lam_to_minus_infinity_is_uniform_at_rate_one_over_lam(self, name):
        z = in_domain(name, torch.randn(50, 7, dtype=F64))
        defects = [float((mapping(name, -(10.0**k))(z) - 1 / 7).abs().max()) for k in (3, 5, 7)]
        assert defects[0] < 0.1
        for near, far in itertools.pairwise(defects):
            assert far == pytest.approx(near / 100, rel=0.02)

    def test_masked_entries_stay_out_however_uniform_the_rest(self):
        for low in (-math.inf, torch.finfo(torch.float32).min):
            z = torch.tensor([3.0, low, 1.0, -2.0])
            for lam in (-1e30, -1e300, torch.tensor([-1e38])):
                assert torch.allclose(C.sparsegen_lin(z, lam=lam), torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]))
                assert C.sparsegen_lin(z.expand(2, 4) + 1, lam=lam)[:, 1].tolist() == [0, 0]
            assert C.softmax(z, temperature=1e38)[1] == 0

    def test_the_support_never_grows_with_lam(self):
        z = torch.randn(50, 12, dtype=F64)
        sizes = torch.stack([(C.sparsegen_lin(z, lam=x) > 0).sum(-1) for x in (-20.0, -3.0, 0.0, 0.5, 0.9, 0.999)])
        assert bool((sizes.diff(dim=0) <= 0).all())
        assert bool((sizes[0] > sizes[-1]).all())

    def test_q_zero_is_sum_normalization_and_q_infinity_sparsemax(self):
        z = torch.randn(50, 6, dtype=F64)
        assert torch.equal(C.sparsehourglass(z, q=math.inf), sparsemax(z))
        defects = [float((C.sparsehourglass(z, q=10.0**k) - sparsemax(z)).abs().max()) for k in (2, 4, 6)]
        for near, far in itertools.pairwise(defects):
            assert far == pytest.approx(near / 100, rel=0.1)
        expected = sparsemax(z / z.sum(-1, keepdim=True).abs())
        assert torch.allclose(C.sum_normalization_pp(z), expected, atol=1e-9)
        assert torch.allclose(C.sparsehourglass(z, q=1e-12), expected, atol=1e-6)

    def test_temperature(self):
        z = torch.tensor([1.0, 0.9, -2.0], dtype=F64)
        assert torch.allclose(C.softmax(z, temperature=1e-4), torch.tensor([1.0, 0.0, 0.0], dtype=F64))
        assert torch.allclose(C.softmax(z, temperature=1e9), torch.full((3,), 1 / 3, dtype=F64))
        assert torch.allclose(C.softmax(z, temperature=0.7), torch.softmax(z / 0.7, -1))


class TestGradients:
    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "value"), ALL)
    @pytest.mark.parametrize("masked", [False, True])
    def test_gradcheck_twice(self, name, value, masked):
        z = in_domain(name, torch.randn(3, 5, dtype=F64)).requires_grad_()
        mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5]) if masked else None
        if masked and name in ("sparsecone", "sum_normalization_pp"):
            z = (z.detach() + 2.0).requires_grad_()
        if value is None:
            assert torch.autograd.gradcheck(lambda z: getattr(C, name)(z, mask=mask), (z,))
            assert torch.autograd.gradgradcheck(lambda z: getattr(C, name)(z, mask=mask), (z,))
            return
        option = FAMILY[name][0]
        for shape in ((), (3, 1), (1,)):
            learned = torch.full(shape, value, dtype=F64, requires_grad=True)
            function = lambda z, x: getattr(C, name)(z, **{option: x}, mask=mask)  # noqa: E731
            assert torch.autograd.gradcheck(function, (z, learned))
            assert torch.autograd.gradgradcheck(function, (z, learned))

    def test_jacobians_written_out(self):
        z = torch.tensor([0.9, 0.6, -0.2, -1.5], dtype=F64)
        jacobian = torch.func.jacrev
        centre = lambda s: torch.diag(s) - torch.outer(s, s) / s.sum()  # noqa: E731
        s = (sparsemax(z) > 0).to(F64)
        assert s.tolist() == [1, 1, 0, 0]
        assert torch.allclose(jacobian(sparsemax)(z), centre(s), atol=1e-14)
        s = (C.sparsegen_exp(z, lam=-2.0) > 0).to(F64)
        assert s.sum() > 2
        expected = centre(s) @ torch.diag(z.exp()) / 3
        assert torch.allclose(jacobian(lambda z: C.sparsegen_exp(z, lam=-2.0))(z), expected, rtol=1e-12, atol=1e-14)
        q, total = 0.5, float(z.sum())
        a = (1 + 4 * q) / (abs(total) + 4 * q)
        s = (C.sparsehourglass(z, q) > 0).to(F64)
        expected = centre(s) @ (
            a * torch.eye(4, dtype=F64)
            - torch.outer(z, torch.full((4,), a / (abs(total) + 4 * q), dtype=F64)) * math.copysign(1, total)
        )
        assert torch.allclose(jacobian(lambda z: C.sparsehourglass(z, q))(z), expected, rtol=1e-12, atol=1e-14)
        p = C.spherical_softmax(z)
        expected = 2 * (torch.diag(z) - torch.outer(p, z)) / z.square().sum()
        assert torch.allclose(jacobian(C.spherical_softmax)(z), expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(("name", "value"), WITH_OPTION)
    def test_one_option_per_head(self, name, value):
        option = FAMILY[name][0]
        z = in_domain(name, torch.randn(2, 3, 4, 5, dtype=F64))
        heads = torch.tensor([value, value - 0.05, value + 0.1], dtype=F64).view(3, 1, 1).requires_grad_()
        weight = torch.randn(2, 3, 4, 5, dtype=F64)
        out = getattr(C, name)(z, **{option: heads})
        (out * weight).sum().backward()
        for head in range(3):
            alone = heads.detach()[head].reshape(()).requires_grad_()
            part = getattr(C, name)(z[:, head], **{option: alone})
            assert torch.allclose(part, out[:, head], atol=1e-14)
            (part * weight[:, head]).sum().backward()
            assert torch.allclose(heads.grad[head].reshape(()), alone.grad, atol=1e-12)

    @pytest.mark.parametrize(("name", "value"), ALL)
    def test_under_torch_func(self, name, value):
        z = in_domain(name, torch.randn(4, 5, dtype=F64))
        function = lambda z: mapping(name, value)(z)[..., 0].sum()  # noqa: E731
        expected = torch.func.grad(function)(z)
        assert torch.allclose(torch.func.vmap(torch.func.grad(function))(z), expected, atol=1e-12)
        last = torch.func.vmap(mapping(name, value), in_dims=1, out_dims=1)(z.T.contiguous())
        assert torch.allclose(last.T, mapping(name, value)(z), atol=1e-12)

    def test_vmap_over_options(self):
        z = torch.randn(4, 5, dtype=F64)
        lam = torch.tensor([0.1, 0.5, -1.0, 0.9], dtype=F64)
        rows = torch.func.vmap(lambda z, x: C.sparsegen_lin(z, lam=x))(z, lam)
        assert torch.allclose(rows, C.sparsegen_lin(z, lam=lam[:, None]))
        shared = torch.func.vmap(lambda x: C.sparsehourglass(z, q=x))(lam.abs())
        assert torch.allclose(shared[2], C.sparsehourglass(z, q=1.0))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "value"), [("sparsegen_lin", 0.4), ("sparsehourglass", 0.5), ("sparsegen_exp", 0.1)]
    )
    def test_compiles_without_graph_breaks(self, name, value):
        z = torch.randn(6, 80, dtype=F64)
        option = torch.tensor(value, dtype=F64)
        results = []
        eager = lambda z, x: getattr(C, name)(z, **{FAMILY[name][0]: x})  # noqa: E731
        for function in (eager, torch.compile(eager, fullgraph=True, backend="aot_eager")):
            leaf, x = z.clone().requires_grad_(), option.clone().requires_grad_()
            out = function(leaf, x)
            out.square().sum().backward()
            results.append((out.detach(), leaf.grad, x.grad))
        for one, two in zip(*results, strict=True):
            assert torch.allclose(one, two, atol=1e-12)


class TestShapesTypesAndMasks:
    @pytest.mark.parametrize(("name", "value"), ALL)
    def test_any_dimension(self, name, value):
        z = in_domain(name, torch.randn(2, 3, 4, 5, dtype=F64))
        expected = mapping(name, value)(z)
        for dim in (0, 1, 2, -2):
            moved = z.movedim(-1, dim)
            assert torch.allclose(mapping(name, value)(moved, dim=dim).movedim(dim, -1), expected, atol=1e-14)

    @pytest.mark.parametrize(("name", "value"), ALL)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_narrow_types_lose_no_more_than_their_rounding(self, name, value, dtype):
        z = in_domain(name, torch.randn(20, 40)).to(dtype)
        if name in ("sparsecone", "sum_normalization_pp"):
            z = (z.abs() + 0.1).to(dtype)  # a sum near zero would ask for more digits than the input has
        leaf, wide = z.clone().requires_grad_(), z.to(F64).requires_grad_()
        weight = torch.randn(20, 40)
        out, expected = mapping(name, value)(leaf), mapping(name, value)(wide)
        assert out.dtype == dtype
        eps = torch.finfo(dtype).eps
        # sparsehourglass can divide by a small row sum; the error allowed grows with its scale.
        scale = 50 if name == "sparsehourglass" else 4
        assert (out.double() - expected).abs().max() <= scale * eps
        (out.float() * weight).sum().backward()
        (expected * weight.double()).sum().backward()
        size = wide.grad.abs().max()
        assert leaf.grad.dtype == dtype
        assert (leaf.grad.double() - wide.grad).abs().max() <= 400 * eps * size

    @pytest.mark.parametrize(("name", "value"), ALL)
    def test_masking_equals_leaving_out(self, name, value):
        z = in_domain(name, torch.randn(6, 5, dtype=F64)).abs() + 0.05
        filler = torch.tensor([-50.0, 0.0, 1e6], dtype=F64).expand(6, 3)
        wide = torch.cat([filler[:, :1], z, filler[:, 1:]], dim=-1).requires_grad_()
        mask = torch.tensor([False] + [True] * 5 + [False] * 2)
        weight = torch.randn(6, 5, dtype=F64)
        narrow = z.clone().requires_grad_()
        expected = mapping(name, value)(narrow)
        (expected * weight).sum().backward()
        out = mapping(name, value)(wide, mask=mask)
        assert torch.allclose(out[:, mask], expected, atol=1e-14)
        assert bool((out[:, ~mask] == 0).all())
        (out[:, mask] * weight).sum().backward()
        assert torch.allclose(wide.grad[:, mask], narrow.grad, atol=1e-12)
        assert bool((wide.grad[:, ~mask] == 0).all())

    @pytest.mark.parametrize(("name", "value"), ALL)
    @pytest.mark.parametrize("low", [-math.inf, "finfo.min"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_scores_can_carry_the_mask(self, name, value, low, dtype):
        z = (torch.randn(4, 6).abs() + 0.1).to(dtype)
        mask = torch.rand(4, 6) > 0.4
        mask[:, 0] = True
        mask[3] = False
        low = torch.finfo(dtype).min if low == "finfo.min" else low
        leaf = z.masked_fill(~mask, low).requires_grad_()
        out = mapping(name, value)(leaf)
        assert torch.equal(out, mapping(name, value)(z, mask=mask))
        out[:, 0].sum().backward()
        assert bool(leaf.grad.isfinite().all())
        assert bool((leaf.grad[~mask] == 0).all())

    @pytest.mark.parametrize(("name", "value"), ALL)
    def test_rows_masked_whole_are_zero_and_pass_no_gradient(self, name, value):
        z = (torch.randn(3, 4).abs() + 0.1).requires_grad_()
        mask = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
        options = {}
        if value is not None:
            options[FAMILY[name][0]] = torch.tensor(value, requires_grad=True)
        out = getattr(C, name)(z, mask=mask, **options)
        assert bool((out[1] == 0).all())
        assert torch.allclose(out.sum(-1), torch.tensor([1.0, 0.0, 1.0]))
        (out * torch.randn(3, 4)).sum().backward()
        assert bool((z.grad[1] == 0).all())
        assert bool(z.grad.isfinite().all())
        for learned in options.values():
            assert bool(learned.grad.isfinite())

    @pytest.mark.parametrize(
        ("name", "value"), [*((n, v) for n, v in WITH_OPTION if n not in ("sparsegen_log", "sparsecone"))]
    )
    @pytest.mark.parametrize("size", [1e-30, 1e4, 1e18, 3e37])
    def test_extreme_scores_stay_finite(self, name, value, size):
        z = (
            torch.tensor([[1.0, -1.0, 0.5, 1.0], [-1.0, -2.0, -3.0, -4.0], [0.0, 0.0, 0.0, 0.0]]) * size
        ).requires_grad_()
        out = mapping(name, value)(z)
        assert bool(out.isfinite().all())
        assert torch.allclose(out.sum(-1), torch.ones(3))
        out[:, 0].sum().backward()
        assert not bool(z.grad.isnan().any())
        # Between tied scores the slope of exp itself is beyond the largest float.
        assert bool(z.grad.isfinite().all()) or name == "sparsegen_exp"

    def test_nan_is_seen_and_stays_in_its_row(self):
        z = torch.tensor([[0.1, math.nan, 0.3], [0.1, 0.2, 0.3]])
        for function in (C.sparsegen_lin, C.sparsegen_log, C.sparsehourglass, C.softmax, C.spherical_softmax):
            out = function(z)
            assert bool(out[0].isnan().any())
            assert bool(out[1].isfinite().all())


class TestBadInput:
    @pytest.mark.parametrize("name", ["sparsegen_lin", "sparsegen_exp", "sparsegen_sq", "sparsegen_log", "sparsegen"])
    @pytest.mark.parametrize(
        "lam", [1.0, 1.5, 2, math.inf, -math.inf, math.nan, torch.tensor(1.0), torch.tensor([[0.5], [1.0]])]
    )
    def test_lam_at_least_one(self, name, lam):
        with pytest.raises(ValueError, match=r"lam must lie in \(-inf, 1\)"):
            getattr(C, name)(torch.rand(2, 3) + 0.1, lam=lam)

    @pytest.mark.parametrize("name", ["sparsecone", "sparsehourglass"])
    @pytest.mark.parametrize("q", [-1e-6, -1, -math.inf, math.nan, torch.tensor(-0.1)])
    def test_negative_q(self, name, q):
        with pytest.raises(ValueError, match=r"q must lie in \[0, inf\]"):
            getattr(C, name)(torch.rand(2, 3), q=q)

    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan, torch.tensor([0.0])])
    def test_temperature(self, temperature):
        with pytest.raises(ValueError, match=r"temperature must lie in \(0, inf\)"):
            C.softmax(torch.rand(2, 3), temperature=temperature)

    @pytest.mark.parametrize("scores", [[1.0, 0.0], [1.0, -0.5], [-1.0, -2.0]])
    def test_log_of_non_positive_scores(self, scores):
        with pytest.raises(ValueError, match="scores > 0"):
            C.sparsegen_log(torch.tensor(scores))
        with pytest.raises(ValueError, match="scores > 0"):
            C.sparsegen(torch.tensor(scores), "log")
        with pytest.raises(ValueError, match="outside the domain of g"):
            C.sparsegen(torch.tensor(scores), torch.log)

    @pytest.mark.parametrize(
        ("scores", "q"),
        [([-1.0, -1.0], 1.0), ([-5.0, 1.0], 1.0), ([0.5, -0.5], 0.0), ([-1.0, -1.0], torch.tensor(0.5))],
    )
    def test_sparsecone_outside_its_domain(self, scores, q):
        with pytest.raises(ValueError, match=r"sum\(scores\) > -K\*q"):
            C.sparsecone(torch.tensor(scores), q=q)

    def test_sparsecone_counts_allowed_entries_only(self):
        z = torch.tensor([-1.5, 0.2, 9.0])
        mask = torch.tensor([True, True, False])
        assert bool(C.sparsecone(z, q=1.0, mask=mask).isfinite().all())
        with pytest.raises(ValueError, match="sparsecone is defined"):
            C.sparsecone(z, q=0.5, mask=mask)

    def test_other_domains(self):
        with pytest.raises(ValueError, match="scores >= 0"):
            C.sum_normalization(torch.tensor([1.0, -0.1]))
        with pytest.raises(ValueError, match="positive sum"):
            C.sum_normalization(torch.tensor([0.0, 0.0]))
        with pytest.raises(ValueError, match=r"sum\(scores\) != 0"):
            C.sum_normalization_pp(torch.tensor([1.0, -1.0]))
        with pytest.raises(ValueError, match="nonzero score"):
            C.spherical_softmax(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="sums to zero"):
            C.sparsehourglass(torch.tensor([[1.0, -1.0]]), q=torch.tensor([[0.0]]))

    def test_shapes_and_types(self):
        z = torch.rand(2, 3)
        with pytest.raises(TypeError, match="floating-point"):
            C.sparsegen_lin(torch.ones(2, 3, dtype=torch.long))
        with pytest.raises(TypeError, match="bool"):
            C.softmax(z, mask=torch.ones(2, 3))
        with pytest.raises(ValueError, match="cannot be broadcast"):
            C.softmax(z, mask=torch.ones(4, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match="no entry along"):
            C.sparsehourglass(torch.ones(2, 0))
        with pytest.raises(ValueError, match="no entry along"):
            C.sparsegen_lin(torch.tensor(1.0))
        with pytest.raises(ValueError, match="size 1 along dim"):
            C.sparsegen_lin(z, lam=torch.zeros(3))
        with pytest.raises(ValueError, match="does not fit"):
            C.sparsegen_lin(z, lam=torch.zeros(5, 1))
        with pytest.raises(TypeError, match="real number"):
            C.sparsegen_lin(z, lam="0.5")
        with pytest.raises(TypeError, match="real number"):
            C.sparsehourglass(z, q=True)
        with pytest.raises(TypeError, match="floating-point"):
            C.sparsehourglass(z, q=torch.tensor(1))
        with pytest.raises(ValueError, match="choose from"):
            C.sparsegen(z, "cube")
        with pytest.raises(TypeError, match="callable"):
            C.sparsegen(z, 3)
        with pytest.raises(ValueError, match="return a tensor of shape"):
            C.sparsegen(z, lambda z: z[:1])
        with pytest.raises(IndexError):
            C.sparsegen_lin(z, dim=5)


class TestModules:
    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            (C.SparsegenLin(0.4), lambda z, m: C.sparsegen_lin(z, 0.4, mask=m)),
            (C.SparsegenExp(0.4), lambda z, m: C.sparsegen_exp(z, 0.4, mask=m)),
            (C.SparsegenSq(-1.0), lambda z, m: C.sparsegen_sq(z, -1.0, mask=m)),
            (C.SparsegenLog(), lambda z, m: C.sparsegen_log(z, mask=m)),
            (C.Sparsegen(torch.tanh, 0.2), lambda z, m: C.sparsegen(z, torch.tanh, 0.2, mask=m)),
            (C.Sparsecone(2.0), lambda z, m: C.sparsecone(z, 2.0, mask=m)),
            (C.Sparsehourglass(0.3), lambda z, m: C.sparsehourglass(z, 0.3, mask=m)),
            (C.Softmax(0.5), lambda z, m: C.softmax(z, 0.5, mask=m)),
            (C.SumNormalization(), lambda z, m: C.sum_normalization(z, mask=m)),
            (C.SumNormalizationPP(), lambda z, m: C.sum_normalization_pp(z, mask=m)),
            (C.SphericalSoftmax(), lambda z, m: C.spherical_softmax(z, mask=m)),
        ],
    )
    def test_equal_their_functions(self, module, expected):
        z = torch.rand(4, 5) + 0.1
        mask = torch.rand(4, 5) > 0.3
        assert torch.equal(module(z, mask), expected(z, mask))
        assert torch.equal(module(z), expected(z, None))
        assert not list(module.parameters())
        module.dim = 0
        assert torch.allclose(module(z.T), expected(z, None).T)

    @pytest.mark.parametrize(
        ("module", "low", "high"),
        [(C.SparsegenLin, -4.0, 0.95), (C.Sparsehourglass, 0.01, 10.0), (C.Softmax, 0.05, 5.0)],
    )
    def test_learned_options_stay_inside(self, module, low, high):
        learned = module("learned", shape=(3, 1, 1))
        z = torch.randn(2, 3, 4, 5)
        target = torch.rand(2, 3, 4, 5)
        optimiser = torch.optim.SGD(learned.parameters(), lr=1e4)
        assert learned.option.a.shape == (3, 1, 1)
        for _ in range(3):
            (learned(z) * target).sum().backward()
            optimiser.step()
            value = learned.value()
            assert bool(((value >= low) & (value <= high)).all())
            assert bool(learned(z).isfinite().all())

    def test_learning_recovers_an_option(self):
        torch.manual_seed(1)
        z = torch.randn(256, 8)
        target = C.sparsegen_lin(z, lam=-1.0)
        learned = C.SparsegenLin("learned", init=0.3)
        assert float(learned.value().detach()) == pytest.approx(0.3, abs=1e-6)
        optimiser = torch.optim.Adam(learned.parameters(), lr=0.1)
        for _ in range(150):
            optimiser.zero_grad()
            (learned(z) - target).square().sum().backward()
            optimiser.step()
        assert float(learned.value().detach()) == pytest.approx(-1.0, abs=0.01)

    def test_bad_modules(self):
        with pytest.raises(ValueError, match="lam must lie"):
            C.SparsegenLin(1.0)
        with pytest.raises(ValueError, match='or "learned"'):
            C.Sparsehourglass("auto")
        with pytest.raises(ValueError, match="is fixed"):
            C.SparsegenLin(0.1, init=0.2)
        with pytest.raises(ValueError, match="strictly between"):
            C.SparsegenLin("learned", init=0.97)
        with pytest.raises(ValueError, match="lam must lie"):
            C.SparsegenLin("learned", bounds=(0.0, 2.0))
        with pytest.raises(ValueError, match="finite interval"):
            C.Sparsehourglass("learned", bounds=(0.1, math.inf))

    def test_a_learned_option_starts_inside_its_bounds(self):
        assert float(C.SparsegenLin("learned", bounds=(0.2, 0.6)).value().detach()) == pytest.approx(0.4)
        assert float(C.Softmax("learned").value().detach()) == pytest.approx(1.0)

    def test_signatures_and_names_are_those_of_the_functions(self):
        assert list(inspect.signature(C.Sparsegen).parameters) == ["g", "lam", "dim", "init", "bounds", "shape"]
        assert repr(C.SparsegenLin(0.5)) == "SparsegenLin(lam=0.5, dim=-1)" and repr(C.SphericalSoftmax(1)).endswith(
            "(dim=1)"
        )
        with pytest.raises(TypeError, match="unexpected keyword argument 'lam'"):
            C.Softmax(lam=0.5)
        again = pickle.loads(pickle.dumps(C.Sparsehourglass("learned", shape=(2, 1))))
        assert list(again.state_dict()) == ["option.a"]
