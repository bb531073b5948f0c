"""The Triton kernels against the oracle: in Triton's interpreter on the CPU, or compiled on a GPU.

`test_triton_gpu.py` runs this file in a process of its own, since TRITON_INTERPRET has to be set before anything imports Triton
(torch.compile does). To run it alone: ``TRITON_INTERPRET=1 python -m pytest tests/ops/triton_cases.py``; on a machine with a
GPU, without that variable.
"""

import functools
import math
import os
import sys
import types

import pytest
import reference
import torch
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint
from triton.runtime import interpreter

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from conformance import *  # noqa: F403  the tests of every backend, and what they need
from conformance import K, Q, Subject, _check_half, compare, leaves
from device_report import report  # noqa: F401  a fixture
from tolerances import assert_forward, assert_gradient, measured

from hf_entmax.losses import entmax_loss, linear_entmax_loss
from hf_entmax.ops import backends, entmax, entmax_attention, rows, self_check, triton_gpu
from hf_entmax.ops.candidates import dense_probs, solve_rows
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.triton_gpu import blocks, exact_host, launch, row_host, row_kernel, row_math, tiles, unsupported

attention = functools.partial(entmax_attention, backend="triton")
torch_attention = functools.partial(entmax_attention, backend="torch")
INTERPRETED = isinstance(launch.forward._entmax_attention_fwd_kernel, interpreter.InterpretedFunction)
assert INTERPRETED or torch.cuda.is_available(), "set TRITON_INTERPRET=1 where there is no GPU"
if not INTERPRETED:
    torch.set_default_device("cuda")
DEVICE = torch.get_default_device().type


def _patch_once(function, patch=interpreter._patch_lang):
    """The interpreter searches Triton's language anew for every call inside a kernel, which is half of its time."""
    seen = [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]
    fresh = any(tl.core.is_builtin(module.load) for module in seen)
    return patch(function) if fresh else types.SimpleNamespace(restore=lambda: None)


interpreter._patch_lang = _patch_once

# One process runs the whole file: the random masks below must not depend on what was imported before.
torch.manual_seed(0)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def subject():
    return Subject("triton", weights=False)


@pytest.fixture
def kernel(subject):
    return subject


def make(B=1, H=2, H_kv=None, T_q=Q, T_k=K, D=16, D_v=None, sharpness=2.0, dtype=torch.float32, alpha=(1.3, 1.75)):
    query = (torch.randn(B, H, T_q, D) * sharpness).to(dtype)
    key = torch.randn(B, H_kv or H, T_k, D).to(dtype)
    # Values within one: an error of the output is then an average of errors of the weights.
    value = (torch.rand(B, H_kv or H, T_k, D_v or D) * 2 - 1).to(dtype)
    alphas = torch.tensor(alpha, dtype=torch.float32) if isinstance(alpha, tuple) else alpha
    return query, key, value, alphas


@pytest.mark.parametrize("alpha", [6.0, torch.tensor([1.5, 6.0])])
def test_an_alpha_that_float32_thresholds_cannot_tell_is_refused(alpha):
    query, key, value, _ = make(T_k=64)
    with pytest.raises(ValueError, match="alpha: 6 is above 4"):
        attention(query, key, value, alpha)
    if isinstance(alpha, torch.Tensor):  # what could not be looked at is NaN, for that head alone
        out = triton_gpu.attention(query, key, value, alpha, AttentionOptions())[0]
        assert out[:, 1].isnan().all() and out[:, 0].isfinite().all()


