"""What is there? Versions, the device, its tools, and what a copy and a matrix product reach on it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Any

import torch

from hf_entmax.bench.timing import package_version

from .rows import Rows
from .setting import Setting, figures

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "accelerate", "numpy", "pytest", "pytest-xdist", "adasplash"
)  # fmt: skip
TOOLS = ("compute-sanitizer", "ncu", "nvidia-smi", "cuobjdump", "nvdisasm")


def run(rows: Rows, setting: Setting) -> None:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    rows.run("versions", lambda: found | {name: package_version(name) or "missing" for name in PACKAGES})
    rows.run("tools", lambda: {name: shutil.which(name) or "missing" for name in TOOLS})
    rows.run("device", lambda: device(setting))
    rows.run("ceilings", lambda: ceilings(setting))


def device(setting: Setting) -> dict[str, Any]:
    if setting.tiny:
        return {"name": platform.processor() or platform.machine()}
    found = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which("nvidia-smi") else ""
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "driver, clocks, power": clocks,
    }


def ceilings(setting: Setting) -> dict[str, Any]:
    """TB/s of a copy, read and written bytes counted; TFLOP/s of a bfloat16 matrix product."""
    n = 128 if setting.tiny else 8192
    source = torch.randn(n, n, device=setting.device)
    target, half = torch.empty_like(source), source.bfloat16()
    times = figures(setting.times({"copy": lambda: target.copy_(source), "product": lambda: half @ half}, seconds=5))
    return {
        "terabytes_per_second": round(2 * 4 * n * n / times["copy"]["median"] / 1e9, 4),
        "teraflops": round(2 * n**3 / times["product"]["median"] / 1e9, 2),
        "times": times,
    }
