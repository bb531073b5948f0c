"""What the Trainer must know of patched models: what it must refuse, a moment callbacks need, a figure to report."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_entmax.alpha import LearnedAlpha
from hf_entmax.integration.config_hook import CONFIG_KEY, wrap_methods
from hf_entmax.integration.output_loss import check_fused_head, counting_support, output_losses

logger = logging.getLogger(__name__)
#: Steps after which it is said that nothing is sparse, and the alpha below which hardly any weight is zero.
_SETTLED, _NEARLY_SOFTMAX = 100, 1.03


def install() -> None:
    """Hook how the Trainer starts, trains, evaluates, logs and writes its card."""
    from transformers.trainer import Trainer
    from transformers.trainer_callback import CallbackHandler

    loop = ["self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"]
    wrap_methods(
        [
            (Trainer, "__init__", ["self", "model", "args"], _init),
            (CallbackHandler, "on_log", ["self", "args", "state", "control", "logs"], _on_log),
            (Trainer, "evaluation_loop", loop, _evaluation_loop),
            (Trainer, "create_model_card", ["self", "language"], _create_model_card),
            (Trainer, "train", ["self", "resume_from_checkpoint"], _train),
        ]
    )


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.trainer import Trainer

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _refuse_other_losses(self)
        if type(self).create_model_card is not Trainer.create_model_card:  # TRL's trainers write cards of their own
            self.create_model_card = _completing(self.create_model_card)

    return init


def _completing(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def write_and_complete(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        _complete_card(write.__self__)  # type: ignore[attr-defined]

    return write_and_complete


def _on_log(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_log(self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        # Trainer puts its reporters before the callbacks of the user: what these add to the logs would come too late.
        for callback in self.callbacks:
            before_report = getattr(callback, "before_report", None)
            if before_report is not None:
                before_report(args, state, logs, model=self.model)
        _say_dense(self, state)
        return original(self, args, state, control, logs)

    return on_log


def _evaluation_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    def evaluation_loop(
        self: Any,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        with counting_support(self.model) as batches:
            result = original(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        support = _mean_support(self, dataloader, batches)
        if support is not None and result.metrics is not None:
            result.metrics[f"{metric_key_prefix}_support_size"] = support
        return result

    return evaluation_loop


def _create_model_card(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_model_card(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _complete_card(self)

    return create_model_card


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = [callback for callback in self.callback_handler.callbacks if hasattr(callback, "leave_model")]
        _clear_model(self.model, own)
        try:
            return original(self, *args, **kwargs)
        finally:
            for callback in own:  # an exception or Ctrl-C calls no on_train_end
                callback.leave_model()

    return train


def _say_dense(handler: Any, state: Any) -> None:
    """Say once, after the first hundred steps, that no head has become sparse, and what to do about it."""
    config = getattr(handler.model, "config", None)
    if state.global_step < _SETTLED or getattr(handler, "_hf_entmax_told", False) or not state.is_world_process_zero:
        return
    handler._hf_entmax_told = True
    entmax = getattr(config, CONFIG_KEY, None) or {}
    if entmax.get("alpha") != "learned" or entmax.get("mapping", "entmax") != "entmax":
        return
    learned = [m() for m in handler.model.modules() if isinstance(m, LearnedAlpha)]
    if not learned or any(isinstance(values, DTensor) for values in learned):
        return
    highest = max(float(values.detach().max()) for values in learned)
    if highest < _NEARLY_SOFTMAX:
        logger.warning(
            "After %d steps no alpha is above %.3f: attention is as good as dense. To get zeros, call hf_entmax.sparsify(model, "
            "batches, ...), start higher (alpha_init=1.5 with length_scaling='constant', length_scaling_init='softmax'), or give "
            "alphas a learning rate of their own (hf_entmax.training.alpha_parameter_groups).",
            state.global_step,
            highest,
        )


def _clear_model(model: Any, own: list[Any]) -> None:
    """Remove from a model what callbacks of another trainer left on it, and say so."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner: Any = getattr(hook, "__self__", None)
            if hasattr(owner, "leave_model") and not any(owner is callback for callback in own):
                warnings.warn(
                    f"This model still carries hooks of the {type(owner).__name__} of a training that did not end: they are "
                    "removed. Its loss was not the model's own until now.",
                    stacklevel=3,
                )
                owner.leave_model()


def _complete_card(trainer: Any) -> None:
    """Say in the Trainer's own card how the model is loaded, and what its attention is."""
    path = Path(trainer.args.output_dir, "README.md")
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapter = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    base = model.get_base_model() if adapter else model
    if not trainer.is_world_process_zero() or not path.is_file():
        return
    from hf_entmax.integration.card import add_to_card, card_section
    from hf_entmax.integration.patching import stored_configs

    if len(stored_configs(getattr(base, "config", None))) != 1:
        return  # parts that are patched differently have cards of their own
    # A path of this machine means nothing to those who read the card.
    add_to_card(path, card_section(base, trainer.hub_model_id or "PATH_OR_HUB_ID", adapter=adapter))


