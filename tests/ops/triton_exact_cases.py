"""Exact sparse attention by the Triton kernels: never a wrong zero, and the output of the oracle. Run as `triton_cases.py` is."""

import dataclasses
import functools
import itertools
import math
import types

import pytest
import reference
import test_exact_paged
import torch
import triton
import triton.language as tl
import triton_cases  # which sets the device
from conformance import poison  # noqa: F401  a fixture
from test_exact_attention import ROWS
from tolerances import absolute_error, assert_half

from hf_entmax.ops import exact_sparse_attention, sketch_keys
from hf_entmax.ops.attention import head_alpha
from hf_entmax.ops.exact.paged import paged_attention
from hf_entmax.ops.options import AttentionOptions, append_sink
from hf_entmax.ops.triton_gpu import exact_host, exact_kernels

exact = functools.partial(exact_sparse_attention, backend="triton")
# Two key heads with two query heads each; three pages of 16 keys and two keys that are in none.
H, H_KV, T, D = 4, 2, 50, 20
LEARNED = torch.tensor([1.0, 1.1, 1.5, 1.8])


def draw(queries=1, batch=1, head_dim=D, value_dim=9, sharpness=3.0):
    shapes = ((H, queries, head_dim), (H_KV, T, head_dim), (H_KV, T, value_dim))
    query, key, value = (torch.randn(batch, *shape) for shape in shapes)
    return sharpness * query, key, value


def oracle(query, key, value, alpha, sink=None, **options):
    given = query.double(), key.double(), value.double()
    if sink is not None:
        *last, with_sink = append_sink(*given, AttentionOptions(**options, sink=sink.double()))
        given, options = (
            (given[0], *last),
            {name: getattr(with_sink, name) for name in ("attention_mask", "position_bias", "softcap")},
        )
        options["scaling"] = with_sink.scale(query.shape[-1])
    return reference.attention(*given, alpha, **options)


def check(query, sketch, key, value, alpha, **options):
    """Output and counts against the oracle; returns the shares of keys that were read."""
    out, counts = exact(query, sketch, key, value, alpha, **options)
    sink = options.pop("sink", None)
    expected = oracle(query, key, value, alpha, sink, **options)
    weights = expected["weights"][..., : key.shape[2]]
    assert absolute_error(out, expected["out"]) <= 2e-6 * float(value.abs().max())
    visible = AttentionOptions(**options).visible(query.shape[2], key.shape[2], query.device)
    visible = torch.ones(1, dtype=torch.bool) if visible is None else visible
    assert torch.equal(counts.total, visible.expand(weights.shape).sum((-1, -2)))
    # A weight that float32 rounds to zero may be one less.
    assert bool((counts.nonzero >= (weights > 1e-5).sum((-1, -2))).all() and (counts.nonzero <= counts.read).all())
    assert bool((counts.read >= (weights > 0).sum((-1, -2))).all() and (counts.read <= counts.total).all())
    return (counts.read / counts.total.clamp(min=1)).mean(0)


def option_cases():
    """Name -> (queries, options)."""
    real = torch.arange(T) >= 7
    additive = torch.zeros(1, 1, 1, T).masked_fill(~real, torch.finfo(torch.float32).min)
    bias = 3 * torch.randn(1, H, 2, T)
    return {
        "plain": (1, {}),
        "negative scaling": (1, {"scaling": -0.3}),
        "padding": (1, {"key_padding_mask": real.expand(1, T)}),
        "bool mask": (2, {"attention_mask": torch.rand(1, H, 2, T) < 0.5}),
        "additive mask, softcap": (1, {"attention_mask": additive, "softcap": 2.0}),
        "causal, infinite bias": (2, {"is_causal": True, "position_bias": bias.masked_fill(bias > 2, -math.inf)}),
        "window": (2, {"is_causal": True, "sliding_window": 20, "softcap": 5.0}),
        "sink": (1, {"sink": torch.linspace(-3, 6, H), "softcap": 3.0}),
        "no key": (1, {"key_padding_mask": torch.zeros(1, T, dtype=torch.bool), "sink": torch.zeros(H)}),
    }


