"""Puts a recipe's settings, folder and order of the data into Transformers' `Seq2SeqTrainer`, and reads its numbers back.

What the Trainer does not do by itself is here: the steps hold examples of similar length in an order that follows from seed and
epoch alone, so that a run that was killed goes on with the batches that it had not seen; alphas have their own learning rate
and are not decayed; a checkpoint that was cut off while it was written is passed over.
"""

from __future__ import annotations

import copy
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.utils.data import Sampler
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_callback import ExportableState

from common.run import Run, write_atomically
from common.training import digest, parameter_groups
from hf_entmax import entmax_config, is_patched
from hf_entmax.training import AlphaLoggingCallback, SmoothedEntmaxLoss

#: So many steps are drawn at random and sorted by length, before their own order is drawn.
POOL = 50
#: What the Trainer calls its numbers, and what ``log.jsonl`` does.
NAMES = {"loss": "loss", "learning_rate": "lr", "grad_norm": "gradient_norm"}


class SimilarLengths(Sampler[int]):
    """Draw examples so that those of a step are similarly long.

    Args:
        lengths: of every example.
        batch_size: examples of a step, over all processes.
        seed: of the order.
        epoch: says which epoch begins.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Callable[[], int]) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed}/{self.epoch()}")
        order = list(range(len(self)))
        rng.shuffle(order)
        pool = POOL * self.batch_size
        pools = [sorted(order[i : i + pool], key=self.lengths.__getitem__) for i in range(0, len(order), pool)]
        order = [example for part in pools for example in part]
        steps = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        last = [steps.pop()] if len(steps[-1]) < self.batch_size else []  # an incomplete one ends the epoch
        rng.shuffle(steps)
        return iter([example for step in steps + last for example in step])


class Clock(TrainerCallback, ExportableState):
    """Count the seconds of all steps, also of those before a resume, and write a checkpoint every so many of them."""

    def __init__(self, checkpoint_steps: int = 0) -> None:
        self.checkpoint_steps, self.seconds, self.began = checkpoint_steps, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock; ask for a checkpoint."""
        self.seconds += time.perf_counter() - self.began
        if self.checkpoint_steps and state.global_step % self.checkpoint_steps == 0:
            control.should_save = True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {"checkpoint_steps": self.checkpoint_steps}, "attributes": {"seconds": self.seconds}}


