"""Inputs for a model of any kind, made from the names in its ``forward``, and the runs that reach its attention."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from hf_entmax.integration.discovery import AttentionSite, attention_sites
from recipes.lab.pages.model_types import ONLY_INSIDE

BATCH, LENGTH, TARGETS = 2, 9, 7


@dataclass(frozen=True)
class Run:
    """A call of a model, or of a model inside it.

    Attributes:
        path: dotted name of the inner model; empty for the whole.
        inputs: keyword arguments.
    """

    path: str
    inputs: dict[str, Any]


def call(model: nn.Module, run: Run, **changed: Any) -> Any:
    """The output of a run; random numbers inside are the same each time."""
    torch.manual_seed(0)
    inputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in {**run.inputs, **changed}.items()}
    return model.get_submodule(run.path)(**inputs)


def numbers(output: Any) -> list[Tensor]:
    """All floating-point tensors of an output that lie in a graph or could."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def find_runs(model: PreTrainedModel) -> tuple[list[Run], list[AttentionSite], str]:
    """Runs that together reach as many attention modules as possible.

    Returns:
        The runs, the attention modules that none of them reaches, and why the whole model could not be run (or "").
    """
    sites = attention_sites(model)
    missing = {site.name for site in sites}
    runs: list[Run] = []
    problem = ""
    inner = [(name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    for path, submodel in inner:
        if path and not any(name.startswith(path + ".") for name in missing):
            continue
        found, why = _working(model, path, submodel)
        if not path:
            problem = why
        if found is None:
            continue
        reached = _reached(model, found, sites) & missing
        if reached or not path:
            runs.append(found)
            missing -= reached
    return runs, [site for site in sites if site.name in missing], problem if not runs else ""


def _working(model: nn.Module, path: str, submodel: PreTrainedModel) -> tuple[Run | None, str]:
    first = ""
    for inputs in itertools.islice(candidates(submodel), 90):
        try:
            with torch.no_grad():
                found = numbers(call(model, Run(path, inputs)))
        except Exception as error:
            first = first or f"{type(error).__name__}: {error}".split("\n")[0][:160]
            continue
        if found and all(bool(t.isfinite().any()) for t in found if t.numel()):
            return Run(path, inputs), ""
        first = first or "its outputs hold no finite number"
    known = _makers(submodel, submodel.config)
    if others := [name for name in _required(submodel) if name not in known]:
        return None, first or f"{ONLY_INSIDE}: {', '.join(others)}"
    names = list(inspect.signature(submodel.forward).parameters)
    return None, first or f"its forward takes {', '.join(names[:4])}"


def _reached(model: nn.Module, run: Run, sites: list[AttentionSite]) -> set[str]:
    names: set[str] = set()
    hooks = [
        site.module.register_forward_hook(lambda *_, name=site.name: names.add(name))  # type: ignore[misc]
        for site in sites
    ]
    try:
        with torch.no_grad():
            call(model, run)
    finally:
        for hook in hooks:
            hook.remove()
    return names


def _required(model: PreTrainedModel) -> list[str]:
    """What its ``forward`` cannot do without, but for masks of sounds, which are as long as these."""
    parameters = inspect.signature(model.forward).parameters
    future = ["future_values", "future_time_features"] if "future_time_features" in parameters else []
    return future + [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        and name not in _SOUND_MASKS
    ]


def candidates(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try, the fullest first."""
    names = [name for name in inspect.signature(model.forward).parameters if name not in ("self", "kwargs", "args")]
    required = _required(model)
    config = model.config
    made = _makers(model, config)
    common = {"use_cache": False} if "use_cache" in names else {}
    if "return_dict" in names:
        common["return_dict"] = True
    main = [name for name in _MAIN if name in names and name in made]
    if "inputs_embeds" in main and main[0] != "inputs_embeds":  # one or the other
        main.remove("inputs_embeds")
    groups: list[tuple[str, ...]] = []
    texts = tuple(name for name in ("input_ids", "decoder_input_ids", "bbox") if name in names)
    media = tuple(name for name in main if name not in texts)
    if texts and media:
        groups += [(*texts, name) for name in media]
    if "encoder_hidden_states" in names and getattr(config, "is_encoder_decoder", False) is False:
        groups += [(*texts, "encoder_hidden_states")]
    if texts:
        groups += [texts, tuple(t for t in texts if t != "decoder_input_ids")]
    decoder = tuple(t for t in texts if t == "decoder_input_ids")
    groups += [(name, *decoder) for name in media] + [(name,) for name in media] + [media, (*media, *decoder)]
    seen: list[tuple[str, ...]] = []
    for group in groups:
        wanted = tuple(dict.fromkeys((*group, *(n for n in required if n in made))))
        if not wanted or wanted in seen or any(n not in wanted for n in required):
            continue
        seen.append(wanted)
        for chosen in itertools.islice(itertools.product(*(made[n]() for n in wanted)), 6 if texts and media else 24):
            inputs = dict(zip(wanted, chosen, strict=True))
            if "input_ids" in inputs and "attention_mask" in names:
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if "input_features" in inputs:
                frames = max(inputs["input_features"].shape[1:])
                for mask in _SOUND_MASKS & set(names):
                    inputs[mask] = torch.ones(BATCH, frames, dtype=torch.long)
            yield {**inputs, **common}


_SOUND_MASKS = {"input_features_mask", "feature_attention_mask"}
_MAIN = (
    "input_ids",
    "decoder_input_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "hidden_states",
    "inputs_embeds",
    "past_values",
    "flattened_patches",
    "bbox",
)


def _number(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """The first of these attributes that a configuration, or one inside it, has."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (int, list, tuple)) and not isinstance(value, bool) and value:
            return value
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig) and (found := _number(value, *names)) is not None:
            return found
    return default


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[-2]), int(value[-1]))


