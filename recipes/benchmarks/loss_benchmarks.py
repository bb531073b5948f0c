"""Measure the losses against cross-entropy, forward and backward: time on logits, time and peak memory on hidden states.

    python recipes/benchmarks/loss_benchmarks.py                          # 128k classes, 2048 rows: six minutes on two cores
    python recipes/benchmarks/loss_benchmarks.py --classes 8000 --rows 256 --dimension 64 --out /tmp/losses.csv

Three kinds of logits: *flat* (normal with deviation 1, an untrained model), *frequency* (every row knows little more than how
frequent the classes are, the k-th as 1/k: a model early in training, hundreds of classes remain possible) and *trained*
(eight classes of every row lead by 4 to 14, the label mostly among them). Losses and gradients are compared with float64 on
some of the rows before anything is timed; implementations take turns; medians and quantiles are written.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_entmax.bench.timing import interleaved_times, peak_memory, quantile
from hf_entmax.losses import entmax_loss, linear_entmax_loss

CHECKED_ROWS = 8
KINDS = ("flat", "frequency", "trained")
LOGIT_ALPHAS = (1.5, 2.0, 1.33, 1.2, 1.05, 1.0)
LINEAR_ALPHAS = (1.5, 2.0, 1.0)
TIME_TARGETS, MEMORY_TARGET = {"logits": 1.2, "linear": 1.3}, 0.25


@dataclasses.dataclass
class Problem:
    """Logits ``[N, V]`` with labels ``[N]``, or hidden states ``[N, D]`` with the weight ``[V, D]`` that makes them."""

    inputs: Tensor
    weight: Tensor | None
    labels: Tensor

    def leaves(self) -> list[Tensor]:
        """What gradients are wanted for."""
        return [self.inputs] if self.weight is None else [self.inputs, self.weight]


def make_problem(kind: str, form: str, rows: int, classes: int, dimension: int, device: str) -> Problem:
    """Logits of a kind, seed 0."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (rows,), generator=generator)
    leaders = torch.randint(classes, (rows, 8), generator=generator)
    # Four rows out of five have learned their label.
    learned = torch.rand(rows, generator=generator) < 0.8
    leaders[learned, 0] = labels[learned]
    lead = torch.linspace(14.0, 4.0, 8)
    frequency = -torch.arange(1.0, classes + 1).log()[torch.randperm(classes, generator=generator)]
    if form == "logits":
        logits = torch.randn(rows, classes, generator=generator)
        if kind == "trained":
            logits.scatter_add_(1, leaders, lead.expand(rows, 8))
        elif kind == "frequency":
            logits = logits.mul_(0.5).add_(frequency)
        return Problem(logits.to(device).requires_grad_(), None, labels.to(device))
    weight = torch.randn(classes, dimension, generator=generator) / dimension**0.5
    hidden = torch.randn(rows, dimension, generator=generator)
    if kind == "frequency":  # one dimension holds how frequent a class is
        weight[:, 0], hidden[:, 0] = frequency, 1.0
    elif kind == "trained":
        hidden += torch.einsum("k,nkd->nd", lead, weight[leaders])
    return Problem(hidden.to(device).requires_grad_(), weight.to(device).requires_grad_(), labels.to(device))


def implementations(form: str) -> dict[str, tuple[float, Callable[[Problem], Tensor]]]:
    """Losses by name, with their alpha."""
    if form == "logits":
        return {
            "cross_entropy": (1.0, lambda p: F.cross_entropy(p.inputs, p.labels)),
            **{
                f"entmax_loss alpha={alpha}": (alpha, lambda p, alpha=alpha: entmax_loss(p.inputs, p.labels, alpha))
                for alpha in LOGIT_ALPHAS
            },
        }
    return {
        "linear + cross_entropy": (1.0, lambda p: F.cross_entropy(F.linear(p.inputs, p.weight), p.labels)),
        **{
            f"linear_entmax_loss alpha={alpha}": (
                alpha,
                lambda p, alpha=alpha: linear_entmax_loss(p.inputs, p.weight, p.labels, alpha),
            )
            for alpha in LINEAR_ALPHAS
        },
    }


