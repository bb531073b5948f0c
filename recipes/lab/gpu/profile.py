"""Where the time of the slowest case goes: kernels of one training step, their rates against the peaks, Nsight's view.

What the time should be: `recipes.lab.gpu.forecast`.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from hf_entmax.ops import entmax_attention

from ..rows import ROOT
from . import problems
from .rows import Rows, Skip, read
from .setting import Setting

#: Operations and bytes per second of the H100 SXM: what a rate is compared with where the part "environment" measured nothing.
PEAK_TERAFLOPS, PEAK_TERABYTES = 989.0, 3.35
#: Matrix products of each kernel per tile it visits.
PRODUCTS = {"fwd": 3, "bwd_query": 3, "bwd_key": 4}
METRICS = (
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
)


def run(rows: Rows, setting: Setting) -> None:
    rows.run("slowest case", lambda: profiled(setting, slowest(setting)))
    rows.run("nsight", lambda: nsight(setting))


def slowest(setting: Setting) -> tuple[int, int, float | None]:
    """Length, head dimension and wanted share of empty tiles of the case that is furthest from its goal."""
    worst, found = 0.0, ((20, 16, 0.5) if setting.tiny else (16384, 64, 0.65))
    for line in [line for line in read(setting.out) if line["part"] == "timings"]:
        furthest = max([g["ratio"] / g["at_most"] for g in line.get("goals", {}).values()], default=0.0)
        if furthest > worst:
            worst, (_, _, length, head_dim) = furthest, line["shape"]
            found = length, head_dim, None if "random" in line["case"] else line["empty_tiles"]
    return found


def profiled(setting: Setting, case: tuple[int, int, float | None]) -> dict[str, Any]:
    """Microseconds by kernel, and what share of the peaks the attention kernels reach at least."""
    shape, tensors, alpha, empty = problems.problem(*case, setting)

    def step() -> None:
        out = entmax_attention(*tensors, alpha, is_causal=True, backend="triton")[0]
        torch.autograd.grad(out, (*tensors, alpha), torch.ones_like(out))

    step()
    activities = [ProfilerActivity.CPU, *([] if setting.tiny else [ProfilerActivity.CUDA])]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    name = "self_cpu_time_total" if setting.tiny else "self_device_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, name))
    table = {event.key: round(float(getattr(event, name)), 1) for event in events[:15]}
    rates = {}
    for kernel, numbers in least(shape, empty).items():
        microseconds = next((time for key, time in table.items() if f"attention_{kernel}_kernel" in key), None)
        if microseconds:
            teraflops, terabytes = (numbers[what] / microseconds / 1e6 for what in ("flops", "bytes"))
            rates[kernel] = {
                "teraflops": round(teraflops, 1),
                "share_of_peak": round(teraflops / PEAK_TERAFLOPS, 3),
                "terabytes_per_second": round(terabytes, 3),
                "share_of_bandwidth": round(terabytes / PEAK_TERABYTES, 3),
            }
    return {"shape": shape, "empty_tiles": round(empty, 4), "microseconds": table, "rates": rates}


def least(shape: tuple[int, int, int, int], empty: float) -> dict[str, Any]:
    """Floating-point operations and bytes that the kernels cannot do without, by kernel.

    Args:
        shape: B, H, length (causal, T_q = T_k), D.
        empty: share of the tiles within the causal limit that carry no weight.
    """
    batch, heads, length, head_dim = shape
    product = 2 * batch * heads * head_dim * length * (length + 1) / 2
    tensor = 2 * batch * heads * length * head_dim
    # One product over all tiles finds the maximum; one pass at least the threshold.
    flops = {kernel: count * product * (1 - empty) for kernel, count in PRODUCTS.items()}
    flops["fwd"] += product * (1 + (1 - empty))
    size = {"fwd": 4 * tensor + 2 * tensor, "bwd_query": 6 * tensor, "bwd_key": 6 * tensor}
    return {kernel: {"flops": flops[kernel], "bytes": size[kernel]} for kernel in PRODUCTS}


def nsight(setting: Setting) -> dict[str, Any]:
    """How busy each unit is during the kernels of one small step."""
    if (tool := shutil.which("ncu")) is None:
        raise Skip("ncu is not on the PATH")
    program = [sys.executable, "-m", "recipes.lab.gpu.correctness", "half", setting.device, "2048"]
    watched = [tool, "--csv", "--page", "raw", "--clock-control", "none", "-k", "regex:entmax_attention", "-c", "8"]
    watched += ["--metrics", ",".join(METRICS)]
    done = subprocess.run([*watched, *program], cwd=ROOT, capture_output=True, text=True, timeout=setting.left)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        raise RuntimeError((done.stdout + done.stderr)[-1500:])
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    wanted = ("Kernel Name", *METRICS)
    return {"kernels": [{key: row.get(key) for key in wanted} for row in table if row.get("ID")]}
