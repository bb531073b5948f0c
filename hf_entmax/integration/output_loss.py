"""The training loss of a head model, replaced from outside: a forward hook that sees logits and labels.

The other half of ``output_alpha``, sparse probabilities in ``generate()``, needs nothing on the model: the hook in
``hf_entmax.generation`` reads the configuration.

Most head models compute their loss inside ``forward``, each in its own lines. A hook on the model works for all of them:
the model's own output scaling and softcap have been applied to the logits that it sees. TRL's fused head, which makes no
logits, is given the linear form of the loss from hidden states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_entmax import _registration
from hf_entmax.config import EntmaxConfig
from hf_entmax.integration.labels import shifts_labels
from hf_entmax.losses import entmax_loss, linear_entmax_loss
from hf_entmax.losses.core import record_support_sizes
from hf_entmax.losses.targets import Reduction
from hf_entmax.ops.candidates import solve_rows

_SUPPORTED = ("conditional generation (encoder-decoder)", "causal language modelling", "masked language modelling",
              "token classification", "sequence classification", "multiple choice")  # fmt: skip
_OTHER_LOSSES = ("ForQuestionAnswering", "ForCTC", "ForObjectDetection", "ForSegmentation", "ForPreTraining", "ForNextSentencePrediction",
                 "ForImageSegmentation", "ForTokenClassificationWithCRF", "ForMaskedImageModeling")  # fmt: skip

#: Factor in the configuration -> names in the output of what it multiplies (Mixtral and its like, Switch, NLLB-MoE).
_BALANCING = {
    "router_aux_loss_coef": ("aux_loss", "encoder_aux_loss", "decoder_aux_loss"),
    "router_z_loss_coef": ("encoder_z_loss", "decoder_z_loss"),
}


@dataclasses.dataclass(eq=False)
class OutputLoss:
    """The forward hook: computes the loss from logits and labels in the place of the model's own.

    Args:
        alpha: of the entmax loss, >= 1; None where ``mapping`` is given.
        mapping: name of a multilabel loss of ``hf_entmax.losses.multilabel``; None where ``alpha`` is given.
        shift: predict token t + 1 from position t.
    """

    alpha: float | None
    mapping: str | None
    shift: bool
    #: Whether the fused head's ``log_probs`` are what the trainer makes its loss of, as TRL's ``SFTTrainer`` does.
    replaces_log_probs: bool = False
    # Inside `counting_support`: of every row of every batch, the classes with a probability above 0 and the positions,
    # summed; else None.
    support: list[Tensor] | None = None
    #: Where somebody looks: the nodes of the autograd graph that made losses; None for one that a compiler hides.
    nodes: list[Any] | None = None
    _hidden: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Replace ``loss`` in what the model returns; nothing happens where no labels were given."""
        given = _arguments(module, args, kwargs)
        labels = given.get("labels")
        if labels is None:
            return None
        if given.get("fused_lm_head"):
            return self._fused(module, labels, given, output)
        loss = self._loss(module, _logits(module, output), labels, given)
        self._remember(loss)
        auxiliary = _auxiliary(module, output)
        if auxiliary is not None:
            loss = loss + auxiliary
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output

    def _remember(self, loss: Tensor) -> None:
        if self.nodes is not None:
            self.nodes.append(None if torch.compiler.is_compiling() else loss.grad_fn)

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
        loss = self._entmax_loss(logits, labels, "mean" if items is None else "sum")
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

    def _entmax_loss(self, logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
        if self.support is None or torch.compiler.is_compiling():
            return entmax_loss(logits, labels, float(self.alpha or 1.0), reduction=reduction)
        with record_support_sizes() as sizes:
            loss = entmax_loss(logits, labels, float(self.alpha or 1.0), reduction=reduction)
        self._count(sizes, labels, labels.flatten())
        return loss

    def _count(self, sizes: list[Tensor], labels: Tensor, solved: Tensor) -> None:
        """Sum over the rows of a batch what was solved for their positions, one after the other, ``solved`` among them."""
        counted = labels != -100
        found = torch.zeros(labels.shape, device=labels.device)
        if sizes:
            found[counted] = torch.cat(sizes)[solved != -100].float()
        rows = len(labels)
        sums = [part.reshape(rows, -1).sum(1) for part in (found, counted.float())]
        self.support.append(torch.stack(sums, 1))  # type: ignore[union-attr]

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the hidden states that TRL's fused head is about to see, where one is in use."""
        if not kwargs.get("fused_lm_head") or kwargs.get("labels") is None:
            return
        if not self.replaces_log_probs or self.alpha is None:
            raise ValueError(
                f"{type(module).__name__} was called with fused_lm_head=True, which gives log-probabilities of a softmax and no "
                "logits. Only TRL's SFTTrainer makes a loss of them that an entmax loss can stand in for: train with that, "
                "or patch without output_alpha and output_mapping."
            )
        check_fused_head(module)

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            handle.remove()
            self._hidden = output.last_hidden_state

        handle = module.base_model.register_forward_hook(keep)  # type: ignore[union-attr,operator]

    def _fused(self, module: Any, labels: Tensor, given: dict[str, Any], output: Any) -> Any:
        """Put entmax losses where TRL's fused head has log-probabilities, and the entropy of entmax where it has softmax's."""
        hidden, self._hidden = self._hidden, None
        shifted = given.get("shift_labels")
        if shifted is None:
            hidden, shifted = hidden[:, :-1], labels[:, 1:]  # type: ignore[index]
        head = module.get_output_embeddings()
        hidden, shifted = hidden.to(head.weight.device), shifted.to(head.weight.device)  # type: ignore[union-attr]
        softcap = getattr(module.config.get_text_config(), "final_logit_softcapping", None)
        with record_support_sizes() as sizes:
            losses = linear_entmax_loss(
                hidden,
                head.weight,
                shifted,
                float(self.alpha or 1.0),
                bias=head.bias,
                softcap=softcap,
                reduction="none",
            )
        if self.support is not None:
            self._count(sizes, shifted, shifted[shifted != -100])
        items = given.get("num_items_in_batch")
        self._remember(losses)
        loss = losses.sum() / (output.label_mask.sum().clamp(min=1) if items is None else items)
        auxiliary = _auxiliary(module, output)
        output["loss"] = loss if auxiliary is None else loss + auxiliary
        output["log_probs"] = -losses
        if output.entropy is not None:
            output["entropy"] = self._entropies(hidden.detach(), head, softcap, shifted)
        return output

    @torch.no_grad()
    def _entropies(self, hidden: Tensor, head: nn.Linear, softcap: float | None, labels: Tensor) -> Tensor:
        """Compute Shannon entropies, in nats, of the probabilities at the positions with a label; 0 elsewhere."""
        places = labels != -100
        found = [hidden.new_zeros(0)]
        for part in hidden[places].split(256):
            logits = torch.nn.functional.linear(part.to(head.weight.dtype), head.weight, head.bias)
            logits = logits if softcap is None else (logits / softcap).tanh() * softcap
            solution = solve_rows(logits, float(self.alpha or 1.0) - 1.0)
            terms = torch.special.entr(solution.probs)
            if solution.rows is not None:
                terms = terms.new_zeros(len(part)).index_add_(0, solution.rows, terms)[:, None]
            found.append(terms.sum(-1).to(hidden.dtype))
        return hidden.new_zeros(places.shape).masked_scatter(places, torch.cat(found))


@contextlib.contextmanager
def counting_support(model: nn.Module) -> Iterator[list[Tensor]]:
    """Have the losses of a model say how many classes their probabilities hold.

    Yields:
        A list that every call with labels adds ``[rows, 2]`` to: support sizes and positions with a label, each summed over
        a row of the batch. The counts are those of the loss's own solution.
    """
    hooks, support = output_losses(model), []
    before = [hook.support for hook in hooks]
    for hook in hooks:
        hook.support = support if hook.alpha is not None else None
    try:
        yield support
    finally:
        for hook, former in zip(hooks, before, strict=True):
            hook.support = former


def check_fused_head(model: Any) -> None:
    """Raise ValueError where hidden states and the output layer's weight do not make the model's logits."""
    config = model.config.get_text_config()
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{type(model).__name__} scales its logits ({name}={getattr(config, name)}), which the entmax loss on the hidden "
                "states of TRL's fused head does not: use the Trainer of Transformers, or patch without output_alpha."
            )


