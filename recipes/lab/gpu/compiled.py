"""Compile the kernels for a GPU, on any machine: registers, spills, shared memory, instructions of each loop.

    TRITON_INTERPRET=0 python -m recipes.lab.gpu.compiled learned        # a case; a line of JSON for each kernel
    TRITON_INTERPRET=0 python -m recipes.lab.gpu.compiled learned 80     # for compute capability 8.0 (else 9.0)

The interpreter accepts what the compiler does not (types of a loop's variables, shapes of a dot product), and does not know what
fits into a multiprocessor. A stand-in for the driver names the target, and launches stop after compilation: arguments are
specialised as in a real launch, and tensors stay on the CPU. Kernels end up in Triton's cache, where a real launch finds them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..rows import ROOT
from .rows import Rows
from .setting import Setting

#: Of compute capability 9.0: bytes of shared memory a block of threads may have, bytes of stack that are a few registers.
SHARED, STACK = 227 * 1024, 1024
#: Matrix products: of Ampere, Hopper and Blackwell.
PRODUCT = r"[HQ]G?MMA|UTC\w*MMA"
#: Machine instructions by the unit that runs them: cycles that one takes of a quarter of a multiprocessor.
UNITS = {
    "powers": (r"MUFU", 8),
    "spills": (r"LDL|STL", 4),
    "half_rate": (r"FMNMX|FSETP|FSEL|FSET|LOP|IADD|V?IMNMX|ISETP|SEL|SHF|LEA|PRMT|F2F|I2F|PLOP", 2),
}


class Step(NamedTuple):
    """One training step: the dtype, head dimension, alpha (None: learned), and more."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    alpha: float | None = None
    queries: int = 128
    keys: int = 128
    batch: int = 2
    heads: int = 4
    options: str = "is_causal"


CASES: dict[str, Step | None] = {
    "learned": Step(options="is_causal position_bias"),
    "options": Step(torch.float16, 80, options="mask padding softcap dropout sliding_window need_weights"),
    "float32": Step(torch.float32, 64, 1.5, options="additive padding"),
    "rows": None,
    "exact": Step(head_dim=80, queries=1, keys=4096, options="mask position_bias padding softcap is_causal"),
    "exact in float32": Step(torch.float32, 64, 1.5, queries=1, keys=4096, options=""),
    # One query, key, head, sequence: Triton takes an argument that is 1 for a constant.
    "ones": Step(queries=1, keys=1, batch=1, heads=1, options="is_causal position_bias padding sliding_window"),
    "decoding": Step(queries=1, keys=4096),
    # Two steps of other sizes: they should be the same kernels.
    "sizes": Step(options="is_causal sliding_window"),
    **{
        f"{dtype}-{head_dim}{'' if alpha is None else f' at {alpha}'}": Step(getattr(torch, dtype), head_dim, alpha)
        for dtype, alpha in (("bfloat16", None), ("bfloat16", 1.5), ("float16", None), ("float32", None))
        for head_dim in (64, 80, 128, 256)
    },
    "softmax": Step(alpha=1.0),
    "sparsemax": Step(alpha=2.0),
}


def run(rows: Rows, setting: Setting) -> None:
    for name in ("rows",) if setting.tiny else CASES:
        rows.run(name, lambda name=name: in_a_process(name))


