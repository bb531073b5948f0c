"""The public calls: patch a model, ask for its configuration, undo the patch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from hf_entmax.config import EntmaxConfig, config_from
from hf_entmax.integration.attach import attach, check_selection, detach, heads_of, new_heads, selected_sites
from hf_entmax.integration.config_hook import CALIBRATION_KEY, CONFIG_KEY, SPARSITY_KEY
from hf_entmax.integration.discovery import attention_sites, check_supported, unpatched_softmax
from hf_entmax.integration.interface import HEADS_MODULE, IMPLEMENTATION
from hf_entmax.integration.output_loss import check_output, install_output, remove_output
from hf_entmax.integration.softmax_blocks import softmax_block

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

#: Remembers, on the model, each configuration and the attention implementation that unpatching restores.
_PREVIOUS = "_entmax_previous_implementations"
_PREVIOUS_FP32 = "_entmax_previous_keep_fp32"
MODEL_TAGS = ("hf_entmax", "entmax", "sparse-attention")


def patch_model(model: ModelT, config: EntmaxConfig | Mapping[str, Any] | None = None, **options: Any) -> ModelT:
    r"""Replace the softmax in a model's attention by alpha-entmax, in place.

    Every selected attention module computes ``weights = entmax(scores, alpha)`` with, by default, one learned
    ``alpha = 1 + sigmoid(a)`` per head (Correia et al. 2019, eq. 10). All other weights stay as they are, and the
    model goes on to train, generate, save and load as before; a saved checkpoint can only be loaded where hf_entmax
    is imported.

    Modules with a softmax outside attention, such as a pooling head, keep it; a warning names them (see
    ``unpatched_softmax``).

    Args:
        model: any ``PreTrainedModel`` whose attention goes through Transformers' attention interface.
        config: an ``EntmaxConfig`` or a dict of its fields; the default learns alpha everywhere.
        **options: fields of ``EntmaxConfig``, e.g. ``alpha=1.5``; they override ``config``.

    Returns:
        The same model.

    Raises:
        TypeError: if ``model`` is not a ``PreTrainedModel`` or an option has the wrong type.
        ValueError: if the model is patched already, cannot be patched (the message says why), or an option is out of
            range. The model is then as it was.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> model = hf_entmax.patch_model(model, alpha_init=1.2)
        >>> hf_entmax.alphas(model)
        {'decoder_self': tensor([[1.2000, 1.2000]])}
    """
    config = config_from(config, options)
    check_supported(model)
    if is_patched(model):
        raise ValueError(
            f"This {type(model).__name__} is patched already. Change its numbers with hf_entmax.set_alphas, or call "
            "hf_entmax.unpatch_model(model) first to patch it differently."
        )
    sites = attention_sites(model)
    check_selection(model, sites, config)
    check_output(model, config)
    for site in selected_sites(model, sites, config):
        new_heads(site, config)  # whatever is wrong with the options is found before anything changes
    attach(model, config)
    configs = _patched_configs(model)
    setattr(model, _PREVIOUS, [(c, c._attn_implementation) for c in configs])
    for model_config in configs:
        setattr(model_config, CONFIG_KEY, config.to_dict())
        model_config._attn_implementation_internal = IMPLEMENTATION
    for submodel in _submodels(model):
        _keep_float32(submodel, config)
    install_output(model, config)
    model.add_model_tags(list(MODEL_TAGS))
    if kept := unpatched_softmax(model):
        named = f"{', '.join(kept[:3])}{', ...' if len(kept) > 3 else ''}"
        warnings.warn(
            f"{len(kept)} module{'s' * (len(kept) > 1)} of this {type(model).__name__} outside the attention interface "
            f"keep{'s' if len(kept) == 1 else ''} a softmax: {named}. hf_entmax.unpatched_softmax(model) lists all of them.",
            stacklevel=2,
        )
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo ``patch_model``: softmax again, every other weight untouched, nothing of hf_entmax left on the model.

    Raises:
        ValueError: if the model is not patched.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> model = hf_entmax.unpatch_model(hf_entmax.patch_model(model))
        >>> hf_entmax.is_patched(model)
        False
    """
    if not is_patched(model):
        raise ValueError(f"This {type(model).__name__} is not patched: there is nothing to undo.")
    remove_output(model)
    previous = [pair for submodel in _submodels(model) for pair in submodel.__dict__.pop(_PREVIOUS, ())]
    configs = _patched_configs(model)
    detach(model)
    for model_config in configs:
        for key in (CONFIG_KEY, CALIBRATION_KEY, SPARSITY_KEY):
            if hasattr(model_config, key):
                delattr(model_config, key)
    known = {id(c) for c, _ in previous}
    # Loaded from a checkpoint: back to what Transformers would have chosen.
    previous += [(c, model.get_correct_attn_implementation(None)) for c in configs if id(c) not in known]
    for model_config, implementation in previous:
        model_config._attn_implementation_internal = implementation
    for submodel in _submodels(model):
        if _PREVIOUS_FP32 in submodel.__dict__:
            submodel._keep_in_fp32_modules_strict = submodel.__dict__.pop(_PREVIOUS_FP32)
        if "model_tags" in submodel.__dict__:
            submodel.model_tags = [tag for tag in submodel.model_tags or () if tag not in MODEL_TAGS]
            if not submodel.model_tags:
                del submodel.model_tags  # the class's own None shows again
    return model


