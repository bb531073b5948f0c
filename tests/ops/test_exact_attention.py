"""Exact sparse attention: never a wrong zero, and the output of dense attention."""

import functools
import itertools
import math

import fresh
import pytest
import reference
import torch
from tolerances import absolute_error, assert_half
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_entmax.ops import available_backends, entmax_attention, exact_sparse_attention, sketch_keys
from hf_entmax.ops.exact.bounds import candidate_keys
from hf_entmax.ops.options import AttentionOptions

pytestmark = pytest.mark.usefixtures("two_threads")  # the kernels share rows among them

BACKENDS = [n for n, why in available_backends().items() if n != "triton" and why.startswith("available")]
B, H, H_KV, T, D = 2, 6, 2, 101, 16
EPS = torch.finfo(torch.float32).eps


def grid(*shape, largest=8, digits=4):
    """Multiples of 1/4: their products and sums are exact in float32, and many are equal."""
    return torch.randint(-largest, largest + 1, shape) / digits


#: Name -> (queries, keys) and the alphas whose weights float32 scores determine.
SMOOTH, ALL = (1.01, 1.1, 1.3, 1.5, 1.9, 2.0), (1.01, 1.3, 1.5, 2.0, 3.0, 8.0)
ROWS = {
    "normal": (lambda *s: 2 * torch.randn(s), lambda *s: torch.randn(s), SMOOTH),
    "sharp": (lambda *s: 20 * torch.randn(s), lambda *s: torch.randn(s), SMOOTH),
    "flat": (lambda *s: 1e-3 * torch.randn(s), lambda *s: torch.randn(s), SMOOTH),
    "ties": (grid, lambda *s: grid(*s, largest=2), ALL),
    "two values": (lambda *s: grid(*s, largest=2), lambda *s: grid(*s, largest=1, digits=1).sign(), ALL),
    "constant channels": (
        grid,
        lambda *s: torch.where(torch.arange(s[-1]) % 3 == 0, 16.0, grid(*s, largest=3)),
        ALL,
    ),
    "equal keys": (grid, lambda *s: grid(*s[:2], 1, s[-1]).expand(s).clone(), ALL),
    "huge ranges": (
        lambda *s: torch.randn(s),
        lambda *s: torch.randn(s) * 10.0 ** torch.randint(-6, 4, (s[-1],)),
        SMOOTH,
    ),
    "too large for float16": (
        lambda *s: 1e-4 * torch.randn(s),
        lambda *s: torch.randn(s) * torch.where(torch.rand((*s[:-1], 1)) < 0.02, 1e5, 1.0),
        SMOOTH,
    ),
    "denormal": (lambda *s: torch.randn(s), lambda *s: torch.randn(s) * 1e-39, SMOOTH),
    "tiny queries": (lambda *s: torch.randn(s) * 1e-38, lambda *s: torch.randn(s), SMOOTH),
}
EYE = torch.eye(T).expand(B, H_KV, T, T)


def dense(query, key, value, alpha, backend, **options):
    return entmax_attention(query, key, value, alpha, backend=backend, **options)[0]