@pytest.fixture(params=[3], autouse=True)
def splits(request, monkeypatch):
    """Over how many programs a row is split, of at most as many as there are pages."""
    monkeypatch.setattr(exact_host, "row_splits", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("splits", [1], indirect=True)
def test_exact_numbers_of_splits(monkeypatch):
    """What is read may grow with the number, as each split has its own bounds and only the highest of the others' pages."""
    query, key, value = draw()
    sketch, options = sketch_keys(key, 4, 16), {"is_causal": True, "sink": torch.linspace(-3, 3, H)}
    once = check(query, sketch, key, value, LEARNED, **options)
    for number in (2, 64):  # 64: more than there are pages
        monkeypatch.setattr(exact_host, "row_splits", lambda *_, number=number: number)
        assert bool((check(query, sketch, key, value, LEARNED, **options) >= once).all())


def test_exact_splits_fill_a_device(monkeypatch):
    monkeypatch.undo()  # of the fixture
    count = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: count)
    splits = functools.partial(exact_host.row_splits, device=torch.device("cuda"))
    # One sequence of 32 heads, eight, many; few keys; one row.
    assert [splits(32, 32768), splits(256, 32768), splits(2048, 32768)] == [8, 1, 1]
    assert [splits(32, 1024), splits(32, 10), splits(1, 2**20)] == [2, 1, 64]


def test_exact_blocks_of_one_buffer():
    options = {"softcap": 3.0, "scaling": 0.5, "sink": torch.linspace(-2, 2, 6)}
    query, key, value, table, sketch = test_exact_paged._problem()
    alpha = torch.tensor([1.0, 1.05, 1.5, 1.2, 2.0, 2.4])
    wide = query.double(), key.double(), value.double(), alpha.double()
    expected = test_exact_paged._alone(*wide, table, backend="torch", **options)
    given = {name: getattr(table, name).cpu() for name in ("tables", "lengths", "sketched")}
    out, counts = paged_attention(
        query, key, value, alpha, dataclasses.replace(table, **given), sketch, AttentionOptions(**options), "triton"
    )
    assert absolute_error(out, expected) <= 2e-5
    assert counts.total.tolist() == [[length] * len(alpha) for length in test_exact_paged.LENGTHS]
    assert bool((counts.nonzero <= counts.read).all() and (counts.read[3:, [2, 4]] < counts.total[3:, [2, 4]]).all())


@triton.jit
def _bounds_kernel(scores, width, low, high, N: tl.constexpr):
    cols = tl.arange(0, N)[None, :]
    z = tl.load(scores + cols)
    highest = tl.max(z, 1)[:, None]
    lower, upper = exact_kernels._bounds(exact_kernels._gap(z, highest), width, highest)
    tl.store(low + cols, lower)
    tl.store(high + cols, upper)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 300.0, 1e6, 1e30])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_exact_bounds_are_rounded_outwards(size, offset):
    """Upper ones are at or above the scores, lower ones at least a width below them, and both are close to them."""
    n, width = 4096, 0.25
    scores = torch.randn(n) * size * torch.logspace(-6, 0, n) + offset
    low, high = torch.empty(2, n)
    _bounds_kernel[(1,)](scores, width, low, high, N=n)
    gap, rounding = scores.max().double() - scores, 2.0**-23 * float(scores.abs().max())
    assert bool((high >= scores).all())
    assert bool((low <= scores.double() - width + rounding).all())
    near = gap < 60000
    assert bool((high - scores.double() <= gap / 128 + 2**-20 + rounding)[near].all())
    assert bool((scores.double() - width - low <= gap / 64 + 2**-20 + 2 * rounding)[near].all())
    # Unknown ones make all unknown, and what is not visible stays so.
    scores[:3] = torch.tensor([math.inf, -3e38, 5.0])
    _bounds_kernel[(1,)](scores, width, low, high, N=n)
    assert high[0] == math.inf and not bool(high[1] > -1.7e38) and high[2] == math.inf and bool((low < -1.7e38).all())


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
@pytest.mark.parametrize("name", option_cases())
def test_exact_options(name, monkeypatch):
    monkeypatch.setattr(exact_host, "_CHUNK", 32)  # several chunks of each list
    queries, options = option_cases()[name]
    bits = (2, 4, 6, 8)[list(option_cases()).index(name) % 4]
    query, key, value = draw(queries)
    check(query, sketch_keys(key, bits, 16), key, value, LEARNED, **options)


