"""Giving attention modules their learned numbers, and taking them away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_entmax.alpha import FixedAlpha, LearnedAlpha, MappingOptions, TiedAlpha
from hf_entmax.config import EntmaxConfig
from hf_entmax.integration.config_hook import softmax_refused
from hf_entmax.integration.discovery import AttentionSite, attention_sites
from hf_entmax.integration.interface import HEADS_MODULE, IMPLEMENTATION, KEEPS_SOFTMAX
from hf_entmax.integration.parallel import same_everywhere
from hf_entmax.integration.scaled_query import KEPT_INPUT, input_width, keep_input, length_scaling_of
from hf_entmax.length import AdaptiveScaling, ConstantScaling, LogScaling
from hf_entmax.ops.controllable import attention_mapping


def selected_sites(model: nn.Module, sites: list[AttentionSite], config: EntmaxConfig) -> list[AttentionSite]:
    """Return the attention modules that a configuration selects.

    The choice depends on the configuration and the structure of the model only, so that loading a checkpoint makes
    the same choice as patching did.
    """
    counts: dict[str, int] = {}
    for site in sites:
        counts[site.site] = counts.get(site.site, 0) + 1
    prefix = getattr(model, "base_model_prefix", "")

    def chosen(site: AttentionSite) -> bool:
        if config.sites is not None and site.site not in config.sites:
            return False
        if config.layers is not None:
            count = counts[site.site]
            if site.layer not in {layer + count if layer < 0 else layer for layer in config.layers}:
                return False
        return not any(_named(site.name, name, prefix) for name in config.exclude)

    return [site for site in sites if chosen(site)]


def check_selection(model: nn.Module, sites: list[AttentionSite], config: EntmaxConfig) -> None:
    """Raise where a selection names something that the model does not have, or selects nothing."""
    present = sorted({site.site for site in sites})
    if config.sites is not None and (missing := [s for s in config.sites if s not in present]):
        raise ValueError(f"sites={list(config.sites)} names {missing}, but {type(model).__name__} has only {present}.")
    if config.layers is not None:
        wanted = [s for s in sites if config.sites is None or s.site in config.sites]
        depth = max(s.layer for s in wanted) + 1
        if beyond := [layer for layer in config.layers if not -depth <= layer < depth]:
            raise ValueError(
                f"layers={list(config.layers)} names {beyond}, but {type(model).__name__} has layers 0 to {depth - 1}."
            )
    prefix = getattr(model, "base_model_prefix", "")
    for name in config.exclude:
        if not any(_named(site.name, name, prefix) for site in sites):
            raise ValueError(
                f"exclude names {name!r}, which no attention module of {type(model).__name__} is called or ends with; "
                f"its first ones are {[site.name for site in sites[:6]]}."
            )
    if not selected_sites(model, sites, config):
        raise ValueError(
            f"sites, layers and exclude together leave no attention module of {type(model).__name__} to patch."
        )


def new_heads(site: AttentionSite, config: EntmaxConfig) -> nn.Module:
    """Build the module of learned (or fixed) parameters that a configuration asks for."""
    num_heads, keep = site.num_heads, config.alpha_dtype == "float32"
    if config.mapping != "entmax":
        heads: nn.Module = _mapping_heads(num_heads, config, keep)
    elif config.alpha == "learned":
        shared = config.tie != "none"
        heads = LearnedAlpha(num_heads, config.alpha_init, config.alpha_range, shared=shared, keep_float32=keep)
    else:
        heads = FixedAlpha(num_heads, float(config.alpha))
    heads.backend = config.backend  # type: ignore[assignment]
    chosen = (config.length_scaling_heads, config.length_scaling_init)
    try:
        if config.length_scaling in ("constant", "log"):
            kind = ConstantScaling if config.length_scaling == "constant" else LogScaling
            heads.length_scaling = kind(num_heads, *chosen, keep_float32=keep)
            _soften(heads.length_scaling, heads)
        elif config.length_scaling == "adaptive":
            width = input_width(site.module)
            heads.length_scaling = AdaptiveScaling(num_heads, width, *chosen, keep_float32=keep)
    except ValueError as error:
        raise ValueError(f"{site.name}: {error}") from error
    return heads


def _soften(scaling: nn.Module, heads: nn.Module) -> None:
    """Start a temperature where these alphas are about as sharp as softmax, if the configuration says so."""
    if isinstance(scaling, ConstantScaling) and scaling.init == "softmax":
        scaling.soften(heads())


def _mapping_heads(num_heads: int, config: EntmaxConfig, keep: bool) -> MappingOptions:
    """Build the options of ``config.mapping``, one number per head where an option is learned."""
    options: dict[str, nn.Module] = {}
    for name, setting in attention_mapping(config.mapping).settings(config.mapping_options).items():
        if setting.bounds is None:
            options[name] = FixedAlpha(num_heads, setting.value)
        else:
            shared = config.tie == "layer"
            options[name] = LearnedAlpha(num_heads, setting.value, setting.bounds, shared=shared, keep_float32=keep)
    return MappingOptions(num_heads, config.mapping, options)


def attach(model: nn.Module, config: EntmaxConfig) -> None:
    """Bring the attention modules of a model into the state that a configuration describes; it may be called again.

    Modules that have their numbers keep them; missing ones are added on the device of their module; modules that are
    not selected lose them and are marked as left alone. Called for the sub-models of a model before the model itself,
    as Transformers builds them; the last call, for the whole model, decides.
    """
    sites = attention_sites(model)
    selected = {site.name for site in selected_sites(model, sites, config)}
    for site in sites:
        if site.name not in selected:
            site.module._modules.pop(HEADS_MODULE, None)
            setattr(site.module, KEEPS_SOFTMAX, True)
            continue
        if HEADS_MODULE not in site.module._modules:
            heads = new_heads(site, config)
            _move(heads, site.module, keep_dtype=config.alpha_dtype == "float32")
            site.module.add_module(HEADS_MODULE, heads.train(site.module.training))
        if hasattr(site.module, KEEPS_SOFTMAX):
            delattr(site.module, KEEPS_SOFTMAX)
    patched = [site for site in sites if site.name in selected]
    _tie(patched, config)
    _watch(model, patched)
    _listen(model, patched if config.length_scaling == "adaptive" else [])


def check_implementation(module: nn.Module, *_: Any) -> None:
    """Raise if the configuration that a patched module reads names another attention; runs before every call of the module.

    ``config._attn_implementation`` is a plain attribute that anyone may set. It stands before each attention module, so
    that a tool which calls the modules one by one is caught too, and before the models that hold them, because they
    choose the kind of mask by it. It reads one string; compilers see a constant.
    """
    requested = module.config._attn_implementation  # type: ignore[union-attr]
    if requested != IMPLEMENTATION:
        raise softmax_refused(type(module).__name__, requested)


def _watch(model: nn.Module, sites: list[AttentionSite]) -> None:
    """Run `check_implementation` before the given attention modules and the models that hold them, nowhere else."""
    watched = {site.module for site in sites}
    for name, module in model.named_modules():
        inside = f"{name}." if name else ""
        if isinstance(module, PreTrainedModel) and any(site.name.startswith(inside) for site in sites):
            watched.add(module)
    _hook(model, watched, check_implementation)


def _listen(model: nn.Module, sites: list[AttentionSite]) -> None:
    """Let the given attention modules keep their input while they run, and no other."""
    listening = {site.module for site in sites}
    for module in model.modules():
        if module in listening:
            module.__dict__.setdefault(KEPT_INPUT, {})
        else:
            module.__dict__.pop(KEPT_INPUT, None)
    _hook(model, listening, keep_input, with_kwargs=True)


def _hook(model: nn.Module, wanted: set[nn.Module], hook: Callable[..., None], *, with_kwargs: bool = False) -> None:
    """Let a hook run before the given modules, once each, and before no other module of the model."""
    for module in model.modules():
        present = [key for key, other in module._forward_pre_hooks.items() if other is hook]
        for key in present if module not in wanted else ():
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        if module in wanted and not present:
            module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)


def detach(model: nn.Module) -> None:
    """Remove every trace that ``attach`` left on the attention modules."""
    _watch(model, [])
    _listen(model, [])
    for site in attention_sites(model):
        site.module._modules.pop(HEADS_MODULE, None)
        if hasattr(site.module, KEEPS_SOFTMAX):
            delattr(site.module, KEEPS_SOFTMAX)


def heads_of(site: AttentionSite) -> nn.Module | None:
    """Return the parameters of an attention module, or None where it is not patched.

    PEFT's ``modules_to_save`` wraps a module and trains a copy of it; then that copy is the one in use.
    """
    heads = site.module._modules.get(HEADS_MODULE)
    copies = getattr(heads, "modules_to_save", None)
    if heads is None or copies is None:
        return heads
    active = [name for name in heads.active_adapters if name in copies]  # type: ignore[union-attr]
    return copies[active[0]] if active and not heads.disable_adapters else heads.original_module  # type: ignore[return-value]


def _tie(sites: list[AttentionSite], config: EntmaxConfig) -> None:
    """Let all modules of a site (or of the model) use the number of the first one."""
    if config.mapping != "entmax" or config.alpha != "learned" or config.tie not in ("site", "model"):
        return
    owners: dict[str, LearnedAlpha] = {}
    for site in sites:
        group = site.site if config.tie == "site" else "model"
        heads = heads_of(site)
        if group not in owners:
            if isinstance(heads, TiedAlpha):  # its former owner lies in another sub-model
                scaling, heads = length_scaling_of(heads), new_heads(site, config)
                _move(heads, site.module, keep_dtype=config.alpha_dtype == "float32")
                if scaling is not None:
                    heads.length_scaling = scaling
                    _soften(scaling, heads)
                site.module.add_module(HEADS_MODULE, heads.train(site.module.training))
            owners[group] = heads  # type: ignore[assignment]
            continue
        tied = TiedAlpha(site.num_heads, owners[group])
        tied.backend = config.backend  # type: ignore[assignment]
        if (scaling := length_scaling_of(heads)) is not None:  # that is each module's own
            tied.length_scaling = scaling
            if not isinstance(heads, TiedAlpha):
                _soften(scaling, tied)  # the alpha that it was softened for has just been given up
        site.module.add_module(HEADS_MODULE, tied.train(site.module.training))


def _move(heads: nn.Module, module: nn.Module, *, keep_dtype: bool) -> None:
    own = [p for p in module.parameters() if p.is_floating_point()]
    if not own:
        return
    # A model that is being loaded lies on the meta device, but for parameters drawn on the CPU (DiffLlama's lambdas).
    beside = next((p for p in own if p.device.type == "meta"), own[0])
    dtype = None if keep_dtype else beside.dtype
    if beside.device.type == "meta":
        heads.to_empty(device="meta")
    heads.to(device=beside.device, dtype=dtype)
    same_everywhere(heads, beside)


def _named(name: str, given: str, prefix: str) -> bool:
    """Check whether ``given`` is the module's name or a dotted suffix of it, with or without the head model's prefix."""
    if prefix:
        name, given = name.removeprefix(prefix + "."), given.removeprefix(prefix + ".")
    return name == given or name.endswith("." + given)
