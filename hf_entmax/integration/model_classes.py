"""Which classes of Transformers a configuration can build."""

from __future__ import annotations

import sys

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

#: Kinds of heads, the ones that are looked for first.
_PREFERRED = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "PRETRAINING",
)


def model_classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """List classes that a configuration can build: two with a head, the one without, and, where these are missing, any other.

    What comes first shows most of the model: both halves of an encoder-decoder, the images of a model of texts and images.
    """
    mappings = {
        name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING"): getattr(modeling_auto, name)
        for name in dir(modeling_auto)
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING")
    }
    names = [name for name in _PREFERRED if name in mappings] + [n for n in mappings if n not in _PREFERRED]
    found: list[type[PreTrainedModel]] = []
    heads = [mappings[name][type(config)] for name in names if type(config) in mappings[name]][:2]
    base = [modeling_auto.MODEL_MAPPING[type(config)]] if type(config) in modeling_auto.MODEL_MAPPING else []
    for given in (*heads, *base):
        found += [cls for cls in (given if isinstance(given, tuple) else (given,)) if cls not in found]  # type: ignore[assignment]
    return found or _classes_beside(config)


def _classes_beside(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """List models without an auto class: those of the modelling file that name this configuration as theirs."""
    package = type(config).__module__
    name = package.replace("configuration_", "modeling_")
    try:
        __import__(name)
    except ImportError:
        return []
    return [
        cls
        for cls in vars(sys.modules[name]).values()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and cls.__dict__.get("config_class", getattr(cls, "config_class", None)) is type(config)
        and "forward" in vars(cls)
    ]
