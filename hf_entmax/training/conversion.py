"""What makes a model sparse while the Trainer trains it: pressure on the density, and closeness to the original."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_entmax.generation.members import output_alpha_of
from hf_entmax.integration.attach import heads_of
from hf_entmax.integration.labels import count_labels, divides_by_items, shifts_labels
from hf_entmax.integration.output_loss import output_losses
from hf_entmax.integration.patching import is_patched, softmax_attention
from hf_entmax.training.callbacks import _inner, plain_model
from hf_entmax.training.density import DensityTarget, LossBudget, attention_density, soft_density
from hf_entmax.training.distillation import (
    ATTENTION_LOSSES,
    Recorded,
    attention_distillation,
    attention_pairs,
    encoder_states_of,
    logit_distillation,
    logits_of,
    loss_of,
    record_attention,
    state_distillation,
    with_mask,
)
from hf_entmax.training.parameters import trains_weights

Distance = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclasses.dataclass
class _Original:
    """What the original made of a batch: its loss, its output, its encoder's, the weights of its attention; None is not needed."""

    loss: Tensor | None
    logits: Tensor | None
    states: Tensor | None
    seen: Recorded | None


class ConversionCallback(TrainerCallback, ExportableState):
    r"""Makes a model sparse and keeps it close to the softmax model that it was.

    The model's loss becomes

        task_weight loss + distill_logits D_out + distill_encoder D_enc + distill_attention mean_m D_m + lam mean_h max(D_tau_h, floor)

    with the distances to the original of `logit_distillation` (``D_out``), `state_distillation` (``D_enc``, of the encoder of an
    encoder-decoder) and `attention_distillation` (``D_m``, of each attention module), and the stand-in `soft_density` (``D_tau_h``) for
    the density of each sparse head. ``constraint`` moves ``lam`` after every optimiser step: a `DensityTarget` by the density of the
    step, a `LossBudget` by how far the loss is above the original's, or, with ``task_weight=0`` and ``distill_logits``, by ``D_out``.

    With each report of the training loss come, after the callback's name, ``task`` (the loss without all this), ``logits``, ``encoder``
    and ``attention`` (the distances), ``density`` (share of nonzero weights in the last step), ``multiplier`` and ``rise``. Training
    goes on from a checkpoint with the multiplier that it had.

    Args:
        constraint: a `DensityTarget` or `LossBudget`; None puts no pressure on the density.
        reference: the original: ``"softmax"`` is the same model with softmax attention and the weights that it has when the
            Trainer is made (a frozen copy where weights are trained, the model itself where only alphas or adapters are). Any
            ``PreTrainedModel`` may serve instead, or, for a loss budget that distils nothing, a fixed loss.
        task_weight: weight of the model's own loss, >= 0.
        distill_logits: weight of the distance of the outputs, >= 0.
        temperature: of that distance, > 0.
        distill_encoder: weight of the distance of the encoder's outputs, >= 0. It keeps an encoder near the original on inputs of other
            kinds than those it is trained on, where the task's loss alone would let it forget them.
        distill_attention: weight of the distance of the attention weights, mean over modules, >= 0.
        attention_loss: that distance, ``"kl"`` or ``"mse"``.
        distance: another distance of the outputs: a function of the model's logits, the original's, and the labels (None
            without any), as the model gives them.
        tau: attention weight that counts half in `soft_density`, > 0.
        floor: density below which a head is not pushed any further, in [0, 1).
        after: share of training from which on the multiplier moves, in [0, 1]: a schedule may move alpha before.
        dropout: False trains without the model's dropout.

    Raises:
        ValueError: if an argument is out of range; when training starts, if there is a constraint and the model is not patched, if
            attention weights are needed and gradients checkpointed, or if the original is gone because the callback was not given
            to the Trainer's constructor; in a step whose batch has no labels, or a Trainer that computes the loss itself.
    """

    #: What the names of reported numbers begin with.
    prefix = "conversion"

    def __init__(
        self,
        constraint: DensityTarget | LossBudget | None = None,
        reference: str | float | PreTrainedModel = "softmax",
        *,
        task_weight: float = 1.0,
        distill_logits: float = 0.0,
        temperature: float = 1.0,
        distill_encoder: float = 0.0,
        distill_attention: float = 0.0,
        attention_loss: str = "kl",
        distance: Distance | None = None,
        tau: float = 0.01,
        floor: float = 0.0,
        after: float = 0.0,
        dropout: bool = True,
    ) -> None:
        number = isinstance(reference, (int, float)) and not isinstance(reference, bool) and math.isfinite(reference)
        if not (number or reference == "softmax" or isinstance(reference, PreTrainedModel)):
            raise ValueError(f"reference={reference!r} is not allowed: give 'softmax', a finite loss, or a model.")
        distances = {
            "distill_logits": distill_logits,
            "distill_encoder": distill_encoder,
            "distill_attention": distill_attention,
        }
        weights = {"task_weight": task_weight, **distances}
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name}={weight!r} is not allowed: give a weight of at least 0.")
        if not any(weights.values()):
            raise ValueError("task_weight=0 is not allowed where nothing is distilled: the model would learn nothing.")
        if number and any(distances.values()):
            raise ValueError(f"reference={reference!r} is a loss: to distil give 'softmax' or a model.")
        for name, value in (("temperature", temperature), ("tau", tau)):
            if not value > 0:
                raise ValueError(f"{name}={value!r} is not allowed: give a number above 0.")
        if attention_loss not in ATTENTION_LOSSES:
            raise ValueError(f"attention_loss={attention_loss!r} is not known; choose one of {list(ATTENTION_LOSSES)}.")
        if not 0.0 <= floor < 1.0:
            raise ValueError(f"floor={floor!r} is not allowed: give a density in [0, 1).")
        if not 0.0 <= after <= 1.0:
            raise ValueError(f"after={after!r} is not allowed: give a share of training in [0, 1].")
        if not isinstance(constraint, (DensityTarget, LossBudget, type(None))):
            raise ValueError(
                f"constraint={constraint!r} is not allowed: give a DensityTarget, a LossBudget or None "
                "(restore_callback_states_from_checkpoint cannot make this callback again, and is not needed)."
            )
        self.constraint, self.reference = constraint, reference
        self.task_weight, self.distill_logits, self.distill_encoder, self.distill_attention = weights.values()
        self.temperature, self.attention_loss, self.distance = temperature, attention_loss, distance
        self.tau, self.floor, self.after, self.dropout = tau, floor, after, dropout
        self._original: PreTrainedModel | None = reference if isinstance(reference, PreTrainedModel) else None
        self._asked = False
        self._hooks: list[Any] = []
        self._open: contextlib.ExitStack | None = None
        self._model: PreTrainedModel | None = None
        self._seen: Recorded | None = None
        self._busy = self._running = False
        self._known: _Original | None = None
        self._measured: list[float] = []
        self._last: dict[str, float] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the original, before a checkpoint is loaded or a step taken."""
        self._keep_original(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the model, go on where a checkpoint stopped, and start to look at forward passes."""
        model = _inner(kwargs["model"]) if self.constraint is not None else plain_model(kwargs["model"])
        if args.gradient_checkpointing and self._looks:
            raise ValueError(
                f"{type(self).__name__} reads the attention weights of each forward pass, which gradient_checkpointing does not "
                "keep: set it to False."
            )
        if self.distill_encoder and not model.config.is_encoder_decoder:
            raise ValueError(f"distill_encoder is for encoder-decoder models, {type(model).__name__} is not one.")
        if not self._asked:
            if state.global_step and self._own_original and trains_weights(kwargs["model"], model):
                raise ValueError(
                    f"{type(self).__name__} must see the model before its checkpoint is loaded: give it to Trainer(callbacks=[...]) "
                    "(restore_callback_states_from_checkpoint is not needed), or give the original as reference=."
                )
            self._keep_original(kwargs["model"])
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if isinstance(saved, dict) and self.constraint is not None:
            self.constraint.load_state_dict(saved["attributes"]["constraint_state"])
        self._precision = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._outer = kwargs["model"]
        self.leave_model()
        self._model = model
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See whether the multiplier moves yet."""
        self._moves = state.global_step / max(1, state.max_steps) >= self.after

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as any other."""
        self.leave_model()

    def leave_model(self) -> None:
        """Take everything off the model; called when training ends, however it ends."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._model, self._measured, self._seen, self._known = [], None, [], None, None
        self._running = False
        if self._open is not None:
            self._open.close()
            self._open = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ConversionCallback:
        """Return itself: a copy of the model is not trained by this Trainer, and its hooks remove themselves when they first run."""
        return self

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the multiplier by what the whole step has measured."""
        if not self._measured:
            return
        value = torch.tensor(
            sum(self._measured) / len(self._measured), device=next(kwargs["model"].parameters()).device
        )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
        self._measured = []
        if self.constraint is not None and self._moves:
            self.constraint.update(float(value))

    def before_report(self, args: Any, state: Any, logs: dict[str, Any], model: nn.Module) -> None:
        """Add to the logs of training before they are reported."""
        if "loss" not in logs or not self._last:
            return
        added = dict(self._last)
        if self.constraint is not None:
            added["multiplier"] = self.constraint.multiplier
        if isinstance(self.constraint, LossBudget):
            added["rise"] = self.constraint.rise
        logs |= {f"{self.prefix}/{name}": value for name, value in added.items()}
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(logs)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        kept = {} if self.constraint is None else {"constraint_state": self.constraint.state_dict()}
        return {"args": {"constraint": "restored"}, "attributes": kept}

    @property
    def _looks(self) -> bool:
        """Whether attention weights are needed."""
        return self.constraint is not None or self.distill_attention > 0

    @property
    def _distils(self) -> bool:
        return max(self.distill_logits, self.distill_encoder, self.distill_attention) > 0

    @property
    def _compares(self) -> bool:
        """Whether the original is asked about every batch."""
        return self._distils or (
            isinstance(self.constraint, LossBudget) and not isinstance(self.reference, (int, float))
        )

    @property
    def _own_original(self) -> bool:
        return self._compares and self.reference == "softmax"

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self._model:
            self._leave_copy(module)
            return
        if self._busy or not (module.training and torch.is_grad_enabled()):
            return
        self._known = self._ask_original(module, args, kwargs)
        self._running = True
        if not self.dropout:
            module.eval()
        if self._looks:
            self._open = contextlib.ExitStack()
            self._seen = self._open.enter_context(record_attention(module))  # type: ignore[arg-type]

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if module is not self._model or self._busy or not self._running:
            return None
        self._running = False
        if not self.dropout:
            module.train()
        if self._open is not None:
            self._open.close()
            self._open = None
        if output is None:  # the forward pass has raised
            return None
        loss, share = loss_of(output), self._share(kwargs)
        known, seen, labels = self._known, self._seen, kwargs.get("labels")
        self._known = self._seen = None
        self._last = {"task": float(loss.detach()) / share}
        rise = math.nan
        if isinstance(self.constraint, LossBudget):
            reference = self.reference if known is None or known.loss is None else float(known.loss) / share
            rise = self._last["task"] - float(reference)  # type: ignore[arg-type]
        more = loss.new_zeros(())
        if self.distill_logits:
            distance = self._distance(logits_of(output), known.logits, labels)  # type: ignore[union-attr]
            more = more + self.distill_logits * distance
            self._last["logits"] = float(distance.detach())
            # The loss of the task may rise as it likes where it is not trained.
            rise = rise if self.task_weight else self._last["logits"]
        if self.distill_encoder:
            states, mask = encoder_states_of(output, kwargs), kwargs.get("attention_mask")
            # A mask over samples of sound is longer than the states: then all of them count.
            mask = mask if mask is not None and mask.shape == states.shape[:-1] else None
            distance = state_distillation(states, known.states, mask)  # type: ignore[union-attr]
            more = more + self.distill_encoder * distance
            self._last["encoder"] = float(distance.detach())
        if seen is not None:
            more = more + self._of_attention(module, with_mask(kwargs), seen, known, rise)
        # What the Trainer adds up over a step weighs each batch by its share of the step's tokens.
        total = self.task_weight * loss + share * more
        if isinstance(output, tuple):
            return (total, *output[1:])
        output.loss = total
        return output

    def _of_attention(
        self, module: nn.Module, batch: dict[str, Any], seen: Recorded, known: _Original | None, rise: float
    ) -> Tensor:
        """Return the terms of the attention weights, and note what moves the multiplier."""
        pairs, weights = attention_pairs(module, batch, seen), seen.weights  # type: ignore[arg-type]
        terms = next(iter(weights.values())).new_zeros((), dtype=torch.float32)
        if self.distill_attention:
            wanted = known.seen.weights  # type: ignore[union-attr]
            distances = [
                attention_distillation(w, wanted[name], pairs[name], self.attention_loss) for name, w in weights.items()
            ]
            distance = torch.stack(distances).mean()
            self._last["attention"] = float(distance.detach())
            terms = terms + self.distill_attention * distance
        # Modules that were left alone keep their softmax, which has no zeros.
        sparse = {name: w for name, w in weights.items() if heads_of(seen.sites[name]) is not None} or weights
        hard = torch.stack([attention_density(w.detach(), pairs[name]) for name, w in sparse.items()]).mean()
        self._last["density"] = float(hard)
        if self.constraint is not None:
            soft = [soft_density(w, pairs[name], self.tau, self.floor) for name, w in sparse.items()]
            terms = terms + self.constraint.multiplier * torch.stack(soft).mean()
            self._measured.append(rise if isinstance(self.constraint, LossBudget) else float(hard))
        return terms

    def _distance(self, student: Tensor, original: Tensor, labels: Tensor | None) -> Tensor:
        if self.distance is not None:
            return self.distance(student, original, labels)
        if labels is None:
            raise ValueError(
                f"{type(self).__name__} needs labels to say which positions count: give batches with them."
            )
        if shifts_labels(self._outer):
            student, original, labels = student[..., :-1, :], original[..., :-1, :], labels[..., 1:]
        alpha = output_alpha_of(self._model, None)
        return logit_distillation(student, original, labels, alpha, temperature=self.temperature)

    def _ask_original(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Original | None:
        """Run the original on the batch, if it is needed."""
        if not self._compares:
            return None
        own = self._original is None
        model: Any = module if own else self._original
        device = next(module.parameters()).device
        # Its dropout would be another than the model's; only a loss is compared with one under dropout. Random numbers are put back.
        training = self.dropout and not self._distils
        self._busy = True
        try:
            with contextlib.ExitStack() as around:
                around.enter_context(torch.no_grad())
                around.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
                if self._precision is not None:
                    around.enter_context(torch.autocast(device.type, self._precision))
                if own and hasattr(self._outer, "disable_adapter"):
                    around.enter_context(self._outer.disable_adapter())
                if self.reference == "softmax" and is_patched(model):
                    around.enter_context(softmax_attention(model))
                around.callback(model.train, model.training)
                (model if own else model.to(device)).train(training)
                seen = around.enter_context(record_attention(model)) if self.distill_attention else None
                output = model(*args, **kwargs)
                compared = isinstance(self.constraint, LossBudget)
                return _Original(
                    loss_of(output) if compared else None,
                    logits_of(output) if self.distill_logits else None,
                    encoder_states_of(output, kwargs) if self.distill_encoder else None,
                    seen,
                )
        finally:
            self._busy = False

    def _share(self, kwargs: dict[str, Any]) -> float:
        """Return the batch's part of the tokens by which its loss was divided: 1 where that is its own mean."""
        items = kwargs.get("num_items_in_batch")
        divided = divides_by_items(self._outer) or output_losses(self._outer)
        if items is None or not divided or not isinstance(kwargs.get("labels"), Tensor):
            return 1.0
        return max(1, count_labels(self._outer, kwargs)) / float(items)

    def _keep_original(self, model: nn.Module) -> None:
        self._asked = True
        inner = plain_model(model)
        if not self._own_original or not trains_weights(model, inner):
            return  # its own weights are the original's, below the adapters if there are any
        self._original = copy.deepcopy(inner).requires_grad_(False)

    def _leave_copy(self, module: nn.Module) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
