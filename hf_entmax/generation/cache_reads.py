"""What decoding with a sketch read of its cache, and what it proved to have weight zero."""

from __future__ import annotations

import collections
import dataclasses

import torch
from torch import Tensor

#: Steps whose counts are kept one by one; older ones remain in the sums.
STEPS_KEPT = 256


@dataclasses.dataclass(frozen=True)
class LayerCertificate:
    """The counts of one attention layer. A *pair* is one query and one key that its masks let it attend to.

    Attributes:
        name: ``"self 3"`` or ``"cross 3"``, counted from 0.
        bits: most bits per channel of a sketch, None where the layer has none.
        head_bits: of each head, None where its keys have no sketch.
        steps: decoding steps that read the sketch.
        dense_steps: why other steps read every key -> how many did.
        pairs: int64 ``[H]``, pairs of all steps.
        read: int64 ``[H]``, pairs whose key was read in full; all pairs of a dense step are.
        dense: int64 ``[H]``, pairs of the dense steps, and of all steps of a head whose keys have no sketch.
        nonzero: int64 ``[H]``, pairs of nonzero weight in all others.
        last_steps: int64 ``[n, 3, H]``, pairs, read and nonzero of the last ``n <= 256`` steps; nonzero is -1 where it is
            not counted: in dense steps and heads.
        sketch_bytes: memory of the sketch, without the room to grow.
        cache_bytes: of the keys and values held, likewise.
    """

    name: str
    bits: int | None
    head_bits: tuple[int | None, ...]
    steps: int
    dense_steps: dict[str, int]
    pairs: Tensor
    read: Tensor
    dense: Tensor
    nonzero: Tensor
    last_steps: Tensor
    sketch_bytes: int
    cache_bytes: int


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What a generation read of its cache, and what it proved: every key that was not read had weight exactly zero.

    Attributes:
        layers: one record per attention layer that the cache holds.
        others: layers that are read in full and not counted, by name -> why: the cache layer of Transformers that they keep, or
            a model that computes other keys from those that it stored.
        violations: keys that were not read and had weight after all. The bound excludes them; ``verify=True`` looks.
        verified_steps: layer steps that were compared with dense weights.
    """

    layers: tuple[LayerCertificate, ...]
    others: dict[str, str]
    violations: int
    verified_steps: int

    @property
    def keys_total(self) -> int:
        """Pairs of a query and a key that it may attend to, over all decoding steps, layers and heads."""
        return sum(int(layer.pairs.sum()) for layer in self.layers)

    @property
    def keys_read(self) -> int:
        """Pairs whose key was read in full."""
        return sum(int(layer.read.sum()) for layer in self.layers)

    @property
    def keys_zero(self) -> int:
        """Pairs whose weight was proved to be zero from the sketch alone: ``keys_total - keys_read``."""
        return self.keys_total - self.keys_read

    def rows(self) -> list[dict[str, str | int | float]]:
        """Make one row per layer and head, for tables and data frames."""
        return [
            {
                "layer": layer.name,
                "head": head,
                "bits": layer.head_bits[head] or 0,
                "steps": layer.steps + sum(layer.dense_steps.values()),
                "keys_total": int(layer.pairs[head]),
                "keys_read": int(layer.read[head]),
                "keys_zero": int(layer.pairs[head] - layer.read[head]),
                "keys_nonzero": int(layer.nonzero[head]),
            }
            for layer in self.layers
            for head in range(len(layer.pairs))
        ]

    def __str__(self) -> str:
        checked = f", {self.verified_steps} layer steps compared with dense weights" if self.verified_steps else ""
        lines = [
            f"{self.keys_total:,} keys looked at: {self.keys_read:,} read ({_share(self.keys_read, self.keys_total)}), "
            f"{self.keys_zero:,} proved zero ({_share(self.keys_zero, self.keys_total)}); "
            f"{self.violations} violations{checked}",
            f"{'layer':>9} {'bits':>4} {'steps':>6} {'read':>7} {'nonzero':>8}  heads read most and least; dense steps",
        ]
        for layer in self.layers:
            counted = int((layer.pairs - layer.dense).sum())
            shares = layer.read.double() / layer.pairs.clamp(min=1)
            spread = f"{100 * shares.max():.2f} % .. {100 * shares.min():.2f} %" if len(shares) else ""
            dense = "; ".join(f"{steps} dense ({why})" for why, steps in layer.dense_steps.items())
            lines.append(
                f"{layer.name:>9} {layer.bits or '-':>4} {layer.steps + sum(layer.dense_steps.values()):>6} "
                f"{_share(int(layer.read.sum()), int(layer.pairs.sum())):>7} {_share(int(layer.nonzero.sum()), counted):>8}"
                f"  {spread}{'; ' if dense else ''}{dense}"
            )
        lines += [f"{name:>9}  read in full: {why}" for name, why in self.others.items()]
        return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


class Tally:
    """The running counts of one layer; a few numbers per head, whatever the number of steps."""

    def __init__(self) -> None:
        self.steps, self.violations, self.verified = 0, 0, 0
        self.dense_steps: dict[str, int] = {}
        self.counted: Tensor | int = 0  # [3, H]: pairs, read and nonzero of the steps that read the sketch
        self.dense: Tensor | int = 0  # [H]
        self.last: collections.deque[Tensor] = collections.deque(maxlen=STEPS_KEPT)
        self._unsummed: list[Tensor] = []

    def add(self, step: Tensor) -> None:
        """Count a step that read a sketch: pairs, read and nonzero, int64 ``[3, H]``; nonzero is -1 for dense heads."""
        self.steps += 1
        self.last.append(step)
        self._unsummed.append(step)
        # Sums take several small operations, which every layer of every step would notice.
        if len(self._unsummed) == STEPS_KEPT:
            self._sum_up()

    def _sum_up(self) -> None:
        if self._unsummed:
            steps = torch.stack(self._unsummed)
            dense = steps[:, 2:] < 0
            self.counted = steps.masked_fill(dense, 0).sum(0) + self.counted
            self.dense = steps[:, 0].where(dense[:, 0], 0).sum(0) + self.dense
            self._unsummed.clear()

    def add_dense(self, why: str, pairs: Tensor) -> None:
        """Count a step that read every key, int64 ``[H]``."""
        self.dense_steps[why] = self.dense_steps.get(why, 0) + 1
        self.dense = pairs + self.dense
        self.last.append(torch.stack([pairs, pairs, torch.full_like(pairs, -1)]))

    def certificate(self, name: str, bits: list[int | None], sketch_bytes: int, cache_bytes: int) -> LayerCertificate:
        """Return the counts so far; ``bits`` are those of each key head."""
        self._sum_up()
        heads = self.last[-1].shape[1] if self.last else 0
        nothing = torch.zeros(3, heads, dtype=torch.int64)
        last = torch.stack([step.cpu() for step in self.last]) if self.last else nothing[None][:0]
        pairs, read, nonzero = (nothing + torch.as_tensor(self.counted).cpu()).unbind()
        dense = nothing[0] + torch.as_tensor(self.dense).cpu()
        return LayerCertificate(
            name,
            max(filter(None, bits), default=None),
            tuple(own for own in bits for _ in range(heads // len(bits))),
            self.steps,
            dict(self.dense_steps),
            pairs + dense,
            read + dense,
            dense,
            nonzero,
            last,
            sketch_bytes,
            cache_bytes,
        )
