"""Where the time of the slowest case goes: kernels of one training step, their rates against the peaks, Nsight's view.

What attention has to cost: products, scores and bytes of each pass, against what a GPU can do.

Counted for one head, in tiles of 64 x 64 scores at D 64, bfloat16, alpha learned and above 1.25. H100 SXM (132 multiprocessors, 1.83
GHz): 989 TFLOP/s on tensor cores, that is 128 cycles for a product of such a tile; 3.35 TB/s; each quarter of a multiprocessor issues
one instruction a cycle, half a comparison or selection, an eighth of a power or logarithm. *Issued* is read off the machine code
(the part "compiled"), without the branch for tiles at the edge of what is visible:

    pass                      tiles    products (cycles)            powers   issued   at alpha 1.5
    maximum                   all      Q K^T (128)                       0      320      290
    threshold, 2 to 4 times   fewer    Q K^T (128)                     512      710      550
    output                    listed   Q K^T, P V, S V (384)           512     1020      580
    backward, queries         listed   Q K^T, dO V^T, dS K (384)       512     1090      550
    backward, keys            listed   + P^T dO, dS^T Q (512)          512     1340      920

- **Passes are bound by instructions on scores**, not by products or bytes. So what is saved is passes and instructions: one power
  serves p, s and s/w; the threshold starts from a bound that equal scores attain; NaN is found in a sum; a tile's flag comes from
  row sums; the polynomial beside the logarithm runs below alpha 1.25 only (210 more a pass).
- FlashAttention: 2 products and a power forward, 5 and 1 backward, about 500 + 1000 cycles a tile. Dense rows cost ours (3 steps of the
  threshold) 3500 + 2400, 3.5 to 4 times as much; at alpha 1.5 some 2.7 times. With two thirds of the tiles empty, which only the
  first passes read: 1.1 (alpha 1.5) to 1.6 times. To be faster there the passes over keys have to become fewer, or tiles wider.
- Bytes: keys and values of a head (8 MiB at 32k) are read n / rows times from L2, 50 MiB; outside it every tensor once, and 4 + 1 bytes a
  tile for lists and flags. That is hundreds of operations a byte: memory is no limit, except in decoding (T_q 1), where every
  pass reads all keys that are left: the sketch of `exact_sparse_attention` is for that.
- Launches: forward 1 (2 with padding), backward 4 and a sum. Short rows pay for them and for Python: compare the rows "graph" of the
  timings. Loops over keys hold 30 KiB of code each.
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
