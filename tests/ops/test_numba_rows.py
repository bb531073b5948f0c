"""The fused CPU kernels for independent rows against the float64 path, which uses no kernel."""

import ctypes
import math
import mmap
import threading

import pytest
import torch

from hf_entmax.losses import entmax_loss, linear_entmax_loss
from hf_entmax.ops import backends
from hf_entmax.ops.candidates import dense_probs, solve_rows

pytestmark = pytest.mark.usefixtures("two_threads")  # the kernels share rows among them

pytest.importorskip("numba")
ALPHAS = [1.00001, 1.01, 1.05, 1.2, 1.26, 1.33, 1.5, 1.75, 2.0, 2.5, 4.0, 8.0, 64.0]
ROWS = 21


def dense(solution, shape):
    if solution.rows is None:
        return solution.probs
    return torch.zeros(shape, dtype=solution.probs.dtype).index_put_((solution.rows, solution.columns), solution.probs)


def without_kernel(monkeypatch):
    monkeypatch.setitem(backends._loaded, "numba", "switched off")


@pytest.mark.parametrize("record", ["RECORD", "ROWS_RECORD"])
def test_records_lie_in_memory_as_the_kernels_read_them(record):
    from hf_entmax.ops.numba_cpu import layout

    dtype = getattr(layout, record)
    kind = layout.structure(dtype)
    assert ctypes.sizeof(kind) == dtype.itemsize
    assert {name: getattr(kind, name).offset for name in dtype.names} == {n: dtype.fields[n][1] for n in dtype.names}
    with pytest.raises(AttributeError):
        kind().no_such_field = 1


