"""Adaptive sparse attention for Hugging Face Transformers.

``import hf_entmax`` registers the attention ``"hf_entmax"`` with Transformers and makes patched checkpoints loadable;
models that are not patched are not touched. Everything else is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_entmax import _registration
from hf_entmax._version import __version__

if TYPE_CHECKING:
    from hf_entmax import analysis, generation, losses, ops, training
    from hf_entmax.config import EntmaxConfig
    from hf_entmax.integration.discovery import unpatched_softmax
    from hf_entmax.integration.head_numbers import alphas, length_scalings, mapping_options, set_alphas
    from hf_entmax.integration.patching import entmax_config, is_patched, patch_model, softmax_attention, unpatch_model
    from hf_entmax.ops.backends import available_backends
    from hf_entmax.ops.controllable import register_mapping
    from hf_entmax.training.calibration import calibrate_alphas
    from hf_entmax.training.sparsify import sparsify

_LAZY = {
    "EntmaxConfig": "hf_entmax.config",
    "available_backends": "hf_entmax.ops.backends",
    "calibrate_alphas": "hf_entmax.training.calibration",
    "register_mapping": "hf_entmax.ops.controllable",
    "sparsify": "hf_entmax.training.sparsify",
    "unpatched_softmax": "hf_entmax.integration.discovery",
    **dict.fromkeys(
        ("alphas", "length_scalings", "mapping_options", "set_alphas"), "hf_entmax.integration.head_numbers"
    ),
    **dict.fromkeys(
        ("entmax_config", "is_patched", "patch_model", "softmax_attention", "unpatch_model"),
        "hf_entmax.integration.patching",
    ),
}
#: Loaded when used like these, with a warning, and gone in the next version.
_FORMER = ("multilabel",)
_NEEDS_TRANSFORMERS = "hf_entmax.integration"
_SUBMODULES = ("analysis", "generation", "losses", "ops", "training")

__all__ = [
    "EntmaxConfig",
    "__version__",
    "alphas",
    "analysis",
    "available_backends",
    "calibrate_alphas",
    "entmax_config",
    "generation",
    "is_patched",
    "length_scalings",
    "losses",
    "mapping_options",
    "ops",
    "patch_model",
    "register_mapping",
    "set_alphas",
    "softmax_attention",
    "sparsify",
    "training",
    "unpatch_model",
    "unpatched_softmax",
]

_registration.register(
    {
        "transformers.configuration_utils": "hf_entmax.integration.config_hook",
        "transformers.modeling_utils": "hf_entmax.integration.hooks",
        "transformers.generation.utils": "hf_entmax.generation.generate_hook",
        "transformers.trainer": "hf_entmax.integration.trainer_hook",
        "peft.peft_model": "hf_entmax.integration.peft_hook",
    }
)


def __getattr__(name: str) -> Any:
    if name in (*_SUBMODULES, *_FORMER):
        return importlib.import_module(f"hf_entmax.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'hf_entmax' has no attribute {name!r}; it has {__all__}")
    module = _LAZY[name]
    if module.startswith(_NEEDS_TRANSFORMERS):
        _registration.ensure()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
