"""Which tile, warps and stages are fastest: every candidate is compiled by many processes, then timed by one.

The result is ``blocks.json`` in the folder of results, which `hf_entmax.ops.triton_gpu.blocks.tuned_blocks` reads. A tile is the
unit that the forward pass finds empty and the backward pass skips, so both have the same one; warps and stages are their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_entmax.bench.timing import quantile
from hf_entmax.ops import entmax_attention
from hf_entmax.ops.triton_gpu import blocks

from . import problems
from .rows import Rows, read
from .setting import Setting, together

#: Rows and columns of tiles, by case.
TILES = {
    "half-64": ((64, 64), (128, 64), (128, 32), (64, 128), (128, 128)),
    "half-128": ((64, 64), (128, 64), (128, 32), (64, 32)),
    "half-256": ((64, 32), (64, 64), (128, 32)),
    "float32-64": ((32, 32), (64, 32), (64, 64)),
}
WARPS_STAGES = ((4, 2), (4, 3), (8, 2), (8, 3))
BACKWARD = ((4, 1), (4, 2), (8, 1), (8, 2))


def candidates(case: str, tiny: bool) -> Iterator[blocks.Blocks]:
    """Forward and backward options of one tile are tried in the same calls, one after the other."""
    tiles = TILES[case][:2] if tiny else TILES[case]
    for rows, cols in tiles:
        for forward, backward in list(zip(WARPS_STAGES, BACKWARD, strict=True))[: 1 if tiny else 4]:
            yield blocks.Blocks(rows, cols, *forward, *backward)


def run(rows: Rows, setting: Setting) -> None:
    """Write the rows of this part, and ``blocks.json`` after each case."""
    for case in ("half-64",) if setting.tiny else TILES:
        if not setting.tiny:
            numbers = (",".join(map(str, candidate)) for candidate in candidates(case, False))
            together("tuning", [(case, each, setting.out) for each in numbers])
        for candidate in candidates(case, setting.tiny):
            name = f"{case} {' '.join(map(str, candidate))}"
            rows.run(name, lambda case=case, candidate=candidate: measure(case, candidate, setting))
        rows.run(f"{case} best", lambda case=case: choose(case, setting, rows))


def use(case: str, candidate: blocks.Blocks, setting: Setting, path: str) -> None:
    """Have the package take a candidate."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"device": device_name(setting), "blocks": {case: candidate._asdict()}}, file)
    os.environ[blocks.VARIABLE] = path
    blocks.tuned_blocks.cache_clear()


def device_name(setting: Setting) -> str:
    return "interpreter" if setting.tiny else torch.cuda.get_device_name()


def passes(case: str, setting: Setting, small: bool = False) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass, with what the backward pass wants, and the backward pass alone.

    Half the keys of a causal row are in reach, as in training; one alpha per head.
    """
    kind, head_dim = case.split("-")
    heads, length = (1, 16) if setting.tiny else (2, 128) if small else (16, 4096)
    tensors = problems.make(1 if setting.tiny or small else 2, heads, length, int(head_dim), 1.0, setting.device)
    if kind == "float32":
        tensors = [t.detach().float().requires_grad_() for t in tensors]
    alpha = torch.linspace(1.3, 1.9, heads, device=setting.device).requires_grad_()

    def forward() -> torch.Tensor:
        return entmax_attention(*tensors, alpha, is_causal=True, backend="triton")[0]

    out = forward()
    grad_out = torch.randn_like(out)
    return forward, lambda: torch.autograd.grad(out, (*tensors, alpha), grad_out, retain_graph=True)


def measure(case: str, candidate: blocks.Blocks, setting: Setting) -> dict[str, Any]:
    use(case, candidate, setting, str(setting.out / "candidate.json"))
    forward, backward = passes(case, setting)
    times = setting.times({"forward": forward, "backward": backward}, seconds=1.0)
    return {"tile": candidate[:2], **{name: round(quantile(values, 0.5), 4) for name, values in times.items()}}


def choose(case: str, setting: Setting, rows: Rows) -> dict[str, Any]:
    """The tile whose passes are fastest together, each with its own warps and stages; written to ``blocks.json``."""
    found: dict[tuple[int, int], list[tuple[blocks.Blocks, float, float]]] = {}
    for line in read(setting.out):
        if line["part"] == rows.part and line["status"] == "ok" and line["case"].startswith(case) and "tile" in line:
            candidate = blocks.Blocks(*map(int, line["case"].split()[1:]))
            found.setdefault(tuple(line["tile"]), []).append((candidate, line["forward"], line["backward"]))
    best = None
    for (height, width), tried in found.items():
        forward = min(tried, key=lambda one: one[1])
        backward = min(tried, key=lambda one: one[2])
        total = forward[1] + backward[2]
        if best is None or total < best[0]:
            best = total, blocks.Blocks(height, width, *forward[0][2:4], *backward[0][4:])
    if best is None:
        raise ValueError(f"no candidate of {case} ran")
    path = setting.out / "blocks.json"
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"blocks": {}}
    table["device"] = device_name(setting)
    table["blocks"][case] = best[1]._asdict()
    path.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return {"milliseconds": best[0], "blocks": best[1]._asdict()}


def compile_one(case: str, numbers: str, out: str) -> None:
    setting = Setting(Path(out), False, 60.0)
    use(case, blocks.Blocks(*map(int, numbers.split(","))), setting, f"{out}/candidate.{os.getpid()}.json")
    try:
        passes(case, setting, small=True)[1]()
    finally:
        os.unlink(f"{out}/candidate.{os.getpid()}.json")


if __name__ == "__main__":
    compile_one(*sys.argv[1:])
