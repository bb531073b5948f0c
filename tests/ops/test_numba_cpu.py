"""The CPU kernel against the float64 oracle and the dense torch path."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading

import fresh
import pytest
import reference
import torch
from environments import inductor_works

pytest.importorskip("numba")

from hf_entmax.ops import entmax_attention, numba_cpu
from hf_entmax.ops.options import AttentionOptions

pytestmark = pytest.mark.usefixtures("two_threads")  # the kernels share rows among them

numba_attention = functools.partial(entmax_attention, backend="numba")
torch_attention = functools.partial(entmax_attention, backend="torch")
ALPHAS = (1.0, 1.05, 1.5, 2.0)


def make_inputs(B=2, H=4, H_kv=2, T_q=21, T_k=37, D=16, D_v=None, alphas=ALPHAS, sharpness=1.0, dtype=torch.float32):
    def draw(*shape, factor=1.0):
        return (torch.randn(*shape) * factor).to(dtype).requires_grad_()

    query = draw(B, H, T_q, D, factor=sharpness)
    key, value = draw(B, H_kv, T_k, D), draw(B, H_kv, T_k, D_v or D)
    alpha = torch.tensor(alphas).requires_grad_()
    return query, key, value, alpha


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12)).item()


def check_against_oracle(tensors, out_tolerance=4e-6, gradient_tolerance=1e-4, **options):
    """Compare with the oracle; where float32 scores alone cost more digits, allow twice what they cost the dense path."""
    query, key, value, alpha = tensors
    bias = options.get("position_bias")
    out, weights = numba_attention(query, key, value, alpha, need_weights=True, **options)
    cotangent = torch.randn(out.shape)
    wanted = [query, key, value, alpha] + ([bias] if bias is not None else [])
    gradients = torch.autograd.grad(out, wanted, cotangent)
    oracle = reference.attention(query, key, value, alpha, grad_out=cotangent, **options)
    with torch.no_grad():
        plain, plain_weights = torch_attention(query, key, value, alpha, need_weights=True, **options)
    for ours, torchs, exact in ((out, plain, oracle["out"]), (weights, plain_weights, oracle["weights"])):
        assert (ours - exact).abs().max() < max(out_tolerance, 2 * (torchs - exact).abs().max())
    for name, gradient in zip(("query", "key", "value", "alpha"), gradients, strict=False):
        assert relative(gradient, oracle[name]) < gradient_tolerance, name
    if bias is not None:
        assert relative(gradients[4], oracle["scores"].sum_to_size(bias.shape)) < gradient_tolerance
    return out, weights


SHAPES = {
    "plain": {},
    "multi head": {"H_kv": 4},
    "one key head": {"H_kv": 1},
    "odd head dimensions": {"D": 20, "D_v": 24},
    "wide heads": {"D": 80, "D_v": 144},
    "one query": {"T_q": 1},
    "two queries, many keys": {"T_q": 2, "T_k": 131},
    "one key": {"T_k": 1},
    "more queries than keys": {"T_q": 40, "T_k": 23},
}


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_sharpness(shape, sharpness):
    check_against_oracle(make_inputs(sharpness=sharpness, **SHAPES[shape]))


@pytest.mark.parametrize(
    "alphas",
    [(1.0, 1.0000001, 1.0001, 1.001), (1.01, 1.1, 1.2, 1.3), (1.4, 1.49, 1.51, 1.7), (1.9, 1.99, 2.0, 1.999)],
)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])
def test_every_alpha(alphas, sharpness):
    check_against_oracle(make_inputs(alphas=alphas, sharpness=sharpness))


EVEN_LIMITS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"sliding_window": 90},
    "causal window": {"is_causal": True, "sliding_window": 75},
    "padding": {"key_padding_mask": torch.arange(133) < torch.tensor([[133], [91]])},
    "holes": {"attention_mask": torch.arange(133) % 23 != 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", EVEN_LIMITS)
@pytest.mark.parametrize("sharpness", [0.0, 0.1, 0.6, 2.0])
def test_even_rows_near_softmax(limit, sharpness):
    tensors = make_inputs(T_q=83, T_k=133, alphas=(1.0 + 1e-6, 1.01, 1.1, 1.24), sharpness=sharpness)
    bias = torch.zeros(1, 4, 83, 133).requires_grad_()
    tolerance = 1e-4 if sharpness else 2e-3  # equal scores: d_alpha is 0 up to rounding
    if sharpness:
        check_against_oracle(tensors, **EVEN_LIMITS[limit], position_bias=bias, gradient_tolerance=tolerance)
        return
    out, weights = numba_attention(*tensors, need_weights=True, **EVEN_LIMITS[limit])
    oracle = reference.attention(*tensors, grad_out=torch.ones_like(out), **EVEN_LIMITS[limit])
    assert (weights - oracle["weights"]).abs().max() < 2e-6
    (gradient,) = torch.autograd.grad(out.sum(), tensors[3])
    assert gradient.abs().max() < 1e-3


def test_alpha_above_two():
    # Weights near the threshold rise like a root there: an error of 1e-7 in a score is one of 1e-5 in such a weight.
    check_against_oracle(make_inputs(alphas=(2.2, 2.5, 3.0, 4.0)), out_tolerance=1e-4, gradient_tolerance=2e-3)


LIMITS = {
    "causal": {"is_causal": True},
    "window": {"sliding_window": 7},
    "causal window": {"is_causal": True, "sliding_window": 7},
    "softcap": {"softcap": 1.5},
    "scaling": {"scaling": 0.7, "softcap": 30.0},
}


@pytest.mark.parametrize("sharpness", [0.1, 2.0])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shape", ["plain", "two queries, many keys", "more queries than keys"])
def test_limits(limit, shape, sharpness):
    check_against_oracle(make_inputs(sharpness=sharpness, **SHAPES[shape]), **LIMITS[limit])


def padding(kind, batch, keys):
    position, length = torch.arange(keys), torch.tensor([keys, keys // 2] * batch)[:batch, None]
    if kind == "right":
        return position < length
    if kind == "left":
        return position >= keys - length
    if kind == "nothing left":
        return (position < length) & torch.tensor([True, False] * batch)[:batch, None]
    return torch.rand(batch, keys) > 0.3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float", "float16"])
@pytest.mark.parametrize("kind", [None, "right", "left", "holes", "nothing left"])
def test_masks(kind, mask, causal):
    tensors = make_inputs(sharpness=0.3)
    options = {"is_causal": causal}
    if kind is not None:
        options["key_padding_mask"] = padding(kind, 2, 37)
    if mask is not None:
        allowed = torch.rand(2, 1, 21, 37) > 0.3
        allowed[0, 0, 3] = False
        options["attention_mask"] = allowed
        if mask != "bool":
            dtype = torch.float32 if mask == "float" else torch.float16
            options["attention_mask"] = torch.where(allowed, 0.25, torch.finfo(dtype).min).to(dtype)
    _, weights = check_against_oracle(tensors, **options)
    if kind is not None:
        assert (weights * ~options["key_padding_mask"][:, None, None, :] == 0).all()


@pytest.mark.parametrize("sharpness", [0.05, 1.0])
@pytest.mark.parametrize(
    "shape", [(1, 4, 21, 37), (2, 1, 21, 37), (2, 4, 21, 37), (1, 4, 1, 37), (4, 1, 37), (37,), (1, 1, 1, 37)]
)
def test_position_bias_gradient(shape, sharpness):
    bias = (torch.randn(shape) * sharpness).requires_grad_()
    check_against_oracle(make_inputs(sharpness=sharpness), position_bias=bias)


def test_position_bias_constant_over_keys_has_no_gradient():
    query, key, value, alpha = make_inputs()
    bias = torch.randn(1, 4, 21, 1, requires_grad=True)
    out, _ = numba_attention(query, key, value, alpha, position_bias=bias)
    (gradient,) = torch.autograd.grad(out.square().sum(), bias)
    assert gradient.shape == bias.shape and gradient.abs().max() < 1e-4


def test_additive_mask_gradient():
    query, key, value, alpha = make_inputs(sharpness=0.5)
    mask = torch.randn(2, 1, 21, 37, requires_grad=True)
    bias = torch.randn(1, 4, 21, 37, requires_grad=True)
    out, _ = numba_attention(query, key, value, alpha, attention_mask=mask, position_bias=bias)
    cotangent = torch.randn(out.shape)
    gradients = torch.autograd.grad(out, (mask, bias), cotangent)
    oracle = reference.attention(query, key, value, alpha, attention_mask=mask, position_bias=bias, grad_out=cotangent)[
        "scores"
    ]
    assert relative(gradients[0], oracle.sum_to_size(mask.shape)) < 1e-4
    assert relative(gradients[1], oracle.sum_to_size(bias.shape)) < 1e-4


def test_gradient_through_the_weights():
    tensors = make_inputs(H_kv=4)
    cotangent, other = torch.randn(2, 4, 21, 16), torch.randn(2, 4, 21, 37)

    def gradients(attend, inputs):
        out, weights = attend(*inputs, need_weights=True)
        return torch.autograd.grad(
            (out * cotangent.to(out.dtype)).sum() + (weights * other.to(out.dtype)).sum(), inputs
        )

    doubles = [t.detach().double().requires_grad_() for t in tensors]
    for got, want in zip(gradients(numba_attention, tensors), gradients(torch_attention, doubles), strict=True):
        assert relative(got, want) < 1e-4


def compare_with_dense(tensors, tolerance=2e-5, **options):
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    out, _ = numba_attention(*tensors, **options)
    want, _ = torch_attention(*doubles, **options)
    cotangent = torch.randn(out.shape)
    assert (out - want).abs().max() < tolerance
    for got, exact in zip(
        torch.autograd.grad(out, tensors, cotangent),
        torch.autograd.grad(want, doubles, cotangent.double()),
        strict=True,
    ):
        assert relative(got, exact) < 1e-4


@pytest.mark.parametrize("sharpness", [0.1, 2.0])
def test_many_blocks_and_growing_storage(sharpness, monkeypatch):
    from hf_entmax.ops.numba_cpu import host

    # One block of storage at a time: the kernel must come back for more, many times.
    monkeypatch.setattr(host, "_SMALL_STORAGE", 0)
    monkeypatch.setattr(host, "_FIRST_SHARE", 0.0)
    monkeypatch.setattr(host, "_SCORES_BYTES", 1 << 14)
    compare_with_dense(make_inputs(B=1, H=2, H_kv=1, T_q=200, T_k=331, alphas=(1.2, 1.6), sharpness=sharpness))


@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"sliding_window": 40, "is_causal": True}])
def test_dense_and_sparse_rows_agree(threshold, options, monkeypatch):
    from hf_entmax.ops.numba_cpu import host

    monkeypatch.setattr(host, "_DENSE_ABOVE", threshold)
    compare_with_dense(make_inputs(B=1, T_q=130, T_k=150, alphas=(1.0, 1.1, 1.5, 1.8), sharpness=0.5), **options)


@pytest.mark.parametrize("sharpness", [0.1, 1.0])
def test_dropout(sharpness):
    query, key, value, alpha = make_inputs(B=4, T_q=64, T_k=64, sharpness=sharpness)
    value = torch.eye(64)[None, None].expand(4, 2, 64, 64).clone().requires_grad_()
    out, weights = numba_attention(query, key, value, alpha, dropout=0.25, need_weights=True)
    assert torch.equal(out, weights) or (out - weights).abs().max() < 1e-6
    _, plain = numba_attention(query, key, value, alpha, need_weights=True)
    support = plain > 0
    kept = weights > 0
    assert (kept <= support).all()
    torch.testing.assert_close(weights[kept], (plain / 0.75)[kept], rtol=1e-5, atol=1e-7)
    share = kept.sum() / support.sum()
    assert abs(share - 0.75) < 4 * (0.1875 / support.sum()) ** 0.5
    # The gradient is that of the function with this very mask.
    mask = torch.where(support, kept / 0.75, 0).detach()
    cotangent = torch.randn(out.shape)
    got = torch.autograd.grad(out, (query, key, value, alpha), cotangent)
    doubles = [t.detach().double().requires_grad_() for t in (query, key, value, alpha)]
    exact = torch_attention(*doubles, need_weights=True)[1] * mask
    exact = exact @ doubles[2].repeat_interleave(2, 1)
    for gradient, want in zip(got, torch.autograd.grad(exact, doubles, cotangent.double()), strict=True):
        assert relative(gradient, want) < 1e-4


def test_dropout_follows_the_seed():
    tensors = make_inputs()
    torch.manual_seed(1)
    first = numba_attention(*tensors, dropout=0.5)[0]
    second = numba_attention(*tensors, dropout=0.5)[0]
    torch.manual_seed(1)
    again = numba_attention(*tensors, dropout=0.5)[0]
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("alphas", [(1.2, 1.4, 1.6, 2.0), (2.5, 3.0, 4.0, 8.0), (4.0,) * 4], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_at_most_twice_as_wrong_as_torch(dtype, alphas):
    tensors = make_inputs(T_q=64, T_k=64, dtype=dtype, alphas=alphas)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    cotangent = torch.randn(2, 4, 64, 16).to(dtype)
    results = []
    for attend, inputs in ((numba_attention, tensors), (torch_attention, tensors), (torch_attention, doubles)):
        out, _ = attend(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))])
    for ours, torchs, exact in zip(*results, strict=True):
        assert ours.dtype == torchs.dtype
        assert relative(ours, exact) <= 2 * relative(torchs, exact) + 1e-6


def test_unusual_memory_layouts():
    query, key, value, alpha = make_inputs(B=2, H=4, H_kv=4, T_q=21, T_k=21)
    plain = numba_attention(query, key, value, alpha)[0]

    def transposed(t):
        return t.detach().transpose(1, 2).contiguous().transpose(1, 2)

    def strided(t):
        wide = torch.full((*t.shape[:3], 2 * t.shape[3]), torch.nan)
        wide[..., ::2] = t.detach()
        return wide[..., ::2]

    for change in (transposed, strided):
        changed = numba_attention(change(query), change(key), change(value), alpha)[0]
        assert torch.equal(plain, changed)
    shared = key[:, :1].detach().expand(2, 4, 21, 16).requires_grad_()
    compare_with_dense([query, shared, value, alpha])


@pytest.mark.parametrize("empty", ["B", "T_q", "T_k"])
def test_empty_inputs(empty):
    tensors = make_inputs(**{empty: 0})
    out, _weights = numba_attention(*tensors, need_weights=True)
    assert (out == 0).all() and out.shape == (*tensors[0].shape[:3], 16)
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert gradient.shape == tensor.shape and (gradient == 0).all()


def test_not_a_number_is_handed_on():
    query, key, value, alpha = make_inputs(H_kv=4)
    with torch.no_grad():
        query[0, 1, 2] = torch.nan
    out, _ = numba_attention(query, key, value, alpha)
    assert out[0, 1, 2].isnan().all() and out.isnan().sum() == 16
    gradient = torch.autograd.grad(out.sum(), query)[0]
    assert gradient[0, 1, 2].isnan().all() and gradient.isnan().sum() == 16


def test_large_offsets_do_not_matter():
    query, key, value, alpha = make_inputs()
    plain = numba_attention(query, key, value, alpha)[0]
    bias = torch.full((1, 1, 21, 37), 4096.0)
    moved = numba_attention(query, key, value, alpha, position_bias=bias)[0]
    assert (plain - moved).abs().max() < 5e-3


def test_a_wrong_alpha_is_an_error():
    query, key, value, _ = make_inputs()
    for wrong in (0.9, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            numba_attention(query, key, value, torch.tensor([1.5, 1.5, wrong, 1.5]))


def test_unsupported_names_the_argument():
    query, key, value, alpha = make_inputs()
    assert numba_cpu.unsupported(query, key, value, alpha) is None
    assert "query" in numba_cpu.unsupported(query.double(), key, value, alpha)
    assert "value" in numba_cpu.unsupported(query, key, value.double(), alpha)
    assert "key" in numba_cpu.unsupported(query, key.to("meta"), value, alpha)
    assert "attention_mask" in numba_cpu.unsupported(
        query, key, value, alpha, AttentionOptions(attention_mask=torch.ones(1, dtype=torch.bool, device="meta"))
    )


def test_functional_transforms_are_refused():
    query, key, value, alpha = (t.detach() for t in make_inputs())
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda q: entmax_attention(q, key, value, alpha, backend="numba")[0].sum())(query)


def test_a_second_derivative_is_refused():
    tensors = make_inputs()
    out, _ = numba_attention(*tensors)
    (gradient,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"need_weights": True}, {"dropout": 0.3}])
def test_operators_are_sound(options):
    from hf_entmax.ops.numba_cpu.function import attention_operator

    query, key, value, alpha = make_inputs(T_q=9, T_k=11, D=20)
    bias = torch.randn(1, 4, 9, 11, requires_grad=True)
    seed = torch.tensor(5) if options.get("dropout") else None
    arguments = (query, key, value, alpha, None, bias, None, seed, options.get("is_causal", False), 0, 0.0, 0.25)
    arguments += (options.get("dropout", 0.0), options.get("need_weights", False))
    torch.library.opcheck(attention_operator, arguments)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "need_weights": True}])
def test_compiled_equals_eager(options):
    tensors = make_inputs(D=32)
    bias = torch.randn(1, 4, 21, 37, requires_grad=True)

    def attend(query, key, value, alpha, bias):
        out, weights = entmax_attention(query, key, value, alpha, position_bias=bias, backend="numba", **options)
        return out.sin(), weights

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    eager, traced = attend(*tensors, bias), compiled(*tensors, bias)
    assert (eager[0] - traced[0]).abs().max() < 1e-6
    inputs = [*tensors, bias]
    for want, got in zip(
        torch.autograd.grad(eager[0].sum(), inputs), torch.autograd.grad(traced[0].sum(), inputs), strict=True
    ):
        assert relative(got, want) < 1e-5


def test_checkpointing_and_retained_graphs():
    from torch.utils.checkpoint import checkpoint

    tensors = make_inputs()
    want = torch.autograd.grad(numba_attention(*tensors, dropout=0.1)[0].sum(), tensors)
    torch.manual_seed(0)
    tensors = make_inputs()
    out = checkpoint(lambda *t: numba_attention(*t, dropout=0.1)[0], *tensors, use_reentrant=False)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(out.sum(), tensors)
    for a, b, c in zip(want, first, second, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)


def test_saved_tensors_may_be_moved():
    tensors = make_inputs(sharpness=2.0)
    want = torch.autograd.grad(numba_attention(*tensors)[0].sum(), tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        out = numba_attention(*tensors)[0]
    for moved, plain in zip(torch.autograd.grad(out.sum(), tensors), want, strict=True):
        assert torch.equal(moved, plain)


def run_once(tensors):
    out = numba_attention(*tensors)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


def test_threads_do_not_change_the_numbers(two_threads):
    tensors = make_inputs(B=1, H_kv=1, T_q=80, T_k=90)
    parallel = run_once(tensors)
    torch.set_num_threads(1)
    for one, two in zip(run_once(tensors), parallel, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_several_threads_may_call_at_once(two_threads):
    problems = [make_inputs(T_q=20 + i, T_k=64) for i in range(4)]
    want = [run_once(problem) for problem in problems]
    got: list = [None] * 4

    def work(i):
        for _ in range(5):
            got[i] = run_once(problems[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for expected, result in zip(want, got, strict=True):
        for a, b in zip(expected, result, strict=True):
            assert torch.equal(a, b)


def test_without_openmp(two_threads, monkeypatch):
    from hf_entmax.ops.numba_cpu import runtime

    tensors = make_inputs(B=3, T_q=64)
    want = run_once(tensors)
    monkeypatch.setattr(runtime._state, "openmp", None)
    monkeypatch.setattr(runtime._state, "openmp_known", True)
    for a, b in zip(run_once(tensors), want, strict=True):
        assert torch.equal(a, b)


def _forked(connection, tensors):
    connection.send([t.numpy() for t in run_once(tensors)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork exists on Unix only")
def test_fork_after_use(two_threads):
    tensors = make_inputs(T_q=8, T_k=16)
    want = run_once(tensors)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_forked, args=(there, tensors))
    child.start()
    assert here.poll(60), "the forked process did not answer"
    for a, b in zip(here.recv(), want, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b)
    child.join()


@pytest.mark.slow
def test_fork_after_import():
    """The parent has imported the package and computed nothing: the child starts its own threads."""
    code = """
