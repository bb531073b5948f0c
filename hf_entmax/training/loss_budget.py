"""The loss as the constraint, density as the objective: a callback for the Trainer."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_entmax.integration.interface import CHILD
from hf_entmax.integration.labels import count_labels, divides_by_items
from hf_entmax.integration.output_loss import output_losses
from hf_entmax.integration.patching import softmax_attention
from hf_entmax.training.callbacks import _inner
from hf_entmax.training.density import LossBudget, attention_density, soft_density
from hf_entmax.training.distillation import attention_pairs, record_attention


class LossBudgetCallback(TrainerCallback, ExportableState):
    r"""Makes attention as sparse as a budget on the loss allows while the Trainer trains.

        min  mean_h D_h      subject to      loss - reference <= budget          (nats per token)

    The model's loss becomes ``loss + lam mean_h max(D_tau_h, floor)`` with the stand-in `soft_density` and the multiplier of
    `LossBudget`, moved after every optimiser step: it grows while the loss is within the budget and falls by factors when it
    is overshot. What is trained is up to the parameters that take gradients: weights and alphas, alphas alone (freeze the
    others), or adapters and alphas (PEFT with ``modules_to_save=["entmax_norm"]``).

    With each report of the training loss come ``loss_budget/rise`` (moving average of loss - reference),
    ``loss_budget/multiplier``, ``loss_budget/task`` (the loss without the pressure) and ``loss_budget/density`` (share of
    nonzero weights in the last step). Training goes on from a checkpoint with the multiplier that it had.

    Args:
        budget: how far the loss may rise, nats per token, at least 0.
        reference: ``"softmax"`` compares each batch with the original, the same model with softmax attention and the weights
            that it has when the Trainer is made: a frozen copy where weights are trained, the model itself where only alphas
            or adapters are. It costs one more forward pass per batch. Any ``PreTrainedModel`` may serve instead, or a fixed
            loss.
        tau: attention weight that counts half in `soft_density`.
        floor: density below which a head is not pushed any further, in [0, 1).
        rate: largest change of ``log lam`` in a step.
        start: the first ``lam``; None takes the budget.
        memory: share of the moving average that a step keeps, in [0, 1).

    Raises:
        ValueError: if an argument is out of range; when training starts, if the model is not patched, none of its alphas
            is trained, gradients are checkpointed, or the original is gone because the callback was not given to the
            Trainer's constructor; in a step whose batch has no labels, or a Trainer that computes the loss itself.
    """

    def __init__(
        self,
        budget: float,
        reference: str | float | PreTrainedModel = "softmax",
        *,
        tau: float = 0.01,
        floor: float = 0.0,
        rate: float = 0.05,
        start: float | None = None,
        memory: float = 0.9,
    ) -> None:
        number = isinstance(reference, (int, float)) and not isinstance(reference, bool) and math.isfinite(reference)
        if not (number or reference == "softmax" or isinstance(reference, PreTrainedModel)):
            raise ValueError(f"reference={reference!r} is not allowed: give 'softmax', a finite loss, or a model.")
        if not tau > 0:
            raise ValueError(f"tau={tau!r} is not allowed: give a weight above 0.")
        if not 0.0 <= floor < 1.0:
            raise ValueError(f"floor={floor!r} is not allowed: give a density in [0, 1).")
        self.constraint = LossBudget(budget, rate, start=start, memory=memory)
        self.reference, self.tau, self.floor = reference, tau, floor
        self._original: PreTrainedModel | None = reference if isinstance(reference, PreTrainedModel) else None
        self._asked = False
        self._hooks: list[Any] = []
        self._open: contextlib.ExitStack | None = None
        self._model: nn.Module | None = None
        self._seen: Any = None
        self._busy = False
        self._known: float | None = None
        self._rises: list[float] = []
        self._last: dict[str, float] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the original, before a checkpoint is loaded or a step taken."""
        self._keep_original(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the model, go on where a checkpoint stopped, and start to look at forward passes."""
        model = _inner(kwargs["model"])
        if not any(parameter.requires_grad for parameter in _alphas(model)):
            raise ValueError(
                "LossBudgetCallback moves density by learned alphas, and none is trained here: patch with alpha='learned', let "
                "them take gradients, and inside PEFT name them in modules_to_save=['entmax_norm']."
            )
        if args.gradient_checkpointing:
            raise ValueError(
                "LossBudgetCallback reads the attention weights of each forward pass, which gradient_checkpointing does not "
                "keep: set it to False."
            )
        if not self._asked:
            if state.global_step and self.reference == "softmax" and _trains_weights(kwargs["model"], model):
                raise ValueError(
                    "LossBudgetCallback must see the model before its checkpoint is loaded: give it to Trainer(callbacks=[...]) "
                    "(restore_callback_states_from_checkpoint is not needed), or give the original as reference=."
                )
            self._keep_original(kwargs["model"])
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None  # type: ignore[union-attr]
        if isinstance(saved, dict):
            self.constraint.load_state_dict(saved["attributes"]["constraint_state"])
        self._outer = kwargs["model"]
        self.leave_model()
        self._model = model
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as any other."""
        self.leave_model()

    def leave_model(self) -> None:
        """Take everything off the model; called when training ends, however it ends."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._model, self._rises, self._seen = [], None, [], None
        if self._open is not None:
            self._open.close()
            self._open = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LossBudgetCallback:
        """A copy of the model is not trained by this Trainer: its hooks remove themselves when they first run."""
        return self

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the multiplier by the rise of the whole step."""
        if not self._rises:
            return
        rise = torch.tensor(sum(self._rises) / len(self._rises), device=next(kwargs["model"].parameters()).device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(rise)
            rise /= torch.distributed.get_world_size()
        self._rises = []
        self.constraint.update(float(rise))

    def before_report(self, args: Any, state: Any, logs: dict[str, Any], model: nn.Module) -> None:
        """Add to the logs of training before they are reported."""
        if "loss" not in logs or not self._last:
            return
        added = {"rise": self.constraint.rise, "multiplier": self.constraint.multiplier, **self._last}
        logs |= {f"loss_budget/{name}": value for name, value in added.items()}
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(logs)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        reference = self.reference if isinstance(self.reference, (str, float, int)) else "softmax"
        args = {"budget": self.constraint.budget, "reference": reference, "tau": self.tau, "floor": self.floor}
        args |= {"rate": self.constraint.rate, "memory": self.constraint.memory}
        return {"args": args, "attributes": {"constraint_state": self.constraint.state_dict()}}

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self._model:
            self._leave_copy(module)
            return
        if self._busy or not (module.training and torch.is_grad_enabled()):
            return
        self._known = self._reference_loss(module, args, kwargs)
        self._open = contextlib.ExitStack()
        self._seen = self._open.enter_context(record_attention(module))  # type: ignore[arg-type]

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if module is not self._model or self._busy or self._open is None or self._seen is None or self._known is None:
            return None
        self._open.close()
        self._open = None
        if output is None:  # the forward pass has raised
            return None
        loss = _loss_of(output)
        share = self._share(kwargs)
        pairs, weights = attention_pairs(module, _with_mask(kwargs), self._seen), self._seen.weights  # type: ignore[arg-type]
        soft = torch.stack([soft_density(w, pairs[name], self.tau, self.floor) for name, w in weights.items()]).mean()
        hard = torch.stack([attention_density(w.detach(), pairs[name]) for name, w in weights.items()]).mean()
        task = float(loss.detach()) / share
        known = self._known / share if self.reference == "softmax" or self._original is not None else self._known
        self._rises.append(task - known)
        self._last = {"task": task, "density": float(hard)}
        self._seen = None
        # What the Trainer adds up over a step weighs each batch by its share of the step's tokens.
        total = loss + share * self.constraint.multiplier * soft
        if isinstance(output, tuple):
            return (total, *output[1:])
        output.loss = total
        return output

    def _reference_loss(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if isinstance(self.reference, (int, float)):
            return float(self.reference)
        own = self._original is None
        device = next(module.parameters()).device
        self._busy = True
        try:
            # The same dropout would not help: the masks of two models are not comparable. Random numbers are put back.
            with (
                torch.no_grad(),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                contextlib.ExitStack() as off,
            ):
                if own:
                    if hasattr(self._outer, "disable_adapter"):
                        off.enter_context(self._outer.disable_adapter())
                    off.enter_context(softmax_attention(module))  # type: ignore[arg-type]
                    return float(_loss_of(module(*args, **kwargs)))
                self._original.to(device).train(module.training)  # type: ignore[union-attr]
                if self.reference == "softmax":
                    off.enter_context(softmax_attention(self._original))  # type: ignore[arg-type]
                return float(_loss_of(self._original(*args, **kwargs)))  # type: ignore[misc]
        finally:
            self._busy = False

    def _share(self, kwargs: dict[str, Any]) -> float:
        """The batch's part of the tokens by which its loss was divided: 1 where that is its own mean."""
        items = kwargs.get("num_items_in_batch")
        divided = divides_by_items(self._outer) or output_losses(self._outer)
        if items is None or not divided or not isinstance(kwargs.get("labels"), Tensor):
            return 1.0
        return max(1, count_labels(self._outer, kwargs)) / float(items)

    def _keep_original(self, model: nn.Module) -> None:
        self._asked = True
        if self.reference != "softmax":
            return
        inner = _inner(model)
        if not _trains_weights(model, inner):
            return  # its own weights are the original's, below the adapters if there are any
        self._original = copy.deepcopy(inner).requires_grad_(False)

    def _leave_copy(self, module: nn.Module) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]


def _alphas(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if f".{CHILD}." in f".{name}"]


def _trains_weights(outer: nn.Module, inner: PreTrainedModel) -> bool:
    """Whether training changes what the model computes with softmax attention and without adapters."""
    if hasattr(outer, "disable_adapter"):
        return False
    alphas = {id(parameter) for parameter in _alphas(inner)}
    return any(parameter.requires_grad and id(parameter) not in alphas for parameter in inner.parameters())


def _loss_of(output: Any) -> Tensor:
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ValueError(
            "LossBudgetCallback needs the loss of the model itself: give batches with labels, and no compute_loss_func or "
            "label_smoothing_factor to the Trainer."
        )
    return loss


def _with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Without a mask the labels say where a text has been filled up."""
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if (
        batch.get("attention_mask") is None
        and isinstance(labels, Tensor)
        and isinstance(ids, Tensor)
        and labels.shape == ids.shape
    ):
        return {**batch, "attention_mask": (labels != -100).long()}
    return batch
