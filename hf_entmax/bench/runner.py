"""Running cases: check, time, collect rows, write them down."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hf_entmax.bench.cases import PRESETS, AnyCase, Case, LossCase, ModelCase, loss_cases
from hf_entmax.bench.implementations import (
    IMPLEMENTATIONS,
    Problem,
    backward,
    checked,
    exact_counts,
    forward,
    make_problem,
    training_steps,
    unavailable,
)
from hf_entmax.bench.losses import loss_steps
from hf_entmax.bench.timing import interleaved_times, machine, peak_memory, quantile, spread
from hf_entmax.ops import entmax_attention
from hf_entmax.options import BenchOptions


@dataclass(frozen=True)
class Measurement:
    """One row of the results.

    ``ratio`` is our median over this implementation's (the other way round for tokens/s, so that below 1 always means that ours is
    better), in the row of a loss its own over cross-entropy's; ``target`` the largest ratio the case should reach.
    """

    case: str
    implementation: str
    mode: str
    median: float
    q20: float
    q80: float
    unit: str
    ratio: float | None
    target: float | None
    density: float | None
    repeats: int
    device: str
    threads: int
    dtype: str
    torch: str
    numba: str
    triton: str
    python: str


def run(preset: str = "quick", *, report: Callable[[str], None] = print, **options: Any) -> list[Measurement]:
    """Measure a preset, or a grid of one's own, and write the results.

    Args:
        preset: a name in `PRESETS`: "quick", "targets", "grid", "decoding", "model", "losses" or "losses-small"; ignored when
            ``lengths`` or ``classes`` is given.
        report: called with every line of the report.
        options: fields of `hf_entmax.options.BenchOptions`, which says what they mean. ``out`` gets ``<preset>-<device>.csv``
            and, where matplotlib is installed, ``.png``.

    Returns:
        The rows of the CSV file.

    Raises:
        TypeError: if an option is unknown.
        ValueError: if a name is unknown, or an argument is given that no case heeds.
        RuntimeError: if an implementation's output is wrong. Then nothing is timed.
        KeyboardInterrupt: if it is interrupted, after what had been measured until then was written.
    """
    chosen = BenchOptions(**options)
    dtype, device, implementations, lengths = chosen.dtype, chosen.device, chosen.implementations, chosen.lengths
    causal, classes, rows, only = chosen.causal, chosen.classes, chosen.rows, chosen.only
    repeats, budget, out = chosen.repeats, chosen.budget, chosen.out
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; the options are 'float32', 'bfloat16' and 'float16'.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; the options are 'auto', 'cpu' and 'cuda'.")
    if unknown := [name for name in implementations or () if name not in IMPLEMENTATIONS]:
        raise ValueError(f"Unknown implementations {unknown}; the options are {sorted(IMPLEMENTATIONS)}.")
    cases: Sequence[AnyCase]
    if lengths is not None or classes is not None:
        preset, name = "custom", "L{}, q x {:g}" + (", causal" if causal else "")
        alpha: dict[str, Any] = {} if chosen.alpha is None else {"alpha": chosen.alpha}
        shapes = [(n, s) for n in lengths or () for s in chosen.sharpness]
        cases = [Case(name.format(n, s), 1, 8, n, sharpness=s, causal=causal, **alpha) for n, s in shapes]
        cases += [case for count in classes or () for case in loss_cases(count, rows)]
    elif preset in PRESETS:
        cases = PRESETS[preset]
    else:
        raise ValueError(f"preset is {preset!r}; the options are {', '.join(map(repr, PRESETS))}.")
    if only and not (cases := [case for case in cases if any(part in case.name for part in only)]):
        raise ValueError(f"No case has a name with {' or '.join(map(repr, only))} in it.")
    attention = any(isinstance(case, Case) for case in cases)
    idle = {
        "causal": causal and lengths is None,
        "alpha": chosen.alpha is not None and lengths is None,
        "rows": rows != BenchOptions.rows and classes is None,
        "dtype": dtype != "float32" and not attention,
        "implementations": implementations is not None and not attention,
    }
    if names := [name for name, does_nothing in idle.items() if does_nothing]:
        raise ValueError(
            f"Without effect here: {', '.join(names)}. Grids of attention (lengths) have causal and alpha, losses over classes "
            "of one's own (classes) have rows, and only attention has a dtype and implementations."
        )
    torch_dtype = getattr(torch, dtype)
    measured: list[Measurement] = []
    stopped: KeyboardInterrupt | None = None
    for number, case in enumerate(cases, 1):
        report(f"{number} of {len(cases)}: {case.name}")
        try:
            if isinstance(case, ModelCase):
                new = _measure_model(case, device, repeats, budget)
            elif isinstance(case, LossCase):
                new = _measure_losses(case, device, repeats, budget)
            else:
                new = _measure_case(case, device, torch_dtype, repeats, budget, implementations, report)
        except KeyboardInterrupt as stop:
            report(f"interrupted: {number - 1} of {len(cases)} cases were measured")
            stopped = stop
            break
        for row in new:
            report(_line(row))
        measured += new
    if out is not None and (measured or stopped is None):
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{preset}-{device}.csv"
        write_csv(measured, path)
        report(f"wrote {path}")
        try:
            plot_ratios(measured, path.with_suffix(".png"))
            report(f"wrote {path.with_suffix('.png')}")
        except ImportError:
            report("no plot: matplotlib is not installed (pip install 'hf_entmax[figures]')")
    if stopped is not None:
        raise stopped
    return measured


def write_csv(rows: Sequence[Measurement], path: Path) -> None:
    """Write the rows with a header of their field names."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measurement)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{v:.5g}" if isinstance(v, float) else v for key, v in asdict(row).items()})


