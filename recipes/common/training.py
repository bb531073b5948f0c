"""The training loop of the recipes: accumulation, clipping, warm-up, evaluation, early stopping, exact resume."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from tqdm.auto import tqdm

from common.batches import Batches
from common.run import Run
from common.settings import RunSettings
from common.settings import attention_and_output as attention_and_output
from common.settings import make_sparse as make_sparse
from hf_entmax import alphas, entmax_config, is_patched
from hf_entmax.integration.interface import CHILD
from hf_entmax.training import alpha_parameter_groups
from hf_entmax.training.callbacks import rounded
from hf_entmax.training.parameters import decayed_parameters

Loss = Callable[[Any, dict[str, Any]], Tensor]


@dataclasses.dataclass
class Progress:
    """How far a run is; part of every checkpoint."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    worse: int = 0
    seconds: float = 0.0
    tokens: int = 0
    finished: bool = False
    data: str = ""

    def state_dict(self) -> dict[str, Any]:
        """For ``Accelerator.save_state``."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For ``Accelerator.load_state``."""
        for name, value in state.items():
            setattr(self, name, value)


def count_labels(batch: dict[str, Any]) -> int:
    """How many positions the loss is a mean over: labels that are not ignored."""
    return int((batch["labels"] != -100).sum())


def count_shifted_labels(batch: dict[str, Any]) -> int:
    """The same for causal language models, which predict every token but the first of a row."""
    return int((batch["labels"][:, 1:] != -100).sum())


def count_tokens(batch: dict[str, Any]) -> int:
    """Tokens that are read or predicted: for the speed. Padding does not count."""
    read = batch.get("attention_mask", batch["input_ids"] != -1)
    own_labels = "decoder_input_ids" in batch or batch["labels"].shape != batch["input_ids"].shape
    return int(read.sum()) + (count_labels(batch) if own_labels and batch["labels"].dim() > 1 else 0)


def model_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """What the model itself computes from its labels: a mean over them."""
    return model(**batch).loss