def test_the_kernel_is_what_runs(monkeypatch):
    scores = torch.randn(3, 50)
    assert backends.row_kernel(scores) is not None and backends.row_kernel(scores.bfloat16()) is not None
    assert backends.row_kernel(scores.double()) is None and backends.row_kernel(scores[:0]) is None
    assert backends.row_kernel(torch.empty(3, 50, device="meta")) is None
    without_kernel(monkeypatch)
    assert backends.row_kernel(scores) is None


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 200, 4001])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_solution_equals_float64(alpha, length, scale):
    torch.manual_seed(length)
    scores = scale * torch.randn(ROWS, length)
    if length > 2:
        scores[::3, 1] = -math.inf
    ours, exact = solve_rows(scores, alpha - 1.0), solve_rows(scores.double(), alpha - 1.0)
    expected = dense(exact, scores.shape)
    torch.testing.assert_close(dense(ours, scores.shape).double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.conjugate, exact.conjugate, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours.shift.double(), exact.shift, atol=5e-6, rtol=0)
    if ours.rows is not None:
        assert (ours.probs > 0).all() and (ours.rows.diff() >= 0).all()
        assert ours.probs.numel() <= 0.25 * scores.numel()
    again = dense_probs(scores, ours.maximum, ours.shift, 3.0 * ours.scale, alpha - 1.0)
    torch.testing.assert_close(again.double(), 3.0 * expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("alpha", [1.0, *ALPHAS])
@pytest.mark.parametrize("length", [17, 4001])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_solution_without_the_kernel(alpha, length, scale, monkeypatch):
    without_kernel(monkeypatch)
    test_solution_equals_float64(alpha, length, scale)


def test_entmax_of_many_long_rows_is_the_kernels(monkeypatch):
    import reference

    from hf_entmax.ops import entmax, rows
    from hf_entmax.ops.numba_cpu import row_host

    calls, original = [], row_host.solve_rows
    monkeypatch.setattr(row_host, "solve_rows", lambda *a, **k: (calls.append(a), original(*a, **k))[1])
    monkeypatch.setattr(rows, "KERNEL_ELEMENTS", 4 * 400)
    scores = 3.0 * torch.randn(4, 400)
    scores[1], scores[2, 7], scores[3, 0] = -math.inf, torch.finfo(torch.float32).min, -math.inf
    for alpha in (1.0, 1.00001, 1.3, 1.5, 2.0, torch.tensor([1.0, 1.5, 1.7, 2.0])[:, None]):
        for given in (scores, scores.bfloat16(), scores.half().clamp(min=torch.finfo(torch.float16).min)):
            calls.clear()
            probs = entmax(given, alpha)
            assert calls and probs.dtype == given.dtype
            expected = reference.entmax(given, alpha)
            bound = 2e-6 if given is scores else 4e-3
            torch.testing.assert_close(probs.double(), expected, atol=bound, rtol=0)
            assert probs[1].eq(0).all() and probs[2, 7] == 0
    scores[0, 0] = math.nan
    assert entmax(scores, 1.5)[0].isnan().all() and not entmax(scores, 1.5)[1:].isnan().any()
    calls.clear()
    entmax(scores, 2.5), entmax(scores.double(), 1.5), entmax(scores[:3], 1.5), entmax(scores, 1.5, backend="torch")
    torch.jit.trace(lambda s: entmax(s, 1.5), scores, check_trace=False)
    assert not calls


def test_one_alpha_per_row():
    torch.manual_seed(0)
    scores = 2.0 * torch.randn(len(ALPHAS) + 1, 700)
    u = torch.tensor([1.0, *ALPHAS])[:, None] - 1.0
    ours, exact = solve_rows(scores, u), solve_rows(scores.double(), u.double())
    torch.testing.assert_close(dense(ours, scores.shape).double(), dense(exact, scores.shape), atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", [5, 16, 70, 3000])
def test_rows_that_cannot_be_solved_keep_to_themselves(length):
    torch.manual_seed(0)
    scores = torch.randn(40, length)
    plain = dense(solve_rows(scores, 0.5), scores.shape)
    broken = scores.clone()
    broken[3] = -math.inf
    broken[5, -1] = math.nan
    broken[6, 0] = math.inf
    broken[7] = torch.finfo(torch.float32).min
    solution = solve_rows(broken, 0.5)
    probs = dense(solution, scores.shape)
    assert solution.impossible.nonzero().flatten().tolist() == [3] and probs[3].eq(0).all()
    assert probs[5].isnan().all() and probs[6].isnan().all()
    torch.testing.assert_close(probs[7], torch.full((length,), 1.0 / length))
    others = [i for i in range(40) if i not in (3, 5, 6, 7)]
    torch.testing.assert_close(probs[others], plain[others], atol=0, rtol=0)
    assert solution.maximum[3] == 0 and solution.conjugate[3] == 0 and solution.conjugate[5].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_and_strided_scores(dtype):
    wide = (3.0 * torch.randn(30, 500)).to(dtype)
    for scores in (wide, wide[::2], wide.t(), wide[:, 100:333], wide[:1].expand(7, -1)):
        torch.testing.assert_close(
            dense(solve_rows(scores, 0.4), scores.shape),
            dense(solve_rows(scores.float().contiguous(), 0.4), scores.shape),
            atol=0,
            rtol=0,
        )


def test_nothing_is_read_behind_the_last_row():
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mprotect"):
        pytest.skip("no mprotect on this system")
    assert libc.mprotect(ctypes.c_void_p(address + page), page, 0) == 0
    try:
        for length in (3, 15, 17, 33):
            flat = torch.frombuffer(memory, dtype=torch.float32, count=2 * length, offset=page - 8 * length)
            scores = flat.view(2, length)
            scores.copy_(torch.randn(2, length))
            solution = solve_rows(scores, 0.5)
            dense_probs(scores, solution.maximum, solution.shift, solution.scale, 0.5)
            assert dense(solution, scores.shape).sum().item() == pytest.approx(2.0, abs=1e-6)
    finally:
        libc.mprotect(ctypes.c_void_p(address + page), page, mmap.PROT_READ | mmap.PROT_WRITE)


def test_any_number_of_threads_and_two_callers():
    scores = 2.0 * torch.randn(300, 1003)
    expected = dense(solve_rows(scores, 0.37), scores.shape)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            torch.testing.assert_close(dense(solve_rows(scores, 0.37), scores.shape), expected, atol=1e-6, rtol=0)
    finally:
        torch.set_num_threads(before)
    found = []
    callers = [
        threading.Thread(target=lambda: found.append(dense(solve_rows(scores, 0.37), scores.shape))) for _ in "ab"
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 2
    for result in found:
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("alpha", [1.05, 1.33, 1.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("length", [40, 2500])
def test_losses_do_not_depend_on_the_kernel(alpha, smoothing, length, monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(60, 8), torch.randn(length, 8, requires_grad=True)
    labels = torch.randint(0, length, (60,))
    labels[::7] = -100
    labels[1::7] = (hidden @ weight.t()).argmax(-1)[1::7]

    def run():
        logits = (hidden @ weight.detach().t()).requires_grad_()
        slope = torch.tensor(alpha, requires_grad=True)
        loss = entmax_loss(logits, labels, slope, label_smoothing=smoothing)
        linear = linear_entmax_loss(hidden, weight, labels, alpha, label_smoothing=smoothing, chunk_size=16)
        return [loss, linear, *torch.autograd.grad(loss, (logits, slope)), *torch.autograd.grad(linear, weight)]

    ours = run()
    without_kernel(monkeypatch)
    for one, other in zip(ours, run(), strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-6)