def test_blocks_off_the_support_are_never_read():
    """Values of key blocks that no query can reach are NaN: neither output nor gradients may notice."""
    query, key, value, _ = make(T_q=64, T_k=160)
    query[..., 0] = 40.0
    key[..., 0] = 0.0
    key[..., 64:128, 0] = -40.0
    value[..., 64:128, :] = torch.nan
    query, key, value, alpha = leaves(query, key, value, torch.tensor([1.3, 1.8]))
    out = attention(query, key, value, alpha)[0]
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    kept = [*range(64), *range(128, 160)]
    expected = reference.attention(query, key[:, :, kept], value[:, :, kept], alpha, grad_out=grad_out)
    assert_forward(out, expected["out"])
    assert_gradient(query.grad, expected["query"])
    assert_gradient(alpha.grad, expected["alpha"])
    assert_gradient(key.grad[:, :, kept], expected["key"])
    assert (key.grad[:, :, 64:128] == 0).all() and (value.grad[:, :, 64:128] == 0).all()


def test_bins_count_every_score(monkeypatch):
    """Of 22 tiles: an element of a tile has room for fifteen."""
    if not INTERPRETED:
        pytest.skip("counts are looked at in the interpreter")
    query, key, value, alpha = make(H=1, T_q=3, T_k=700, alpha=(1.5,))
    query[..., 0], key[..., 1:] = 4.0, 0.0
    key[..., 0] = torch.where(torch.arange(700) < 64, -0.5, -0.85) - 0.01 * torch.rand(700)
    key[..., 300, 0] = 0.0
    seen, bracket = [], launch.forward.histogram_bracket
    monkeypatch.setattr(launch.forward, "histogram_bracket", lambda *given: seen.append(given) or bracket(*given))
    out = attention(query, key, value, alpha)[0]
    assert_forward(out, reference.attention(query, key, value, alpha)["out"])
    ((counts, width, *_),) = seen
    scores = (query @ key.mT * 0.25)[0, 0].double()
    width = torch.from_numpy(width.handle.data[:3])[:, None].double()
    places = ((scores.amax(1, keepdim=True) - scores) / width + 0.125).floor()
    for place, count in enumerate(counts):  # a score on the edge of two bins may be in either
        assert abs(torch.from_numpy(count.handle.data[:3]) - (places == place).sum(1)).max() <= 1
    assert counts[-1].handle.data[0] == 700 - 64 - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_tolerances_of_half_precision_keep_their_promise(dtype, monkeypatch):
    """In float32, where their error can be seen: twice the limit of the sum, by the largest value."""
    query, key, value, alpha = make(H=4, T_q=20, T_k=90, sharpness=3.0, alpha=(1.05, 1.3, 1.5, 1.9))
    limit = launch._TOLERANCES[dtype][1]
    monkeypatch.setitem(launch._TOLERANCES, torch.float32, launch._TOLERANCES[dtype])
    out, weights = attention(query, key, value, alpha, need_weights=True)
    expected = reference.attention(query, key, value, alpha)
    assert (weights.sum(-1) - 1).abs().max() <= limit + 1e-6
    assert (out.double() - expected["out"]).abs().max() <= 2 * limit + 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_far_from_zero(dtype, subject):
    """There the maximum is taken off within a multiply-add: what scores have in common, about 1,400, costs next to nothing."""
    limit = launch._TOLERANCES[dtype][1]
    for alphas in ((1.1, 1.3), (1.5, 1.9)):
        tensors = subject.draw(alphas, T_q=K, T_k=130, D=32, dtype=dtype)
        tensors[0][..., 0] = 64.0
        tensors[1][..., 0] = 128.0
        expected = reference.attention(*tensors, is_causal=True)["out"]
        out = attention(*tensors, is_causal=True)[0]
        # Roundings of the dot product move scores by as much as the constant that the maximum is in.
        slack = 2**-23 * 64 * 128 * 32**-0.5
        assert (out.double() - expected).abs().max() <= 2 * limit + torch.finfo(dtype).eps + 2 * slack
        _check_half(subject, tensors, dtype)


