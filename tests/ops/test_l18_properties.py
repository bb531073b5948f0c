"""The property table of the mappings, shown: each tick on random scores, each cross by its counter-example."""

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from l18_properties import PROPERTIES, TABLE, markdown_table

CLAIMED = [(name, prop) for name in TABLE for prop in PROPERTIES if TABLE[name].claims[prop].holds is not False]
REFUTED = [(name, prop) for name in TABLE for prop in PROPERTIES if TABLE[name].claims[prop].refuted_by is not None]


def rows_of(kind, n=200, k=5, spread=2.0):
    """Random scores inside the domain of a mapping."""
    z = torch.randn(n, k, dtype=torch.float64) * spread
    if kind == "positive":
        return z.abs() + 1e-3
    if kind == "sum":
        return z - z.mean(-1, keepdim=True) + 1.0 / k
    return z


def apply(name, z, **options):
    row = TABLE[name]
    return row.function(z, **{**row.options, **options})


def defect(name, prop, z, change, **options):
    """How far a property is from holding at scores ``z`` (0 where it holds)."""
    f = functools.partial(apply, name, **options)
    if prop == "idempotence":
        return float((f(z) - z).abs().max())
    if prop == "monotonicity":
        order = z.argsort(-1)
        return float((-f(z).gather(-1, order).diff(dim=-1)).clamp(min=0).max())
    if prop == "translation_invariance":
        return float((f(z + change) - f(z)).abs().max())
    if prop == "scale_invariance":
        return float((f(z * change) - f(z)).abs().max())
    probs = f(z)
    return 0.0 if bool(probs.isfinite().all()) and torch.allclose(probs.sum(-1), torch.ones_like(probs[:, 0])) else 1.0


def test_every_mapping_and_property_is_in_the_table():
    assert len(TABLE) == 11
    for row in TABLE.values():
        assert tuple(row.claims) == PROPERTIES
    # Every cell is shown by at least one of the two tests below, and what depends on an option by both.
    assert len(set(CLAIMED) | set(REFUTED)) == 11 * len(PROPERTIES)
    both = {(name, prop) for name, prop in CLAIMED if TABLE[name].claims[prop].holds == "option"}
    assert both - {("sparsehourglass", "full_domain")} == set(CLAIMED) & set(REFUTED)


@pytest.mark.parametrize(("name", "prop"), CLAIMED)
def test_where_it_is_claimed_it_holds(name, prop):
    row, claim = TABLE[name], TABLE[name].claims[prop]
    options = dict(claim.options)
    if prop == "idempotence":
        z = torch.distributions.Dirichlet(torch.full((5,), 0.5, dtype=torch.float64)).sample((200,))
        z = torch.cat([z, torch.eye(5, dtype=torch.float64), torch.tensor([[0.5, 0.5, 0, 0, 0]], dtype=torch.float64)])
    elif prop == "full_domain":
        z = torch.cat([rows_of("all", spread=s) for s in (1e-3, 1.0, 1e3)])
        z = torch.cat([z, torch.zeros(1, 5, dtype=torch.float64), z - z.mean(-1, keepdim=True)])
    else:
        z = rows_of(row.domain)
    for change in (0.3, 1.7, 25.0):
        assert defect(name, prop, z, change, **options) < 1e-9


@pytest.mark.parametrize(("name", "prop"), REFUTED)
def test_where_it_is_refuted_the_example_refutes_it(name, prop):
    claim = TABLE[name].claims[prop]
    z = torch.tensor([claim.refuted_by], dtype=torch.float64)
    if prop == "full_domain":
        with pytest.raises(ValueError, match="defined for"):
            apply(name, z)
        return
    if prop == "idempotence":
        assert torch.allclose(z.sum(-1), torch.ones(1, dtype=torch.float64))
    assert defect(name, prop, z, claim.change) > 0.01


def test_sparsehourglass_needs_q_above_zero_for_the_full_domain():
    z = torch.tensor([1.0, -1.0])
    with pytest.raises(ValueError, match=r"sum\(scores\) != 0"):
        TABLE["sparsehourglass"].function(z, q=0.0)
    assert TABLE["sparsehourglass"].function(z, q=1e-6).tolist() == [1.0, 0.0]


