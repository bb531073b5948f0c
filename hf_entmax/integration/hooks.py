"""The few methods of Transformers that must know of patched models. For all other models they do what they did.

Each hook is installed once, checks that the method it wraps looks as expected, and touches only models whose
configuration carries ``entmax_config``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hf_entmax.alpha import LearnedNumbers
from hf_entmax.integration.config_hook import CONFIG_KEY, Wrapper, softmax_refused, wrap_methods
from hf_entmax.integration.interface import HEADS_MODULE, IMPLEMENTATION, entmax_attention_forward, is_head_number
from hf_entmax.integration.masks import entmax_mask


def install() -> None:
    """Register the attention function and its mask, and hook model building, loading and saving."""
    methods: list[tuple[str, list[str], Wrapper]] = [
        ("post_init", ["self"], _post_init),
        ("_initialize_weights", ["self", "module", "is_custom_code"], _initialize_weights),
        ("get_correct_attn_implementation", ["self", "requested_attention", "is_init_check"], _get_correct),
        ("_adjust_missing_and_unexpected_keys", ["self", "loading_info"], _adjust_keys),
        ("save_pretrained", ["self", "save_directory", "is_main_process"], _save_pretrained),
        ("_upload_modified_files", ["self", "working_dir", "repo_id"], _upload),
    ]
    if wrap_methods([(PreTrainedModel, *method) for method in methods]):
        AttentionInterface.register(IMPLEMENTATION, entmax_attention_forward)
        # Without a mask function of its own, Transformers would hand over no mask at all: every decoder would see the future.
        AttentionMaskInterface.register(IMPLEMENTATION, entmax_mask)


def _post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        from hf_entmax.integration.patching import adopt, restore

        if getattr(self.config, CONFIG_KEY, None) is not None:
            restore(self)
        else:
            adopt(self)

    return post_init


def _initialize_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_weights(self: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        if not isinstance(module, LearnedNumbers):
            return original(self, module, is_custom_code)
        parts = (module, *module.parameters(recurse=False))
        if not any(getattr(part, "_is_hf_initialized", False) for part in parts):
            module.reset_parameters()
        module._is_hf_initialized = True  # type: ignore[assignment]
        return None

    return initialize_weights


def _get_correct(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if getattr(self.config, CONFIG_KEY, None) is None:
            return original(self, requested_attention, is_init_check)
        if requested_attention in (None, IMPLEMENTATION):
            return IMPLEMENTATION
        raise softmax_refused(type(self).__name__, requested_attention)

    return get_correct_attn_implementation


def _adjust_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    def adjust_missing_and_unexpected_keys(self: PreTrainedModel, loading_info: Any) -> Any:
        result = original(self, loading_info)
        unexpected = sorted(key for key in loading_info.unexpected_keys if is_head_number(key))
        if unexpected:
            raise ValueError(
                f"The checkpoint holds {len(unexpected)} entmax parameters ({unexpected[0]}, ...) that this "
                f"{type(self).__name__} has no place for: its configuration is not the one the checkpoint was saved with. "
                "Load it with its own config.json."
            )
        missing = {key for key in loading_info.missing_keys if is_head_number(key)}
        missing |= {entry[0] for entry in loading_info.mismatched_keys if is_head_number(entry[0])}
        # Alphas may be new where the whole attention is new (cross-attention added to an encoder), not otherwise.
        lost = sorted(key for key in missing if not _attention_is_new(self, key, loading_info.missing_keys))
        if lost:
            raise ValueError(
                f"The checkpoint's configuration says that it is patched, but {len(lost)} of its entmax parameters are "
                f"missing or of the wrong shape ({lost[0]}, ...). The checkpoint is incomplete or belongs to another "
                "configuration. To patch a plain softmax checkpoint, load it with its own config and call "
                "hf_entmax.patch_model(model)."
            )
        for name, module in self.named_modules():
            if isinstance(module, LearnedNumbers):
                for key, values in module.named_parameters(recurse=False):
                    module.check_loaded(f"{name}.{key}", values.detach())
        return result

    return adjust_missing_and_unexpected_keys


def _save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(
        self: PreTrainedModel,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        adapter = getattr(self, "_hf_peft_config_loaded", False)
        if adapter:  # then Transformers writes the adapter alone
            from hf_entmax.integration.peft_hook import mark_adapter, refuse_parts

            refuse_parts(self)
        result = original(self, save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            if adapter and getattr(self.config, CONFIG_KEY, None) is not None:
                mark_adapter(self, Path(save_directory))
            _write_card(self, save_directory)
        return result

    return save_pretrained


def _upload(original: Callable[..., Any]) -> Callable[..., Any]:
    def upload_modified_files(
        self: Any, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(self, PreTrainedModel):
            _write_card(self, working_dir, repo_id)
        return original(self, working_dir, repo_id, *args, **kwargs)

    return upload_modified_files


def _write_card(
    model: PreTrainedModel, directory: str | os.PathLike[str], path_or_hub_id: str = "PATH_OR_HUB_ID"
) -> None:
    from hf_entmax.integration.patching import stored_configs

    if len(stored_configs(model.config)) == 1:  # parts that are patched differently have cards of their own
        from hf_entmax.integration.card import write_model_card

        write_model_card(model, directory, path_or_hub_id)


def _attention_is_new(model: nn.Module, key: str, missing: set[str]) -> bool:
    parent = key.split(f"{HEADS_MODULE}.")[0]
    own = [
        f"{parent}{name}"
        for name, _ in model.get_submodule(parent.rstrip(".")).named_parameters()
        if not is_head_number(name)
    ]
    return bool(own) and all(name in missing for name in own)
