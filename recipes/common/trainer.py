"""Transformers' `Seq2SeqTrainer`, with what the recipes need beside it; without ``predict_with_generate`` it is a plain Trainer.

What the Trainer does not do by itself:

- the examples of a step are similarly long, in an order that follows from seed and epoch alone, so that a run that was killed
  goes on with the batches that it had not seen (`SimilarLengths`; the Trainer's own sampler draws anew);
- checkpoints and evaluations within epochs beside those at their ends, and the seconds of all steps (`Pace`);
- alphas have their own learning rate and are not decayed; dropout differs by process; the loss is a mean over all labels of a
  step; a checkpoint that was cut off while it was written is passed over; a finished run is not trained again.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from common.folder import write
from common.settings import RunSettings, attention_and_output
from hf_entmax.integration.interface import HEADS_MODULE
from hf_entmax.integration.labels import shifts_labels
from hf_entmax.training import AlphaLoggingCallback, SmoothedEntmaxLoss, alpha_parameter_groups

#: So many steps are drawn at random and sorted by length, before their own order is drawn.
POOL = 50


def training_arguments(settings: RunSettings, **more: Any) -> Seq2SeqTrainingArguments:
    """Return the Trainer's arguments for a recipe's settings; ``more`` adds to them or changes them."""
    state, on_cpu = PartialState(), not torch.accelerator.is_available()
    usual = {
        "output_dir": settings.out,
        "num_train_epochs": settings.epochs,
        "max_steps": 2 if settings.smoke else -1,
        "per_device_train_batch_size": settings.batch_size // settings.gradient_accumulation // state.num_processes,
        "per_device_eval_batch_size": 64,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "learning_rate": settings.lr,
        "adam_beta2": 0.98,
        "weight_decay": settings.weight_decay,
        "lr_scheduler_type": settings.lr_scheduler,
        "warmup_steps": settings.warmup,
        "max_grad_norm": settings.clip_norm,
        "bf16": settings.mixed_precision == "bf16",
        "fp16": settings.mixed_precision == "fp16",
        "use_cpu": on_cpu,  # else the processes of torchrun would not find each other
        "dataloader_pin_memory": not on_cpu,
        "seed": settings.seed,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "eval_steps": getattr(settings, "evaluate_every", 0) or None,  # this and the next are for `Pace`
        "save_steps": settings.checkpoint_steps or 10**9,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "restore_callback_states_from_checkpoint": True,
        "logging_steps": settings.log_steps,
        "logging_first_step": True,
        "report_to": settings.report_to or "none",
        "generation_num_beams": 1,
        "disable_tqdm": not state.is_main_process,
    }
    return Seq2SeqTrainingArguments(**{**usual, **more})


class SimilarLengths(Sampler[int]):
    """Draw examples of these lengths so that those of a step, ``batch_size`` over all processes, are similarly long."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; the Trainer does."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed}/{self.epoch}")
        order = list(range(len(self)))
        rng.shuffle(order)
        pool = POOL * self.batch_size
        pools = [sorted(order[i : i + pool], key=self.lengths.__getitem__) for i in range(0, len(order), pool)]
        order = [example for part in pools for example in part]
        steps = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        last = [steps.pop()] if len(steps[-1]) < self.batch_size else []  # an incomplete one ends the epoch
        rng.shuffle(steps)
        return iter([example for step in steps + last for example in step])


class Pace(TrainerCallback, ExportableState):
    """Count the seconds of all steps; save and evaluate every so many of them, beside the ends of epochs."""

    def __init__(self) -> None:
        self.seconds, self.began = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on from the seconds of a checkpoint."""
        if state.global_step and "Pace" in state.stateful_callbacks:
            self.seconds = state.stateful_callbacks["Pace"]["attributes"]["seconds"]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock; ask for a checkpoint or an evaluation, which has a checkpoint too, and report the last step."""
        self.seconds += time.perf_counter() - self.began
        control.should_log |= state.global_step >= state.max_steps
        within = state.epoch % 1 > 0 and state.global_step < state.max_steps
        if within and args.eval_steps and state.global_step % args.eval_steps == 0:
            control.should_evaluate = control.should_save = True
        elif state.global_step % args.save_steps == 0:
            control.should_save = True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}


