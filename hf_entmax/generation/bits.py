"""How many bits the sketch of a layer has: from its alphas first, then from what the last steps had to read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hf_entmax.ops.exact import suggested_bits

Bits = Literal["auto", 2, 4, 6, 8]
# Below this alpha nearly every key has weight, and reading every key is cheaper than proving that.
_NEARLY_SOFTMAX = 1.02
# Steps whose counts decide whether the bits suffice.
_LOOK_AT = 8
# A key that is read out of order costs about this much more than one read in a row.
_OUT_OF_ORDER = 1.5
# Cost of a step, as a share of reading all keys in a row, above which another choice is tried.
_TOO_MUCH = 0.8


class BitChoice:
    """The bits of one layer's sketch, None where reading every key is cheaper.

    With given bits that is all. ``"auto"`` starts from the layer's alphas and takes more bits, in the end none, while
    the last steps cost nearly as much as reading every key in a row. It never goes back: alphas do not change.

    Args:
        bits: what the user asked for.
    """

    def __init__(self, bits: Bits) -> None:
        self.automatic = bits == "auto"
        self.bits: int | None = None if bits == "auto" else bits
        self._steps: list[Tensor] = []

    def start(self, alpha: float | Tensor, kv_heads: int) -> None:
        """Choose from the alphas of the heads; a key head is read in full if one of its query heads needs that."""
        if not self.automatic:
            return
        lowest = torch.as_tensor(alpha).reshape(-1)
        if lowest.numel() % kv_heads == 0:
            lowest = lowest.view(kv_heads, -1).amin(1)
        self.bits = suggested_bits(alpha) if bool((lowest >= _NEARLY_SOFTMAX).any()) else None

    def saw(self, step: Tensor, kv_heads: int, element_bits: int) -> None:
        """Look at a step: the keys it could have read and those it read, ``[2, H]``, and the bits of one number of them."""
        if not self.automatic or self.bits is None:
            return
        self._steps.append(step)
        if len(self._steps) < _LOOK_AT:
            return
        pairs, read = torch.stack(self._steps).sum(0)
        share, self._steps = (read / pairs.clamp(min=1)).view(kv_heads, -1).amax(1), []
        cost = self.bits / element_bits + float((_OUT_OF_ORDER * share).clamp(max=1.0).mean())
        if cost > _TOO_MUCH:
            self.bits = {2: 4, 4: 6, 6: 8}.get(self.bits)
