"""The options of a controllable mapping as modules, one number per head where an option is learned."""

from __future__ import annotations

from torch import nn

from hf_entmax.alpha import FixedAlpha, LearnedAlpha, MappingOptions
from hf_entmax.config import EntmaxConfig
from hf_entmax.ops.controllable import attention_mapping


def mapping_heads(num_heads: int, config: EntmaxConfig) -> MappingOptions:
    """The options that ``config.mapping`` has, for one attention module.

    Raises:
        ValueError: if the mapping is unknown or cannot serve as attention, or an option is unknown or out of range.
    """
    keep = config.alpha_dtype == "float32"
    options: dict[str, nn.Module] = {}
    for name, setting in attention_mapping(config.mapping).settings(config.mapping_options).items():
        if setting.bounds is None:
            options[name] = FixedAlpha(num_heads, setting.value)
        else:
            shared = config.tie == "layer"
            options[name] = LearnedAlpha(num_heads, setting.value, setting.bounds, shared=shared, keep_float32=keep)
    return MappingOptions(num_heads, config.mapping, options)