def in_a_process(name: str) -> dict[str, Any]:
    """One case in a process that compiles; "wrong" where a kernel does not fit or spills much."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "recipes.lab.gpu.compiled", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    kernels = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    bad = [k for k, found in kernels.items() if found["shared"] > SHARED or found["stack"] > STACK or found["calls"]]
    return {"status": "wrong" if bad else "ok", "reason": f"{bad}" if bad else "", "kernels": kernels}


def compile_case(name: str, capability: int = 90) -> dict[str, dict[str, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from hf_entmax.ops import triton_gpu

    calls = {"get_current_device": lambda: 0, "get_current_stream": lambda device=None: 0}
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", capability, 32), **calls)
    compiled: dict[str, Any] = {}
    variants: dict[str, set[str]] = {}
    launch: Any = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = compiled[self.__name__] = launch(self, *args, grid=grid, warmup=True, **options)
        variants.setdefault(self.__name__, set()).add(kernel.hash)

    driver.set_active(target)  # type: ignore[arg-type]
    JITFunction.run = compile_only  # type: ignore[method-assign]
    # Tensors on the CPU are taken, as by the interpreter, which is not used.
    triton_gpu._INTERPRETED = True
    case = CASES[name]
    if case is None:
        solve()
    elif name.startswith("exact"):
        decode(case)
    else:
        attend(case)
        if name == "sizes":
            attend(case._replace(queries=100, keys=1000, batch=1, heads=32))
    return {kernel: {**describe(found), "variants": len(variants[kernel])} for kernel, found in compiled.items()}


def decode(case: Step) -> None:
    """A step of exact sparse decoding, with each size of codes, of rows that are split and that are not."""
    from hf_entmax.ops import sketch_keys, triton_gpu
    from hf_entmax.ops.triton_gpu import exact_host

    query, key, value, alpha, options = arguments(case)
    with_sink = dataclasses.replace(options, sink=torch.zeros(case.heads))
    for bits, splits in ((4, 1), (6, 8)):
        sketch = sketch_keys(key.detach(), bits)
        with mock.patch.object(exact_host, "row_splits", lambda *_, splits=splits: splits):
            triton_gpu.exact_sparse_attention(query, sketch, key, value, alpha, with_sink)


def attend(case: Step) -> None:
    """Everything that one training step launches."""
    from hf_entmax.ops import triton_gpu

    out, weights = triton_gpu.attention(*arguments(case))
    results = [out] if weights is None else [out, weights]
    # Not of a sum: its gradient is one number with strides of 0, which would be read element by element.
    torch.autograd.backward(results, list(map(torch.ones_like, results)))


def arguments(case: Step) -> tuple[Any, ...]:
    from hf_entmax.ops.options import AttentionOptions

    dtype, shape = case.dtype, (case.queries, case.keys)
    kv_heads = max(1, case.heads // 2)
    sizes = ((case.heads, case.queries), (kv_heads, case.keys), (kv_heads, case.keys))
    query, key, value = (
        torch.randn(case.batch, heads, length, case.head_dim, dtype=dtype, requires_grad=True)
        for heads, length in sizes
    )
    alpha = torch.full((case.heads,), 1.5, requires_grad=True) if case.alpha is None else case.alpha
    known = {
        "is_causal": ("is_causal", True),
        "position_bias": ("position_bias", torch.randn(1, case.heads, *shape, dtype=dtype, requires_grad=True)),
        "mask": ("attention_mask", torch.ones(1, 1, *shape, dtype=torch.bool)),
        "additive": ("attention_mask", torch.zeros(case.keys)),
        "padding": ("key_padding_mask", torch.ones(case.batch, case.keys, dtype=torch.bool)),
        "softcap": ("softcap", 30.0),
        "dropout": ("dropout", 0.1),
        "sliding_window": ("sliding_window", 64),
        "need_weights": ("need_weights", True),
    }
    options: dict[str, Any] = dict(known[name] for name in case.options.split())
    return query, key, value, alpha, AttentionOptions(**options)


def solve() -> None:
    """The kernels for rows, with one alpha and with one for each row."""
    from hf_entmax.ops import triton_gpu

    kernel, scores = triton_gpu.row_kernel(torch.empty(1)), torch.randn(64, 300)
    assert kernel is not None
    for u in (0.5, torch.full((64, 1), 0.5)):
        kernel.solve_rows(scores.bfloat16(), u, floor=-1e38)


def describe(kernel: Any) -> dict[str, Any]:
    """Resources and loops of a compiled kernel."""
    ptx, usage = kernel.asm["ptx"], nvidia_tool("cuobjdump", kernel, "-res-usage")
    registers, stack = (int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "products": next((name for name in ("wgmma", "tcgen05", "mma.sync") if name in ptx), "none"),
        "calls": kernel.asm["ttgir"].count("tt.call"),
        "lines": len(ptx.splitlines()),
        "loops": loops(nvidia_tool("nvdisasm", kernel, "-c")),
    }


def nvidia_tool(name: str, kernel: Any, *options: str) -> str:
    """What a program that comes with Triton says about machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, *options, file.name], check=True, capture_output=True, text=True).stdout


def loops(assembly: str) -> list[dict[str, int]]:
    """The loops that hold matrix products, in order: instructions, and cycles of a quarter of a multiprocessor for each warp.

    All branches of a condition count, so that a loop costs at most these cycles; ``least`` has the shortest way through it (no edge of
    what is visible, no series for alphas near 1).
    """
    labels: dict[str, int] = {}
    code: list[tuple[str, str, bool]] = []
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);", line):
            code.append((found[2], found[3], found[1] is not None or "P" in found[3].split("`")[0]))
    jumps = {place: labels.get(_target(rest), place) for place, (name, rest, _) in enumerate(code) if name[:3] == "BRA"}
    spans = [(target, place) for place, target in jumps.items() if target < place]
    result = []
    for first, last in spans:
        if any(first < other and end < last for other, end in spans):
            continue  # an inner loop is counted by itself
        counts = _counts(code[first : last + 1])
        if counts["products"]:
            least = _cycles(_counts([code[place] for place in _shortest(code, jumps, first, last)]))
            result.append({**counts, "cycles": _cycles(counts), "least": least})
    return result


def _target(rest: str) -> str:
    found = re.search(r"\.L_\w+", rest)
    return found[0] if found else ""


def _shortest(code: list[tuple[str, str, bool]], jumps: dict[int, int], first: int, last: int) -> list[int]:
    """The places of the fewest instructions that lead from the first to the last of a loop."""
    length, following = {last: 1}, {}
    for place in range(last - 1, first - 1, -1):
        ways = [place + 1] if place not in jumps or code[place][2] else []
        ways += [jumps[place]] if place < jumps.get(place, 0) <= last else []
        following[place] = min(ways, key=lambda way: length[way], default=last)
        length[place] = 1 + (length[following[place]] if ways else len(code))
    places = [first]
    while places[-1] != last:
        places.append(following[places[-1]])
    return places


def _counts(code: list[tuple[str, str, bool]]) -> dict[str, int]:
    counts = {"instructions": len(code), "products": sum(bool(re.match(PRODUCT, operation)) for operation, *_ in code)}
    return counts | {
        unit: sum(bool(re.match(pattern, operation)) for operation, *_ in code) for unit, (pattern, _) in UNITS.items()
    }


def _cycles(counts: dict[str, int]) -> int:
    return max(counts["instructions"], *(cycles * counts[unit] for unit, (_, cycles) in UNITS.items()))


if __name__ == "__main__":
    for kernel, found in compile_case(sys.argv[1], *map(int, sys.argv[2:])).items():
        print(json.dumps([kernel, found]))