def _refuse_other_losses(trainer: Any) -> None:
    """Raise where a trainer would take another loss than the one the model's configuration asks for, without a word."""
    entmax = getattr(getattr(trainer.model, "config", None), CONFIG_KEY, None) or {}
    chosen = [f"{n}={entmax[n]!r}" for n in ("output_alpha", "output_mapping") if entmax.get(n) is not None]
    if not chosen:
        return
    option, arguments = chosen[0], trainer.args
    smoothed = "hf_entmax.training.SmoothedEntmaxLoss(alpha, label_smoothing)"
    if factor := getattr(arguments, "label_smoothing_factor", 0.0):
        raise ValueError(
            f"TrainingArguments(label_smoothing_factor={factor}) makes the Trainer compute a smoothed cross-entropy and "
            f"would silently replace the loss of {option}. Set it to 0. For label smoothing in Fenchel-Young form "
            f"give the Trainer compute_loss_func={smoothed}."
        )
    own = getattr(trainer, "compute_loss_func", None)
    if own is not None and not getattr(own, "replaces_output_loss", False):
        raise ValueError(
            f"compute_loss_func={getattr(own, '__name__', type(own).__name__)} would silently replace the loss of {option}. "
            f"Leave it out, give {smoothed}, or, where that is what you want, say so: set replaces_output_loss = True on "
            "the function."
        )
    _watch_own_loss(trainer, option, smoothed)
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    if not kinds:
        return
    names = [kind.__name__ for kind in kinds]
    if "SFTTrainer" not in names:
        raise ValueError(
            f"TRL's {names[0]} computes its loss from log-probabilities of a softmax: {option} has no part in it, while "
            "generate() would draw from sparse probabilities. Patch without the option for this training."
        )
    if getattr(arguments, "loss_type", "nll") not in ("nll", "chunked_nll"):
        raise ValueError(
            f"SFTConfig(loss_type={arguments.loss_type!r}) would silently replace the loss of {option}: use 'nll', which the "
            "entmax loss then stands in for, or patch without the option."
        )
    for hook in output_losses(trainer.model):
        hook.replaces_log_probs = True
    check_fused_head(trainer.model)


def _watch_own_loss(trainer: Any, option: str, smoothed: str) -> None:
    """Check once, in the first step, that the loss of a trainer with its own ``compute_loss`` is made of ours.

    Only the graph tells a loss that adds something to ``super().compute_loss(...)`` from one that takes its place.
    """
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    if owner.__module__.partition(".")[0] in ("transformers", "trl") or getattr(trainer, "replaces_output_loss", False):
        return
    compute = trainer.compute_loss

    @functools.wraps(compute)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        hooks, nodes = output_losses(trainer.model), []
        for hook in hooks:
            hook.nodes = nodes
        try:
            found = compute(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.nodes = None
        loss = found[0] if isinstance(found, tuple) else found
        if not loss.requires_grad:  # evaluation
            return found
        if None not in nodes and not _made_of(loss, nodes):
            raise ValueError(
                f"{owner.__name__}.compute_loss makes a loss that has no part of the loss of {option}, which it would silently "
                "replace. Start from super().compute_loss(...) or outputs.loss, with the labels given to the model; or train "
                f"with compute_loss_func={smoothed}; or, where that is what you want, set replaces_output_loss = True on "
                f"{type(trainer).__name__}."
            )
        del trainer.compute_loss
        return found

    trainer.compute_loss = compute_loss


def _made_of(loss: torch.Tensor, nodes: list[Any]) -> bool:
    """Check whether one of these nodes lies in the autograd graph of a loss."""
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node in nodes:
            return True
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
    return False


def _mean_support(trainer: Any, dataloader: Any, batches: list[torch.Tensor]) -> float | None:
    """Return the mean number of classes with a probability above 0, over the rows of all processes.

    With several processes the last batches are filled up with rows that were there before. They stand last when the
    processes' batches are put one after the other, and are left out, as ``Accelerator.gather_for_metrics`` leaves them
    out: where the length of the data is known. ``None`` where no loss is in place or nothing was counted.
    """
    if not batches:
        return None
    accelerator = trainer.accelerator
    whole = sum((batch.sum(0) for batch in batches[:-1]), torch.zeros_like(batches[-1][0]))
    last = accelerator.gather(accelerator.pad_across_processes(batches[-1], pad_index=0.0))
    rows = getattr(dataloader, "remainder", -1)
    if rows > 0 and accelerator.num_processes > 1 and accelerator.even_batches:
        last = last[:rows]
    sums = accelerator.reduce(whole, reduction="sum")
    total, count = (sums + last.sum(0)).tolist()
    return total / count if count else None
