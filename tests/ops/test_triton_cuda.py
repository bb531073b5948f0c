"""The Triton kernels on a real GPU, against float64 on the torch path. All skip, with the reason, where there is none.

What the kernels compute is checked in detail by `triton_cases.py`, which runs on a GPU too; here stand the dtypes and sizes that
the interpreter cannot reach, concurrency, losses, and the choice of the backend.
"""

import os
import threading

import pytest
import torch
from device_report import report  # noqa: F401  a fixture
from tolerances import FORWARD, GRADIENT, absolute_error, assert_gradient, assert_half, assert_loss, relative_error

from hf_entmax.losses import entmax_loss, linear_entmax_loss
from hf_entmax.ops import entmax, entmax_attention, exact_sparse_attention, sketch_keys

REASON = "needs a CUDA device and Triton, not interpreted"
triton = pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason=REASON
)

ALPHA = (1.0, 1.05, 1.3, 1.5, 1.8, 2.0, 1.2, 1.6)


def make(B=2, H=8, H_kv=None, T_q=200, T_k=333, D=64, dtype=torch.float32, sharpness=2.0):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads, length):
        return torch.randn(B, heads, length, D, generator=generator, device="cuda")

    query, key, value = draw(H, T_q) * sharpness, draw(H_kv or H, T_k), draw(H_kv or H, T_k).tanh()
    alpha = torch.tensor(ALPHA[:H], device="cuda")
    return [t.to(dtype).requires_grad_() for t in (query, key, value)] + [alpha.requires_grad_()]


def run(attend, tensors, grad_out, **options):
    out = attend(*tensors, **options)[0]
    bias = options.get("position_bias")
    leaves = [*tensors, bias] if bias is not None else tensors
    return [out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def torch_attention(*tensors, **options):
    return entmax_attention(*tensors, backend="torch", **options)


def fused(*tensors, **options):
    return entmax_attention(*tensors, backend="triton", **options)


def oracle(tensors, grad_out, **options):
    wide = [t.detach().double().requires_grad_() for t in tensors]
    if options.get("position_bias") is not None:
        options["position_bias"] = options["position_bias"].detach().double().requires_grad_()
    return run(torch_attention, wide, grad_out.double(), **options)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "sliding_window": 77},
    "softcap": {"softcap": 5.0},
    "padding": {"padding": True},
    "bool mask": {"mask": True},
    "T5": {"bias": True},
    "a sink": {"sink": True, "is_causal": True},
}


def build(name):
    options = dict(OPTIONS[name])
    if options.pop("padding", False):
        position = torch.arange(333, device="cuda")
        options["key_padding_mask"] = torch.stack([position < 150, position >= 200])
    if options.pop("mask", False):
        options["attention_mask"] = torch.rand(2, 1, 200, 333, device="cuda") > 0.4
    if options.pop("bias", False):
        options["position_bias"] = torch.randn(1, 8, 200, 333, device="cuda", requires_grad=True)
    if options.pop("sink", False):
        # One key that all see, whose score is one number of each head.
        bias = torch.zeros(1, 8, 1, 333, device="cuda")
        bias[..., 0] = torch.linspace(-2, 6, 8, device="cuda")[:, None]
        options["position_bias"] = bias.requires_grad_()
    return options


def check_float32(tensors, grad_out, **options):
    ours, wanted = run(fused, tensors, grad_out, **options), oracle(tensors, grad_out, **options)
    assert absolute_error(ours[0], wanted[0]) <= FORWARD[torch.float32] * 2  # scores of 64 products, 4 deviations wide
    for actual, expected in zip(ours[1:], wanted[1:], strict=True):
        assert_gradient(actual, expected, torch.float32)


def check_half(dtype, tensors, grad_out, **options):
    ours = run(fused, tensors, grad_out, **options)
    plain = run(torch_attention, tensors, grad_out, **options)
    for actual, torchs, expected in zip(ours, plain, oracle(tensors, grad_out, **options), strict=True):
        assert_half(actual.to(dtype).cpu(), torchs.to(dtype).cpu(), expected.cpu())


@pytest.mark.parametrize("name", OPTIONS)
def test_float32(name):
    grad_out = torch.randn(2, 8, 200, 64, device="cuda")
    check_float32(make(H_kv=4 if name == "causal" else None), grad_out, **build(name))