OPTION_GRID = {
    "softmax": [{"temperature": t} for t in (0.3, 1.0, 2.0)],
    "sparsemax": [{}],
    "sparsegen_lin": [{"lam": x} for x in (-2.0, 0.0, 0.8)],
    "sparsehourglass": [{"q": q} for q in (0.05, 0.5, 3.0)],
}
FINITE = [(name, options) for name, grid in OPTION_GRID.items() for options in grid]


def steepest(name, options, k):
    """Scores at which the local slope comes close to the Lipschitz constant."""
    if name == "softmax":
        z = torch.full((k,), -200.0, dtype=torch.float64)
        z[:2] = 0.0
        return z
    if name == "sparsehourglass":
        # Nearly one-hot with full support, and a sum of (almost) zero.
        p = torch.full((k,), 1e-4, dtype=torch.float64)
        p[0] = 1 - (k - 1) * 1e-4
        q = options["q"]
        return (p - 1 / k) * (k * q) / (1 + k * q) + 1e-9
    return torch.linspace(0, 0.01, k, dtype=torch.float64)


@pytest.mark.parametrize(("name", "options"), FINITE)
@pytest.mark.parametrize("k", [2, 5])
def test_finite_lipschitz_constants_bound_and_are_attained(name, options, k):
    constant = TABLE[name].lipschitz.constant(k, options)
    for spread in (0.1, 1.0, 10.0):
        z = torch.randn(2000, k, dtype=torch.float64) * spread
        z = torch.cat([z, z - z.mean(-1, keepdim=True)])
        other = z + torch.randn_like(z) * spread * torch.rand(len(z), 1, dtype=torch.float64)
        change = (apply(name, z, **options) - apply(name, other, **options)).norm(dim=-1)
        assert bool((change <= constant * (z - other).norm(dim=-1) * (1 + 1e-9)).all())
    jacobian = torch.func.jacrev(lambda z: apply(name, z, **options))(steepest(name, options, k))
    slope = torch.linalg.matrix_norm(jacobian, ord=2)
    assert 0.99 * constant <= slope <= constant * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.lipschitz.constant is None])
def test_infinite_lipschitz_constants_grow_along_their_curve(name):
    slopes = []
    for t in (10.0, 100.0, 1000.0):
        z = torch.tensor(TABLE[name].lipschitz.steep(t), dtype=torch.float64)
        jacobian = torch.func.jacrev(functools.partial(apply, name))(z)
        slopes.append(float(torch.linalg.matrix_norm(jacobian, ord=2)))
    assert slopes[1] > 5 * slopes[0]
    assert slopes[2] > 5 * slopes[1]


@pytest.mark.parametrize("name", list(TABLE))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_all_are_permutation_equivariant_distributions(name, data):
    row = TABLE[name]
    values = data.draw(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=8))
    z = torch.tensor([values], dtype=torch.float64)
    if row.domain == "positive":
        z = z.abs() + 0.1
    elif row.domain == "sum":
        z = z - z.mean(-1, keepdim=True) + 1.0
    elif name == "spherical_softmax":
        z = torch.where(z == 0, 0.5, z)
    probs = apply(name, z)
    assert bool((probs >= 0).all())
    assert abs(float(probs.sum()) - 1) < 1e-9
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    assert torch.allclose(apply(name, z[:, order]), probs[:, order], atol=1e-9)


def test_the_page_has_this_table():
    lines = markdown_table().splitlines()
    page = Path(__file__).parents[2] / "model_cards" / "controllable_mappings.md"
    assert markdown_table() in page.read_text(encoding="utf-8")
    assert len(lines) == len(TABLE) + 2
    assert {line.count("|") for line in lines} == {8}
    hourglass = next(line for line in lines if "`sparsehourglass`" in line)
    assert hourglass == (
        "| `sparsehourglass` | ✓ | ✓ | ◐ (q → ∞) | ◐ (q = 0) | ◐ (q > 0) | √((1+1/(Kq))² + (K−1)/(Kq)²) |"
    )
