"""A cache for ``generate()`` that reads in full only the keys that may have weight."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)

from hf_entmax.generation.bits import Bits
from hf_entmax.generation.cache_reads import Certificate
from hf_entmax.generation.exact_layer import ExactSparseLayer, Plan
from hf_entmax.generation.weights_state import WatchedWeights
from hf_entmax.integration.config_hook import CONFIG_KEY
from hf_entmax.ops.exact import KeySketch


class ExactSparseCache(Cache):
    r"""Keys and values of a patched model, with a few bits of every key beside them; decoding is exact.

    With entmax most keys have weight exactly zero. From the bits of a key (its *sketch*) follow bounds of its score, and
    from the bounds of all scores one of the threshold, which never falls when a score rises. A key whose upper bound
    does not reach it has weight zero and is not read (see `hf_entmax.ops.exact_sparse_attention`). The result is what
    reading every key would give; `certificate` says how many keys that took.

    Give it to ``generate(past_key_values=cache)``, or let ``generate(cache_implementation="exact_sparse")`` make one,
    with these arguments in ``cache_config``. Prompts are read by the training kernel; steps of up to 8 tokens use the
    sketch. Layers with a state of another kind (linear attention, indexers) keep a cache layer of Transformers and are
    read in full, as are heads of softmax. The last, unfinished page has no sketch and is read in full.

    A cache belongs to the weights that filled it: where they change while it is in use, the next step raises.
    `hf_entmax.generation.weights_state.WatchedWeights` says what is noticed and what is not; ``reset`` starts anew.

    Args:
        model: a patched model, or its configuration.
        bits: of the sketch, per number of a key: 2, 4, 6 or 8. ``"auto"`` chooses per key head, from the alphas
            of its query heads and from what the last steps had to read, and reads every key where that is cheaper.
        page_size: keys that share one range per channel, 16 to 128.
        max_cache_len: tokens to make room for once and for all; None lets the buffers grow, at constant cost per token.
        verify: compare every step with dense weights and raise where they differ; slow, for checks.

    Raises:
        ValueError: if the model is not patched, has a mapping without a threshold, or an option is not allowed.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import hf_entmax
        >>> config = LlamaConfig(
        ...     hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=11
        ... )
        >>> model = hf_entmax.patch_model(LlamaForCausalLM(config).eval(), alpha=2.0)
        >>> cache = ExactSparseCache(model, bits=8, page_size=16)
        >>> out = model.generate(torch.arange(50)[None] % 11, past_key_values=cache, max_new_tokens=5, min_new_tokens=5)
        >>> found = cache.certificate()
        >>> found.keys_total == 2 * (51 + 52 + 53 + 54) == found.keys_read + found.keys_zero, found.violations
        (True, 0)
    """

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> ExactSparseCache:
        """Make the form that the model needs."""
        if cls is ExactSparseCache:
            config = getattr(model, "config", model)
            form = _EncoderDecoder if getattr(config, "is_encoder_decoder", False) else _Decoder
            return super().__new__(form)  # type: ignore[arg-type]
        return super().__new__(cls)

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        bits: Bits = "auto",
        page_size: int = 32,
        *,
        max_cache_len: int | None = None,
        verify: bool = False,
    ) -> None:
        weights = WatchedWeights(model if isinstance(model, nn.Module) else None)
        self._fill(*_read(model, bits, page_size, max_cache_len, verify), weights)

    def _fill(self, config: PreTrainedConfig, plan: Plan, weights: WatchedWeights) -> None:
        raise NotImplementedError("ExactSparseCache(...) makes one of its two forms.")

    def certificate(self) -> Certificate:
        """Report what was read and proved since the cache was made or reset."""
        layers = self._named_layers()
        own = {name: layer for name, layer in layers.items() if isinstance(layer, ExactSparseLayer)}
        others = {name: type(layer).__name__ for name, layer in layers.items() if name not in own}
        others |= {
            name: "keys that the model changes after the cache" for name, layer in own.items() if not layer.is_asked
        }
        return Certificate(
            tuple(layer.certificate() for name, layer in own.items() if name not in others),
            others,
            sum(layer.tally.violations for layer in own.values()),
            sum(layer.tally.verified for layer in own.values()),
        )

    def _named_layers(self) -> dict[str, Any]:
        raise NotImplementedError


class _Decoder(ExactSparseCache, DynamicCache):
    """The cache of a decoder: one layer for each of the model's, as Transformers' dynamic cache has them."""

    def _fill(self, config: PreTrainedConfig, plan: Plan, weights: WatchedWeights, site: str = "self") -> None:
        self._site, self._weights = site, weights
        kinds, options = get_layer_types_and_kwargs(_of_decoder(config))
        if site == "cross":  # whatever the decoder's own windows, its queries see the whole input
            kinds, options = ["full_attention"] * len(kinds), [{}] * len(kinds)
            plan = dataclasses.replace(plan, max_cache_len=None)
        layers = [
            _layer(f"{site} {number}", kind, arguments, plan)
            for number, (kind, arguments) in enumerate(zip(kinds, options, strict=True))
        ]
        Cache.__init__(self, layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer; see `ExactSparseLayer.update`."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"This ExactSparseCache was made for a model of {len(self.layers)} layers and is asked for layer {layer_idx}: "
                "it belongs to another model."
            )
        if not layer_idx and not torch.compiler.is_compiling() and self._weights.changed():
            raise ValueError(
                "The weights of the model (or its adapters) changed while an ExactSparseCache was in use: its keys and values are "
                "those of the old ones. Make a new cache, or call cache.reset()."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Forget all keys, and the weights that made them."""
        super().reset()
        self._weights.forget()

    def _named_layers(self) -> dict[str, Any]:
        return {
            f"{self._site} {number}": layer
            for number, layer in enumerate(self.layers)
            if not isinstance(layer, DummyLayer)
        }


