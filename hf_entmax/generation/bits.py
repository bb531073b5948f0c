"""How many bits the sketch of each key head has: from its alphas first, then from what the last steps had to read."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import torch
from torch import Tensor

from hf_entmax.ops.exact import suggested_bits
from hf_entmax.ops.options import AttentionOptions

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
    """The bits of the sketch of each key head of a layer, None where reading every key is cheaper.

    With bits that the user gave that is all. ``"auto"`` starts from the alphas of the query heads that share a key head, and takes more
    bits, in the end none, while the last steps cost nearly as much as reading every key in a row. It never goes back:
    alphas do not change.
    """

    def __init__(self, bits: Bits) -> None:
        self._given = bits
        self.bits: list[int | None] = []
        self._steps: list[Tensor] = []

    @property
    def automatic(self) -> bool:
        """Whether the bits are chosen here."""
        return self._given == "auto"

    def start(self, alpha: float | Tensor, kv_heads: int) -> None:
        """Choose from the alphas of the heads; a key head is read in full if one of its query heads needs that."""
        if self._given != "auto":
            self.bits = [int(self._given)] * kv_heads
            return
        alphas = torch.as_tensor(alpha).detach().reshape(-1).cpu()
        alphas = alphas.expand(kv_heads) if alphas.numel() == 1 else alphas
        self.bits = [
            suggested_bits(own) if float(own.min()) >= _NEARLY_SOFTMAX else None for own in alphas.view(kv_heads, -1)
        ]

    def runs(self) -> list[tuple[int, int, int | None]]:
        """List runs of neighbouring key heads of the same bits: the first, one past the last, and the bits."""
        ends = [0, *itertools.accumulate(len(list(same)) for _, same in itertools.groupby(self.bits))]
        return [(first, last, self.bits[first]) for first, last in itertools.pairwise(ends)]

    def saw(self, step: Tensor, element_bits: int) -> None:
        """Look at a step: the keys it could have read and those it read, ``[2, H]``, and the bits of one number of them."""
        if not self.automatic:
            return
        self._steps.append(step)
        if len(self._steps) < _LOOK_AT:
            return
        pairs, read = torch.stack(self._steps).sum(0)
        shares, self._steps = (read / pairs.clamp(min=1)).view(len(self.bits), -1).amax(1).tolist(), []
        for head, (bits, share) in enumerate(zip(self.bits, shares, strict=True)):
            if bits is not None and bits / element_bits + min(_OUT_OF_ORDER * share, 1.0) > _TOO_MUCH:
                self.bits[head] = {2: 4, 4: 6, 6: 8}.get(bits)


def of_run(
    first: int, last: int, query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, float | Tensor, AttentionOptions]:
    """Return of the arguments of attention what belongs to the key heads of a run, and to the query heads that share them."""
    if (first, last) == (0, key.shape[1]):
        return query, key, value, alpha, options
    group = query.shape[1] // key.shape[1]
    heads = slice(first * group, last * group)
    by_head = {n: t for n, t in options.tensors().items() if n != "key_padding_mask" and t.dim() > 2}
    by_head = {name: term[..., heads, :, :] for name, term in by_head.items() if term.shape[-3] > 1}
    options = dataclasses.replace(options, **by_head, sink=None if options.sink is None else options.sink[heads])
    alpha = alpha[heads] if isinstance(alpha, Tensor) and alpha.numel() > 1 else alpha
    return query[:, heads], key[:, first:last], value[:, first:last], alpha, options
