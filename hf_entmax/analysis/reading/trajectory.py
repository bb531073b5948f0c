"""How alpha, density and diversity moved during training, read back from the compact log."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_entmax.analysis.reading.records import numbered_lines


@dataclass
class Trajectory:
    """Values of a training run over its logged steps. Where a step did not log something there is NaN.

    Attributes:
        steps: optimizer steps, ascending.
        alpha: by site, float64 [steps, layers, heads].
        density: by site, float64 [steps, layers, heads], or [steps, layers] where the log has means over heads.
        js: head diversity by site, float64 [steps, layers], in units of log(heads).
    """

    steps: list[int]
    alpha: dict[str, Tensor] = field(default_factory=dict)
    density: dict[str, Tensor] = field(default_factory=dict)
    js: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """Sites that logged anything."""
        return list(dict.fromkeys([*self.alpha, *self.density, *self.js]))


def read_trajectory(path: str | os.PathLike[str]) -> Trajectory:
    """Read the JSON-lines log of :class:`hf_entmax.training.AlphaLoggingCallback`, also ``.gz``.

    Each line is ``{"step": 10, "alpha": {site: [[...], ...]}, "density": {site: [[...], ...]}, "js": {site: [...]}}``; all
    keys but ``step`` may be missing, and density may be one number per layer. Lines may come in any order; of two lines
    for one step the later counts (a run that was resumed writes the steps after its checkpoint again). A last line cut
    off by a killed run is left out with a warning.

    Args:
        path: of the log.

    Returns:
        Steps in ascending order and, by site, the values at each.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken line (its number is named), values of changing shape, or no step at all.
    """
    path = Path(path)
    records: dict[int, dict[str, dict[str, Tensor]]] = {}
    broken: str | None = None
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        if broken is not None:
            raise ValueError(broken)
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            broken = f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno})."
            continue
        step, values = _parse(record, f"{path}:{number}")
        records[step] = values
    if broken is not None:
        warnings.warn(f"{broken} It is the last line, cut off perhaps, and was left out.", stacklevel=2)
    if not records:
        raise ValueError(f"{path}: no logged step in it.")
    steps = sorted(records)
    trajectory = Trajectory(steps)
    for what in ("alpha", "density", "js"):
        for site in dict.fromkeys(site for step in steps for site in records[step][what]):
            values = [records[step][what].get(site) for step in steps]
            getattr(trajectory, what)[site] = _stack(values, f"{path}: {what} of {site}")
    return trajectory


def _parse(record: Any, where: str) -> tuple[int, dict[str, dict[str, Tensor]]]:
    if not isinstance(record, Mapping) or type(record.get("step")) is not int:
        raise ValueError(f"{where}: every line must be an object with an integer 'step'.")
    values: dict[str, dict[str, Tensor]] = {}
    for what, dimensions in (("alpha", (2,)), ("density", (1, 2)), ("js", (1,))):
        per_site = record.get(what) or {}
        if not isinstance(per_site, Mapping):
            raise ValueError(f"{where}: {what!r} must map sites to lists of numbers.")
        values[what] = {}
        for site, numbers in per_site.items():
            try:
                tensor = torch.tensor(_with_nan(numbers), dtype=torch.float64)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {what} of {site!r} is no rectangular list of numbers ({error}).") from error
            if tensor.dim() not in dimensions:
                shape = " or ".join("[layers][heads]" if count == 2 else "[layers]" for count in dimensions)
                raise ValueError(
                    f"{where}: {what} of {site!r} must be numbers by {shape}, not of {tensor.dim()} dimensions."
                )
            values[what][site] = tensor
    return record["step"], values


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(entry) for entry in value]
    return float("nan") if value is None else value


def _stack(tensors: list[Tensor | None], where: str) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors if tensor is not None}
    if len(shapes) > 1:
        raise ValueError(
            f"{where} changes its shape between steps ({', '.join(map(str, sorted(shapes)))}): two models in one log?"
        )
    (shape,) = shapes
    return torch.stack([torch.full(shape, float("nan"), dtype=torch.float64) if t is None else t for t in tensors])
