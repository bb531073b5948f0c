"""Attention, causal, bfloat16: ours with one learned alpha per head and at 1.5, against softmax and AdaSplash."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_entmax import bench
from hf_entmax.bench.implementations import IMPLEMENTATIONS, Problem
from hf_entmax.bench.timing import peak_memory
from hf_entmax.ops import entmax_attention

from . import problems
from .rows import Rows
from .setting import Setting, figures, goal, together

Attend = Callable[[], Tensor]


#: Length, head dimension, and the share of empty tiles that is wanted, or None for rows as from random weights.
SHAPES = (
    (16384, 64, 0.65), (2048, 64, None), (32768, 128, 0.65), (512, 64, None), (8192, 64, 0.65),
    (16384, 128, 0.65), (2048, 128, None), (8192, 128, 0.65), (32768, 64, 0.65), (512, 128, None),
)  # fmt: skip
#: The largest ratio of our time to theirs, for forward + backward.
SPARSE_GOALS = {"sdpa_flash": 1.0, "adasplash_v1": 1.0, "adasplash_v2": 1.0}
DENSE_GOALS = {"sdpa_flash": 2.5, "eager_softmax": 0.6}
#: The largest error of an output, and of a gradient.
BOUNDS = (0.03, 0.05)


def run(rows: Rows, setting: Setting) -> None:
    if not setting.tiny:
        together("timings", itertools.product((64, 128), ("ours_learned", "ours_1.5"), ("forward", "both")))
    for length, head_dim, empty in ((20, 16, None),) if setting.tiny else SHAPES:
        kind = "as random weights" if empty is None else f"{empty:.0%} of tiles empty"
        shape = length, head_dim, empty
        rows.run(f"n {length}, D {head_dim}, {kind}", lambda shape=shape: measure(*shape, setting))


def measure(length: int, head_dim: int, empty: float | None, setting: Setting) -> dict[str, Any]:
    """Times of both passes and their ratios, after a check against float64."""
    shape, tensors, alpha, share = problems.problem(length, head_dim, empty, setting)
    errors = {"learned": check(tensors, alpha), "1.5": check(tensors, 1.5)}
    functions = implementations(tensors, alpha, eager=length <= 2048)
    grad_out = torch.randn_like(tensors[2])
    leaves = [*tensors, alpha]
    left_out = drop_failing(functions, leaves, grad_out)

    def both(attend: Attend) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), leaves, grad_out, allow_unused=True)

    found: dict[str, Any] = {"shape": shape, "empty_tiles": round(share, 4), "errors": errors, "left_out": left_out}
    for mode, wrap in (("forward", torch.no_grad()), ("forward+backward", both)):
        calls = {name: wrap(function) for name, function in functions.items()}
        found[mode] = figures(setting.times(calls, seconds=8.0))
    found["memory_mib"] = {name: round(peak_memory(both(f), setting.device), 1) for name, f in functions.items()}
    if not setting.tiny and length <= 2048:
        known = {name: function for name, function in functions.items() if not name.startswith("adasplash")}
        found["forward+backward, graph"] = figures(setting.times(captured(known, both), seconds=4.0))
    medians = {name: values["median"] for name, values in found["forward+backward"].items()}
    goals = DENSE_GOALS if empty is None else SPARSE_GOALS
    found["goals"] = {}
    for name, most in goals.items():
        ours = "ours_1.5" if name.startswith("adasplash") else "ours_learned"
        if name in medians:
            found["goals"][f"{ours} / {name}"] = goal(medians[ours] / medians[name], most)
    if empty is not None:
        found["goals"]["ours_learned / ours_1.5"] = goal(medians["ours_learned"] / medians["ours_1.5"], 1.05)
    return found


def check(tensors: list[Tensor], alpha: Tensor | float) -> dict[str, float]:
    """Errors of one head at its last queries against float64: of the output, and of the gradients that these queries make.

    Those of a gradient are relative to its largest entry.

    Raises:
        ValueError: if one is not what bfloat16 explains.
    """
    out = entmax_attention(*tensors, alpha, is_causal=True, backend="triton")[0]
    part = (slice(0, 1), slice(-1, None), slice(-64, None))
    grad_out = torch.zeros_like(out)
    grad_out[part] = torch.randn_like(out[part])
    ours, exact = [*tensors], [t[:1, -1:].detach().double().requires_grad_() for t in tensors]
    exact[0] = exact[0][:, :, -64:].detach().requires_grad_()
    last: Tensor | float = alpha
    if isinstance(alpha, Tensor):
        last = alpha[-1:].detach().double().requires_grad_()
        ours, exact = [*ours, alpha], [*exact, last]
    expected = entmax_attention(*exact[:3], last, is_causal=True, backend="torch")[0]
    errors = {"out": float((out[part].double() - expected).abs().max())}
    found = torch.autograd.grad(out, ours, grad_out)
    wanted = torch.autograd.grad(expected, exact, grad_out[part].double())
    for name, got, want in zip(("query", "key", "value", "alpha"), found, wanted, strict=False):
        got = got[-1:] if name == "alpha" else got[part] if name == "query" else got[:1, -1:]
        errors[name] = float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-4))
    for name, error in errors.items():
        if not error < BOUNDS[name != "out"]:
            raise ValueError(f"the kernel is off by {error:.3g} in {name}: nothing was timed")
    return errors


def implementations(tensors: list[Tensor], alpha: Tensor, *, eager: bool) -> dict[str, Attend]:
    """What is timed, by name."""
    query, key, value = tensors
    shape = dict(zip(("batch", "heads", "length", "head_dim"), query.shape, strict=True))
    problem = Problem(query, key, value, alpha, None, bench.Case("timings", **shape, causal=True))
    sdpa = IMPLEMENTATIONS["sdpa"][0](problem)

    def flash() -> Tensor:
        if query.device.type == "cpu":
            return sdpa()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa()

    found: dict[str, Attend] = {
        "ours_learned": lambda: entmax_attention(query, key, value, alpha, is_causal=True, backend="triton")[0],
        "ours_1.5": lambda: entmax_attention(query, key, value, 1.5, is_causal=True, backend="triton")[0],
        "sdpa_flash": flash,
        **({"eager_softmax": IMPLEMENTATIONS["eager_softmax"][0](problem)} if eager else {}),
    }
    try:
        import adasplash  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    for name in ("adasplash_v1", "adasplash_v2"):
        if (function := getattr(adasplash, name, None)) is not None:
            known = inspect.signature(function).parameters
            options = {word: given for word, given in {"alpha": 1.5, "is_causal": True}.items() if word in known}
            found[name] = functools.partial(function, query, key, value, **options)
    return found


def drop_failing(functions: dict[str, Attend], leaves: list[Tensor], grad_out: Tensor) -> dict[str, str]:
    """Take out of ``functions`` what others wrote and does not run here, forward or backward, and say why; ours must run."""
    reasons = {}
    for name in [name for name in functions if not name.startswith("ours")]:
        try:
            torch.autograd.grad(functions[name](), leaves, grad_out, allow_unused=True)
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            reasons[name] = f"{type(error).__name__}: {error}"[:300]
            del functions[name]
    return reasons


def captured(
    functions: dict[str, Attend], wrap: Callable[[Attend], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """Replays of CUDA graphs: what is left when nobody waits for Python."""
    graphs = {}
    for name, function in functions.items():
        call, graph, side = wrap(function), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            call()
        graphs[name] = graph.replay
    return graphs


def compile_one(head_dim: str, name: str, mode: str) -> None:
    tensors = problems.random(2, 4, 256, int(head_dim), "cuda")
    alpha = torch.linspace(1.3, 1.9, 4, device="cuda").requires_grad_()
    attend = implementations(tensors, alpha, eager=False)[name]
    if mode == "both":
        attend().sum().backward()
    else:
        torch.no_grad()(attend)()


if __name__ == "__main__":
    compile_one(*sys.argv[1:])
