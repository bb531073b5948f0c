"""The training loss of a head model, replaced from outside: a forward hook that sees logits and labels.

The other half of ``output_alpha``, sparse probabilities in ``generate()``, needs nothing on the model: the hook in
``hf_entmax.generation`` reads the configuration.

Most head models compute their loss inside ``forward``, each in its own lines. A hook on the model works for all of them:
the model's own output scaling and softcap have been applied to the logits that it sees.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_entmax import _registration
from hf_entmax.config import EntmaxConfig
from hf_entmax.losses import entmax_loss
from hf_entmax.ops import entmax

_SUPPORTED = ("conditional generation (encoder-decoder)", "causal language modelling", "masked language modelling",
              "token classification", "sequence classification", "multiple choice")  # fmt: skip
_CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_OTHER_LOSSES = ("ForQuestionAnswering", "ForCTC", "ForObjectDetection", "ForSegmentation", "ForPreTraining", "ForNextSentencePrediction",
                 "ForImageSegmentation", "ForTokenClassificationWithCRF", "ForMaskedImageModeling")  # fmt: skip

#: Factor in the configuration -> names in the output of what it multiplies (Mixtral and its like, Switch, NLLB-MoE).
_BALANCING = {
    "router_aux_loss_coef": ("aux_loss", "encoder_aux_loss", "decoder_aux_loss"),
    "router_z_loss_coef": ("encoder_z_loss", "decoder_z_loss"),
}


class OutputLoss:
    """The forward hook: computes the loss from logits and labels in the place of the model's own.

    Args:
        alpha: of the entmax loss, >= 1; None where ``mapping`` is given.
        mapping: name of a multilabel loss of ``hf_entmax.losses.multilabel``; None where ``alpha`` is given.
        shift: predict token t + 1 from position t.
    """

    def __init__(self, alpha: float | None, mapping: str | None, shift: bool) -> None:
        self.alpha = alpha
        self.mapping = mapping
        self.shift = shift
        # In evaluation: of every row of every batch, the classes with a probability above 0 and the positions, summed.
        self._support: list[Tensor] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Replace ``loss`` in what the model returns; nothing happens where no labels were given."""
        given = _arguments(module, args, kwargs)
        labels = given.get("labels")
        if labels is None:
            return None
        logits = _logits(output)
        loss = self._loss(module, logits, labels, given)
        if not module.training:
            self._count_support(logits.detach(), labels, given)
        auxiliary = _auxiliary(module, output)
        if auxiliary is not None:
            loss = loss + auxiliary
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output

    def _loss(self, module: nn.Module, logits: Tensor, labels: Tensor, given: dict[str, Any]) -> Tensor:
        labels = labels.to(logits.device)
        if self.mapping is not None:
            from hf_entmax.losses.multilabel import multilabel_loss

            items = given.get("num_items_in_batch")
            if items is None:
                return multilabel_loss(logits, labels, mapping=self.mapping)
            # The Trainer counts labels; each row has as many of them as there are classes.
            return multilabel_loss(logits, labels, mapping=self.mapping, reduction="sum") * (labels.shape[-1] / items)
        if labels.is_floating_point():
            raise ValueError(
                f"{type(module).__name__} was given labels of dtype {labels.dtype}: output_alpha needs one class index per "
                'prediction. For several labels at once patch with output_mapping="..." instead; regression has no entmax loss.'
            )
        logits, labels = self._aligned(logits, labels, given)
        items = given.get("num_items_in_batch")
        loss = entmax_loss(logits, labels, float(self.alpha or 1.0), reduction="mean" if items is None else "sum")
        if items is None:
            return loss
        return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)

    def _aligned(self, logits: Tensor, labels: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        shifted = given.get("shift_labels")
        if self.shift and shifted is not None:
            return logits, shifted.to(logits.device)
        if self.shift:
            # The labels move, not the logits: a slice of these would be copied whole.
            return logits, torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
        return logits.reshape(*labels.shape, logits.shape[-1]), labels

    def _count_support(self, logits: Tensor, labels: Tensor, given: dict[str, Any]) -> None:
        if self.alpha is None or torch.compiler.is_compiling():
            return
        logits, labels = self._aligned(logits, labels, given)
        labels = labels.reshape(len(labels), -1)
        counted = labels != -100
        rows = logits.reshape(*labels.shape, logits.shape[-1])[counted]
        sizes = torch.zeros(labels.shape, dtype=torch.float32, device=logits.device)
        if len(rows):
            sizes[counted] = torch.cat([(entmax(part, self.alpha) > 0).sum(-1).float() for part in rows.split(256)])
        self._support.append(torch.stack([sizes.sum(1), counted.sum(1).float()], 1))

    def take_support(self) -> list[Tensor]:
        """For each batch since the last call ``[rows, 2]``: support sizes and positions, summed over a row."""
        taken, self._support = self._support, []
        return taken


def check_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Raise where an output option cannot be honoured by this model, before anything is changed.

    Raises:
        ValueError: if the model computes no classification loss from labels, or ``problem_type`` contradicts the option.
    """
    alpha, mapping = config.output_alpha, config.output_mapping
    if alpha is None and mapping is None:
        return
    name = type(model).__name__
    option = f"output_alpha={alpha}" if mapping is None else f"output_mapping={mapping!r}"
    if "labels" not in inspect.signature(type(model).forward).parameters or any(
        other in name for other in _OTHER_LOSSES
    ):
        raise ValueError(
            f"{option} cannot be used with {name}: it computes no classification loss from labels. Load the model with a "
            f"head for one of: {', '.join(_SUPPORTED)}; or leave the option out."
        )
    problem = getattr(model.config, "problem_type", None)
    sequence = "ForSequenceClassification" in name or "ForImageClassification" in name
    if mapping is not None:
        from hf_entmax.losses.multilabel import check_mapping

        check_mapping(mapping)
        if not sequence or problem not in (None, "multi_label_classification"):
            raise ValueError(
                f"{option} needs a sequence-classification head with problem_type='multi_label_classification'; "
                f"{name} has problem_type={problem!r}."
            )
    elif sequence and (
        problem in ("regression", "multi_label_classification") or getattr(model.config, "num_labels", 2) == 1
    ):
        raise ValueError(
            f"{option} needs one class per input; {name} has problem_type={problem!r} and num_labels={model.config.num_labels}. "
            "For several labels at once use output_mapping; regression has no entmax loss."
        )


def install_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Have a head model compute the loss that the configuration asks for from the labels it is given.

    A model without a loss (the base of a head model that was patched) is left as it is.

    Raises:
        ImportError: if ``generate()`` could not be hooked, so that it would go on to sample from a softmax.
    """
    if config.output_alpha is not None:
        _registration.ensure()
    elif config.output_mapping is None:
        return
    remove_output(model)
    try:
        check_output(model, config)
    except ValueError:
        return  # patch_model has asked before; loading a checkpoint's base model without its head is no mistake
    hook = OutputLoss(config.output_alpha, config.output_mapping, shifts_labels(model))
    model.register_forward_hook(hook, with_kwargs=True)


def remove_output(model: nn.Module) -> None:
    """Give a head model its own loss back."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, OutputLoss):
            del model._forward_hooks[key]
            model._forward_hooks_with_kwargs.pop(key, None)


def output_losses(model: nn.Module) -> list[OutputLoss]:
    """The hooks that ``install_output_loss`` left on a model or on models inside it."""
    return [
        hook for module in model.modules() for hook in module._forward_hooks.values() if isinstance(hook, OutputLoss)
    ]


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether a head model predicts token t + 1 from position t, or compares logits and labels as they stand.

    Encoder-decoders shift their decoder inputs instead. Most causal models shift, but a few decoders (BART's and its
    relatives') compare as they stand; a model that shifts says so in its code.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or not any(n in name for n in _CAUSAL_NAMES):
        return False
    code = inspect.unwrap(type(model).forward).__code__
    return "loss_function" in code.co_names or any("shift" in variable for variable in code.co_varnames)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _logits(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[1]  # (loss, logits, ...): labels were given
    return output["logits"] if "logits" in output else output["prediction_logits"]


def _auxiliary(module: nn.Module, output: Any) -> Tensor | None:
    """The balancing losses of a mixture of experts that the model added to its own loss.

    They are in the output where they were asked for (``output_router_logits``), under these names, and each is added with
    the factor that the configuration gives.
    """
    if isinstance(output, tuple):
        return None
    config: Any = getattr(module, "config", None)
    total = None
    for coefficient, names in _BALANCING.items():
        for name in names:
            term = getattr(output, name, None)
            if isinstance(term, Tensor):
                term = getattr(config, coefficient, 0.0) * term
                total = term if total is None else total + term
    return total