def _makers(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, Callable[[], list[Any]]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1))

    def ids(length: int) -> Callable[[], list[Tensor]]:
        vocabulary = _number(config, "vocab_size", default=100)
        low, high = 5 + (vocabulary > 200) * 20, max(min(vocabulary - 70, 900), 10)

        def make() -> list[Tensor]:
            drawn = torch.randint(low, high, (BATCH, length), generator=torch.Generator().manual_seed(2))
            books = _number(config, "num_codebooks", "num_channels")  # codes of sounds
            codes = [drawn[..., None].expand(-1, -1, books).clone()] if isinstance(books, int) else []
            if hasattr(config, "eos_token_id") and isinstance(config.eos_token_id, int):
                ended = drawn.clone()
                ended[:, -1] = min(config.eos_token_id, vocabulary - 1)
                return [drawn, ended, *codes]
            return [drawn, *codes]

        return make

    def pixels() -> list[Tensor]:
        channels = _number(config, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        size = _number(config, "image_size", "input_size", "img_size", default=64)
        sizes = list(dict.fromkeys([_pair(size), (64, 64), (128, 128), (224, 224)]))
        frames = _number(config, "num_frames", "frames_per_clip", "tubelet_size", default=2)
        frames = frames if isinstance(frames, int) else frames[0]
        patch = _number(config, "patch_size", default=16)
        patch = patch if isinstance(patch, int) else patch[-1]
        time = _number(config, "temporal_patch_size", default=1)
        times = dict.fromkeys((time if isinstance(time, int) else time[0], 1, 2))
        flat = [random(32, channels * k * patch * patch) for k in times]
        flat += [random(32, channels, patch, patch), random(1, 32, channels, patch, patch)]
        found = flat if "grid_thw" in inspect.signature(model.forward).parameters else []
        for height, width in sizes:
            if height * width > 600 * 600:
                continue
            found.append(random(BATCH, channels, height, width))
            found.append(random(BATCH, frames, channels, height, width))
        found.append(random(BATCH, 16, channels * patch * patch))
        return found

    def features() -> list[Tensor]:
        mel = _number(
            config,
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_dim",
            "feature_size",
            "n_mels",
            "mel_bins",
            "input_size",
            default=80,
        )
        mel = mel if isinstance(mel, int) else mel[0]
        source = _number(config, "max_source_positions", default=100)
        lengths = dict.fromkeys([min(2 * source, 3000), 100, 128, 200])
        return [random(BATCH, *shape) for t in lengths for shape in ((mel, t), (t, mel), (1, mel, t), (1, t, mel))]

    def waves() -> list[Tensor]:
        mel = _number(config, "num_mel_bins", default=80)
        longest = _number(config, "max_length", default=128)
        return [
            random(BATCH, 2400),
            random(BATCH, 1, 2400),
            random(BATCH, 16000),
            random(BATCH, longest, mel),
            random(BATCH, 1, 4000),
        ]

    def states() -> list[Tensor]:
        width = _number(config, "hidden_size", "d_model", "embed_dim", "dim", default=32)
        width = width if isinstance(width, int) else width[0]
        channels = _number(config, "in_channels", "in_chans", "num_channels", default=3)
        patch = _number(config, "patch_size", default=14)
        time = _number(config, "temporal_patch_size", default=1)
        found = [random(BATCH, LENGTH, width)]
        if isinstance(channels, int) and isinstance(patch, int) and isinstance(time, int):
            flat = random(32, channels * time * patch * patch)
            found = [flat, *found]
        return found

    def encoded() -> list[Tensor]:
        own = states()[-1].shape[-1]
        width = _number(config, "encoder_hidden_size", "cross_attention_hidden_size", "cross_hidden_size", default=own)
        return [random(BATCH, LENGTH, width)]

    def boxes() -> list[Tensor]:
        return [torch.tensor([1, 2, 3, 4]).expand(BATCH, LENGTH, 4)]

    def grid() -> list[Tensor]:
        return [torch.tensor([[1, 4, 8]]), torch.tensor([[2, 4, 4]]), torch.tensor([[4, 8]])]

    def patches() -> list[Tensor]:
        patch = _number(config, "patch_size", default=16)
        width = _number(config, "patch_embed_hidden_size", default=3 * patch * patch)
        places = torch.cartesian_prod(torch.arange(1.0, 5), torch.arange(1.0, 5)).expand(BATCH, -1, -1)
        return [torch.cat((places, random(BATCH, 16, width)), -1)]

    def series() -> list[Tensor]:
        return [*(random(BATCH, past, k) for k in (1, 7)), random(BATCH, past)]

    past = _number(config, "context_length", default=32) + max(_number(config, "lags_sequence", default=(0,)))
    times, future = _number(config, "num_time_features", default=1), _number(config, "prediction_length", default=8)

    return {
        "input_ids": ids(LENGTH),
        "decoder_input_ids": ids(TARGETS),
        "inputs_embeds": lambda: [states()[-1]],
        "query_embeds": lambda: [states()[-1]],
        "encoder_hidden_states": encoded,
        "hidden_states": states,
        "bbox": boxes,
        "grid_thw": grid,
        "image_grid_thw": grid,
        "pixel_values": pixels,
        "pixel_values_videos": pixels,
        "input_features": features,
        "input_values": waves,
        "attention_mask": lambda: [torch.ones(BATCH, LENGTH, dtype=torch.long)],
        "past_values": series,
        "past_time_features": lambda: [random(BATCH, past, times)],
        "past_observed_mask": lambda: [torch.ones(BATCH, past)],
        "future_values": lambda: [random(BATCH, future)],
        "future_time_features": lambda: [random(BATCH, future, times)],
        "flattened_patches": patches,
        "spatial_shapes": lambda: [torch.tensor([[4, 4]]).expand(BATCH, 2)],
        "pixel_attention_mask": lambda: [torch.ones(BATCH, 16, dtype=torch.long)],
        "merge_sizes": lambda: [torch.ones(1, dtype=torch.long)],
    }
