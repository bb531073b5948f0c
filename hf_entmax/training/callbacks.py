"""What the Trainer is given: callbacks that write down alpha and density or move alpha on a schedule, and a smoothed loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from hf_entmax.config import check_alpha
from hf_entmax.integration.discovery import unwrapped
from hf_entmax.integration.head_numbers import alphas, set_alphas
from hf_entmax.integration.patching import entmax_config, is_patched
from hf_entmax.losses import entmax_loss

SHAPES = ("linear", "cosine")


class AlphaLoggingCallback(TrainerCallback):
    """Logs alpha, density and head diversity wherever the Trainer reports to, and into a small file.

    With every report of the training loss it adds, per site, ``alpha/SITE/mean``, ``/min`` and ``/max`` and, measured
    on a probe batch, ``density/SITE`` (share of possible attention weights that are not zero) and ``js/SITE`` (head
    diversity, Correia et al. 2019, eq. 11). The file ``alphas.jsonl`` in the output directory has one JSON object per
    report with every head: ``{"step", "alpha": {site: [[...]]}, "density": {site: [[...]]}, "js": {site: [...]}}``,
    ``[layers][heads]`` and ``[layers]``; ``hf_entmax.analysis`` draws trajectories from it.

    Args:
        probe_batch: tensors to run the model on for density and diversity; by default the first training batch is kept,
            at most ``probe_size`` of its rows.
        probe_size: rows of the kept batch.
        per_head: also report one number per head, ``alpha/SITE/LAYER/HEAD`` (many, for large models).
        statistics: measure density and diversity at all; False saves one forward pass on the probe batch per report.
        log_file: name of the file in the output directory; None writes none.

    Raises:
        ValueError: when training starts with a model that is not patched.
    """

    def __init__(
        self,
        probe_batch: Mapping[str, Tensor] | None = None,
        *,
        probe_size: int = 16,
        per_head: bool = False,
        statistics: bool = True,
        log_file: str | None = "alphas.jsonl",
    ) -> None:
        self.probe_batch = None if probe_batch is None else dict(probe_batch)
        self.probe_size = probe_size
        self.per_head = per_head
        self.statistics = statistics
        self.log_file = log_file
        self._last_step = -1
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the model and start to wait for a probe batch."""
        model = _inner(kwargs["model"])
        entmax_config(model)
        self._last_step = -1
        if self.statistics and self.probe_batch is None:
            self._handle = model.register_forward_pre_hook(self._keep_batch, with_kwargs=True)
        if self.log_file is not None and state.is_world_process_zero:
            path = self._path(args)
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_until(path, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop waiting for a batch that never came."""
        self._drop_hook()

    def before_report(self, args: Any, state: Any, logs: dict[str, Any], model: nn.Module) -> None:
        """Add to the logs before they are reported. Called for every report; only those of training are added to."""
        if "loss" not in logs or state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        inner = _inner(model)
        record: dict[str, Any] = {"step": state.global_step}
        added: dict[str, float] = {}
        if entmax_config(inner).mapping == "entmax":
            table = alphas(inner)
            record["alpha"] = {site: rounded(values) for site, values in table.items()}
            added.update(_alpha_logs(table, self.per_head))
        if self.statistics and self.probe_batch is not None:
            density, diversity = self._measure(inner)
            record["density"] = {site: rounded(values) for site, values in density.items()}
            record["js"] = {site: rounded(values) for site, values in diversity.items()}
            added |= {f"density/{site}": float(values.nanmean()) for site, values in density.items()}
            added |= {f"js/{site}": float(values.nanmean()) for site, values in diversity.items()}
        logs |= added
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(added)
        if self.log_file is not None and state.is_world_process_zero:
            with self._path(args).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _measure(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        from hf_entmax.analysis import collect

        # Leaves no trace on the run: not in the model's mode, not in its random numbers (dropout is off).
        statistics = collect(model, [self.probe_batch or {}])
        return statistics.density, statistics.head_diversity

    def _keep_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.ndim}
        if tensors:
            rows = min(len(value) for value in tensors.values())
            same = {name: value for name, value in tensors.items() if len(value) >= rows}
            self.probe_batch = {name: value[: self.probe_size].detach().clone() for name, value in same.items()}
            self._drop_hook()

    def _drop_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _path(self, args: TrainingArguments) -> Path:
        return Path(str(args.output_dir)) / str(self.log_file)


class AlphaSchedule:
    r"""Alpha on its way from ``start`` to ``end`` over the first part of training.

        alpha(s) = start + (end - start) * shape(min(1, s / over)),     s: share of training done, in [0, 1]

    Args:
        start: alpha at the beginning, >= 1.
        end: alpha from the share ``over`` on, >= 1.
        over: share of training over which alpha moves, in (0, 1].
        shape: ``"linear"``, ``"cosine"`` (``0.5 - 0.5 cos(pi x)``) or a function from [0, 1] to [0, 1].

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self, start: float, end: float, over: float = 0.5, shape: str | Callable[[float], float] = "linear"
    ) -> None:
        if not 0.0 < over <= 1.0:
            raise ValueError(f"over={over!r} is not allowed: give a share of training in (0, 1].")
        if not callable(shape) and shape not in SHAPES:
            raise ValueError(f"shape={shape!r} is not allowed: choose 'linear', 'cosine' or give a function.")
        self.start, self.end = check_alpha(start, "start"), check_alpha(end, "end")
        self.over, self.shape = float(over), shape

    def __call__(self, share: float) -> float:
        """Return alpha when ``share`` of training, in [0, 1], is done."""
        done = min(1.0, share / self.over)
        if callable(self.shape):
            done = self.shape(done)
        elif self.shape == "cosine":
            done = 0.5 - 0.5 * math.cos(math.pi * done)
        return self.start + (self.end - self.start) * done

    def arrived(self, share: float) -> bool:
        """Tell whether alpha moves no more: learned alphas are free from here on."""
        return share >= self.over


