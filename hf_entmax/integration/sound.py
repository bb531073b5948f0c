"""What a speech model makes of time."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def frame_seconds(model: Any, extractor: Any) -> float:
    """Return the seconds from one position of a speech encoder's output to the next.

    Args:
        model: a speech model that writes.
        extractor: its feature extractor.
    """
    strides = [m.stride[0] for m in model.get_encoder().modules() if isinstance(m, nn.Conv1d)]
    return getattr(extractor, "hop_length", 1) * math.prod(strides) / extractor.sampling_rate
