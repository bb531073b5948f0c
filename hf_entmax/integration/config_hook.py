"""The one hook on configurations, apart from the others so that it needs no torch.

A patched configuration must always be written with ``"attn_implementation": "hf_entmax"``: Transformers knows no such
implementation unless hf_entmax is imported, so that loading a patched checkpoint without it raises instead of running
as a softmax.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

CONFIG_KEY = "entmax_config"
#: The name under which the attention function is registered. Transformers treats names with "flash", "sdpa", "flex" or
#: a slash in them specially, so it has none of these.
IMPLEMENTATION = "hf_entmax"


def install() -> None:
    """Hook ``PreTrainedConfig._remove_keys_not_serialized``.

    Raises:
        ImportError: if this version of Transformers lacks the method or has it with other parameters.
    """
    from transformers.configuration_utils import PreTrainedConfig

    if getattr(PreTrainedConfig, "_hf_entmax_hooked", False):
        return
    require(PreTrainedConfig, "_remove_keys_not_serialized", ["self", "d"])
    original = PreTrainedConfig._remove_keys_not_serialized

    @functools.wraps(original)
    def remove_keys_not_serialized(self: PreTrainedConfig, d: dict[str, Any]) -> None:
        original(self, d)
        if d.get(CONFIG_KEY):
            d["attn_implementation"] = IMPLEMENTATION
            return
        # Only sub-models are patched: the key of the whole configuration, read first, must name them one by one.
        nested = {
            k: v["attn_implementation"] for k, v in d.items() if isinstance(v, dict) and v.get("attn_implementation")
        }
        if nested:
            d["attn_implementation"] = nested

    PreTrainedConfig._remove_keys_not_serialized = remove_keys_not_serialized
    PreTrainedConfig._hf_entmax_hooked = True  # type: ignore[attr-defined]


def require(owner: type, name: str, parameters: list[str]) -> None:
    """Raise unless ``owner.name`` exists and its first parameters are these.

    Raises:
        ImportError: naming the method and the version of Transformers that is needed.
    """
    import transformers

    method = getattr(owner, name, None)
    found = list(inspect.signature(method).parameters) if method is not None else None
    if found is None or found[: len(parameters)] != parameters:
        raise ImportError(
            f"hf_entmax needs transformers>=5.23,<6: in version {transformers.__version__}, {owner.__name__}.{name} "
            f"{'does not exist' if found is None else f'has the parameters {found}'}, where {parameters} are expected. "
            'Install it with: pip install "transformers>=5.23,<6"'
        )
