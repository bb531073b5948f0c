"""The learned numbers of the heads apart from the weights: as parameter groups for an optimiser, and which of both train."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from hf_entmax.integration.interface import is_head_number

# What the Trainer leaves without weight decay: biases and the scales of normalisation layers.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay is for: all but biases and the scales of normalisation layers."""
    return set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))


def alpha_parameter_groups(
    model: nn.Module,
    lr: float,
    alpha_lr: float | None = None,
    weight_decay: float = 0.0,
    length_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Make groups for any optimiser of ``torch.optim``: weights, weights without decay, the heads' alphas, length scaling.

    Alphas are never decayed (decay would pull ``a`` to 0, alpha to the middle of its range), nor is length scaling, and
    both may learn faster than the weights. Give the result to an optimiser and that to the Trainer,
    ``Trainer(optimizers=(optimizer, None))``; the Trainer then adds its own schedule, which scales all of them.

    Args:
        model: a patched model, also inside PEFT or a distributed wrapper. Frozen parameters are left out.
        lr: learning rate of the weights, >= 0.
        alpha_lr: learning rate of the alphas, >= 0; the same as ``lr`` if None.
        weight_decay: of the weights; biases, normalisation layers, alphas and length scaling have none.
        length_lr: learning rate of the length scaling, >= 0; the same as ``lr`` if None.

    Returns:
        Groups with the keys ``params``, ``lr``, ``weight_decay`` and ``name`` (``"weights"``, ``"no_decay"``,
        ``"alpha"``, ``"length_scaling"``); groups without parameters are left out.

    Raises:
        ValueError: if a rate is negative, nothing in the model is learned by hf_entmax, or a rate is given for what the
            model does not learn.
    """
    given = {"lr": lr, "alpha_lr": alpha_lr, "weight_decay": weight_decay, "length_lr": length_lr}
    for name, value in given.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name}={value!r} is not allowed: give a number >= 0.")
    decayed = decayed_parameters(model)
    groups: dict[str, list[nn.Parameter]] = {"weights": [], "no_decay": [], "alpha": [], "length_scaling": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if is_head_number(name):
            group = "length_scaling" if ".length_scaling." in name else "alpha"
        else:
            group = "weights" if name in decayed else "no_decay"
        groups[group].append(parameter)
    if not groups["alpha"] and not groups["length_scaling"]:
        raise ValueError(
            "This model has no trainable alphas: patch it with hf_entmax.patch_model(model), which learns alpha by default. "
            "Inside PEFT name them in modules_to_save=['entmax_norm']."
        )
    rates = {"alpha": alpha_lr, "length_scaling": length_lr}
    for name, rate in rates.items():
        if rate is not None and not groups[name]:
            what = {"alpha": "alpha_lr", "length_scaling": "length_lr"}[name]
            raise ValueError(
                f"{what}={rate!r} would have no effect: this model trains no {name.replace('_', ' ')}. Leave it out."
            )
    return [
        {
            "params": parameters,
            "lr": lr if rates.get(name) is None else rates[name],
            "weight_decay": weight_decay if name == "weights" else 0.0,
            "name": name,
        }
        for name, parameters in groups.items()
        if parameters
    ]


def trained_alphas(model: nn.Module) -> list[nn.Parameter]:
    """List the alphas (and length scalings) of a model that take gradients."""
    return [parameter for parameter in _heads(model) if parameter.requires_grad]


def trains_weights(outer: nn.Module, inner: nn.Module) -> bool:
    """Tell whether training changes what a model computes with softmax attention and without adapters.

    ``outer`` is the model that is trained, perhaps PEFT's, and ``inner`` the patched model in it.
    """
    if hasattr(outer, "disable_adapter"):
        return False
    heads = {id(parameter) for parameter in _heads(inner)}
    return any(parameter.requires_grad and id(parameter) not in heads for parameter in inner.parameters())


def _heads(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if is_head_number(name)]
