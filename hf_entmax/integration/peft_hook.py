"""Adapters trained on a patched base: saved with what the base needs, so that they can never run over a softmax.

An adapter saved by PEFT names its base, and a base patched in memory is a softmax model again when it is next loaded.
So the adapter's own configuration carries the entmax configuration and the alphas; loading it patches the base. And its
``peft_type`` is written in a form that PEFT does not know without hf_entmax, so that loading without it is an error.
"""

from __future__ import annotations

import inspect
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_entmax.integration.config_hook import CONFIG_KEY, wrap_methods
from hf_entmax.integration.interface import HEADS_MODULE, is_head_number
from hf_entmax.integration.output_loss import output_losses

_STATE_KEY = "entmax_state"
_TYPE_SUFFIX = " (needs: import hf_entmax)"
_ATTRIBUTE = "_hf_entmax"
_last_read = threading.local()
#: Tuners that call ``model.forward`` instead of ``model``: the hook that computes the output loss never runs.
_SKIPS_HOOKS = ("AdaLoraModel",)


def install() -> None:
    """Hook how PEFT saves adapters, reads their configuration and injects them."""
    from peft.config import PeftConfigMixin
    from peft.peft_model import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    wrap_methods(
        [
            (
                PeftModel,
                "save_pretrained",
                ["self", "save_directory", "safe_serialization", "selected_adapters"],
                _save,
            ),
            (PeftModel, "__init__", ["self", "model", "peft_config"], _init),
            (PeftConfigMixin, "from_json_file", ["path_json_file"], _from_json),
            (PeftConfigMixin, "from_pretrained", ["pretrained_model_name_or_path"], _from_pretrained),
            (BaseTuner, "inject_adapter", ["self", "model", "adapter_name"], _inject),
            (PeftModel, "create_or_update_model_card", ["self", "output_dir"], _card),
            (PeftModel, "_upload_modified_files", ["self", "working_dir", "repo_id"], _upload),
        ]
    )


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def save_pretrained(self: Any, save_directory: str, *args: Any, **kwargs: Any) -> Any:
        base = self.get_base_model()
        refuse_parts(base)
        result = original(self, save_directory, *args, **kwargs)
        given = signature.bind(self, save_directory, *args, **kwargs)
        given.apply_defaults()
        if getattr(getattr(base, "config", None), CONFIG_KEY, None) is None or not given.arguments.get(
            "is_main_process", True
        ):
            return result
        # Only what this call has written: below the folder there may be adapters of other runs.
        for name in given.arguments["selected_adapters"] or list(self.peft_config):
            mark_adapter(base, Path(save_directory, *([] if name == "default" else [name])))
        return result

    return save_pretrained


def mark_adapter(base: Any, folder: Path) -> None:
    """Write what a patched base needs into the adapter that was saved to a folder."""
    path = folder / "adapter_config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["peft_type"] = record["peft_type"].removesuffix(_TYPE_SUFFIX) + _TYPE_SUFFIX
    state = {name: values.tolist() for name, values in _numbers(base).items()}
    record |= {CONFIG_KEY: getattr(base.config, CONFIG_KEY), _STATE_KEY: state}
    path.write_text(json.dumps(record, indent=2, sort_keys=True), encoding="utf-8")


def refuse_parts(base: Any) -> None:
    """Refuse a base that is patched in parts: an adapter names one configuration, and would come back over a softmax."""
    from hf_entmax.integration.patching import stored_configs

    config = getattr(base, "config", None)
    if getattr(config, CONFIG_KEY, None) is None and stored_configs(config):
        raise ValueError(
            f"Only parts of this {type(base).__name__} are patched, each with a configuration of its own; an adapter stores that "
            "of the whole, and would be loaded over softmax attention. Call hf_entmax.unpatch_model(model) and patch the whole."
        )


