"""Which modules of a model are attention, which site each belongs to, and whether all of them can be reached."""

from __future__ import annotations

import re
from dataclasses import dataclass

import transformers  # names are looked up when needed: loading them would install the hooks, which import this file
from torch import nn

from hf_entmax.config import SITES, Site
from hf_entmax.integration.families import BOOLEAN_MASKS, KEPT_CLASSES, REFUSED
from hf_entmax.integration.forward_code import has_own_softmax, reads_mask_as_boolean, uses_interface

_CROSS_NAME = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)
_CROSS_PARENT = re.compile(r"cross_?att", re.IGNORECASE)
_ATTENTION_CLASS = re.compile(r"Attention|Attn")
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
    site: Site
    layer: int
    num_heads: int
    module: nn.Module


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Return all attention modules of a model that go through Transformers' attention interface, in module order.

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
        sites.append(AttentionSite(name, site, counts[site], head_count(module, name), module))
        counts[site] += 1
    return sites


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside distributed wrappers, torch.compile and PEFT; return any other module as it is."""
    while not isinstance(model, transformers.PreTrainedModel):
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # type: ignore[operator]
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    return model


def check_supported(model: nn.Module) -> None:
    """Raise unless every attention of the model can be patched."""
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
    misread = [
        site.name
        for site in sites
        if reads_mask_as_boolean(site.module) and getattr(site.module.config, "model_type", None) not in BOOLEAN_MASKS
    ]
    if sites and not bypassing and not closed and not misread:
        return
    model_type = getattr(model.config, "model_type", "?")
    reason = REFUSED.get(model_type)
    named = bypassing or closed or misread
    if reason is None and misread and not bypassing and not closed:
        reason = "some of its attention modules read their mask as booleans, where other models read numbers"
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


def unpatched_softmax(model: nn.Module) -> list[str]:
    """Return the names of the modules whose ``forward`` keeps a softmax of its own, patched or not.

    Patching replaces the attention between the tokens of a model. What it leaves alone is told here: pooling heads
    (SigLIP), attention in image tokenizers (Chameleon, Janus), indexers, compressors and the mixing of residual streams
    (DeepSeek-V4), the choice among the entries of a codebook (Wav2Vec2). The code of each module is looked at, not its name.

    Two kinds are not listed, because they weigh no positions of a sequence: routers of mixtures of experts, told by
    their code, which speaks of experts, or by a class called router or gate; and what a whole model does with its own
    results, such as class probabilities.

    Args:
        model: any model, patched or not.

    Returns:
        Dotted names in module order. For a model that `patch_model` accepts, this is all that stays a softmax when
        every site is patched; for one that it refuses, its own attention is among them.

    Examples:
        >>> from transformers import SiglipVisionConfig, SiglipVisionModel
        >>> import hf_entmax
        >>> config = SiglipVisionConfig(
        ...     hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        ... )
        >>> hf_entmax.unpatched_softmax(SiglipVisionModel(config))
        ['head.attention']
    """
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, transformers.PreTrainedModel) and has_own_softmax(module)
    ]


def bypassing_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that are attention but compute their weights outside the interface.

    Such a module is called attention, computes a softmax of its own, and neither it nor anything in or around it calls
    the interface. Pooling heads and image tokenizers keep theirs on purpose.
    """
    modules = dict(model.named_modules())
    reached = [name for name, module in modules.items() if uses_interface(module)]
    kept = [name for name, module in modules.items() if KEPT_CLASSES.search(type(module).__name__)]
    return [
        name
        for name in unpatched_softmax(model)
        if _ATTENTION_CLASS.search(type(modules[name]).__name__)
        and not any(_within(r, name) or _within(name, r) for r in reached)
        and not any(_within(name, k) for k in kept)
    ]


def _within(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(ancestor + ".")


def _site(name: str, module: nn.Module) -> Site:
    *_, parent, own = ("", *name.split("."))
    if getattr(module, "is_cross_attention", False) or _CROSS_NAME.search(f"{own} {type(module).__name__}"):
        return "cross"
    if _CROSS_PARENT.search(parent) and "self" not in own:  # BLIP-2: crossattention.attention
        return "cross"
    causal = getattr(module, "is_causal", None)
    if causal is None:
        causal = getattr(module, "is_decoder", False)
    return "decoder_self" if causal else "encoder_self"


def head_count(module: nn.Module, name: str = "") -> int:
    """Return the number of query heads of an attention module, as the module or its configuration says."""
    for holder in (module, getattr(module, "config", None)):
        for attribute in _HEAD_COUNT_NAMES:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count > 0:
                return count
    if isinstance(groups := getattr(module, "groups", None), int):  # Florence-2 attends between channels, in groups
        return groups
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
