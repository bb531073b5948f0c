"""The kernels stay inside the memory that the host gives them: it is put right before a page that may not be touched."""

from __future__ import annotations

import sys

import fresh
import pytest

pytest.importorskip("numba")

_GUARDED = """
import ctypes, itertools, mmap, sys
import torch
from hf_entmax.ops import numba_cpu
from hf_entmax.ops.numba_cpu.row_host import solve_rows
from hf_entmax.ops import exact_sparse_attention, sketch_keys
from hf_entmax.ops.numba_cpu import exact_host, host, row_host, runtime
from hf_entmax.ops.options import AttentionOptions

libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE

def guarded(size):
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + pages * PAGE), PAGE, 0) == 0
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=max(size, 1), offset=pages * PAGE - max(size, 1))
    return tensor.fill_(127)

runtime.storage = host.storage = row_host.storage = exact_host.storage = guarded
host._SMALL_STORAGE = 0
torch.set_num_threads(1)
torch.manual_seed(0)
count = 0

def attend(B, H, H_kv, T_q, T_k, D, D_v, alphas, sharpness, bias=False, **options):
    global count
    count += 1
    query = (sharpness * torch.randn(B, H, T_q, D)).requires_grad_()
    key, value = torch.randn(B, H_kv, T_k, D, requires_grad=True), torch.randn(B, H_kv, T_k, D_v, requires_grad=True)
    alpha = torch.tensor([alphas[h % len(alphas)] for h in range(H)], requires_grad=True)
    if bias:
        options["position_bias"] = torch.randn(1, H, T_q, T_k, requires_grad=True)
    out, _ = numba_cpu.attention(query, key, value, alpha, AttentionOptions(**options))
    out.sum().backward()
    assert out.isfinite().all() and query.grad.isfinite().all()

sizes = [(1, 1, 1), (1, 5, 1), (2, 3, 17), (5, 17, 17), (21, 37, 16), (40, 23, 20), (70, 100, 33), (3, 300, 8), (130, 66, 64)]
for (T_q, T_k, D), alphas, sharpness in itertools.product(sizes, [(1.0, 1.1), (1.5, 2.0), (1.7, 3.0)], [0.0, 0.3, 3.0]):
    attend(1, 2, 1, T_q, T_k, D, D + 3, alphas, sharpness)
    attend(2, 2, 2, T_q, T_k, D, D, alphas, sharpness, bias=True)
    attend(1, 4, 2, T_q, T_k, D, D, alphas, sharpness, is_causal=True, sliding_window=11, dropout=0.3)
    attend(1, 2, 2, T_q, T_k, D, D, alphas, sharpness, softcap=2.0, key_padding_mask=torch.arange(T_k)[None] >= T_k // 3)
for length, u, scale in itertools.product([1, 2, 15, 16, 17, 33, 200, 1001], [0.0, 0.1, 0.5, 0.7, 1.0, 2.0], [0.0, 3.0]):
    solve_rows(scale * torch.randn(19, length), u)
    count += 1
for T_q, T_k, D, bits, kind in itertools.product([1, 3], [1, 40, 64, 300], [5, 16, 40], [4, 8], ["float32", "bfloat16"]):
    query = 2 * torch.randn(2, 4, T_q, D)
    key, value = torch.randn(2, 2, 2, T_k, D).to(getattr(torch, kind))
    alpha, sink = torch.tensor([1.0, 1.2, 1.5, 3.0]), torch.zeros(4)
    for options in ({}, {"softcap": 2.0, "sink": sink}, {"is_causal": True, "sliding_window": 20}):
        out, _ = exact_sparse_attention(query, sketch_keys(key, bits, 16), key, value, alpha, backend="numba", **options)
        assert out.isfinite().all()
        count += 1
print(count)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pages are guarded by mprotect")
def test_nothing_behind_the_memory_of_the_host_is_touched():
    run = fresh.run(_GUARDED, after="torch")
    assert run.returncode == 0, f"ended with {run.returncode}: {run.stderr[-2000:]}"
    assert int(run.stdout) > 600