def _card(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_or_update_model_card(self: Any, output_dir: str, path: str = "PATH_OR_HUB_ID") -> None:
        original(self, output_dir)
        base = self.get_base_model()
        if getattr(getattr(base, "config", None), CONFIG_KEY, None) is not None:
            from hf_entmax.integration.card import add_to_card, card_section

            add_to_card(Path(output_dir, "README.md"), card_section(base, path, adapter=True))

    return create_or_update_model_card


def _upload(original: Callable[..., Any]) -> Callable[..., Any]:
    def upload_modified_files(self: Any, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # What save_pretrained wrote has just been replaced by an empty card.
        if getattr(getattr(self.get_base_model(), "config", None), CONFIG_KEY, None) is not None:
            self.create_or_update_model_card(working_dir, repo_id)
        return original(self, working_dir, repo_id, *args, **kwargs)

    return upload_modified_files


def _from_json(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_json_file(cls: Any, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        record = original(cls, path_json_file, **kwargs)
        entmax, state = record.pop(CONFIG_KEY, None), record.pop(_STATE_KEY, None)
        _last_read.value = None if entmax is None else (entmax, state or {})
        if isinstance(record.get("peft_type"), str):
            record["peft_type"] = record["peft_type"].removesuffix(_TYPE_SUFFIX)
        return record

    return from_json_file


def _from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _last_read.value = None
        config = original(cls, *args, **kwargs)
        if _last_read.value is not None:
            setattr(config, _ATTRIBUTE, _last_read.value)
            _last_read.value = None
        return config

    return from_pretrained


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(peft_config, "inference_mode", False):
            refuse_parts(model)
        _make_ready(model, peft_config)
        original(self, model, peft_config, *args, **kwargs)
        _warn_of_frozen_alphas(self, peft_config)

    return init


def _inject(original: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        _make_ready(model, self.peft_config.get(adapter_name))
        if type(self).__name__ in _SKIPS_HOOKS and output_losses(model):
            raise ValueError(
                f"{type(self).__name__} calls the model's forward past its hooks, so that output_alpha (or output_mapping) "
                "would silently train with cross-entropy. Use another PEFT method, such as LoRA, or patch without it."
            )
        return original(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def _warn_of_frozen_alphas(model: Any, peft_config: Any) -> None:
    """Say that PEFT froze learned alphas. It is no error: an adapter over alphas that are learned already is as usual."""
    if getattr(peft_config, "inference_mode", False):
        return
    alphas = [p for name, p in model.named_parameters() if is_head_number(name)]
    if alphas and not any(p.requires_grad for p in alphas):
        warnings.warn(
            f"PEFT froze all learned alphas of this model: they stay as they are. To train them give {type(peft_config).__name__}"
            f"(modules_to_save=[{HEADS_MODULE!r}], ...).",
            stacklevel=4,
        )


def _make_ready(model: Any, peft_config: Any) -> None:
    """Give the base the patch and the alphas that the adapter was trained over, or refuse."""
    stored = getattr(peft_config, _ATTRIBUTE, None)
    if stored is None:
        return
    from hf_entmax.config import EntmaxConfig
    from hf_entmax.integration.patching import entmax_config, is_patched, patch_model

    config, state = EntmaxConfig.from_dict(stored[0]), stored[1]
    shared = _has_adapters(model)
    if not is_patched(model):
        if shared:
            raise ValueError(
                f"This adapter was trained over a base with {config}; another adapter is on this base, and it was trained over "
                "softmax attention. Load each over a base of its own."
            )
        patch_model(model, config)
        _load_numbers(model, state)
        return
    if entmax_config(model) != config:
        raise ValueError(
            f"This adapter was trained over a base with {config}; the base at hand is patched with {entmax_config(model)}. "
            "Give it the plain base, which is then patched as the adapter needs, or one that is patched the same way."
        )
    own = _numbers(model)
    if all(name in own and own[name].tolist() == values for name, values in state.items()) and len(own) == len(state):
        return
    if not shared:
        _load_numbers(model, state)
        warnings.warn(
            "The alphas of this base are not those that the adapter was trained over: they were replaced by the adapter's.",
            stacklevel=4,
        )
    elif HEADS_MODULE not in (getattr(peft_config, "modules_to_save", None) or ()):  # else it has alphas of its own
        raise ValueError(
            "This adapter was trained over other alphas than the base has, and another adapter on the base needs those. Load "
            f"each over a base of its own, or train adapters with modules_to_save=[{HEADS_MODULE!r}], which keeps the alphas of each."
        )


def _has_adapters(model: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def _numbers(base: nn.Module) -> dict[str, torch.Tensor]:
    """Return the base's own learned numbers by plain name, whatever PEFT wrapped them in."""
    numbers = {}
    for name, parameter in base.named_parameters():
        if is_head_number(name) and ".modules_to_save." not in name:
            numbers[name.replace(".original_module.", ".")] = parameter.detach().float().cpu()
    return numbers


def _load_numbers(model: nn.Module, state: dict[str, list[Any]]) -> None:
    own = {name: parameter for name, parameter in model.named_parameters() if is_head_number(name)}
    stored = {name: torch.tensor(values) for name, values in state.items()}
    if set(own) != set(stored) or any(own[name].shape != values.shape for name, values in stored.items()):
        raise ValueError(
            f"This adapter stores entmax parameters {sorted(state)[:3]}... that do not fit its base, which has {sorted(own)[:3]}...: "
            "the base is not the model that the adapter was trained over."
        )
    with torch.no_grad():
        for name, values in stored.items():
            model.get_submodule(name.rpartition(".")[0]).check_loaded(name, values)  # type: ignore[operator]
            own[name].copy_(values)