class RecipeTrainer(Seq2SeqTrainer):
    """Train a model as the settings of a run say, up to the best of its epochs on dev.

    Args:
        run: the folder and its settings.
        model: patched or not, on any device.
        tokenizer: saved beside the model.
        train: examples, with ``input_ids`` and ``labels``.
        dev: examples that choose the best epoch.
        collator: makes batches of examples.
        compute_metrics: measures of an evaluation, ``"score"`` among them, higher is better.
        more: further training arguments.
    """

    def __init__(
        self,
        run: Run,
        model: Any,
        tokenizer: Any,
        train: Any,
        dev: Any,
        collator: Any,
        compute_metrics: Any,
        **more: Any,
    ) -> None:
        settings, precision = run.settings, run.accelerator.mixed_precision
        processes = run.accelerator.num_processes
        self.run_folder, self.settings = run, settings
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(run.folder),
            num_train_epochs=settings.epochs,
            max_steps=2 if settings.smoke else -1,
            per_device_train_batch_size=settings.batch_size // settings.gradient_accumulation // processes,
            gradient_accumulation_steps=settings.gradient_accumulation,
            learning_rate=settings.lr,
            adam_beta2=0.98,
            weight_decay=settings.weight_decay,
            lr_scheduler_type="inverse_sqrt",
            warmup_steps=settings.warmup,
            max_grad_norm=settings.clip_norm,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            use_cpu=run.accelerator.device.type == "cpu",
            seed=settings.seed,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="score",
            logging_steps=settings.log_steps,
            report_to=settings.report_to or "none",
            predict_with_generate=True,
            generation_num_beams=1,
            per_device_eval_batch_size=64,
            disable_tqdm=not run.main,
            **more,
        )
        self.clock = Clock(settings.checkpoint_steps)
        callbacks: list[TrainerCallback] = [self.clock]
        if is_patched(model) and entmax_config(model).alpha == "learned":
            callbacks.append(AlphaLoggingCallback())
        if settings.patience:
            callbacks.append(EarlyStoppingCallback(settings.patience))
        super().__init__(
            model,
            arguments,
            collator,
            train,
            dev,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            # A mean over the labels of a step, wherever its parts are; the model's own would be a mean of means.
            compute_loss_func=SmoothedEntmaxLoss(settings.output_alpha, 0.0),
            callbacks=callbacks,
        )
        set_seed(settings.seed, device_specific=True)  # dropout differs by process

    def create_optimizer(self, model: Any = None) -> Any:
        """Give alphas their own rate, and no decay."""
        if self.optimizer is None:
            groups = parameter_groups(self.model if model is None else model, self.settings)
            self.optimizer = torch.optim.AdamW(groups, lr=self.settings.lr, betas=(0.9, self.args.adam_beta2))
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> SimilarLengths:
        examples = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(example["input_ids"]) + len(example["labels"]) for example in examples]
        epoch = lambda: int(self.state.epoch or 0)  # noqa: E731
        return SimilarLengths(lengths, self.settings.batch_size, self.settings.seed, epoch)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict, and leave the model's generation settings alone: the Trainer would fill in defaults, 20 tokens among them."""
        own = copy.deepcopy(self.model.generation_config)
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.model.generation_config = own

    def fit(self) -> Any:
        """Train, from the last checkpoint where there is one, and return the best model, which is in ``model`` then.

        Raises:
            ValueError: if the training data are not those that a resumed run began with.
        """
        run, stored = self.run_folder, self.run_folder.folder / "data.sha256"
        data = digest(self.train_dataset)
        last = last_checkpoint(run.folder)
        if last is not None and stored.exists() and stored.read_text(encoding="utf-8") != data:
            raise ValueError(
                f"--resume {run.folder}: the training data have changed since. Restore them, or start in another folder."
            )
        run.accelerator.wait_for_everyone()
        if run.main:
            write_atomically(stored, data)
            for path in run.folder.glob("checkpoint-*"):
                if not (path / "trainer_state.json").exists():
                    shutil.rmtree(path)  # cut off while it was written
        run.accelerator.wait_for_everyone()
        if last is not None:
            run.say(f"Going on from {last}.")
        self.train(resume_from_checkpoint=None if last is None else str(last))
        self.clock = next(c for c in self.callback_handler.callbacks if isinstance(c, Clock))
        run.forget_after(0)
        for line in self.state.log_history:
            values = {NAMES[name]: value for name, value in line.items() if name in NAMES}
            measured = (
                name for name in line if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))
            )
            values |= {f"dev_{name[5:]}": line[name] for name in measured}
            if values:
                run.note("log.jsonl", line["step"], **values)
        model = run.accelerator.unwrap_model(self.model)
        run.save_model(model, self.processing_class)
        return model

    def summary(self) -> dict[str, float]:
        """Return what every result row says about the training."""
        tokens = sum(len(e["input_ids"]) + len(e["labels"]) for e in self.train_dataset) * (self.state.epoch or 0)
        return {
            "steps": self.state.global_step,
            "best_step": self.state.best_global_step or self.state.global_step,
            "train_seconds": round(self.clock.seconds, 1),
            "tokens_per_second": round(tokens / max(self.clock.seconds, 1e-9)),
        }

    @property
    def best(self) -> float:
        """The score of the best model on dev."""
        return math.nan if self.state.best_metric is None else self.state.best_metric


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint that is complete: the Trainer writes ``trainer_state.json`` after everything else."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)