@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_float32_of_other_widths(head_dim):
    check_float32(make(D=head_dim, sharpness=1.0), torch.randn(2, 8, 200, head_dim, device="cuda"), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_half(dtype, head_dim, causal):
    tensors = make(D=head_dim, dtype=dtype, sharpness=1.5)
    check_half(dtype, tensors, torch.randn(2, 8, 200, head_dim, device="cuda").to(dtype), is_causal=causal)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("plain", "causal")])
def test_half_with_options(name):
    tensors = make(H_kv=2, dtype=torch.bfloat16, sharpness=1.5)
    check_half(torch.bfloat16, tensors, torch.randn(2, 8, 200, 64, device="cuda").bfloat16(), **build(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 100])
def test_32k_keys(dtype, queries):
    tensors = make(B=1, H_kv=2, T_q=queries, T_k=32768, dtype=dtype)
    grad_out = torch.randn(1, 8, queries, 64, device="cuda").to(dtype)
    if dtype == torch.float32:
        check_float32(tensors, grad_out, is_causal=True)
    else:
        check_half(dtype, tensors, grad_out, is_causal=True)


def test_half_precision_scores_beyond_the_range_of_float16():
    """Products of queries and keys above 65504 are float32 all the way."""
    query, key, value, alpha = make(D=64, dtype=torch.float16)
    big = [(query.detach() * 60).requires_grad_(), (key.detach() * 60).requires_grad_(), value, alpha]
    ours = run(fused, big, torch.randn(2, 8, 200, 64, device="cuda"), is_causal=True)
    assert float((big[0].detach().float() @ big[1].detach().float().transpose(-1, -2)).max()) > 65504
    expected = oracle(big, torch.zeros(2, 8, 200, 64, device="cuda"), is_causal=True)[0]
    assert absolute_error(ours[0], expected) < 2e-2 and all(bool(t.isfinite().all()) for t in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses(dtype, alpha, smoothing):
    hidden = torch.randn(40, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(20_000, 64, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(20_000, (40,), device="cuda")
    labels[::7] = -100
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]

    def loss(logits):
        return entmax_loss(logits, labels, alpha, label_smoothing=smoothing)

    exact = loss(wide[0] @ wide[1].t())
    expected = torch.autograd.grad(exact, wide)
    # Logits of 64 products, 8 deviations wide: in half precision their own rounding is what counts.
    plain = torch.autograd.grad(loss((hidden @ weight.t()).double()), (hidden, weight))
    for ours in (
        linear_entmax_loss(hidden, weight, labels, alpha, label_smoothing=smoothing),
        loss(hidden @ weight.t()),
    ):
        assert_loss(ours, exact, dtype)
        for actual, torchs, wanted in zip(torch.autograd.grad(ours, (hidden, weight)), plain, expected, strict=True):
            if dtype == torch.float32:
                assert_gradient(actual, wanted)
            else:
                assert_half(actual, torchs, wanted)


def test_auto_chooses_the_kernel():
    tensors = make()
    assert torch.equal(entmax_attention(*tensors)[0], fused(*tensors)[0])


def test_more_weights_than_32_bits_count():
    """B H T_q T_k = 2**32, and offsets of the [B, T, H, D] layout beyond 2**31: the last head equals a call of its own."""
    B, T, H, D = 2, 8192, 32, 64
    query, key, value = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    alpha = torch.linspace(1.1, 1.9, H, device="cuda")
    query = query * 4
    out = fused(query, key, value, alpha, is_causal=True)[0]
    alone = fused(query[-1:, -1:], key[-1:, -1:], value[-1:, -1:], alpha[-1:], is_causal=True)[0]
    assert torch.equal(out[-1:, -1:], alone)
    far = torch.empty(2**31 + 64 * 128, device="cuda", dtype=torch.bfloat16)
    moved = far.as_strided((1, 1, 128, 64), (1, 1, (2**31) // 127, 1))
    moved.copy_(query[:1, :1, :128])
    near = fused(query[:1, :1, :128], key[:1, :1], value[:1, :1], 1.4)[0]
    assert torch.equal(fused(moved, key[:1, :1], value[:1, :1], 1.4)[0], near)


def test_memory_is_linear():
    def peak(length):
        tensors = make(B=1, T_q=length, T_k=length, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(fused, tensors, torch.randn(1, 8, length, 64, device="cuda"))
        return torch.cuda.max_memory_allocated() - before

    # One byte and two list entries for each tile of 64 x 64 are all that grows with the square.
    assert peak(8192) < 3 * peak(4096)


def test_the_same_bits_every_time_and_from_two_threads():
    tensors, grad_out = make(H_kv=2, dtype=torch.bfloat16), torch.randn(2, 8, 200, 64, device="cuda")
    first = run(fused, tensors, grad_out, is_causal=True)
    results = [None, None]

    def work(slot):
        for _ in range(5):
            results[slot] = run(fused, tensors, grad_out, is_causal=True)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for result in results:
        assert result is not None
        for actual, expected in zip(result, first, strict=True):
            assert torch.equal(actual, expected)


def test_dropout():
    query, key, value, _ = make(sharpness=0.5)
    torch.manual_seed(1)
    out, weights = fused(query, key, value, torch.ones(8, device="cuda"), dropout=0.25, need_weights=True)
    assert 0.745 < (weights > 0).float().mean() < 0.755
    assert absolute_error(out, weights.double() @ value.double()) < 1e-5
    torch.manual_seed(1)
    assert torch.equal(fused(query, key, value, torch.ones(8, device="cuda"), dropout=0.25)[0], out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_sparse_attention_is_chosen_and_waits_for_nothing(dtype):
    query, key, value, alpha = (t.detach() for t in make(H_kv=2, T_q=1, T_k=9000, dtype=dtype, sharpness=3.0))
    sketch = sketch_keys(key)
    exact_sparse_attention(query, sketch, key, value, alpha)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, counts = exact_sparse_attention(query, sketch, key, value, alpha)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    wanted = torch_attention(query.double(), key.double(), value.double(), alpha.double())[0]
    if dtype == torch.float32:
        assert absolute_error(out, wanted) <= FORWARD[dtype]
    else:
        assert_half(out, torch_attention(query, key, value, alpha)[0], wanted)
    assert bool((counts.read[:, 3:6] < 0.5 * counts.total[:, 3:6]).all())


def test_compiled_by_inductor():
    tensors, grad_out = make(H_kv=4, dtype=torch.bfloat16), torch.randn(2, 8, 200, 64, device="cuda")
    compiled = torch.compile(lambda *t, **o: fused(*t, **o), fullgraph=True)
    for actual, expected in zip(
        run(compiled, tensors, grad_out, is_causal=True), run(fused, tensors, grad_out, is_causal=True), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape", [(64, 40), (5, 50_000)])
def test_entmax_of_rows(shape):
    from hf_entmax.ops import backends

    scores = torch.randn(shape, device="cuda", requires_grad=True)
    alpha = torch.linspace(1, 2, shape[0], device="cuda").requires_grad_()
    grad = torch.randn(shape, device="cuda")
    wide = [scores.detach().double().requires_grad_(), alpha.detach().double().requires_grad_()]
    expected = entmax(wide[0], wide[1][:, None])
    assert backends.row_kernel(scores).__name__ == "hf_entmax.ops.triton_gpu.row_host"
    probs = entmax(scores, alpha[:, None])
    assert absolute_error(probs, expected) <= FORWARD[torch.float32]
    for actual, wanted in zip(
        torch.autograd.grad(probs, (scores, alpha), grad),
        torch.autograd.grad(expected, wide, grad.double()),
        strict=True,
    ):
        assert relative_error(actual, wanted) <= GRADIENT[torch.float32]


def test_a_loss_waits_for_the_device_only_to_check_its_arguments():
    from hf_entmax.losses.blocks import BatchLosses, row_blocks, write_residuals

    logits, labels = torch.randn(64, 5000, device="cuda"), torch.randint(5000, (64,), device="cuda")
    weight, out = torch.ones(64, 1, device="cuda"), torch.empty(64, 5000, device="cuda")

    def both():
        batch = BatchLosses(logits, need_slope=False)
        list(batch.run(logits, labels, None, 1.5, None, 0.0))
        blocks = row_blocks(logits)
        write_residuals(blocks, logits, batch.solved, 1.5, None, labels, weight, batch.dead, 0.0, out)

    both()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_an_alpha_that_the_kernels_are_wrong_for_takes_the_dense_path():
    query, key, value, _ = make(T_k=700)
    alpha = torch.tensor([1.5] * 7 + [3.1], device="cuda")
    out = entmax_attention(query, key, value, alpha)[0]
    assert torch.equal(out, torch_attention(query, key, value, alpha)[0]) and out.isfinite().all()
    with pytest.raises(ValueError, match=r"alpha: 3\.1 is above 2\.905"):
        fused(query, key, value, alpha)