def is_patched(model: object) -> bool:
    """Check whether a model (or the model inside a wrapper) or a part of it carries an entmax configuration.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> hf_entmax.is_patched(model), hf_entmax.is_patched(hf_entmax.patch_model(model))
        (False, True)
    """
    return bool(stored_configs(getattr(model, "config", None)))


def entmax_config(model: PreTrainedModel) -> EntmaxConfig:
    """Return the configuration that a model was patched with.

    Raises:
        ValueError: if the model is not patched, or its parts are patched differently.
    """
    found = stored_configs(model.config)
    if not found:
        raise ValueError(f"{type(model).__name__} is not patched: call hf_entmax.patch_model(model) first.")
    if len(found) > 1:
        raise ValueError(
            f"The parts of this {type(model).__name__} are patched differently: give the part (model.encoder, model.decoder, "
            "...), or call hf_entmax.unpatch_model(model) and patch the whole."
        )
    return EntmaxConfig.from_dict(found[0])


def stored_configs(config: Any) -> list[dict[str, Any]]:
    """Return the different entmax configurations that a model's configuration holds: its own, or those of its parts."""
    own = getattr(config, CONFIG_KEY, None)
    if own is not None:
        return [own]
    found: list[dict[str, Any]] = []
    for name in getattr(config, "sub_configs", ()):
        found += [record for record in stored_configs(getattr(config, name, None)) if record not in found]
    return found


def update_config(model: PreTrainedModel, **changes: Any) -> EntmaxConfig:
    """Change fields of the stored configuration of a patched model and of all its sub-models; validated."""
    config = entmax_config(model).replace(**changes)
    for model_config in _patched_configs(model):
        if hasattr(model_config, CONFIG_KEY):
            setattr(model_config, CONFIG_KEY, config.to_dict())
    return config


def restore(model: PreTrainedModel) -> None:
    """Patch a freshly built model as its configuration says; called for every model that Transformers builds."""
    config = EntmaxConfig.from_dict(getattr(model.config, CONFIG_KEY))
    check_supported(model)
    attach(model, config)
    _keep_float32(model, config)
    install_output(model, config)
    model.add_model_tags(list(MODEL_TAGS))


def adopt(model: PreTrainedModel) -> None:
    """Mark a model assembled from patched parts as patched, where its parts are patched alike.

    Called for every model that Transformers builds. Selections, and alphas that layers share, mean something else in a whole
    than in a part: such parts stay what they are, each with a configuration of its own.
    """
    found = stored_configs(model.config)
    if len(found) != 1 or hasattr(model.config, CONFIG_KEY):
        return
    config = EntmaxConfig.from_dict(found[0])
    selects = config.sites is not None or config.layers is not None or config.exclude
    sites = attention_sites(model)
    if selects or config.tie in ("site", "model") or any(heads_of(site) is None for site in sites):
        if config.output_alpha is not None or config.output_mapping is not None:
            raise ValueError(
                f"A part of this {type(model).__name__} was patched with an output loss, which the whole would silently replace by "
                "its own. Unpatch the parts, put them together, and patch the whole."
            )
        return
    setattr(model.config, CONFIG_KEY, config.to_dict())
    model.config._attn_implementation_internal = IMPLEMENTATION
    restore(model)


@contextlib.contextmanager
def softmax_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run a patched model with plain softmax attention for a while, for comparisons.

    Alpha is 1 everywhere and no length scaling is applied. This holds for what the calling thread (or asyncio task) runs inside
    the block; other threads go on with entmax. Blocks may be nested and left in any order. The model itself is not changed: what
    is saved, copied or unpatched inside is the sparse model. A compiled model leaves its graph inside the block; compiled with
    ``fullgraph=True`` it raises.

    Raises:
        ValueError: if the model is not patched; when it runs with gradients and checkpoints its layers.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import hf_entmax
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10))
        >>> model = hf_entmax.patch_model(model, alpha=2.0)
        >>> with hf_entmax.softmax_attention(model):
        ...     hf_entmax.alphas(model)
        {'decoder_self': tensor([[1., 1.]])}
        >>> hf_entmax.alphas(model)
        {'decoder_self': tensor([[2., 2.]])}
    """
    entmax_config(model)
    with softmax_block(model, [site.module for site in attention_sites(model)]):
        yield


def _submodels(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _patched_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the model's own configuration and those that its patched attention modules read.

    Usually that is one object, or one for each sub-model. But a composite model may replace the configuration of a
    sub-model after its attention modules took theirs (EncoderDecoderModel does), so both are asked.
    """
    configs = {id(model.config): model.config}
    for submodel in _submodels(model):
        if any(heads_of(site) is not None for site in attention_sites(submodel)):
            configs[id(submodel.config)] = submodel.config
    for site in attention_sites(model):
        if heads_of(site) is not None:
            own: Any = site.module.config
            configs[id(own)] = own
    return list(configs.values())


def _keep_float32(model: PreTrainedModel, config: EntmaxConfig) -> None:
    """Have ``from_pretrained(dtype=bfloat16)`` leave the learned numbers in float32."""
    if config.alpha_dtype != "float32":
        return
    model.__dict__.setdefault(_PREVIOUS_FP32, model._keep_in_fp32_modules_strict)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), HEADS_MODULE}
