"""What is special about turning a softmax model into a sparse one: its loss, and alpha on its way."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.conversion_tasks import CAUSAL, SENTENCES, Kind
from common.run import Run
from common.sentences import SCALE, contrast, embeddings
from hf_entmax import entmax_config, is_patched, set_alphas
from hf_entmax.generation import SamplingMetrics
from hf_entmax.training import (
    AlphaSchedule,
    DensityTarget,
    LossBudget,
    attention_density,
    attention_distillation,
    attention_pairs,
    logit_distillation,
    record_attention,
    soft_density,
)


def base_model(model: Any) -> Any:
    """The Transformers model inside PEFT."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


class Conversion:
    """The loss of a conversion, and what moves with training: alpha, and the pressure on the density.

    Args:
        run: its settings weigh the terms: ``task_weight``, ``distill_logits``, ``temperature``, ``distill_attention``,
            ``attention_loss``, ``density_target``, ``density_rate``, ``tau``; or ``loss_budget``, ``loss_rate``,
            ``density_floor``.
        student: patched (or plain, as a control), perhaps inside PEFT; not yet prepared for the processes.
        teacher: the frozen softmax model, in evaluation mode.
        schedule: of alpha; None leaves alpha alone.
        kind: of the model.
    """

    def __init__(self, run: Run, student: Any, teacher: Any, schedule: AlphaSchedule | None, kind: Kind) -> None:
        settings = run.settings
        self.settings, self.student, self.teacher, self.run = settings, base_model(student), teacher, run
        self.schedule, self.kind = schedule, kind
        self.output_alpha = SamplingMetrics.for_model(self.student).alpha
        self.learned = is_patched(self.student) and entmax_config(self.student).alpha == "learned"
        self.arrived = self.schedule is None
        self.density: DensityTarget | LossBudget | None = None
        parts = settings.gradient_accumulation  # it moves with every part of a step
        if settings.density_target is not None:
            self.density = DensityTarget(settings.density_target, settings.density_rate / parts)
        elif settings.loss_budget is not None:
            self.density = LossBudget(settings.loss_budget, settings.loss_rate / parts)
        if self.density is not None:
            run.accelerator.register_for_checkpointing(self.density)

    def move(self, share: float) -> None:
        """Put alpha where it belongs when this share of training is done."""
        if self.schedule is None:
            return
        self.arrived = self.schedule.arrived(share)
        if not (self.arrived and self.learned):
            set_alphas(self.student, self.schedule(share))

    def arrive(self) -> None:
        """Put alpha where it is headed, at once: to see what that does without any training."""
        if self.schedule is not None:
            set_alphas(self.student, self.schedule.end)

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Task, distances to the teacher, and density, as the settings weigh them."""
        settings = self.settings
        if not settings.dropout:
            model.eval()
        recorded = bool(settings.distill_attention) or self.density is not None
        if recorded and "attention_mask" not in batch:
            batch = {**batch, "attention_mask": (batch["labels"] != -100).long()}
        with record_attention(self.student) if recorded else contextlib.nullcontext() as seen:
            output = self._forward(model, batch)
        loss = settings.task_weight * output.loss
        pairs = {} if seen is None else attention_pairs(self.student, batch, seen)
        known = None
        if settings.distill_logits or settings.distill_attention or settings.loss_budget is not None:
            recording = record_attention(self.teacher) if settings.distill_attention else contextlib.nullcontext()
            with torch.no_grad(), recording as wanted:
                known = self._forward(self.teacher, batch)
            if settings.distill_logits:
                distance = self._distance(output.logits, known.logits, batch["labels"])
                loss = loss + settings.distill_logits * distance
            if seen is not None and wanted is not None:
                terms = [
                    attention_distillation(weights, wanted.weights[name], pairs[name], settings.attention_loss)
                    for name, weights in seen.weights.items()
                ]
                loss = loss + settings.distill_attention * torch.stack(terms).mean()
        if seen is not None and self.density is not None:
            rise = 0.0 if known is None else output.loss.detach() - known.loss
            if settings.distill_logits and not settings.task_weight:
                rise = distance.detach()  # the loss of the task is not what is trained
            loss = loss + self._pressure(self.density, seen.weights, pairs, rise)
        return loss

    def _pressure(
        self,
        constraint: DensityTarget | LossBudget,
        weights: dict[str, Tensor],
        pairs: dict[str, Tensor],
        rise: Tensor | float,
    ) -> Tensor:
        if self.arrived:  # before, alpha itself is still on its way
            measured = rise
            if isinstance(constraint, DensityTarget):
                densities = [attention_density(w, pairs[name]) for name, w in weights.items()]
                measured = torch.stack(densities).mean().detach()
            constraint.update(float(self.run.accelerator.reduce(measured, "mean")))
        settings = self.settings
        soft = [soft_density(w, pairs[name], settings.tau, settings.density_floor) for name, w in weights.items()]
        return constraint.multiplier * torch.stack(soft).mean()

    def _forward(self, model: Any, batch: dict[str, Any]) -> Any:
        """Loss of the task, and output: logits, or embeddings of sentences."""
        if self.kind is not SENTENCES:
            return model(**batch)
        vectors = embeddings(model, {name: values for name, values in batch.items() if name != "labels"})
        return SimpleNamespace(loss=contrast(vectors), logits=vectors)

    def _distance(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """Of the outputs; of embeddings: how far the score of a text with itself falls, nats."""
        if self.kind is SENTENCES:
            return SCALE * (1 - (student * teacher).sum(-1)).mean()
        if self.kind is CAUSAL:
            student, teacher, labels = student[:, :-1], teacher[:, :-1], labels[:, 1:]
        return logit_distillation(student, teacher, labels, self.output_alpha, temperature=self.settings.temperature)
