"""What ``generate()`` does for patched models: entmax probabilities, the cache that reads sparsely, continuous batching."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hf_entmax.generation.processor import EntmaxLogitsProcessor
from hf_entmax.generation.serving import hooks
from hf_entmax.integration.config_hook import CONFIG_KEY, wrap_methods

#: ``generate(cache_implementation=...)``, or the same field of a generation configuration, for `ExactSparseCache`.
CACHE_IMPLEMENTATION = "exact_sparse"


def install() -> None:
    """Hook ``GenerationMixin._get_logits_processor``, ``_prepare_cache_for_generation`` and ``init_continuous_batching``."""
    from transformers.generation import configuration_utils
    from transformers.generation.utils import GenerationMixin

    given = ["self", "generation_config"]
    hooked = wrap_methods(
        [
            (GenerationMixin, "_get_logits_processor", given, _get_logits_processor),
            (GenerationMixin, "init_continuous_batching", given, _init_continuous_batching),
            (GenerationMixin, "_prepare_cache_for_generation", [*given, "model_kwargs"], _prepare_cache),
        ]
    )
    if hooked:
        hooks.install()
        names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = (*names, CACHE_IMPLEMENTATION)


def _get_logits_processor(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_logits_processor(self: Any, *args: Any, **kwargs: Any) -> Any:
        processors = original(self, *args, **kwargs)
        entmax = getattr(self.config, CONFIG_KEY, None)
        alpha = entmax.get("output_alpha") if entmax else None
        config = kwargs.get("generation_config", args[0] if args else None)
        dola = getattr(config, "dola_layers", None)
        if alpha is not None and dola is not None:
            raise ValueError(
                f"dola_layers={dola!r} contrasts softmax distributions of layers, which leaves nothing of "
                f"output_alpha={alpha}: drop dola_layers, or unpatch the model's output."
            )
        if alpha is not None and not any(isinstance(p, EntmaxLogitsProcessor) for p in processors):
            processors.insert(_place(processors), EntmaxLogitsProcessor(alpha))
        return processors

    return get_logits_processor


def _prepare_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        asked = (
            generation_config.cache_implementation == CACHE_IMPLEMENTATION and generation_config.use_cache is not False
        )
        given = model_kwargs.get("past_key_values")
        if asked and given is None:
            model_kwargs["past_key_values"] = _new_cache(self, generation_config)
        # A cache that is given as well is an error, which Transformers raises. But an assistant is called with a copy of this
        # configuration, and from its second call on with its cache.
        if asked and (given is None or generation_config.is_assistant):
            generation_config.cache_implementation = generation_config.cache_config = None
        if asked and given is None:
            return None
        return original(self, generation_config, model_kwargs, *args, **kwargs)

    return prepare_cache_for_generation


def _init_continuous_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hooks.patched_anywhere(self):
            return original(self, *args, **kwargs)
        hooks.refuse_engine(self)
        manager = original(self, *args, **kwargs)
        hooks.check_manager(manager)
        manager.certificate = functools.partial(hooks.certificate_of, manager)
        return manager

    return init_continuous_batching


def _new_cache(model: Any, generation_config: Any) -> Any:
    from hf_entmax.generation.exact_cache import ExactSparseCache

    if not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{type(model).__name__} makes a cache of its own kind, in which cache_implementation={CACHE_IMPLEMENTATION!r} has "
            "no place: leave it out."
        )
    options = dict(generation_config.cache_config or {})
    if generation_config.max_cache_len is not None:
        options.setdefault("max_cache_len", generation_config.max_cache_len)
    try:
        cache = ExactSparseCache(model, **options)
    except TypeError as error:
        raise ValueError(
            f"cache_config={generation_config.cache_config!r} does not fit cache_implementation={CACHE_IMPLEMENTATION!r}: {error}. "
            "It takes bits, page_size, max_cache_len and verify."
        ) from error
    if generation_config.is_assistant:
        cache.activate_past_recording()
    return cache


def _place(processors: list[Any]) -> int:
    """Find the place after everything that acts on logits or forbids tokens, before everything that samples from probabilities.

    What is forbidden first gets no mass, and the others share all of it; temperature, top-k and top-p then act on the
    sparse distribution.
    """
    for position, processor in enumerate(processors):
        name = type(processor).__name__
        if name.endswith("LogitsWarper") or name in (
            "LogitNormalization",
            "WatermarkLogitsProcessor",
            "SynthIDTextWatermarkLogitsProcessor",
        ):
            return position
    return len(processors)
