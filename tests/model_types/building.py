"""A tiny model of every model type: its default configuration, shrunk by rules that keep its proportions."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_entmax.integration.model_classes import model_classes

#: Largest model that is built with numbers.
MAX_PARAMETERS = 20_000_000

_LAYERS = re.compile(
    r"(num_)?(hidden_layers|layers|encoder_layers|decoder_layers|block_layers|blocks)|n_layers?|depth|depths"
    r"|num_(\w+_)?layers|\w+_layers|(\w+_)?depth|num_layers_per_\w+"
)
_WIDTHS = re.compile(
    r"hidden|embed|embd|d_model|d_kv|d_ff|intermediate|ffn|inner|channel|width|dim|rank|filters|state|section|lora"
    r"|head_size|proj|mlp\w*_size|decoder_size|bottleneck|upsample_groups"
)
_NO_WIDTHS = re.compile(
    r"layers|^num_(?!channels)|_num_|^n_(?!embd|inner|state)|max_|position|token|index|indices|patch|image|drop|prob|type|freq|time"
)
_INDICES = re.compile(r"ind(ic|ex)es|out_layers|feature_layer|select_layer|extract_layers|global_att\w*_idx|_ids$")
_HEADS = re.compile(r"(\w+_)?heads|n_head")
_HEAD_WIDTHS = re.compile(r"head_dim|head_size|rotary|rope|section")
_EXPERTS = re.compile(r"(num|n)_(\w+_)?experts|moe_num_experts")
_TOKEN = re.compile(r"token(_id|_index|s_id)?$|_id$|token_id|_token_")
_VOCABULARY = 1024

#: What a configuration class needs to be built at all, or does not hold together without.
_TINY_BERT: dict[str, Any] = dict(
    model_type="bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=1024
)
_TINY_VIT: dict[str, Any] = dict(
    model_type="vit",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
)
_DECODER = {**_TINY_BERT, "is_decoder": True, "add_cross_attention": True}
_SPEECH: dict[str, Any] = dict(
    model_type="wav2vec2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PLAIN: dict[str, Any] = {"rope_parameters": _ROPE, "head_dim": 128}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]},
    "intermediate_size": 4096,
}
_HALF_SECTIONS: dict[str, Any] = {
    "rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
}
_SERIES: dict[str, Any] = {"prediction_length": 8, "num_time_features": 2}
GIVEN: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder": _TINY_BERT, "decoder": _DECODER},
    "vision-encoder-decoder": {"encoder": _TINY_VIT, "decoder": _DECODER},
    "speech-encoder-decoder": {"encoder": _SPEECH, "decoder": _DECODER},
    "vision-text-dual-encoder": {"vision_config": _TINY_VIT, "text_config": _TINY_BERT},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense"] + 31 * ["sparse"]},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": 1024, "pad_token_id": 1, "mask_token_id": 3},
    "lfm2_moe": {"layer_types": 8 * ["conv", "full_attention", "conv", "conv"], "rope_parameters": _ROPE},
    "hunyuan_vl": {"text_config": _PLAIN},
    "nemotron": {"num_key_value_heads": 48},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"), _PLAIN),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), _SECTIONS),
    **{name: {"text_config": _SECTIONS} for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker")},
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_image_text"), _HALF_SECTIONS),
}
#: Made of whole configurations that are tiny already.
_TINY = {
    name for name, given in GIVEN.items() if any(isinstance(v, dict) and "model_type" in v for v in given.values())
}


@dataclass(frozen=True)
class Size:
    """How a default configuration is shrunk.

    Attributes:
        divisor: of widths.
        short: few layers, as many as show every kind of layer.
        heads: fewer heads of the same width, instead of narrower ones: some models know the width of a head by heart.
        short_inputs: small images and short sounds, where the configuration fixes their size.
    """

    divisor: int
    short: bool = True
    heads: bool = False
    short_inputs: bool = True


#: The first that works is taken.
SIZES = (
    Size(8),
    Size(8, heads=True),
    Size(8, short_inputs=False),
    Size(8, heads=True, short_inputs=False),
    Size(32, short_inputs=False),
    Size(4, heads=True, short_inputs=False),
    Size(8, short=False),
    Size(4, short_inputs=False),
    Size(2, heads=True, short_inputs=False),
    Size(2, short_inputs=False),
    Size(1, short_inputs=False),
)


def tiny_config(model_type: str, size: Size = SIZES[0]) -> PreTrainedConfig:
    """The default configuration of a model type, shrunk."""
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(GIVEN.get(model_type, {})))
    if model_type not in _TINY:
        _shrink(config, size, {})
    return config


def _shrink(config: PreTrainedConfig, size: Size, tokens: dict[int, int]) -> None:
    config._experts_implementation = "eager"  # the fast one wants widths in multiples of 16 bytes
    divisor, short, heads = size.divisor, size.short, size.heads
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    kinds = values.get("layer_types")
    depths = [values.get(name) for name in ("num_hidden_layers", "num_layers") if "depths" not in values]
    old_depth = next((value for value in depths if isinstance(value, int)), None)
    depth = 2
    if isinstance(kinds, (list, tuple)):
        depth = min(8, max(2, 1 + max(list(kinds).index(kind) for kind in set(kinds))))
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            if value.model_type == "timm_backbone":  # timm is another package
                setattr(config, name, _tiny_resnet(value))
            else:
                _shrink(value, size, tokens)
            continue
        new = value
        if isinstance(value, dict):
            new = value if heads else _divided_sections(value, divisor)
        elif isinstance(value, bool) or value is None:
            continue
        elif _LAYERS.fullmatch(name):
            if short and isinstance(value, int):
                new = min(value, depth)
            elif short and isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
                new = type(value)(min(v, 2) for v in value)
        elif short and isinstance(value, (list, tuple)) and old_depth and len(value) == old_depth > depth:
            new = type(value)(value[:depth])
        elif "vocab_size" in name and isinstance(value, int):
            new = min(value, _VOCABULARY)
        elif _EXPERTS.fullmatch(name) and isinstance(value, int):
            new = min(value, 16)
        elif _TOKEN.search(name) and isinstance(value, int) and value >= _VOCABULARY - 64:
            new = tokens.setdefault(value, _VOCABULARY - 1 - len(tokens) % 60)
        elif _TOKEN.search(name) and isinstance(value, list) and all(isinstance(v, int) for v in value):
            new = [
                tokens.setdefault(v, _VOCABULARY - 1 - len(tokens) % 60) if v >= _VOCABULARY - 64 else v for v in value
            ]
        elif name in ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"):
            new = min(value, 2) if isinstance(value, int) else value
        elif size.short_inputs and name == "image_size" and isinstance(value, int) and value > 64:
            patch = values.get("patch_size")
            new = 4 * patch if isinstance(patch, int) else 64
        elif size.short_inputs and name in ("max_length", "max_source_positions") and isinstance(value, int):
            new = min(value, 128)
        elif name in ("n_group", "topk_group"):
            new = 1
        elif name in ("first_k_dense_replace", "moe_layer_start_index") and short:
            new = min(value, 1)
        elif heads and _HEADS.fullmatch(name) and isinstance(value, int):
            new = max(1, value // divisor)
        elif heads and _HEAD_WIDTHS.search(name):
            continue
        elif _WIDTHS.search(name) and not _NO_WIDTHS.search(name):
            new = _divided(value, divisor)
        if new is not value and new != value:
            setattr(config, name, new)


def _tiny_resnet(timm: PreTrainedConfig) -> PreTrainedConfig:
    stages = len(getattr(timm, "out_indices", None) or (4,))
    return transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{n}" for n in range(5 - stages, 5)] if stages <= 4 else None,
    )


def _divided(value: Any, divisor: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return value
    if isinstance(value, int):
        return value // divisor if value >= 2 * divisor and value % divisor == 0 else value
    divided = type(value)(_divided(v, divisor) for v in value)
    return divided


def _divided_sections(value: dict[str, Any], divisor: int) -> dict[str, Any]:
    found = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found[key] = _divided_sections(item, divisor)
        elif isinstance(key, str) and "section" in key and isinstance(item, (list, tuple)):
            found[key] = type(item)(max(v // divisor, 1) for v in item)
        else:
            found[key] = item
    return found


def build(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model with eager attention and numbers that make every part of it matter.

    Raises:
        ValueError: if it would be larger than `MAX_PARAMETERS`.
    """
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager").parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"too large: {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    _stir(model)
    return model


@torch.no_grad()
def _stir(model: nn.Module) -> None:
    """Weights of unit gain, and no gate that starts closed: with it, no gradient would reach the attention behind."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if parameter.dim() >= 2:
            fan_in = parameter[0].numel()
            parameter.normal_(0, fan_in**-0.5)
        elif parameter.abs().max() < 0.01:
            parameter.normal_(0, 0.3)


def attempts(model_type: str) -> Iterator[tuple[type[PreTrainedModel], PreTrainedConfig, Size]]:
    """Class, configuration and how that was shrunk, the smallest first."""
    seen = set()
    for size in SIZES:
        config = tiny_config(model_type, size)
        text = config.to_json_string(use_diff=False)
        if text in seen:
            continue
        seen.add(text)
        for cls in model_classes(config):
            yield cls, tiny_config(model_type, size), size
