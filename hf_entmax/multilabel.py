"""The former name of `hf_entmax.losses.multilabel`; goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from hf_entmax.losses import multilabel

__all__ = multilabel.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    value = getattr(multilabel, name)
    if not name.startswith("__"):
        warnings.warn(
            f"hf_entmax.multilabel has moved: import {name} from hf_entmax.losses.multilabel.",
            FutureWarning,
            stacklevel=2,
        )
    return value
