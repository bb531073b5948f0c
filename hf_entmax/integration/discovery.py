"""Which modules of a model are attention, which site each belongs to, and whether all of them can be reached."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import transformers  # names are looked up when needed: loading them would install the hooks, which import this file
from torch import nn

from hf_entmax.config import SITES
from hf_entmax.integration.families import POOLING_CLASSES, REFUSED

_CROSS_NAME = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)
_HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads")


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model.

    Attributes:
        name: dotted name of the module in the model.
        site: ``"encoder_self"``, ``"cross"`` or ``"decoder_self"``.
        layer: position among the modules of its site, from 0.
        num_heads: number of query heads.
        module: the module itself.
    """

    name: str
    site: str
    layer: int
    num_heads: int
    module: nn.Module


def uses_interface(module: nn.Module) -> bool:
    """Whether a module calls Transformers' attention interface: whether its own ``forward`` names it."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention modules of a model that go through Transformers' attention interface, in module order.

    A module that is shared among layers (ALBERT) appears once.

    Raises:
        ValueError: if the number of heads of a module cannot be found.
    """
    counts: dict[str, int] = dict.fromkeys(SITES, 0)
    sites = []
    for name, module in model.named_modules():
        if not uses_interface(module):
            continue
        site = _site(name, module)
        sites.append(AttentionSite(name, site, counts[site], _head_count(name, module), module))
        counts[site] += 1
    return sites


def check_supported(model: nn.Module) -> None:
    """Raise unless every attention of the model can be patched.

    Raises:
        TypeError: if it is no ``PreTrainedModel`` (the message says how to unwrap the usual wrappers).
        ValueError: if some attention bypasses the interface; the message names the family's reason and the modules.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"patch_model needs a transformers.PreTrainedModel, not {type(model).__name__}. {_unwrap_hint(model)}".rstrip()
        )
    bypassing = bypassing_modules(model)
    closed = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(module, transformers.PreTrainedModel) and not module._can_set_attn_implementation()
    ]
    sites = attention_sites(model)
    if sites and not bypassing and not closed:
        return
    model_type = getattr(model.config, "model_type", "?")
    reason = REFUSED.get(model_type)
    named = bypassing or closed
    where = f" ({', '.join(named[:3])}{', ...' if len(named) > 3 else ''})" if named else ""
    if reason is None:
        reason = (
            "some of its attention modules do not go through Transformers' attention interface"
            if named
            else "no module of it calls Transformers' attention interface"
        )
    raise ValueError(
        f"{type(model).__name__} (model_type {model_type!r}) cannot be patched: {reason}{where}. Patching would leave a "
        "softmax where entmax was asked for. Supported are models all of whose attention goes through the interface, e.g. "
        "T5, BART, Marian, mBART, M2M100, Pegasus, Whisper, GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen, Gemma, Phi, BERT, "
        "RoBERTa, DistilBERT, ModernBERT, ViT."
    )


def bypassing_modules(model: nn.Module) -> list[str]:
    """Names of modules that look like attention but compute their weights outside the interface.

    Such a module is called ``...Attention...``, owns parameters, and neither it nor anything in or around it calls
    the interface.
    """
    modules = dict(model.named_modules())
    reached = [name for name, module in modules.items() if uses_interface(module)]
    pooling = [name for name, module in modules.items() if type(module).__name__ in POOLING_CLASSES]
    suspects = []
    for name, module in modules.items():
        if "Attention" not in type(module).__name__ or not any(True for _ in module.parameters()):
            continue
        if any(_within(r, name) or _within(name, r) for r in reached) or any(_within(name, p) for p in pooling):
            continue
        suspects.append(name)
    # Of a wrapper and the module it wraps, name the inner one.
    return [name for name in suspects if not any(other != name and _within(other, name) for other in suspects)]


def _within(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(ancestor + ".")


def _site(name: str, module: nn.Module) -> str:
    class_and_name = f"{name.rpartition('.')[2]} {type(module).__name__}"
    if getattr(module, "is_cross_attention", False) or _CROSS_NAME.search(class_and_name):
        return "cross"
    causal = getattr(module, "is_causal", None)
    if causal is None:
        causal = getattr(module, "is_decoder", False)
    return "decoder_self" if causal else "encoder_self"


def _head_count(name: str, module: nn.Module) -> int:
    for holder in (module, getattr(module, "config", None)):
        for attribute in _HEAD_COUNT_NAMES:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count > 0:
                return count
    raise ValueError(
        f"The number of heads of {name!r} ({type(module).__name__}) cannot be found under any of {list(_HEAD_COUNT_NAMES)}."
    )


def _unwrap_hint(model: object) -> str:
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        return "Patch the base model first, then wrap it with PEFT: get_peft_model(patch_model(model), peft_config)."
    if hasattr(model, "_orig_mod"):
        return "Patch before torch.compile: torch.compile(patch_model(model))."
    if isinstance(getattr(model, "module", None), transformers.PreTrainedModel):
        return "Patch before wrapping for distributed training: give patch_model the inner model, .module."
    return "Load it with an Auto class of Transformers."