class Training:
    """A model, its optimiser and where they stand.

    Args:
        run: the folder and the processes.
        model: on any device; it is prepared for the processes here.
        tokenizer: saved beside the model.
        batches: of training.
        evaluate: returns the measures of the model on dev; ``"score"`` among them, higher is better.
        loss: mean over the labels of a batch; default: the model's own.
        count: labels of a batch that the loss is a mean over.
        before_step: called with the share of training that lies behind, in [0, 1], before every optimiser step.
        evaluate_every: evaluate after so many optimiser steps too, not only after each epoch; 0 does not.
    """

    def __init__(
        self,
        run: Run,
        model: Any,
        tokenizer: Any,
        batches: Batches,
        evaluate: Callable[[Any], dict[str, float]],
        *,
        loss: Loss = model_loss,
        count: Callable[[dict[str, Any]], int] = count_labels,
        before_step: Callable[[float], None] | None = None,
        evaluate_every: int = 0,
    ) -> None:
        settings = run.settings
        self.run, self.tokenizer, self.batches = run, tokenizer, batches
        self.evaluate, self.loss, self.count, self.before_step = evaluate, loss, count, before_step
        self.evaluate_every = evaluate_every
        self.accelerator = run.accelerator
        self.total = 2 if settings.smoke else settings.epochs * len(batches)
        optimizer = torch.optim.AdamW(parameter_groups(model, settings), lr=settings.lr, betas=(0.9, 0.98))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        # Not prepared: a prepared schedule moves once per process and step.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer.optimizer, self._rate)
        self.progress = Progress(data=digest(batches.examples))
        self.accelerator.register_for_checkpointing(self.schedule, self.progress)
        set_seed(settings.seed, device_specific=True)
        if run.resumes:
            now = self.progress.data
            run.load_checkpoint()
            if self.progress.data != now:
                raise ValueError(
                    f"--resume {run.folder}: the training data have changed since. Restore them, or start in another folder."
                )
        run.forget_after(self.progress.step)  # also where a run was killed before its first checkpoint
        if run.resumes:
            run.say(f"Going on after step {self.progress.step} of {self.total}.")

    def _rate(self, step: int) -> float:
        warm = self.run.settings.warmup
        return min((step + 1) / warm, math.sqrt(warm / (step + 1)))

    def fit(self) -> Any:
        """Train to the end, keep the best model on dev in the run's folder ``model``; returns the prepared model."""
        progress, settings = self.progress, self.run.settings
        bar = tqdm(total=self.total, initial=progress.step, disable=not self.run.main, unit="step", mininterval=5)
        self.model.train()
        if not progress.step:
            self._log_alphas()
        while not progress.finished:
            for parts in self.batches.epoch(progress.epoch, progress.step_in_epoch):
                started = time.perf_counter()
                values = self.step(parts)
                progress.seconds += time.perf_counter() - started
                progress.step += 1
                progress.step_in_epoch += 1
                bar.update()
                if progress.step % settings.log_steps == 0 or settings.smoke:
                    bar.set_postfix(loss=f"{values['loss']:.3f}")
                self.run.log(progress.step, **values)
                if progress.step % settings.log_steps == 0 or progress.step >= self.total:
                    self._log_alphas()
                if progress.step >= self.total:
                    break
                within = progress.step_in_epoch < len(self.batches)
                if within and self.evaluate_every and progress.step % self.evaluate_every == 0:
                    self._evaluate(bar)
                    self.run.save_checkpoint()
                    if progress.finished:
                        break
                elif settings.checkpoint_steps and progress.step % settings.checkpoint_steps == 0:
                    self.run.save_checkpoint()
            if progress.finished:
                break
            progress.epoch += 1
            progress.step_in_epoch = 0
            self._evaluate(bar)
            self.run.save_checkpoint()
        bar.close()
        return self.model

    def step(self, parts: list[dict[str, Any]]) -> dict[str, float]:
        """One optimiser step; the loss is a mean over all labels of the step, wherever they were."""
        accelerator, settings = self.accelerator, self.run.settings
        if self.before_step is not None:
            self.before_step(self.progress.step / self.total)
        counts = [self.count(part) for part in parts]
        sums = torch.tensor([sum(counts), sum(map(count_tokens, parts))], device=accelerator.device)
        labels, tokens = (int(n) for n in accelerator.reduce(sums, reduction="sum"))
        total = torch.zeros((), device=accelerator.device)
        for place, (part, count) in enumerate(zip(parts, counts, strict=True)):
            # Gradients are averaged over processes; this makes them the sum, divided by the labels of all.
            weight = count / max(1, labels) * accelerator.num_processes
            last = place == len(parts) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss = self.loss(self.model, part) * weight
                accelerator.backward(loss)
            total += loss.detach().float()
        values = {}
        if settings.clip_norm:
            norm = accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
            values["gradient_norm"] = float(norm) if norm is not None else math.nan
        values["lr"] = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.schedule.step()
        self.optimizer.zero_grad()
        self.progress.tokens += tokens
        return {"loss": float(accelerator.reduce(total, reduction="mean")), **values}

    def _log_alphas(self) -> None:
        """Alpha of every head, where they are learned. Not under FSDP: a step would have to wait for all weights."""
        model = self.accelerator.unwrap_model(self.model)
        if self.accelerator.distributed_type == DistributedType.FSDP or not is_patched(model):
            return
        config = entmax_config(model)
        if config.mapping == "entmax" and config.alpha == "learned":
            table = {site: rounded(values) for site, values in alphas(model).items()}
            self.run.note("alphas.jsonl", self.progress.step, alpha=table)

    def _evaluate(self, bar: Any) -> None:
        progress, settings = self.progress, self.run.settings
        self.model.eval()
        with torch.no_grad():
            model = self.run.unsharded(self.model)
            measures = self.evaluate(model)
        self.model.train()
        # A first score that is no number must not leave the run without a model.
        if measures["score"] > progress.best or not progress.best_step:
            best = measures["score"] if measures["score"] > -math.inf else -math.inf
            progress.best, progress.best_step, progress.worse = best, progress.step, 0
            self.run.save_model(model, self.tokenizer)
        else:
            progress.worse += 1
        stop = bool(settings.patience) and progress.worse >= settings.patience
        progress.finished = stop or progress.step >= self.total
        known = _mean_alphas(model)
        self.run.log(progress.step, **{f"dev_{name}": value for name, value in measures.items()}, **known)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in {**measures, **known}.items())
        bar.clear()
        self.run.say(f"epoch {progress.epoch}, step {progress.step}: {shown}{'  (stops early)' if stop else ''}")

    def summary(self) -> dict[str, float]:
        """What every result row says about the training."""
        progress = self.progress
        return {
            "steps": progress.step,
            "best_step": progress.best_step,
            "train_seconds": round(progress.seconds, 1),
            "tokens_per_second": round(progress.tokens / max(progress.seconds, 1e-9)),
        }


def digest(examples: Any) -> str:
    """Of the training data, all of them in their order."""
    found = hashlib.sha256()
    for example in examples:
        found.update(repr(example).encode())
    return found.hexdigest()


def _mean_alphas(model: Any) -> dict[str, float]:
    """Mean alpha per site, of a model that has alphas."""
    if not is_patched(model) or entmax_config(model).mapping != "entmax":
        return {}
    return {f"alpha/{site}": float(values.nanmean()) for site, values in alphas(model).items()}


def parameter_groups(model: Any, settings: RunSettings) -> list[dict[str, Any]]:
    """Parameter groups: alphas at their own rate and without decay, no decay for biases and norms."""
    if any(p.requires_grad and f".{CHILD}." in f".{name}" for name, p in model.named_parameters()):
        rates = {"lr": settings.lr, "alpha_lr": settings.alpha_lr}
        return alpha_parameter_groups(model, **rates, weight_decay=settings.weight_decay)
    if settings.alpha_lr is not None:
        raise ValueError(
            f"alpha_lr={settings.alpha_lr} would have no effect: attention={settings.attention} learns no alpha."
        )
    names = decayed_parameters(model)
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and name in names]
    others = [p for name, p in model.named_parameters() if p.requires_grad and name not in names]
    return [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