def plot_ratios(rows: Sequence[Measurement], path: Path) -> None:
    """Draw our time over every other's as horizontal bars on a logarithmic axis, with the targets as marks; save the figure."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.ratio is not None]
    names = sorted({row.implementation for row in shown})
    figure = Figure(figsize=(9, 1.2 + 0.24 * max(1, len(shown))), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        assert row.ratio is not None
        color = f"C{names.index(row.implementation)}"
        axes.barh(place, row.ratio, left=0, color=color)
        axes.text(row.ratio, place, f" {row.ratio:.2g}", va="center", fontsize=7)
        if row.target is not None:
            axes.plot([row.target], [place], marker="|", markersize=12, color="black")
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [f"{row.case} | {row.mode} | {row.implementation}" for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("our time or memory over theirs (left of the line: ours is better); black marks: targets")
    figure.savefig(path, dpi=150)


def _measure_case(
    case: Case,
    device: str,
    dtype: torch.dtype,
    repeats: int,
    budget: float,
    chosen: Sequence[str] | None,
    report: Callable[[str], None],
) -> list[Measurement]:
    problem = make_problem(case, device, dtype)
    kernels = [name for name in ("ours_triton", "ours_numba") if unavailable(name, device) is None]
    ours = "ours_exact" if case.bits else [*kernels, "ours_torch"][0]
    functions = {}
    for name in [ours, *(name for name in (case.against if chosen is None else chosen) if name != ours)]:
        if (reason := unavailable(name, device)) is not None:
            report(f"{case.name}: {name} left out: {reason}")
        else:
            functions[name] = checked(name, problem)
    density = _density(problem)
    if case.bits:
        counts = exact_counts(problem)()[1]
        share = int(counts.read.sum()) / max(1, int(counts.total.sum()))
        report(
            f"{case.name}: {100 * share:.2f} % of the keys are read, from {case.bits} bits of each; the others have weight 0"
        )
    rows = []
    for mode in case.modes:
        if mode == "memory":
            calls = {name: backward(function, problem) for name, function in functions.items()}
            values = {name: [peak_memory(call, device)] for name, call in calls.items()}
        else:
            make = backward if mode == "forward+backward" else forward
            calls = {name: make(function, problem) for name, function in functions.items()}
            values = interleaved_times(calls, repeats, device, budget)
        targets = {name: limit for name, wanted, limit in case.targets if wanted == mode}
        base = quantile(values[ours], 0.5)
        for name, measured in values.items():
            middle = quantile(measured, 0.5)
            ratio = None if name == ours or middle == 0 else base / middle
            unit = "MiB" if mode == "memory" else "ms"
            shown = density if name.startswith("ours") or name == "entmax_bisect" else None
            told = (ratio, targets.get(name), shown)
            rows.append(_row((case.name, name, mode), measured, unit, told, device, str(dtype)))
    return rows


@torch.no_grad()
def _density(problem: Problem) -> float:
    """Measure the share of nonzero weights among the allowed ones."""
    case = problem.case
    options = {"key_padding_mask": problem.real_keys, "is_causal": case.causal}
    _, weights = entmax_attention(*problem.tensors(), need_weights=True, **options)
    assert isinstance(weights, torch.Tensor)
    queries = weights.shape[2]
    allowed = torch.ones(queries, case.length, dtype=torch.bool, device=weights.device)
    if case.causal:
        allowed = allowed.tril(case.length - queries)
    pairs = allowed.sum().item() * case.batch
    if problem.real_keys is not None:
        pairs = (allowed & problem.real_keys[:, None, :]).sum().item()
    return (weights > 0).sum().item() / (pairs * case.heads)


def _measure_model(case: ModelCase, device: str, repeats: int, budget: float) -> list[Measurement]:
    steps, tokens = training_steps(case, device)
    times = interleaved_times(steps, repeats, device, budget * 4)
    rates = {name: [1e3 * tokens / t for t in measured] for name, measured in times.items()}
    ours = quantile(rates["ours"], 0.5)
    rows = []
    for name, measured in rates.items():
        ratio = None if name == "ours" else quantile(measured, 0.5) / ours
        target = None if name == "ours" or case.target is None else 1 / case.target
        what = (case.name, name, "training step")
        rows.append(_row(what, measured, "tokens/s", (ratio, target, None), device, "float32"))
    return rows


def _measure_losses(case: LossCase, device: str, repeats: int, budget: float) -> list[Measurement]:
    steps, _ = loss_steps(case, device)
    linear = case.dimension is not None
    found = {"forward+backward": (interleaved_times(steps, repeats, device, budget), "ms", 1.3 if linear else 1.2)}
    if linear:
        found["memory"] = {name: [peak_memory(step, device)] for name, step in steps.items()}, "MiB", 0.25
    rows = []
    for mode, (values, unit, limit) in found.items():
        base, *_ = (quantile(measured, 0.5) for measured in values.values())
        for place, (name, measured) in enumerate(values.items()):
            ratio, target = (quantile(measured, 0.5) / base, limit) if place else (None, None)
            rows.append(_row((case.name, name, mode), measured, unit, (ratio, target, None), device, "float32"))
    return rows


def _row(
    what: tuple[str, str, str], values: list[float], unit: str, told: Sequence[float | None], device: str, dtype: str
) -> Measurement:
    """Return a row of case, implementation and mode; ``told`` are ratio, target and density."""
    middle, low, high, repeats = spread(values)
    ratio, target, density = told
    rest = machine(device) | {"repeats": repeats, "dtype": dtype.removeprefix("torch.")}
    return Measurement(*what, middle, low, high, unit, ratio, target, density, **rest)


def _line(row: Measurement) -> str:
    text = f"{row.case:38s} {row.implementation:24s} {row.mode:17s} {row.median:10.2f} {row.unit:9s}"
    if row.density is not None:
        text += f" density {100 * row.density:.1f} %"
    if row.ratio is not None and math.isfinite(row.ratio):
        text += f" ours / {'cross-entropy' if 'loss' in row.implementation else 'this'} {row.ratio:.3f}"
        if row.target is not None:
            text += f" (at most {row.target:g}: {'reached' if row.ratio <= row.target else 'MISSED'})"
    return text