def step(function: Callable[[Problem], Tensor], problem: Problem) -> list[Tensor]:
    """Forward and backward; the gradients."""
    return list(torch.autograd.grad(function(problem), problem.leaves()))


def oracle(logits: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Losses ``[n]`` and their gradients ``[n, V]`` in float64, by bisection and the definition."""
    z = logits.detach().double()
    target = F.one_hot(labels, z.shape[-1]).double()
    if alpha == 1.0:
        return F.cross_entropy(z, labels, reduction="none"), z.softmax(-1) - target
    u = alpha - 1.0
    centred = z - z.amax(-1, keepdim=True)
    low, high = torch.zeros_like(z[:, :1]), torch.full_like(z[:, :1], 20.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = (1 + u * (centred - middle)).clamp(min=0).pow(1 / u).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = (1 + u * (centred - low)).clamp(min=0).pow(1 / u)
    p = p / p.sum(-1, keepdim=True)
    entropy = (p - p.pow(alpha)).sum(-1) / (alpha * u)
    return ((p - target) * z).sum(-1) + entropy, p - target


def check(name: str, alpha: float, function: Callable[[Problem], Tensor], problem: Problem) -> None:
    """Compare the loss of some rows and the gradients of the whole with float64.

    Raises:
        ValueError: if they differ by more than float32 explains.
    """
    few = slice(0, CHECKED_ROWS)
    part = Problem(problem.inputs[few], problem.weight, problem.labels[few])
    logits = part.inputs if part.weight is None else part.inputs.double() @ part.weight.double().t()
    losses, residual = oracle(logits, part.labels, alpha)
    gradient = residual if part.weight is None else residual @ part.weight.double()
    found = step(function, problem)[0][few].double() * problem.inputs.shape[0]
    torch.testing.assert_close(
        function(part).double(), losses.mean(), rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}"
    )
    torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}")


def measure(form: str, kind: str, arguments: argparse.Namespace, device_name: str) -> list[dict[str, object]]:
    """Check, then time; and for the linear form the memory too."""
    problem = make_problem(kind, form, arguments.rows, arguments.classes, arguments.dimension, arguments.device)
    losses = implementations(form)
    for name, (alpha, function) in losses.items():
        check(name, alpha, function, problem)
    calls = {name: (lambda f=function: step(f, problem)) for name, (_, function) in losses.items()}
    times = interleaved_times(calls, arguments.repeats, arguments.device, arguments.budget)
    figures = {"forward+backward": {name: (values, TIME_TARGETS[form], "ms") for name, values in times.items()}}
    if form == "linear":
        figures["memory"] = {
            name: ([peak_memory(call, arguments.device)], MEMORY_TARGET, "MiB") for name, call in calls.items()
        }
    size = f"V {arguments.classes}, N {arguments.rows}" + (f", D {arguments.dimension}" if form == "linear" else "")
    rows: list[dict[str, object]] = []
    for mode, by_name in figures.items():
        base = None
        for name, (values, target, unit) in by_name.items():
            middle = quantile(values, 0.5)
            ratio = None if base is None else middle / base
            base = middle if base is None else base
            rows.append(
                {
                    "case": f"{size}, {kind}",
                    "implementation": name,
                    "mode": mode,
                    "median": f"{middle:.5g}",
                    "q20": f"{quantile(values, 0.2):.5g}",
                    "q80": f"{quantile(values, 0.8):.5g}",
                    "unit": unit,
                    "ratio": "" if ratio is None else f"{ratio:.3g}",
                    "target": "" if ratio is None else target,
                    "repeats": len(values),
                    "device": device_name,
                    "threads": torch.get_num_threads(),
                    "dtype": "float32",
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                }
            )
            print(*(rows[-1][key] for key in ("case", "implementation", "mode", "median", "unit", "ratio")), sep="  ")
    return rows


def device_name(device: str) -> str:
    """What the figures were measured on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=128_000)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--dimension", type=int, default=256, help="of the hidden states")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds per case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=["logits", "linear"], default=["logits", "linear"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, help="default: results/losses-DEVICE.csv beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    name = device_name(arguments.device)
    rows = [row for form in arguments.forms for kind in arguments.kinds for row in measure(form, kind, arguments, name)]
    out = arguments.out or Path(__file__).parent / "results" / f"losses-{arguments.device}.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
