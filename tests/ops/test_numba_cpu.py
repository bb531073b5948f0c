"""What is particular to the CPU kernel: storage, dense and sparse rows, threads, forks. `test_attention.py` has what all do."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading

import fresh
import pytest
import reference
import torch
from conformance import Subject, compare
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


FULL_LIMITS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"sliding_window": 90},
    "causal window": {"is_causal": True, "sliding_window": 75},
    "padding": {"key_padding_mask": torch.arange(133) < torch.tensor([[133], [91]])},
    "holes": {"attention_mask": torch.arange(133) % 23 != 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", FULL_LIMITS)
@pytest.mark.parametrize("sharpness", [0.0, 0.1, 0.6, 2.0])
def test_full_rows_near_softmax(limit, sharpness):
    tensors = make_inputs(T_q=83, T_k=133, alphas=(1.0 + 1e-6, 1.01, 1.1, 1.24), sharpness=sharpness)
    if sharpness:
        compare(Subject("numba"), tensors, **FULL_LIMITS[limit], position_bias=torch.zeros(1, 4, 83, 133))
        return
    # Equal scores: the gradient in alpha is 0 up to rounding.
    out, weights = numba_attention(*tensors, need_weights=True, **FULL_LIMITS[limit])
    oracle = reference.attention(*tensors, grad_out=torch.ones_like(out), **FULL_LIMITS[limit])
    assert (weights - oracle["weights"]).abs().max() < 2e-6
    (gradient,) = torch.autograd.grad(out.sum(), tensors[3])
    assert gradient.abs().max() < 1e-3


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