@functools.cache
def weighed(kind, alpha, length):
    """Queries, keys, and their weights in float64: 60 rows for each query of a head."""
    query, key = ROWS[kind][0](5 * B, H, length, D), ROWS[kind][1](5 * B, H_KV, T, D)
    return query, key, reference.attention(query.double(), key.double(), key.double(), alpha)["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ROWS)
def test_never_a_wrong_zero(kind, backend):
    """Values of the unit matrix make outputs of weights: 15,000 rows in all for each backend and number of bits."""
    for alpha, length in itertools.product(ROWS[kind][2], (1, 3)):
        query, key, expected = weighed(kind, alpha, length)
        value, page = EYE[:1].expand(5 * B, -1, -1, -1), {1: 16, 3: 48}[length]
        plain = dense(query, key, value, alpha, backend)
        for bits in (2, 4, 8):
            sketch = sketch_keys(key, bits, page)
            weights, counts = exact_sparse_attention(query, sketch, key, value, alpha, backend=backend)
            size = query.norm(dim=-1).max() * key.norm(dim=-1).max() * D**-0.5
            close = max(1e-6, torch.finfo(torch.float32).eps * float(size))  # sums in another order
            assert absolute_error(weights, plain) <= close
            assert bool((counts.read >= (expected > 10 * close).sum((-1, -2))).all())
            assert torch.equal(counts.nonzero, (weights > 0).sum((-1, -2)))
            assert bool((counts.total == length * T).all())
            if backend == "torch":
                u = torch.full((H,), alpha - 1, dtype=torch.float64)
                candidates = candidate_keys(query, sketch, key, u, AttentionOptions())[1]
                assert not bool((~candidates & (expected > 0)).any())
            else:
                assert not bool(((weights == 0) & (expected > 10 * close)).any())


def option_cases():
    """Name -> (queries, options)."""
    real = torch.arange(T) >= torch.tensor([[0], [37]])
    holes = torch.rand(B, T) < 0.6
    additive = torch.zeros(B, 1, 1, T).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)
    bias = 3 * torch.randn(1, H, 3, T)
    return {
        "plain": (1, {}),
        "scaling": (1, {"scaling": 0.7}),
        "negative scaling": (1, {"scaling": -0.3}),
        "left padding": (1, {"key_padding_mask": real}),
        "right padding": (2, {"key_padding_mask": real.flip(1)}),
        "holes": (1, {"key_padding_mask": holes}),
        "bool mask": (3, {"attention_mask": torch.rand(B, 1, 3, T) < 0.5}),
        "mask of heads": (1, {"attention_mask": torch.rand(B, H, 1, T) < 0.5}),
        "additive mask": (2, {"attention_mask": additive}),
        "mask and padding": (1, {"attention_mask": additive, "key_padding_mask": holes}),
        "no key": (1, {"key_padding_mask": torch.zeros(B, T, dtype=torch.bool)}),
        "causal": (3, {"is_causal": True}),
        "window": (1, {"is_causal": True, "sliding_window": 20}),
        "windows": (4, {"is_causal": True, "sliding_window": 40}),
        "narrow window": (1, {"is_causal": True, "sliding_window": 1}),
        "softcap": (1, {"softcap": 2.0}),
        "softcap, bias, mask": (3, {"softcap": 5.0, "position_bias": bias, "attention_mask": additive}),
        "bias": (3, {"position_bias": bias}),
        "bias of one query": (1, {"position_bias": bias[:, :, :1]}),
        "infinite bias": (3, {"position_bias": bias.masked_fill(bias > 2, -math.inf)}),
        "one bias": (1, {"position_bias": torch.randn(1, H, 1, 1)}),
        "many queries": (40, {"is_causal": True}),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", option_cases())
def test_every_option_is_honoured(name, backend):
    queries, options = option_cases()[name]
    for bits, alpha in itertools.product((4, 6), (1.5, torch.tensor([1.0, 1.05, 1.2, 1.5, 1.75, 2.0]))):
        query, key, value = 3 * torch.randn(B, H, queries, D), torch.randn(B, H_KV, T, D), torch.randn(B, H_KV, T, 9)
        out, counts = exact_sparse_attention(
            query, sketch_keys(key, bits, 16), key, value, alpha, backend=backend, **options
        )
        plain, weights = entmax_attention(query, key, value, alpha, need_weights=True, backend=backend, **options)
        # A weight moves by no more than twice what its scores do: a few roundings of sums of products.
        largest = (query.abs() @ key.abs().repeat_interleave(H // H_KV, dim=1).mT).max() * abs(
            options.get("scaling", D**-0.5)
        )
        assert absolute_error(out, plain) <= 8 * EPS * float(largest.clamp(min=1)) * float(value.abs().max())
        visible = AttentionOptions(**options).visible(queries, T, query.device)
        visible = torch.ones(1, dtype=torch.bool) if visible is None else visible
        assert torch.equal(counts.total, visible.expand(B, H, queries, T).sum((-1, -2)))
        assert int((counts.nonzero - (weights > 0).sum((-1, -2))).abs().max()) <= 1
        assert bool((counts.nonzero <= counts.read).all() and (counts.read <= counts.total).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_keys_are_read(backend):
    key, value = torch.randn(1, 1, 4000, 64), torch.randn(1, 1, 4000, 64)
    query = 2 * torch.randn(1, 3, 1, 64)
    read = {}
    for bits in (2, 4, 6, 8):
        _, counts = exact_sparse_attention(query, sketch_keys(key, bits), key, value, 1.5, backend=backend)
        read[bits] = int(counts.read.sum()) / int(counts.total.sum())
    assert read[8] <= read[6] <= read[4] <= read[2] and read[4] < 0.2 and read[8] < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_head_dimensions_and_groups(backend):
    for kv_heads, head_dim, length in itertools.product((1, 2, 6), (5, 16, 33, 64), (7, 16, 90)):
        query = 3 * torch.randn(2, 1, 6, head_dim).transpose(1, 2)
        buffer = torch.randn(2, 128, kv_heads, head_dim).transpose(1, 2)  # as models lay it out, with room for more
        value = torch.randn(2, kv_heads, 128, head_dim)
        key, value = buffer[:, :, :length], value[:, :, :length]
        out, _ = exact_sparse_attention(query, sketch_keys(key, 4, 16), key, value, 1.6, backend=backend)
        assert absolute_error(out, dense(query, key, value, 1.6, backend)) <= 2e-6 * float(value.abs().max())
        rows = torch.randn(2, kv_heads, head_dim, 128).mT[:, :, :length]  # no stride is 1 along the head
        out, _ = exact_sparse_attention(query, sketch_keys(rows, 4, 16), rows, value, 1.6, backend=backend)
        assert absolute_error(out, dense(query, rows, value, 1.6, backend)) <= 2e-6 * float(value.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_in_half_precision(dtype, backend):
    for alpha, bits in itertools.product((1.1, 1.5, 2.0), (4, 8)):
        query, key, value = (t.to(dtype) for t in (3 * torch.randn(B, H, 2, D), *torch.randn(2, B, H_KV, T, D)))
        out, counts = exact_sparse_attention(query, sketch_keys(key, bits, 32), key, value, alpha, backend=backend)
        plain = dense(query, key, value, alpha, backend)
        expected = reference.attention(query.double(), key.double(), value.double(), alpha)
        assert out.dtype == dtype
        assert_half(out, plain, expected["out"])
        if backend == "numba":  # which computes in float32
            assert absolute_error(out, plain) <= torch.finfo(dtype).eps * float(plain.abs().max())
            assert bool((counts.read >= (expected["weights"] > 0).sum((-1, -2))).all())


def test_double_precision_runs_on_the_plain_path():
    query, key, value = 3 * torch.randn(1, 4, 1, 8).double(), *torch.randn(2, 1, 2, 50, 8).double()
    out, _ = exact_sparse_attention(query, sketch_keys(key), key, value, 1.5)
    assert absolute_error(out, reference.attention(query, key, value, 1.5)["out"]) <= 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_sink_is_one_more_score_without_a_value(backend, queries, softcap):
    query, key, value = 2 * torch.randn(B, H, queries, D), *torch.randn(2, B, H_KV, T, D)
    sink, alpha = torch.linspace(-3, 6, H), torch.tensor([1.0, 1.1, 1.4, 1.5, 1.7, 2.0])
    real = torch.arange(T) >= torch.tensor([[0], [T]])
    out, counts = exact_sparse_attention(
        query, sketch_keys(key), key, value, alpha, sink=sink, softcap=softcap, key_padding_mask=real, backend=backend
    )
    scores = (query.double() @ key.double().repeat_interleave(H // H_KV, 1).mT) * D**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~real[:, None, None], -math.inf)
    column = sink.double()[None, :, None, None].expand(B, -1, queries, 1)
    weights = reference.entmax(torch.cat((scores, column), -1), alpha.double()[:, None, None])[..., :-1]
    expected = weights @ value.double().repeat_interleave(H // H_KV, 1)
    assert absolute_error(out, expected) <= 3e-6
    assert bool((counts.nonzero <= counts.read).all()) and not bool(out[1].any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [3, 100])
def test_keys_that_are_not_finite_do_what_they_do_to_dense_attention(bad, place, backend):
    query, key, value = 3 * torch.randn(B, H, 1, D), *torch.randn(2, B, H_KV, T, D)
    key[0, 1, place, 2] = bad
    for options in ({}, {"softcap": 4.0}, {"position_bias": -50.0 * torch.ones(1, 1, 1, T)}):
        out, _ = exact_sparse_attention(query, sketch_keys(key, 4, 16), key, value, 1.5, backend=backend, **options)
        plain = dense(query, key, value, 1.5, backend, **options)
        assert torch.equal(out.isnan(), plain.isnan())
        assert absolute_error(out.nan_to_num(), plain.nan_to_num()) <= 1e-5
    # Where a query does not see it, it is not there.
    real = torch.arange(T).expand(B, T) != place
    out, _ = exact_sparse_attention(
        query, sketch_keys(key, 4, 16), key, value, 1.5, backend=backend, key_padding_mask=real
    )
    assert bool(out.isfinite().all())
    assert absolute_error(out, dense(query, key, value, 1.5, backend, key_padding_mask=real)) <= 3e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_queries_and_values_that_are_not_finite(bad, backend):
    query, key, value = 3 * torch.randn(B, H, 1, D), *torch.randn(2, B, H_KV, T, D)
    query[0, 1, 0, 3] = bad
    out, _ = exact_sparse_attention(query, sketch_keys(key), key, value, 1.5, backend=backend)
    plain = dense(query, key, value, 1.5, backend)
    assert torch.equal(out.isnan(), plain.isnan()) and bool(out[0, 1].isnan().all())
    # A value without weight is not read.
    query[0, 1, 0, 3] = 0.0
    weights = entmax_attention(query, key, value, 1.5, need_weights=True, backend="torch")[1]
    unread = ~(weights > 0).reshape(B, H_KV, -1, T).any(2)
    value[unread] = bad
    out, _ = exact_sparse_attention(query, sketch_keys(key), key, value, 1.5, backend=backend)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [3, 100])
def test_a_bias_that_is_infinite(place, backend):
    query, key, value = 3 * torch.randn(B, H, 1, D), *torch.randn(2, B, H_KV, T, D)
    bias = torch.zeros(1, H, 1, T)
    bias[0, 1, 0, place] = math.inf
    for term in ("position_bias", "attention_mask"):
        out, _ = exact_sparse_attention(
            query, sketch_keys(key, 4, 16), key, value, 1.5, backend=backend, **{term: bias}
        )
        plain = dense(query, key, value, 1.5, backend, **{term: bias})
        assert torch.equal(out.isnan(), plain.isnan()) and bool(out[:, 1].isnan().all())
        assert absolute_error(out.nan_to_num(), plain.nan_to_num()) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sink_that_is_not_finite(bad, backend):
    query, key, value = 3 * torch.randn(B, H, 1, D), *torch.randn(2, B, H_KV, T, D)
    sketch, sink = sketch_keys(key, 4, 16), torch.zeros(H)
    expected, _ = exact_sparse_attention(query, sketch, key, value, 1.5, backend=backend, sink=sink)
    sink[2] = bad
    out, _ = exact_sparse_attention(query, sketch, key, value, 1.5, backend=backend, sink=sink)
    expected[:, 2] = math.nan
    assert torch.allclose(out, expected, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [3, 100])
def test_counts_where_keys_are_not_finite(bad, place, backend):
    query, key, value = torch.rand(1, 4, 1, D), torch.randn(1, 2, T, D), torch.randn(1, 2, T, D)
    key[0, 0, place, 2] = bad  # a score that is as bad, since queries are positive
    seen = torch.tensor([20, 90, T, T])
    for mask in (torch.arange(T) < seen[:, None, None], torch.arange(T) >= T - seen[:, None, None]):
        for term in ({"attention_mask": mask[None]}, {"position_bias": torch.where(mask, 0.5, -math.inf)[None]}):
            _, counts = exact_sparse_attention(query, sketch_keys(key, 4, 16), key, value, 1.5, backend=backend, **term)
            assert torch.equal(counts.total, seen[None])
            assert bool((counts.nonzero <= counts.read).all() and (counts.read <= counts.total).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_that_grows_and_is_cropped(backend):
    buffer, values = torch.randn(2, B, H_KV, 200, D)
    sketch = sketch_keys(buffer[:, :, :1], 4, 16)
    for length in (1, 2, 15, 16, 17, 33, 120, 121, 60, 61, 64, 70, 200):
        if length < sketch.length:
            sketch.crop(length)
            buffer[:, :, length:] = torch.randn_like(buffer[:, :, length:])
        sketch.extend(buffer, length)
        query, key, value = 3 * torch.randn(B, H, 1, D), buffer[:, :, :length], values[:, :, :length]
        out, counts = exact_sparse_attention(query, sketch, key, value, 1.5, backend=backend)
        assert absolute_error(out, dense(query, key, value, 1.5, backend)) <= 4e-6
        assert int(counts.total[0, 0]) == length
    order = torch.tensor([1, 1])
    sketch.reorder(order)
    out, _ = exact_sparse_attention(query, sketch, buffer[order], values[order], 1.5, backend=backend)
    assert absolute_error(out, dense(query, buffer[order], values[order], 1.5, backend)) <= 4e-6


def test_no_keys_at_all():
    query, key = torch.randn(B, H, 1, D), torch.zeros(B, H_KV, 0, D)
    for backend in BACKENDS:
        out, counts = exact_sparse_attention(query, sketch_keys(key), key, key, 1.5, backend=backend)
        assert out.shape == (B, H, 1, D) and not bool(out.any()) and not bool(counts.total.any())


def test_what_is_refused():
    query, key = torch.randn(B, H, 1, D), torch.randn(B, H_KV, T, D)
    sketch = sketch_keys(key)

    def attend(query=query, sketch=sketch, key=key, alpha=1.5, **options):
        return exact_sparse_attention(query, sketch, key, torch.randn(key.shape), alpha, **options)

    for change, error in (
        ({"sketch": sketch_keys(key[:, :1])}, "the sketch was made for"),
        ({"sketch": sketch_keys(key[..., :8])}, "the sketch was made for"),
        ({"sketch": sketch_keys(key.bfloat16())}, "bfloat16"),
        ({"key": key[:, :, :60]}, "crop the sketch"),
        ({"alpha": 0.5}, "alpha"),
        ({"alpha": torch.full((H + 1,), 1.5)}, "alpha"),
        ({"sink": torch.zeros(H - 1)}, "sink has shape"),
        ({"sink": [0.0] * H}, "sink must be a floating tensor .* not list"),
        ({"sink": torch.zeros(H, dtype=torch.complex64)}, "sink must be .* not torch.complex64"),
        ({"sink": torch.zeros(H, dtype=torch.int64)}, "sink must be .* not torch.int64"),
        ({"sink": torch.zeros(H, device="meta")}, "sink is on meta, but query on cpu"),
        ({"softcap": -1.0}, "softcap"),
        ({"key_padding_mask": torch.ones(B, T - 1, dtype=torch.bool)}, "key_padding_mask"),
        ({"backend": "cuda"}, "backend"),
        ({"query": query[..., :8]}, "head dimension"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            attend(**change)
    with pytest.raises(RuntimeError, match="no gradient"):
        attend(query=query.clone().requires_grad_())
    with torch.no_grad():
        attend(query=query.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"torch\.func transform"):
        torch.vmap(lambda row: exact_sparse_attention(row[None], sketch, key, key, 1.5)[0])(query)


def test_fake_tensors():
    query, key = torch.randn(B, H, 1, D), torch.randn(B, H_KV, T, D)
    with FakeTensorMode() as mode:
        query, key = mode.from_tensor(query), mode.from_tensor(key)
        out, counts = exact_sparse_attention(query, sketch_keys(key), key, key[..., :5], 1.5, sink=torch.zeros(H))
        assert out.shape == (B, H, 1, 5) and all(count.shape == (B, H) for count in counts)


_PLAIN = """
import torch
from hf_entmax.ops import entmax_attention, exact_sparse_attention, sketch_keys
from hf_entmax.ops.numba_cpu import codes
assert not codes._HAS_VNNI and not codes._HAS_F16C
torch.manual_seed(0)
for dtype in (torch.float32, torch.float16):
    query, key, value = (torch.randn(2, n, t, 20).mul(2).to(dtype) for n, t in ((4, 1), (2, 150), (2, 150)))
    key[0, 0, 7] *= 1e-6
    out, counts = exact_sparse_attention(query, sketch_keys(key, 6, 32), key, value, 1.5, backend="numba")
    plain = entmax_attention(query, key, value, 1.5, backend="torch")[0]
    assert (out.float() - plain.float()).abs().max() <= (5e-6 if dtype == torch.float32 else 2e-2)
    assert 4 * counts.read.sum() < counts.total.sum()
"""


@pytest.mark.slow
@pytest.mark.skipif("numba" not in BACKENDS, reason="numba is not installed")
def test_processors_without_integer_products(tmp_path):
    run = fresh.run(_PLAIN, after="torch", environment={"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)})
    assert run.returncode == 0, run.stderr
