"""The entmax loss of a large vocabulary against cross-entropy: time on logits, time and memory on hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_entmax.bench.timing import peak_memory
from hf_entmax.losses import entmax_loss, linear_entmax_loss

from .rows import Rows
from .setting import Setting, figures, goal

#: Rows, classes, width of the hidden states.
SIZE, TINY = (8192, 128_000, 2048), (9, 300, 8)
ALPHAS = (1.5, 2.0, 1.2)


def run(rows: Rows, setting: Setting) -> None:
    for kind in ("flat", "trained"):
        rows.run(f"logits, {kind}", lambda kind=kind: on_logits(kind, setting))
    rows.run("hidden states", lambda: on_hidden(setting))


def on_logits(kind: str, setting: Setting) -> dict[str, Any]:
    """Forward and backward pass on bfloat16 logits, of an untrained model or with eight classes far ahead in each row."""
    count, classes, _ = TINY if setting.tiny else SIZE
    generator = torch.Generator(setting.device).manual_seed(0)
    logits = torch.randn(count, classes, generator=generator, device=setting.device, dtype=torch.bfloat16)
    labels = torch.randint(classes, (count,), generator=generator, device=setting.device)
    if kind == "trained":
        leaders = torch.randint(classes, (count, 8), generator=generator, device=setting.device)
        leaders[:, 0] = labels
        lead = torch.linspace(14.0, 4.0, 8, device=setting.device, dtype=logits.dtype)
        logits.scatter_add_(1, leaders, lead.expand(count, 8))
    logits.requires_grad_()
    functions = {"cross_entropy": lambda: F.cross_entropy(logits, labels)}
    for alpha in ALPHAS:
        functions[f"entmax_loss {alpha}"] = lambda alpha=alpha: entmax_loss(logits, labels, alpha)
    errors = {alpha: check(lambda z, alpha=alpha: entmax_loss(z, labels[:8], alpha), [logits[:8]]) for alpha in ALPHAS}
    return {"errors": errors, **measured(functions, [logits], setting, "entmax_loss 1.5", 1.2)}


def on_hidden(setting: Setting) -> dict[str, Any]:
    """The same from bfloat16 hidden states, with the output layer: the logits are never whole."""
    count, classes, width = TINY if setting.tiny else SIZE
    generator = torch.Generator(setting.device).manual_seed(0)
    hidden = torch.randn(count, width, generator=generator, device=setting.device).bfloat16().requires_grad_()
    weight = torch.randn(classes, width, generator=generator, device=setting.device).mul_(width**-0.5)
    weight = weight.bfloat16().requires_grad_()
    labels = torch.randint(classes, (count,), generator=generator, device=setting.device)
    functions = {
        "linear + cross_entropy": lambda: F.cross_entropy(F.linear(hidden, weight), labels),
        "linear_entmax_loss 1.5": lambda: linear_entmax_loss(hidden, weight, labels, 1.5),
    }
    errors = check(lambda h, w: linear_entmax_loss(h, w, labels[:8], 1.5), [hidden[:8], weight])
    found = {"errors": errors, **measured(functions, [hidden, weight], setting, "linear_entmax_loss 1.5", 1.2)}
    memory = found["memory_mib"]
    ratio = memory["linear_entmax_loss 1.5"] / max(memory["linear + cross_entropy"], 1e-9)
    found["goals"]["memory"] = goal(ratio, 0.25)
    return found


def check(loss: Callable[..., Tensor], inputs: list[Tensor]) -> list[float]:
    """Errors against float64 of a loss, and of its gradients relative to the largest entry of each.

    Raises:
        ValueError: if one is not what bfloat16 explains. Logits of hidden states are rounded in the one and not in the other,
            by up to 0.016 where they are 4, which moves a probability by some percent.
    """
    leaves = [t.detach().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    value, exact = loss(*leaves), loss(*wide)
    errors = [float((value.double() - exact).abs())]
    for got, want in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(exact, wide), strict=True):
        errors.append(float((got.double() - want).abs().max() / want.abs().max()))
    if not (errors[0] < 0.02 and max(errors[1:]) < 0.1):
        raise ValueError(f"the loss is off by {errors[0]:.3g}, its gradients by {errors[1:]}: nothing was timed")
    return errors


def measured(
    functions: dict[str, Callable[[], Tensor]], leaves: list[Tensor], setting: Setting, ours: str, most: float
) -> dict[str, Any]:
    """Times, memory and goals of losses; the first is what the others are compared with."""
    calls = {name: (lambda f=function: torch.autograd.grad(f(), leaves)) for name, function in functions.items()}
    times = figures(setting.times(calls, seconds=12.0))
    memory = {name: round(peak_memory(call, setting.device), 1) for name, call in calls.items()}
    against = next(iter(functions))
    goals = {f"{ours} / {against}": goal(times[ours]["median"] / times[against]["median"], most)}
    return {"forward+backward": times, "memory_mib": memory, "goals": goals}