@pytest.mark.parametrize("kind", ROWS)
def test_exact_adversarial_rows(kind):
    """Values of the unit matrix make outputs of weights."""
    queries, keys, alphas = ROWS[kind]
    sizes = (1, 3, 1, 16), (1, 1, T, 16)
    for alpha in (torch.tensor([1.01, 1.3, 2.0]), torch.tensor([1.1, 1.5, 3.0]))[: 1 + (max(alphas) > 2)]:
        query, key = queries(*sizes[0]), keys(*sizes[1])
        value = torch.eye(T).expand(1, 1, T, T)
        weights, counts = exact(query, sketch_keys(key, 4, 48), key, value, alpha)
        expected = reference.attention(query.double(), key.double(), value.double(), alpha)["weights"]
        size = query.norm(dim=-1).max() * key.norm(dim=-1).max() * 16**-0.5
        close = max(2e-6, torch.finfo(torch.float32).eps * float(size))  # sums in another order
        assert absolute_error(weights, expected) <= close
        assert not bool(((weights == 0) & (expected > 10 * close)).any())
        assert bool((counts.read >= (expected > 10 * close).sum((-1, -2))).all())
        assert torch.equal(counts.nonzero, (weights > 0).sum((-1, -2)))


@pytest.mark.parametrize("splits", [1], indirect=True)
def test_exact_few_keys_are_read():
    query, key, value = 2 * torch.randn(1, 2, 1, 64), *torch.randn(2, 1, 1, 700, 64)
    read = [check(query, sketch_keys(key, bits), key, value, 1.5) for bits in (2, 4, 6, 8)]
    assert all(bool((fine <= coarse).all()) for coarse, fine in itertools.pairwise(read))
    assert bool((read[1] < 0.3).all() and (read[3] < 0.05).all())
    # No page at all: everything is bounded by its own score, and what is read is little more than what has weight.
    assert bool((check(query, sketch_keys(key[:, :, :40]), key, value, 1.5) < 0.05).all())


@pytest.mark.parametrize("head_dim", [5, 64, 80])
def test_exact_strides_and_half_precision(head_dim):
    for dtype in (torch.bfloat16, torch.float16):
        query, key, value = (t.to(dtype) for t in draw(head_dim=head_dim))
        key = torch.cat([key, key], 2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :T]  # with room for more
        out, _ = exact(query.mT.contiguous().mT, sketch_keys(key, 4, 16), key, value, 1.6)
        plain = torch.ops.aten.matmul(
            oracle(query, key, value, 1.6)["weights"].to(dtype), value.repeat_interleave(2, 1)
        )
        assert out.dtype == dtype
        assert_half(out, plain, oracle(query, key, value, 1.6)["out"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [3, T - 1])
def test_exact_keys_that_are_not_finite(bad, place):
    query, key, value = draw()
    key[0, 1, place, 2] = bad
    for options in ({}, {"softcap": 4.0}):
        out, _ = exact(query, sketch_keys(key, 4, 16), key, value, 1.5, **options)
        expected = oracle(query, key[:, :1], value[:, :1], 1.5, **options)["out"][:, :2]
        assert absolute_error(out[:, :2], expected) <= 1e-5
        # Under a softcap infinity is a score as any other.
        assert bool(out[:, 2:].isnan().all()) == (math.isnan(bad) or not options)
    real = torch.arange(T).expand(1, T) != place
    out, _ = exact(query, sketch_keys(key, 4, 16), key, value, 1.5, key_padding_mask=real)
    key[0, 1, place] = 0
    expected = oracle(query, key, value, 1.5, key_padding_mask=real)
    assert absolute_error(out, expected["out"]) <= 1e-5
    # A value without weight is not read; a query that is not finite spoils its own row.
    value[~(expected["weights"] > 0).view(1, H_KV, 2, T).any(2)] = bad
    query[0, 0] = bad
    out, _ = exact(query, sketch_keys(key, 4, 16), key, value, 1.5, key_padding_mask=real)
    assert bool(out[:, 0].isnan().all()) and absolute_error(out[:, 1:], expected["out"][:, 1:]) <= 1e-5


def test_exact_alphas_that_the_kernels_cannot_tell():
    query, key, value = draw()
    sketch = sketch_keys(key, 4, 16)
    with pytest.raises(ValueError, match="alpha: 64 is above"):
        exact(query, sketch, key, value, 64.0)
    # "auto" takes plain operations on a GPU; on a CPU it would compile the kernels for CPUs.
    backend = "torch" if triton_cases.INTERPRETED else "auto"
    out, _ = exact_sparse_attention(query, sketch, key, value, head_alpha(64.0, H), backend=backend)
    assert absolute_error(out, oracle(query, key, value, 64.0)["out"]) <= 1e-5