def test_a_step_that_leads_astray_is_noticed_and_repeated(subject, monkeypatch):
    """With no tolerance before the last step worth the name, what comes of it is seen in the output pass, and mended."""
    limit = launch._TOLERANCES[torch.float32][1]
    monkeypatch.setitem(launch._TOLERANCES, torch.float32, (1e9, limit))
    query, key, value, alpha = make(alpha=(1.5, 1.9), sharpness=4.0)
    passes, own = [], launch.forward._output_pass
    if INTERPRETED:
        monkeypatch.setattr(launch.forward, "_output_pass", lambda *given: passes.append(given[-2]) or own(*given))
    compare(subject, [query, key, value, alpha])
    assert not INTERPRETED or True in passes
    weights = attention(query, key, value, alpha, need_weights=True)[1].double()
    u = alpha.view(-1, 1) - 1
    # A threshold below 1/u is rounded once, and so are its differences to scores: by the slopes, that moves the sum.
    slope = torch.where(weights > 0, weights ** (1 - u[..., None]), 0.0).sum(-1)
    allowed = limit + K * 2.0**-24 + slope * (1 + 1 / u) * 2.0**-23
    error = (weights.sum(-1) - 1).abs() / allowed
    measured.append(float(error.max()))
    assert (error <= 1).all()


def test_flags_are_the_support():
    query, key, value, alpha = make(T_q=96, T_k=160, sharpness=8.0, alpha=(1.5, 2.0))
    arguments = blocks.Arguments(query, key, value, alpha, None, None, None, None, 0.0, True, 0, 0.0, 0.25, 0.0)
    flags = launch.attention_forward(arguments, False, True, True)[4]
    cut = blocks.attention_blocks(96, 16, 16, torch.float32)
    weights = reference.attention(query, key, value, alpha, is_causal=True)["weights"]
    tiles_of = (weights > 1e-12).unflatten(3, (-1, cut.cols)).unflatten(2, (-1, cut.rows)).any(5).any(3)
    assert torch.equal(blocks.on_support(flags, 5), tiles_of)
    assert not tiles_of.all() and tiles_of.any()


def test_the_mean_that_is_kept_may_be_rounded():
    """``slope_mean`` in bfloat16 moves ``delta`` by its rounding; the gradient in alpha only by as much as sums of weights are not 1."""
    query, key, value, alpha = make(T_q=20, D=16, dtype=torch.bfloat16, alpha=(1.3, 1.5))
    given = blocks.Arguments(query, key, value, alpha, None, None, None, None, 0.0, False, 0, 0.0, 0.25, 0.0)
    _, _, stats, mean, flags = launch.attention_forward(given, True, True, True)
    u, wide = (alpha - 1).double().view(-1, 1, 1), [t.double() for t in (query, key, value)]
    w = 1 + u * ((wide[0] @ wide[1].mT - stats[..., 0:1].double()) / 4 - stats[..., 1:2].double())
    slopes = w.clamp(min=0) ** (1 / u - 1)
    slopes /= slopes.sum(-1, keepdim=True)
    exact = slopes @ wide[2]
    assert mean.dtype == torch.bfloat16
    grad_out = torch.randn(1, 2, 20, 16).bfloat16()
    rounded, plain = (
        launch.attention_backward(given, grad_out, None, stats, m.float(), flags, True, False, False)
        for m in (mean, exact)
    )
    # The slopes are rounded before their product with the values, and the means after it. The interpreter cuts digits off.
    moved = ((mean - exact).abs() * grad_out.abs()).sum(-1)
    rounding = (
        2.0 ** (-8 if INTERPRETED else -9) * 1.01 * (exact.abs() + slopes @ wide[2].abs()) * grad_out.abs()
    ).sum(-1)
    measured.append(float((moved / rounding).max()))
    assert measured[-1] <= 1
    off = 2.0**-9 / u[..., 0] ** 2
    assert ((rounded[3] - plain[3]).abs() <= (moved * off).sum((0, 2)) + 1e-4).all()
    sums = stats[..., 2].double()
    query_bound = 0.25 * (moved * sums)[..., None] * wide[1].abs().amax((2, 3))[..., None, None]
    assert ((rounded[0] - plain[0]).abs().double() <= query_bound + 2**-8 * plain[0].abs().double()).all()


