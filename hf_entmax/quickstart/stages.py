"""Training with the Seq2SeqTrainer: the softmax stage and the entmax stage differ in their optimiser only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

#: Share of a stage in which the learning rate rises.
WARMUP = 0.1


def learning_rate(step: int, steps: int) -> float:
    """Factor of the learning rate: up to 1 within ``WARMUP`` of the steps, then linearly down to 0."""
    done = step / steps
    return max(0.0, min(max(done, 1 / steps) / WARMUP, (1 - done) / (1 - WARMUP), 1.0))


class _Progress(TrainerCallback):
    """A bar with the current loss, and an early end of the stage, never a silent one, where its time is up."""

    def __init__(self, title: str, steps: int, max_seconds: float, console: Console) -> None:
        self.title, self.steps, self.max_seconds, self.console = title, steps, max_seconds, console
        self.start = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console)
        self.task = self.bar.add_task(title, total=steps, loss="-")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.monotonic()
        self.bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)
        if state.global_step < self.steps and time.monotonic() - self.start >= self.max_seconds:
            control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self.bar.update(self.task, loss=f"{float(logs['loss']):.3f}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.stop()
        if state.global_step < self.steps:
            self.console.print(
                f"[bold red]{self.title} stopped after {state.global_step:,} of {self.steps:,} steps[/], because its "
                f"{self.max_seconds:.0f} seconds were over. The numbers below are those of an unfinished training and "
                "not comparable with published ones; give max_minutes (--max-minutes) more time."
            )


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    optimizer: Optimizer,
    *,
    title: str,
    out_dir: Path,
    steps: int,
    max_seconds: float,
    batch_size: int,
    seed: int,
    console: Console,
    callbacks: Sequence[TrainerCallback] = (),
) -> int:
    """Train with the Seq2SeqTrainer, batches grouped by length.

    Args:
        model: changed in place.
        tokenizer: pads the batches.
        data: token ids, see ``data.training_set``.
        optimizer: over the model's parameters, with their peak learning rates.
        title: of the progress bar.
        out_dir: the Trainer's output directory.
        steps: optimiser steps, >= 1.
        max_seconds: time after which training ends and says so even if steps are left, s.
        batch_size: pairs per step.
        seed: of the order and of dropout.
        console: where the bar is drawn.
        callbacks: more callbacks for the Trainer.

    Returns:
        The number of steps done.
    """
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(out_dir),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        logging_steps=max(1, steps // 20),
        save_strategy="no",
        report_to="none",
        seed=seed,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: learning_rate(step, steps))),
        callbacks=[*callbacks, _Progress(title, steps, max_seconds, console)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.global_step