class AlphaScheduleCallback(TrainerCallback):
    r"""Moves alpha from ``start`` to ``end`` over the first part of training, then holds it (or lets it learn).

    ``alpha(t) = start + (end - start) * shape(t / T)`` with ``T = over * max_steps``, see `AlphaSchedule`.
    A pretrained softmax model is made sparse gently by starting near 1.

    A model with a fixed alpha follows the schedule and keeps ``end``; its stored configuration is kept in step. Learned
    alphas are set by the schedule until step ``T`` and learn freely afterwards.

    Args:
        start: alpha at the beginning, >= 1.
        end: alpha from step ``T`` on, >= 1.
        over: share of training over which alpha moves, in (0, 1].
        shape: ``"linear"``, ``"cosine"`` or a function from [0, 1] to [0, 1].

    Raises:
        ValueError: if an argument is out of range, or, when training starts, the model is not patched with entmax.
    """

    def __init__(
        self, start: float, end: float, over: float = 0.5, shape: str | Callable[[float], float] = "linear"
    ) -> None:
        self.schedule = AlphaSchedule(start, end, over, shape)

    def value(self, step: int, max_steps: int) -> float:
        """Return alpha at a step."""
        return self.schedule(step / max(1, max_steps))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the model has an alpha that can take these values."""
        config = entmax_config(_inner(kwargs["model"]))
        if config.mapping != "entmax":
            raise ValueError(
                f"AlphaScheduleCallback needs mapping='entmax'; this model uses {config.mapping!r}, which has no alpha."
            )
        lo, hi = config.alpha_range
        start, end = self.schedule.start, self.schedule.end
        if config.alpha == "learned" and not (lo <= start <= hi and lo <= end <= hi):
            raise ValueError(
                f"The schedule goes from {start} to {end}; learned alphas of this model stay within {lo} to {hi} (alpha_range)."
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set alpha for the step that begins."""
        model = _inner(kwargs["model"])
        if entmax_config(model).alpha == "learned" and self.schedule.arrived(state.global_step / state.max_steps):
            return
        set_alphas(model, self.value(state.global_step, state.max_steps))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let a fixed alpha end exactly where the schedule ends."""
        model = _inner(kwargs["model"])
        if entmax_config(model).alpha != "learned" and self.schedule.arrived(state.global_step / state.max_steps):
            set_alphas(model, self.value(state.max_steps, state.max_steps))


class SmoothedEntmaxLoss:
    r"""Entmax loss with label smoothing in Fenchel-Young form.

    ``L = (p - q) . z + H(p) - H(q)`` with ``q = (1 - s) e_y + s / V`` (maths of Blondel et al. 2019, sec. 3). It stands
    in for ``TrainingArguments(label_smoothing_factor=s)``, which is a smoothed cross-entropy.

    Args:
        alpha: >= 1; the model's ``output_alpha``.
        label_smoothing: share ``s`` of the mass spread over the vocabulary, in [0, 1).
        shift: predict token t + 1 from position t (causal language models).
    """

    #: Tells the Trainer's hook that this stands in for ``output_alpha`` on purpose.
    replaces_output_loss = True

    def __init__(self, alpha: float = 1.5, label_smoothing: float = 0.1, *, shift: bool = False) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={label_smoothing!r} is not allowed: give a number in [0, 1).")
        self.alpha = check_alpha(alpha)
        self.label_smoothing = label_smoothing
        self.shift = shift

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of a batch: mean over its labels, or sum over ``num_items_in_batch`` where the Trainer gives that."""
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        if self.shift:
            labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = entmax_loss(logits, labels, self.alpha, reduction=reduction, label_smoothing=self.label_smoothing)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def plain_model(model: nn.Module) -> PreTrainedModel:
    """Return the model inside distributed wrappers, torch.compile and PEFT."""
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"No transformers model was found inside {type(model).__name__}.")
    return inner


def _inner(model: nn.Module) -> PreTrainedModel:
    """Return the same of a model that must be patched."""
    inner = plain_model(model)
    if not is_patched(inner):
        raise ValueError(f"{type(inner).__name__} is not patched: call hf_entmax.patch_model(model) before training.")
    return inner


def _alpha_logs(table: dict[str, Tensor], per_head: bool) -> dict[str, float]:
    logs = {}
    for site, values in table.items():
        known = values[~values.isnan()]
        logs |= {f"alpha/{site}/{what}": getattr(known, what)().item() for what in ("mean", "min", "max")}
        if per_head:
            logs |= {f"alpha/{site}/{i}/{j}": values[i, j].item() for i, j in (~values.isnan()).nonzero().tolist()}
    return logs


def rounded(values: Any) -> Any:
    """Return nested lists with five digits: enough to draw, a third of the size. NaN becomes None, which JSON knows."""
    values = values.tolist() if isinstance(values, Tensor) else values
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return None if values != values else round(values, 5)


def _keep_until(path: Path, step: int) -> None:
    """Drop records beyond the step that a resumed run starts from (all of them for a new run)."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step > 0:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            continue  # a line cut off when a run was killed
    path.write_text("".join(kept), encoding="utf-8")
