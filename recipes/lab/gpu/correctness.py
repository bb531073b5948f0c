"""Are the kernels right? Their tests on the device, against float64, and small cases of each under NVIDIA's compute-sanitizer.

The sanitizer looks for reads and writes out of bounds, races and unset memory. What it (and Nsight Compute) looks at is
``python -m recipes.lab.gpu.correctness half cuda [length]``: every kernel once, checked.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hf_entmax.ops import entmax, entmax_attention, exact_sparse_attention, sketch_keys

from ..rows import ROOT
from . import rows as plugin
from .rows import Cut, Rows, Skip
from .setting import PROCESSES, Setting

TESTS = ("tests/ops/test_triton_cuda.py", "tests/ops/triton_cases.py", "tests/ops/triton_exact_cases.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = ("half", "float32", "options", "exact", "rows")
#: Seconds that one case may take under one tool.
LIMIT = 60.0


def run(rows: Rows, setting: Setting) -> None:
    """Have pytest write a row for each test, with its error as a share of what is allowed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin.__name__]
    if setting.tiny:
        command += ["-k", "test_no_gradient_of_the_gradient or test_auto_chooses", "-p", "no:xdist"]
    elif importlib.util.find_spec("xdist"):
        # Most of the time goes into compiling kernels, on the CPU. A process whose device gave up ends and is replaced.
        command += ["-n", str(PROCESSES), "--max-worker-restart", "50"]
    # A pytest that started this program must not be taken for the one that it starts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, *TESTS], cwd=ROOT, env={**environment, plugin.VARIABLE: str(setting.out)})
    # 1: tests failed, and have their rows; 5: all had passed before.
    if done.returncode not in (0, 1, 5):
        raise SystemExit(f"pytest ended with {done.returncode}")


def run_sanitizer(rows: Rows, setting: Setting) -> None:
    with ThreadPoolExecutor(4) as pool:
        for tool in TOOLS:
            for case in CASES[-1:] if setting.tiny else CASES:
                pool.submit(rows.run, f"{tool} {case}", functools.partial(sanitize, tool, case, setting))


def sanitize(tool: str, case: str, setting: Setting) -> dict[str, Any]:
    """Run a case under a tool; "wrong" if the tool found something or the results are off."""
    found = shutil.which("compute-sanitizer")
    if found is None and not setting.tiny:
        raise Skip("compute-sanitizer is not on the PATH")
    if tool != TOOLS[0] and found is None:
        raise Skip("a tiny run without compute-sanitizer runs the cases once, plain")
    watched = [] if found is None else [found, "--tool", tool, "--error-exitcode", "99", "--print-limit", "5"]
    watched += [sys.executable, "-m", "recipes.lab.gpu.correctness", case, setting.device]
    # Memory that PyTorch keeps for later use would hide what lies beyond a tensor.
    options = {
        "cwd": ROOT,
        "env": {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        "timeout": min(LIMIT, setting.left),
    }
    try:
        done = subprocess.run(watched, capture_output=True, text=True, **options)
    except subprocess.TimeoutExpired:
        raise Cut(f"not done within {options['timeout']:.0f} s") from None
    text = done.stdout + done.stderr
    errors = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    status = "ok" if done.returncode == 0 else "wrong"
    return {"status": status, "summary": [a or b for a, b in errors], "reason": "" if status == "ok" else text[-1500:]}


def attend(dtype: torch.dtype, head_dim: int, device: str, length: int, **options: object) -> None:
    """Forward and backward pass against float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, head_dim) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    alpha = torch.tensor([1.0, 1.2, 1.5, 2.0], device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (*tensors, alpha)]
    results = []
    for backend, inputs in (("triton", (*tensors, alpha)), ("torch", exact)):
        out = entmax_attention(*inputs, backend=backend, is_causal=True, **options)[0]  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    limit = 1e-3 if dtype == torch.float32 else 0.06
    for actual, expected in zip(*results, strict=True):
        error = float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        if not error < limit:
            raise SystemExit(f"off by {error:.3g}, allowed {limit}")


def decode(device: str, keys: int) -> None:
    """A step of exact decoding against float64; on a GPU its rows are split."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, n, 64, generator=generator) for heads, n in ((4, 1), (2, keys), (2, keys))
    )
    given, alpha = (
        (3 * query.to(device), key.to(device), value.to(device)),
        torch.tensor([1.0, 1.2, 1.5, 2.0], device=device),
    )
    out, _ = exact_sparse_attention(given[0], sketch_keys(given[1]), *given[1:], alpha, backend="triton")
    wide = [tensor.double() for tensor in (*given, alpha)]
    error = float((out - entmax_attention(*wide, backend="torch")[0]).abs().max())
    if not error < 1e-3:
        raise SystemExit(f"exact decoding is off by {error:.3g}")


def every_kernel(case: str, device: str, length: int = 0) -> None:
    """Run the kernels of a case once, checked."""
    length = length or (20 if device == "cpu" else 150)
    if case == "half":
        attend(torch.bfloat16, 64, device, length)
    elif case == "float32":
        attend(torch.float32, 80, device, length)
    elif case == "options":
        mask = torch.rand(1, 1, length, length, device=device) > 0.2
        padding = torch.arange(length, device=device)[None] < length - 3
        options = {"attention_mask": mask, "key_padding_mask": padding, "softcap": 20.0, "sliding_window": length // 2}
        attend(torch.float16, 128, device, length, **options)
    elif case == "exact":
        decode(device, 100 if device == "cpu" else 1300)
    elif case == "rows":
        for shape in ((33, 40), (2, 1500 if device == "cpu" else 5000)):
            scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
            error = float((entmax(scores, 1.4).double() - entmax(scores.double(), 1.4)).abs().max())
            if not error < 1e-5:
                raise SystemExit(f"rows are off by {error:.3g}")
    else:
        raise SystemExit(f"{case!r} is no case")


if __name__ == "__main__":
    every_kernel(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