@triton.jit
def _bracket_kernel(scores, alpha, least, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    z = tl.load(scores + rows[:, None] * COLS + cols[None, :])
    mapping = row_math.make_mapping(alpha, alpha)
    low = tl.load(least + rows)
    width = row_math.bin_width(low, mapping)
    packed = row_math.bin_bits(z - tl.max(z, 1)[:, None], width[:, None])
    n0, n1, n2 = tl.sum(packed & 15, 1), tl.sum((packed >> 4) & 15, 1), tl.sum((packed >> 8) & 15, 1)
    n3, n4, n5 = tl.sum((packed >> 12) & 15, 1), tl.sum((packed >> 16) & 15, 1), tl.sum((packed >> 20) & 15, 1)
    counts = (n0.to(tl.float32), n1, n2, n3, n4, n5, tl.sum((packed >> 24) & 15, 1))
    largest = row_math.largest_threshold(tl.zeros([ROWS], tl.float32) + COLS, mapping.u)
    found = row_math.histogram_bracket(counts, width, low, largest, mapping, 0.0)
    for i in tl.static_range(3):
        tl.store(out + i * ROWS + rows, found[i])


@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.5, 1.9, 2.0, 2.5, 4.0])
def test_the_histogram_encloses_the_threshold(alpha):
    """Random, tied, crowded and lonely scores: the bracket holds the true threshold, and where F is convex it is narrow."""
    u, n = alpha - 1, 64
    scores = torch.randn(16, n) * torch.logspace(-2, 1, 16)[:, None]
    scores[1], scores[2, 1:] = 3.0, -50.0
    scores[3] = torch.where(
        torch.arange(n) < 3, 1.0, 1.0 - 0.9 / u
    )  # many scores that only just have no weight, or just have
    scores[4] = 1e4 + scores[4].round()
    probs = reference.entmax(scores, alpha)
    top = scores.double().amax(1)
    # p = (1 + u (z - top - c)) ** (1/u) at the maximum, whose weight is far from 0.
    wanted = (1 - probs.amax(1) ** u) / u
    for least in (torch.zeros(16), (wanted - 0.3).clamp(min=0).float()):
        out = torch.empty(3, 16)
        _bracket_kernel[(1,)](scores, alpha, least, out, ROWS=16, COLS=n)
        start, low, high = out.double()
        rounding = 1e-6 * (1 + top.abs())
        assert (low <= wanted + rounding).all() and (wanted <= high + rounding).all()
        assert (low >= least).all() and ((low <= start) & (start <= high)).all()
        if alpha <= 2:
            width = (1 / u - least.double()) / 6.875
            assert (high - low <= 1.07 * width + rounding).float().mean() > 0.8


@triton.jit
def _dropout_kernel(out, seed, plane, first_row, dropout, N: tl.constexpr):
    rows = first_row + tl.arange(0, N)
    cols = tl.arange(0, N)
    factor = tiles.dropout_factor(seed, plane, rows[:, None], cols[None, :], dropout)
    tl.store(out + tl.arange(0, N)[:, None] * N + cols[None, :], factor)


def test_dropout_of_far_rows_and_heads_differs():
    """Counters are not products of lengths: nothing repeats where such a product would pass 2**32."""
    masks = []
    for plane, first_row in ((0, 0), (1, 0), (0, 2**16), (2**16, 0), (0, 2**30)):
        out = torch.empty(64, 64)
        _dropout_kernel[(1,)](out, 12345, plane, first_row, 0.5, N=64)
        assert set(out.unique().tolist()) == {0.0, 2.0} and 0.45 < (out > 0).float().mean() < 0.55
        masks.append(out)
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert 0.4 < (first == second).float().mean() < 0.6


@triton.jit
def _offset_kernel(array, out, batch, head, row, N: tl.constexpr):
    moved = tiles.select(array, batch.to(tl.int64), head.to(tl.int64))
    offsets, _ = tiles._row_offsets(moved, row + tl.arange(0, N), 2**30, N, N)
    base = (moved.pointer.to(tl.int64) - array.pointer.to(tl.int64)) // 4
    tl.store(out + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :], base + offsets)