class RecipeTrainer(Seq2SeqTrainer):
    """A `Seq2SeqTrainer` for a recipe's settings.

    ``compute_metrics`` returns ``"score"`` among its measures: the best model has the highest. Examples are dicts with lists of
    token ids, or tuples of texts.

    Args:
        settings: of the recipe.
        model: patched or not, on any device.
        trainer: the Trainer's own arguments; ``args`` are `training_arguments` where none are given.
    """

    #: Of length scaling; None is the rate of the weights.
    length_lr: float | None = None

    def __init__(self, settings: RunSettings, model: Any, **trainer: Any) -> None:
        self.settings, self.folder = settings, Path(settings.out)
        callbacks = [Pace(), *([EarlyStoppingCallback(settings.patience)] if settings.patience else [])]
        callbacks += trainer.pop("callbacks", [])
        # A mean over the labels of a step, wherever its parts are; a model's own may be a mean of means.
        loss = SmoothedEntmaxLoss(settings.output_alpha, 0.0, shift=shifts_labels(model))
        usual = {"args": training_arguments(settings), "compute_loss_func": loss}
        super().__init__(model, callbacks=callbacks, **{**usual, **trainer})
        # The Trainer knows it from the model's ``loss_type``, which GPT-2 has none of: a step has a label less in each row.
        self._loss_shifts_labels = shifts_labels(model)
        learned = attention_and_output(model)["attention"] == "learned"
        if learned and not self.is_fsdp_enabled:  # a step would have to wait for all weights
            self.add_callback(AlphaLoggingCallback(statistics=False))
        set_seed(settings.seed, device_specific=True)  # dropout differs by process

    def create_optimizer(self, model: Any = None) -> Any:
        """Give alphas their own rate, and no decay."""
        model, settings = self.model if model is None else model, self.settings
        if any(p.requires_grad and f".{HEADS_MODULE}." in f".{name}" for name, p in model.named_parameters()):
            if self.optimizer is None:
                groups = alpha_parameter_groups(
                    model, settings.lr, settings.alpha_lr, settings.weight_decay, self.length_lr
                )
                self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, self.args.adam_beta2))
        elif settings.alpha_lr is not None:
            raise ValueError(
                f"alpha_lr={settings.alpha_lr} would have no effect: attention={settings.attention} learns no alpha."
            )
        return super().create_optimizer(model)

    def _get_train_sampler(self, train_dataset: Any = None) -> SimilarLengths:
        examples = self.train_dataset if train_dataset is None else train_dataset
        return SimilarLengths([length(e) for e in examples], self.settings.batch_size, self.settings.seed)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict, and leave the model's generation settings alone: the Trainer would fill in defaults, 20 tokens among them."""
        own = copy.deepcopy(getattr(self.model, "generation_config", None))
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            if own is not None:
                self.model.generation_config = own

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Predict every example once: the Seq2SeqTrainer would keep those that fill up a batch of several processes."""
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def fit(self) -> Any:
        """Train, from the last checkpoint where there is one, and return the best model, ready for tests.

        It stands in the folder as ``model``, with its tokenizer; ``trainer_state.json`` beside it says that the run is finished.

        Raises:
            ValueError: if the training data are not those that a resumed run began with.
        """
        folder, finished = self.folder, self.folder / "trainer_state.json"
        last = last_checkpoint(folder)
        self._check_data(folder / "data.sha256", resumes=last is not None)
        if finished.exists():
            self.state = TrainerState.load_from_json(str(finished))
            if not self.is_fsdp_enabled:
                self._load_from_checkpoint(str(folder / "model"))
        else:
            size = sum(p.numel() for p in self.model.parameters()) / 1e6
            goes_on = "" if last is None else f", from {last} on"
            self.accelerator.print(f"{len(self.train_dataset)} examples, {size:.2f} M parameters{goes_on}.")
            self.train(resume_from_checkpoint=None if last is None else str(last))
            self.save_model(str(folder / "model"))
            self.save_state()
            self.accelerator.wait_for_everyone()
        model: Any = self.accelerator.unwrap_model(self.model)
        if self.is_fsdp_enabled:  # every process tests the whole model
            kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
            model = kind.from_pretrained(folder / "model")
        return model.to(self.args.device).eval()

    def _check_data(self, stored: Path, resumes: bool) -> None:
        """Raise an error where a resumed run has other data; drop checkpoints that were cut off while they were written."""
        found = hashlib.sha256()
        for example in self.train_dataset:
            found.update(repr(example).encode())
        if resumes and stored.exists() and stored.read_text(encoding="utf-8") != found.hexdigest():
            raise ValueError(
                f"--resume {self.folder}: the training data have changed since. Restore them, or start in another folder."
            )
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            write(stored, found.hexdigest())
            for path in self.folder.glob("checkpoint-*"):
                if not (path / "trainer_state.json").exists():
                    shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def summary(self) -> dict[str, float]:
        """Return what every result row says about the training."""
        seconds = self.state.stateful_callbacks["Pace"]["attributes"]["seconds"]
        tokens = sum(map(length, self.train_dataset)) * (self.state.epoch or 0)
        return {
            "steps": self.state.global_step,
            "best_step": self.state.best_global_step or self.state.global_step,
            "train_seconds": round(seconds, 1),
            "tokens_per_second": round(tokens / max(seconds, 1e-9)),
        }

    @property
    def best(self) -> float:
        """The score of the best model on dev."""
        return math.nan if self.state.best_metric is None else self.state.best_metric


def length(example: Any) -> int:
    """Count the tokens of an example, read and written; the letters of texts."""
    parts = example.values() if isinstance(example, dict) else example
    return sum(len(part) for part in parts if hasattr(part, "__len__"))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint that is complete: the Trainer writes ``trainer_state.json`` after everything else."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)
