"""The training behind ``sparsify(train="adapters")`` and ``"weights"``: Transformers' Trainer, and the best sparse state kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_entmax.training.alpha_vector import AlphaVector
from hf_entmax.training.calibration import evaluated_alone
from hf_entmax.training.loss_budget import LossBudgetCallback
from hf_entmax.training.parameters import alpha_parameter_groups
from hf_entmax.training.search import Task, mean_density

#: Where training towards a budget begins: sparse, since weights recover faster than alphas grow (share of the range of alpha).
_START = 0.5
#: Learning rate of alphas and temperatures.
_ALPHA_RATE = 0.01
#: What the search found, beside the checkpoints.
_RECORD = "sparsify.json"
#: Evaluations over a training, and rank of adapters.
_EVALUATIONS, _RANK = 4, 32
#: What ``train=`` calls low-rank adapters.
ADAPTERS = ("adapters", "lora")
_OURS = ("output_dir", "max_steps", "learning_rate", "per_device_train_batch_size", "eval_strategy", "save_strategy",
         "eval_steps", "save_steps", "load_best_model_at_end", "metric_for_best_model", "greater_is_better")  # fmt: skip


@dataclasses.dataclass
class TrainingPlan:
    """What `hf_entmax.sparsify` was asked for."""

    goal: str
    wanted: float
    train: str
    steps: int
    learning_rate: float
    collator: Callable[[list[Any]], dict[str, Any]] | None
    batch_size: int
    output_dir: str | os.PathLike[str] | None
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        if taken := [name for name in _OURS if name in self.arguments]:
            raise ValueError(
                f"trainer_arguments holds {', '.join(taken)}: sparsify sets them itself; see its own arguments."
            )

    def record(self) -> dict[str, Any] | None:
        """Return what an earlier start in this folder has written, or None if there was none."""
        path = None if self.output_dir is None else Path(self.output_dir, _RECORD)
        return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else None

    def asked(self, vector: AlphaVector) -> dict[str, Any]:
        """Return what a run that goes on must have been asked for."""
        asked = {name: getattr(self, name) for name in ("goal", "wanted", "train", "steps", "learning_rate")}
        return asked | {"alphas": vector.count}


class _SparseTrainer(Trainer):
    """Judges a state by the batches that the search judged by."""

    task: Task
    vector: AlphaVector
    plan: TrainingPlan
    say: Callable[[str], None]

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        with evaluated_alone(self.model, self.vector):  # type: ignore[arg-type]
            loss, table = self.task.measure(self.vector.values())
        rise, density = loss - self.task.before, mean_density(table)
        self.say(f"step {self.state.global_step}: {density:.1%} nonzero at {rise:+.4f}")
        # Within the budget the sparsest wins (above 0), else the one that is nearest to it (below 0).
        within = self.plan.goal == "density" or rise <= self.plan.wanted
        score = 1 - density if within and self.plan.goal != "density" else -rise
        metrics = {f"{metric_key_prefix}_score": score, f"{metric_key_prefix}_rise": rise}
        metrics[f"{metric_key_prefix}_density"] = density
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def train_sparse(
    model: PreTrainedModel,
    task: Task,
    vector: AlphaVector,
    examples: list[Any],
    plan: TrainingPlan,
    say: Callable[[str], None] | None,
) -> bool:
    """Train a model whose alphas were searched; returns whether the goal holds on the batches that judge."""
    searched = vector.values()
    budget = plan.goal == "max_loss_increase"
    if budget:
        sparse = vector.even(_START)
        denser = searched[: vector.count].mean() < sparse[: vector.count].mean()
        vector.set_(sparse if denser else searched)
    with _folder(plan) as folder, _trainable(model, vector, plan) as trained:
        record = {"asked": plan.asked(vector), "searched": searched.tolist(), "alpha_range": vector.range}
        (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        callbacks = [LossBudgetCallback(plan.wanted, rate=0.1)] if budget else []
        every = max(1, plan.steps // _EVALUATIONS)
        options: dict[str, Any] = {"report_to": [], "logging_steps": max(1, every // 5), "save_total_limit": 2}
        options |= {"disable_tqdm": say is None} | dict(plan.arguments)
        options |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": every, "save_steps": every}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=plan.steps,
            learning_rate=plan.learning_rate,
            per_device_train_batch_size=1 if plan.collator is None else plan.batch_size,
            **options,
        )
        optimizer = None  # the Trainer's own, where alphas stay
        if budget:
            rates = {"alpha_lr": _ALPHA_RATE, "length_lr": _ALPHA_RATE if bool(vector.scaled.any()) else None}
            optimizer = torch.optim.AdamW(alpha_parameter_groups(model, plan.learning_rate, **rates))
        trainer = _SparseTrainer(
            model=trained,
            args=arguments,
            train_dataset=examples,  # type: ignore[arg-type]
            eval_dataset=examples[:1],  # type: ignore[arg-type]
            data_collator=plan.collator or _only,
            callbacks=callbacks,  # type: ignore[arg-type]
            optimizers=(optimizer, None),
        )
        trainer.task, trainer.vector, trainer.plan, trainer.say = task, vector, plan, say or _silent
        if say is None:
            trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    with evaluated_alone(model, vector):
        return _meet(task, vector, searched, plan, say or _silent)


def _meet(task: Task, vector: AlphaVector, searched: Tensor, plan: TrainingPlan, say: Callable[[str], None]) -> bool:
    """Move the alphas of a trained model until the goal holds, no further than needed; returns whether it does."""
    reached = vector.values()
    budget = plan.goal == "max_loss_increase"
    # A budget is met by going back to what was searched without training, a density by going up.
    end = searched if budget else vector.even(0.9999)

    def fits(share: float) -> bool:
        loss, table = task.measure(vector.between(reached, end, share) if share else reached)
        rise, density = loss - task.before, mean_density(table)
        say(f"trained, {share:.0%} of the way back: {density:.1%} nonzero at {rise:+.4f}")
        return rise <= plan.wanted if budget else density <= plan.wanted

    if fits(0.0):
        return True
    low, high = 0.0, 1.0
    if not fits(high):
        vector.set_(reached)
        return False
    for _ in range(4):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    vector.set_(vector.between(reached, end, high))
    return True


@contextlib.contextmanager
def _folder(plan: TrainingPlan) -> Iterator[Path]:
    if plan.output_dir is not None:
        folder = Path(plan.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def searched_before(plan: TrainingPlan, vector: AlphaVector) -> Tensor | None:
    """Return what the search of an earlier start in this folder found, or None if there was none.

    Raises:
        ValueError: if the folder holds a run that was asked for something else.
    """
    found, asked = plan.record(), plan.asked(vector)
    if found is None:
        return None
    if found["asked"] != asked:
        raise ValueError(
            f"{plan.output_dir} holds another run: it was asked for {found['asked']}, now {asked}. Give another output_dir."
        )
    return torch.tensor(found["searched"], dtype=torch.float64)


@contextlib.contextmanager
def _trainable(model: PreTrainedModel, vector: AlphaVector, plan: TrainingPlan) -> Iterator[PreTrainedModel]:
    """Take gradients for what is to be trained; adapters are merged at the end, and every flag is as it was."""
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    training = model.training
    own = {id(parameter) for parameter in vector.parameters}
    tuner = None
    if plan.train in ADAPTERS:
        tuner = _adapters(model)
    try:
        for parameter in model.parameters():
            # Towards a density the alphas stay where that is; towards a budget they learn.
            if id(parameter) in own:
                parameter.requires_grad_(plan.goal == "max_loss_increase")
            elif tuner is None:
                parameter.requires_grad_(True)
        yield model
    finally:
        if tuner is not None:
            tuner.merge_and_unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
        model.train(training)


def _adapters(model: PreTrainedModel) -> Any:
    try:
        from peft import LoraConfig, LoraModel
    except ImportError:
        raise ImportError("train='adapters' needs PEFT: pip install peft.") from None
    return LoraModel(model, LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear"), "sparsify")


def _only(batches: list[Any]) -> Any:
    """Return the only one: ready batches come one by one."""
    return batches[0]


def _silent(line: str) -> None:
    pass
