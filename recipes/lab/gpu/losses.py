"""How fast are entmax losses over a large vocabulary, against cross-entropy?"""

from __future__ import annotations

from typing import Any

import torch

from hf_entmax.bench.cases import LossCase
from hf_entmax.bench.losses import loss_steps
from hf_entmax.bench.timing import peak_memory

from .rows import Rows
from .setting import Setting, figures, goal


def run(rows: Rows, setting: Setting) -> None:
    """The entmax loss of a large vocabulary against cross-entropy: time on logits, time and memory on hidden states."""
    count, classes, width = (9, 300, 8) if setting.tiny else (8192, 128_000, 2048)
    for kind in ("flat", "trained"):
        case = LossCase(kind, classes, count)
        rows.run(f"logits, {kind}", lambda case=case: losses(case, (1.5, 2.0, 1.2), setting))
    # The same from hidden states, with the output layer: the logits are never whole.
    rows.run("hidden states", lambda: losses(LossCase("flat", classes, count, width), (1.5,), setting))


def losses(case: LossCase, alphas: tuple[float, ...], setting: Setting) -> dict[str, Any]:
    """Forward and backward passes in bfloat16, after a check against float64: times, memory and goals of alpha 1.5."""
    calls, errors = loss_steps(case, setting.device, torch.bfloat16, alphas)
    times = figures(setting.times(calls, seconds=12.0))
    memory = {name: round(peak_memory(call, setting.device), 1) for name, call in calls.items()}
    against, ours, *_ = calls
    goals = {f"{ours} / {against}": goal(times[ours]["median"] / times[against]["median"], 1.2)}
    if case.dimension is not None:
        goals["memory"] = goal(memory[ours] / max(memory[against], 1e-9), 0.25)
    return {"errors": errors, "forward+backward": times, "memory_mib": memory, "goals": goals}