import multiprocessing, torch
from hf_entmax.ops import entmax_attention, numba_cpu

def work(connection):
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 50, 16)
    out = entmax_attention(query, key, key, 1.3, backend="numba")[0]
    want = entmax_attention(query, key, key, 1.3, backend="torch")[0]
    connection.send((torch.get_num_threads(), (out - want).abs().max().item()))

here, there = multiprocessing.get_context("fork").Pipe()
child = multiprocessing.get_context("fork").Process(target=work, args=(there,))
child.start()
assert here.poll(100), "the forked process did not answer"
print(*here.recv())
child.join()
"""
    for threads in ("1", "2"):
        run = fresh.run(code, after="torch", environment={"OMP_NUM_THREADS": threads})
        assert run.returncode == 0, run.stderr
        seen, error = run.stdout.split()
        assert int(seen) <= int(threads)  # PyTorch takes no more than there are cores
        assert float(error) < 1e-5


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31():
    """A mask of its own for every head has 2.7e9 entries; the pages nobody wrote cost no memory."""
    import numpy as np

    heads, length, shown = 40, 8192, 192
    mask = torch.from_numpy(np.zeros((1, heads, length, length), dtype=np.bool_))
    assert mask.numel() > 2**31
    mask[:, -1, -shown:, -shown:] = True
    mask[:, 0, :shown, :shown] = True
    query, key, value = (torch.randn(1, heads, length, 16, requires_grad=True) for _ in range(3))
    alpha = torch.linspace(1.1, 2.0, heads).requires_grad_()
    inputs = (query, key, value, alpha)
    out, _ = entmax_attention(*inputs, attention_mask=mask, backend="numba")
    cotangent = torch.randn(out.shape)
    gradients = torch.autograd.grad(out, inputs, cotangent)
    touched = torch.zeros(heads, length, dtype=torch.bool)
    for head, rows in ((0, slice(0, shown)), (-1, slice(length - shown, length))):
        touched[head, rows] = True
        parts = [t.detach()[:, head, None, rows].requires_grad_() for t in inputs[:3]]
        parts.append(alpha.detach()[head, None].requires_grad_())
        part, _ = entmax_attention(*parts, backend="torch")
        torch.testing.assert_close(out[:, head, None, rows], part, rtol=1e-4, atol=1e-5)
        wanted = torch.autograd.grad(part, parts, cotangent[:, head, None, rows])
        for gradient, want in zip(gradients[:3], wanted, strict=False):
            assert relative(gradient[:, head, None, rows], want) < 1e-4
        assert relative(gradients[3][head], wanted[3]) < 1e-4
    for tensor in (out, *gradients[:3]):
        assert (tensor[0][~touched] == 0).all()


@pytest.mark.slow
def test_inductor():
    if not inductor_works():
        pytest.skip("the inductor of this machine compiles no sum, or there is no C++ compiler")
    tensors = make_inputs(D=32)

    def attend(*tensors):
        return entmax_attention(*tensors, is_causal=True, backend="numba")[0].sin()

    compiled = torch.compile(attend, fullgraph=True)
    eager, traced = attend(*tensors), compiled(*tensors)
    torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)
    for want, got in zip(
        torch.autograd.grad(eager.sum(), tensors), torch.autograd.grad(traced.sum(), tensors), strict=True
    ):
        assert relative(got, want) < 1e-5


def test_importing_the_package_does_not_import_numba():
    code = "import sys, hf_entmax.ops.numba_cpu; sys.exit('numba' in sys.modules)"
    assert fresh.run(code, after="torch").returncode == 0


def test_buffers_are_written_before_they_are_read(monkeypatch):
    tensors = make_inputs(B=1, T_q=50, T_k=70, sharpness=0.5)
    bias = torch.randn(1, 4, 50, 70, requires_grad=True)
    inputs = [*tensors, bias]

    def run():
        out = numba_attention(*tensors, position_bias=bias, is_causal=True)[0]
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    want = run()
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        tensor.fill_(torch.nan if tensor.is_floating_point() else 127)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    for a, b in zip(run(), want, strict=True):
        assert torch.equal(a, b)