def test_offsets_beyond_32_bits():
    out = torch.empty(16, 16, dtype=torch.int64)
    strides = 2**33, 2**20, 2**17, 2**3
    _offset_kernel[(1,)](tiles.Array(torch.empty(1), *strides), out, 3, 5, 2**20, N=16)
    rows, cols = torch.arange(16)[:, None] + 2**20, torch.arange(16)[None, :]
    assert torch.equal(out, 3 * strides[0] + 5 * strides[1] + rows * strides[2] + cols * strides[3])
    assert out.max() > 2**37


def test_the_same_bits_every_time():
    def run():
        torch.manual_seed(5)
        inputs = leaves(*make(B=2, H=2, H_kv=1))
        bias = torch.randn(1, 2, Q, K, requires_grad=True)
        out = attention(*inputs, position_bias=bias, dropout=0.2)[0]
        return out, *torch.autograd.grad(out.square().sum(), (*inputs, bias))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_operators_are_well_formed():
    inputs = leaves(*make(T_q=5, T_k=6))
    bias = torch.randn(1, 2, 5, 6, requires_grad=True)
    mask = torch.rand(1, 6) > 0.2
    flags = (1.0 * 0, True, 7, 5.0, 0.25, 0.0, True, True, True)
    torch.library.opcheck(torch.ops.hf_entmax.triton_attention.default, (*inputs, None, bias, mask, None, *flags))


def test_other_ways_to_call():
    inputs = leaves(*make())
    out = attention(*inputs)[0]
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad_out)
    # Gradient checkpointing, torch.func.grad.
    again = checkpoint(lambda *t: attention(*t)[0], *inputs, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(again, inputs, grad_out), expected, strict=True):
        assert torch.equal(ours, theirs)
    functional = torch.func.grad(lambda *t: (attention(*t)[0] * grad_out).sum(), argnums=(0, 1, 2, 3))(*inputs)
    for ours, theirs in zip(functional, expected, strict=True):
        assert_gradient(ours, theirs)
    # Autocast lowers as it does torch's own attention.
    with torch.autocast(DEVICE, torch.bfloat16):
        lowered = attention(*inputs)[0]
    assert lowered.dtype == torch.bfloat16
    assert torch.equal(lowered, attention(*(t.bfloat16() for t in inputs[:3]), inputs[3])[0])
    # Merging the heads must not copy.
    assert out.transpose(1, 2).is_contiguous()


