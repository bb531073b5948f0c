"""Compiles the Triton kernels for compute capability 9.0, without a GPU; run by `test_triton_compile.py` in its own process.

The interpreter accepts what the compiler does not (types of a loop's variables, shapes of a dot product). A stand-in for the
driver names the target, and launches stop after compilation: the arguments are specialised as in a real launch.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from hf_entmax.ops import triton_gpu
from hf_entmax.ops.options import AttentionOptions


class _Target:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


driver.set_active(_Target())
compiled = {}
_run = JITFunction.run


def _compile_only(self, *args, grid, warmup, **kwargs):
    compiled[self.__name__] = _run(self, *args, grid=grid, warmup=True, **kwargs)


JITFunction.run = _compile_only


def attend(dtype, head_dim, alpha, bias=None, **options):
    """Compile everything that one training step launches."""
    query, key, value = (torch.randn(2, heads, 128, head_dim, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    if bias is not None:
        options["position_bias"] = torch.randn(bias, dtype=dtype, requires_grad=True)
    out, weights = triton_gpu.attention(query, key, value, alpha, AttentionOptions(**options))
    (out.sum() if weights is None else out.sum() + weights.sum()).backward()


alpha = torch.full((4,), 1.5, requires_grad=True)
keys = torch.ones(2, 128, dtype=torch.bool)
case = sys.argv[1]
if case == "learned":
    attend(torch.bfloat16, 64, alpha, bias=(1, 4, 128, 128), is_causal=True)
elif case == "options":
    attend(
        torch.float16, 80, alpha, attention_mask=torch.ones(1, 1, 128, 128, dtype=torch.bool), key_padding_mask=keys,
        softcap=30.0, dropout=0.1, sliding_window=64, need_weights=True,
    )  # fmt: skip
elif case == "float32":
    attend(torch.float32, 64, 1.5, attention_mask=torch.zeros(128), key_padding_mask=keys)
elif case == "rows":
    kernel, scores = triton_gpu.row_kernel(torch.empty(1)), torch.randn(64, 300)
    for u in (0.5, torch.full((64, 1), 0.5)):
        kernel.solve_rows(scores.bfloat16(), u, floor=-1e38)
for name, kernel in compiled.items():
    ptx, calls = kernel.asm["ptx"], kernel.asm["ttgir"].count("tt.call")
    print(name, "wgmma" if "wgmma" in ptx else "plain", calls, len(ptx.splitlines()))