def check_output(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Raise where an output option cannot be honoured by this model, before anything is changed."""
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
    model.register_forward_pre_hook(hook.before_forward, with_kwargs=True)
    model.register_forward_hook(hook, with_kwargs=True)


def remove_output(model: nn.Module) -> None:
    """Give a head model its own loss back."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, OutputLoss):
            del model._forward_hooks[key]
            model._forward_hooks_with_kwargs.pop(key, None)
    for key, before in list(model._forward_pre_hooks.items()):
        if isinstance(getattr(before, "__self__", None), OutputLoss):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def output_losses(model: nn.Module) -> list[OutputLoss]:
    """Return the hooks that ``install_output_loss`` left on a model or on models inside it."""
    return [
        hook for module in model.modules() for hook in module._forward_hooks.values() if isinstance(hook, OutputLoss)
    ]


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _logits(module: nn.Module, output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[1]  # (loss, logits, ...): labels were given
    for name in ("logits", "prediction_logits"):
        if output.get(name) is not None:
            return output[name]
    raise ValueError(
        f"{type(module).__name__} was given labels and returned no logits (but {', '.join(output)}): output_alpha and "
        "output_mapping need them for their loss. Turn off what fuses the loss into the output layer (a Liger kernel's "
        "fused_linear_cross_entropy, for example), or patch without these options."
    )


def _auxiliary(module: nn.Module, output: Any) -> Tensor | None:
    """Return the load-balancing losses of a mixture of experts that the model added to its own loss.

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