def test_no_gradient_of_the_gradient():
    query, key, value, alpha = leaves(*make())
    (gradient,) = torch.autograd.grad(attention(query, key, value, alpha)[0].sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(gradient.sum(), query)


def test_unsupported_names_the_argument():
    query, key, value, alpha = make()
    assert unsupported(query, key, value, alpha, AttentionOptions(is_causal=True, dropout=0.1)) is None
    assert unsupported(query, key, value, 1.5) is None
    assert unsupported(query.double(), key, value, alpha).startswith("query: torch.float64")
    assert unsupported(query, key.half(), value, alpha).startswith("key: torch.float16 differs")
    assert unsupported(query, key, value.repeat(1, 1, 1, 17), alpha).startswith("value: head dimension 272")
    assert unsupported(query.to("meta"), key, value, alpha).startswith("query: it is on meta")
    assert unsupported(query, key, value, alpha.to("meta")).startswith("alpha: it is on meta")
    wide = torch.zeros(Q, K, dtype=torch.float64)
    assert unsupported(query, key, value, alpha, AttentionOptions(position_bias=wide)).startswith(
        "position_bias: float64"
    )
    elsewhere = AttentionOptions(attention_mask=wide.bool().to("meta"))
    assert unsupported(query, key, value, alpha, elsewhere).startswith("attention_mask:")


@pytest.fixture
def row_calls(monkeypatch):
    """Have rows solved by the kernels of this package; the names of those that ran."""
    calls = []
    monkeypatch.setitem(backends._loaded, "numba", "switched off")
    monkeypatch.setattr(rows, "KERNEL_ELEMENTS", 0)
    monkeypatch.setattr(rows, "KERNEL_LENGTH", 0)
    for name in ("solve_rows", "recompute_rows"):
        function = getattr(row_host, name)
        monkeypatch.setattr(row_host, name, lambda *a, f=function, n=name, **k: (calls.append(n), f(*a, **k))[1])
    return calls


@pytest.mark.parametrize("shape", [(5, 7), (3, 1), (2, 2500), (70, 33)])
def test_entmax_of_rows(shape, row_calls):
    scores = (torch.randn(shape) * 2).requires_grad_()
    alpha = torch.rand(shape[0]) + 1
    alpha[0] = 1.0
    alpha.requires_grad_()
    mask = torch.rand(shape) > 0.3
    mask[-1] = False
    grad = torch.randn(shape)
    probs = entmax(scores, alpha[:, None], mask=mask)
    assert row_calls == ["solve_rows"]
    assert_forward(probs, reference.entmax(scores, alpha[:, None], mask=mask))
    probs.backward(grad)
    expected = [reference.entmax(row, a, mask=m) for row, a, m in zip(scores, alpha.tolist(), mask, strict=True)]
    rows = [
        (reference.jacobian(p, a) @ g.double(), reference.alpha_derivative(p, a) @ g.double())
        for p, a, g in zip(expected, alpha.tolist(), grad, strict=True)
    ]
    assert_gradient(scores.grad, torch.stack([r[0] for r in rows]))
    assert_gradient(alpha.grad, torch.stack([r[1] for r in rows]))


def test_entmax_of_rows_in_all_layouts_and_types(row_calls):
    scores = torch.randn(33, 20).t()
    for alpha in (1.0, 1.5, 2.0, 1.2):
        assert_forward(entmax(scores, alpha), reference.entmax(scores, alpha))
    assert_forward(entmax(scores[:, ::2], 1.3), reference.entmax(scores[:, ::2], 1.3))
    half = scores.half()
    half[3, 4] = torch.finfo(torch.float16).min
    half[5] = torch.finfo(torch.float16).min
    probs = entmax(half, 1.3)
    assert probs.dtype == torch.float16 and probs[3, 4] == 0 and probs[5].eq(0).all()
    assert (probs.float() - reference.entmax(half, 1.3)).abs().max() < 1e-3
    alpha = torch.tensor([[1.4]], requires_grad=True)
    assert len(row_calls) == 6
    entmax(scores, alpha).square().sum().backward()
    probs = reference.entmax(scores, 1.4)
    assert alpha.grad.shape == (1, 1)
    assert_gradient(alpha.grad.sum(), (2 * probs * reference.alpha_derivative(probs, 1.4)).sum())
    assert len(row_calls) == 7
    entmax(scores, 2.5), entmax(scores, torch.tensor([[2.5]])), entmax(scores.double(), 1.5), entmax(scores[:0], 1.5)
    entmax(scores, 1.5, backend="torch")
    assert len(row_calls) == 7


def test_row_kernels_say_what_they_take():
    scores = torch.randn(4, 5)
    assert row_kernel(scores) is row_host and row_kernel(scores.bfloat16()) is row_host
    assert row_kernel(scores.double()) is None and row_kernel(scores.to("meta")) is None
    with pytest.raises(ValueError, match="backend is 'triton'"):
        entmax(scores, backend="triton")


@pytest.mark.parametrize("alpha", [1.0001, 1.05, 1.33, 1.5, 2.0])
@pytest.mark.parametrize("shape", [(5, 3), (3, 1), (2, 2500), (70, 33)])
def test_solved_rows_equal_float64(alpha, shape, row_calls):
    scores = 3.0 * torch.randn(shape)
    if shape[1] > 2:
        scores[1, 1] = -math.inf
    u = alpha - 1.0
    ours, exact = solve_rows(scores, u), solve_rows(scores.double(), u)
    assert row_calls == ["solve_rows"] and ours.rows is None
    expected = reference.entmax(scores, alpha)
    torch.testing.assert_close(ours.probs.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        ours.probs.double().sum(-1), torch.ones(shape[0], dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(ours.conjugate, exact.conjugate, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours.shift.double(), exact.shift, atol=5e-6, rtol=0)
    again = dense_probs(scores, ours.maximum, ours.shift, 3.0 * ours.scale, u)
    assert row_calls == ["solve_rows", "recompute_rows"]
    torch.testing.assert_close(again.double(), 3.0 * expected, atol=3e-6, rtol=0)


def test_rows_that_cannot_be_solved_keep_to_themselves(row_calls):
    scores = torch.randn(40, 70)
    plain = solve_rows(scores, 0.5).probs
    broken = scores.clone()
    broken[3] = -math.inf
    broken[5, -1] = math.nan
    broken[6, 0] = math.inf
    broken[7] = torch.finfo(torch.float32).min
    solution = solve_rows(broken, 0.5)
    probs = solution.probs
    assert solution.impossible.nonzero().flatten().tolist() == [3] and probs[3].eq(0).all()
    assert probs[5].isnan().all() and probs[6].isnan().all()
    torch.testing.assert_close(probs[7], torch.full((70,), 1.0 / 70))
    others = [i for i in range(40) if i not in (3, 5, 6, 7)]
    torch.testing.assert_close(probs[others], plain[others], atol=0, rtol=0)
    assert solution.maximum[3] == 0 and solution.conjugate[3] == 0 and solution.conjugate[5].isnan()


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, torch.tensor(1.4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_use_the_row_kernels(alpha, smoothing, row_calls):
    hidden, weight, labels = torch.randn(6, 4), torch.randn(50, 4), torch.randint(50, (6,))
    labels[2] = -100

    def losses(dtype):
        given = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        own = alpha.to(dtype).requires_grad_() if isinstance(alpha, torch.Tensor) else alpha
        one = linear_entmax_loss(*given, labels, own, label_smoothing=smoothing)
        other = entmax_loss(given[0] @ given[1].t(), labels, own, label_smoothing=smoothing)
        leaves = [*given, *([own] if isinstance(own, torch.Tensor) else [])]
        return [one, other, *torch.autograd.grad(one, leaves), *torch.autograd.grad(other, leaves)]

    found = losses(torch.float32)
    assert set(row_calls) == {"solve_rows", "recompute_rows"}
    count = len(row_calls)
    for ours, exact in zip(found, losses(torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-6)
    assert len(row_calls) == count


@pytest.mark.parametrize("fault", [None, "off", "nan", "raises", "decoding"])
def test_the_check_of_first_use_sees_faults_of_kernels(fault, monkeypatch):
    small = self_check.Case(
        "small", torch.float32, (1.3, 1.75), (1, 2, 1, Q, K, 16), lambda device: AttentionOptions(is_causal=True)
    )
    right, decode = launch.attention_forward, exact_host.attend
    monkeypatch.setattr(self_check, "_EXACT", self_check._EXACT._replace(shape=(1, 4, 2, 1, 100, 16)))

    def planted(*arguments):
        if fault == "raises":
            raise RuntimeError("misaligned address")
        out, *others = right(*arguments)
        return (out * {"off": 1.01, "nan": math.nan}.get(fault, 1.0), *others)

    def decoded(*arguments):
        out, *counts = decode(*arguments)
        return (out * (1.01 if fault == "decoding" else 1.0), *counts)

    monkeypatch.setattr(launch, "attention_forward", planted)
    monkeypatch.setattr(exact_host, "attend", decoded)
    found = list(self_check.findings(triton_gpu, torch.device(DEVICE), [small]))
    assert all(finding.right for finding in found) == (fault is None)
    assert len(found) == 9 or (fault == "raises" and "misaligned" in str(found[0]))
    assert fault != "decoding" or [finding.case for finding in found if not finding.right] == ["exact decoding"]
