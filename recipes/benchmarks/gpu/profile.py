"""Where the time of the slowest case goes: kernels of one training step, their rates against the peaks, Nsight's view."""

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

from . import costs, problems
from .rows import Rows, Skip, read
from .setting import ROOT, Setting

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
    """Write the rows of this part."""
    rows.run("slowest case", lambda: profiled(setting, slowest(setting)))
    rows.run("nsight", lambda: nsight(setting))


def slowest(setting: Setting) -> tuple[int, int, float | None]:
    """Length, head dimension and wanted share of empty tiles of the case that is furthest from its goal."""
    worst, found = 0.0, ((20, 16, 0.5) if setting.tiny else (16384, 64, 0.65))
    for line in read(setting.out):
        ratios = (
            [g["ratio"] / g["at_most"] for g in line.get("goals", {}).values()] if line["part"] == "timings" else []
        )
        if ratios and max(ratios) > worst:
            worst, (_, _, length, head_dim) = max(ratios), line["shape"]
            found = length, head_dim, None if "random" in line["case"] else line["empty_tiles"]
    return found


def profiled(setting: Setting, case: tuple[int, int, float | None]) -> dict[str, Any]:
    """Microseconds by kernel, and what share of the peaks the attention kernels reach at least."""
    length, head_dim, wanted = case
    heads = 1 if setting.tiny else 1024 // head_dim
    shape = (1 if setting.tiny else max(1, 32768 // length), heads, length, head_dim)
    alpha = torch.linspace(1.3, 1.9, heads, device=setting.device).requires_grad_()
    if wanted is None:
        tensors = problems.random(*shape, setting.device)
    else:
        tensors, _ = problems.sparse(shape, wanted, alpha, setting.device)
    empty = problems.empty_share(tensors, alpha)

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
    least, rates = costs.least(shape, empty), {}
    for kernel, numbers in least.items():
        microseconds = next((time for key, time in table.items() if f"attention_{kernel}_kernel" in key), None)
        if microseconds:
            teraflops, terabytes = (numbers[what] / microseconds / 1e6 for what in ("flops", "bytes"))
            rates[kernel] = {
                "teraflops": round(teraflops, 1),
                "share_of_peak": round(teraflops / costs.PEAK_TERAFLOPS, 3),
                "terabytes_per_second": round(terabytes, 3),
                "share_of_bandwidth": round(terabytes / costs.PEAK_TERABYTES, 3),
            }
    return {"shape": shape, "empty_tiles": round(empty, 4), "microseconds": table, "rates": rates}


def nsight(setting: Setting) -> dict[str, Any]:
    """How busy each unit is during the kernels of one small step."""
    if (tool := shutil.which("ncu")) is None:
        raise Skip("ncu is not on the PATH")
    program = [sys.executable, "-m", "recipes.benchmarks.gpu.kernels_once", "half", setting.device, "2048"]
    watched = [tool, "--csv", "--page", "raw", "--clock-control", "none", "-k", "regex:entmax_attention", "-c", "8"]
    done = subprocess.run(
        [*watched, "--metrics", ",".join(METRICS), *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=setting.left,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        raise RuntimeError((done.stdout + done.stderr)[-1500:])
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    wanted = ("Kernel Name", *METRICS)
    return {"kernels": [{key: row.get(key) for key in wanted} for row in table if row.get("ID")]}