class _EncoderDecoder(ExactSparseCache, EncoderDecoderCache):
    """The caches of an encoder-decoder model: self-attention, and cross-attention, which is filled once."""

    def _fill(self, config: PreTrainedConfig, plan: Plan, weights: WatchedWeights) -> None:
        caches = [object.__new__(_Decoder) for _ in range(2)]
        for cache, site, watched in zip(caches, ("self", "cross"), (weights, WatchedWeights()), strict=True):
            cache._fill(config, plan, watched, site)
        EncoderDecoderCache.__init__(self, *caches)

    def _named_layers(self) -> dict[str, Any]:
        own: Any = (self.self_attention_cache, self.cross_attention_cache)
        return {**own[0]._named_layers(), **own[1]._named_layers()}


def _read(
    model: PreTrainedModel | PreTrainedConfig, bits: Bits, page_size: int, max_cache_len: int | None, verify: bool
) -> tuple[PreTrainedConfig, Plan]:
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"ExactSparseCache takes a patched model or its configuration, not {type(model).__name__}.")
    text = config.get_text_config(decoder=True)
    entmax = getattr(text, CONFIG_KEY, None) or getattr(config, CONFIG_KEY, None)
    if entmax is None:
        raise ValueError(
            f"{type(model).__name__} is not patched: with softmax every key has weight, and there is nothing to prove. Call "
            "hf_entmax.patch_model(model) first."
        )
    if entmax.get("mapping", "entmax") != "entmax":
        raise ValueError(
            f"ExactSparseCache knows bounds for entmax alone, and this model uses mapping={entmax['mapping']!r}: generate "
            "without it."
        )
    if bits != "auto" and (isinstance(bits, bool | float) or bits not in (2, 4, 6, 8)):
        raise ValueError(f'bits={bits!r} is not allowed: choose 2, 4, 6 or 8, or "auto".')
    KeySketch.allocate(0, 1, 1, 0, page_size=page_size)  # raises where the size is not allowed
    if max_cache_len is not None and (
        isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1
    ):
        raise ValueError(f"max_cache_len={max_cache_len!r} is not allowed: give a number of tokens, or None.")
    return config, Plan(bits, page_size, max_cache_len, verify)


def _of_decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the decoder with the decoder's number of layers (T5's own gives the encoder's)."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_decoder_layers", None)
    if not config.is_encoder_decoder or layers in (None, text.num_hidden_layers):
        return text
    text = copy.deepcopy(text)
    text.num_hidden_layers = layers
    return text


def _layer(name: str, kind: str, arguments: dict[str, Any], plan: Plan) -> Any:
    """Make a layer of ours where Transformers would hold keys and values and nothing else."""
    theirs = DYNAMIC_LAYER_TYPE_MAPPING[kind]
    if theirs in (DynamicLayer, DynamicSlidingWindowLayer):
        return ExactSparseLayer(name, plan, **arguments)
    return theirs(**arguments)
