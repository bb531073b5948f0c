"""``generate()`` of a model with ``output_alpha`` uses entmax probabilities, with nothing to pass."""

from __future__ import annotations

import functools
from typing import Any

from hf_entmax.generation.processor import EntmaxLogitsProcessor
from hf_entmax.integration.config_hook import CONFIG_KEY, require


def install() -> None:
    """Hook ``GenerationMixin._get_logits_processor`` and ``init_continuous_batching``.

    Raises:
        ImportError: if this version of Transformers has it with other parameters.
    """
    from transformers.generation.utils import GenerationMixin

    if getattr(GenerationMixin, "_hf_entmax_hooked", False):
        return
    require(GenerationMixin, "_get_logits_processor", ["self", "generation_config"])
    require(GenerationMixin, "init_continuous_batching", ["self", "generation_config"])
    original = GenerationMixin._get_logits_processor  # type: ignore[attr-defined]

    @functools.wraps(original)
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

    batching = GenerationMixin.init_continuous_batching  # type: ignore[attr-defined]

    @functools.wraps(batching)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.config, CONFIG_KEY, None) is not None:
            raise NotImplementedError(
                f"{type(self).__name__} is patched with entmax attention, which does not read the paged caches of continuous "
                "batching (generate_batch, transformers serve --continuous-batching); the attention implementations that do "
                "are softmax. Use model.generate with a padded batch, or serve without continuous batching."
            )
        return batching(self, *args, **kwargs)

    GenerationMixin._get_logits_processor = get_logits_processor  # type: ignore[attr-defined]
    GenerationMixin.init_continuous_batching = init_continuous_batching  # type: ignore[attr-defined]
    GenerationMixin._hf_entmax_hooked = True  # type: ignore[attr-defined]


def _place(processors: list[Any]) -> int:
    """After everything that acts on logits or forbids tokens, before everything that samples from probabilities.

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
