"""One layer of `ExactSparseCache`: a sketch of the keys beside them, and attention that reads what it must."""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from hf_entmax.generation.bits import BitChoice, Bits, of_run
from hf_entmax.generation.cache_reads import LayerCertificate, Tally
from hf_entmax.generation.growing_layer import GrowingLayer
from hf_entmax.generation.verification import verify
from hf_entmax.generation.weights_state import version
from hf_entmax.integration.interface import HEADS_MODULE
from hf_entmax.ops.attention import attend
from hf_entmax.ops.backends import Backend
from hf_entmax.ops.exact import KeySketch
from hf_entmax.ops.exact.attention import exact_attend
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import traced
from hf_entmax.ops.sparse_rows import SparseRows

#: More queries than this in one step are a prompt: the training kernel reads a key once for all of them.
MOST_QUERIES = 8
# With fewer keys than this the dense kernel takes no longer than the sketch ("auto" only).
_SHORTEST = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a cache was asked for; see `hf_entmax.generation.ExactSparseCache`."""

    bits: Bits
    page_size: int
    max_cache_len: int | None
    verify: bool


class ExactSparseLayer(GrowingLayer):
    """Keys and values of one attention layer, with a sketch of the keys, made when the first token is decoded.

    The keys that `update` returns name this layer, which is how the attention function finds `attend`. A model that
    changes them on the way loses the name, and its attention reads every key.

    Args:
        name: for errors and the certificate.
        plan: what the cache was asked for.
        sliding_window: keys that a query of this layer sees at most, None for all; only these are kept.
    """

    def __init__(self, name: str, plan: Plan, sliding_window: int | None = None) -> None:
        self.plan = plan
        super().__init__(name, plan.max_cache_len, sliding_window)

    def reset(self) -> None:
        """Forget all keys, counts and who filled the cache."""
        super().reset()
        self._sketches: dict[tuple[int, int, int], KeySketch] = {}
        # How often the buffer of keys had been written to when this layer last wrote to it.
        self._written: int | None = None
        self._attended = 0
        self._readers: dict[Any, tuple[str, Tensor]] = {}
        self.tally, self.choice = Tally(), BitChoice(self.plan.bits)

    def _restarted(self) -> None:
        self._sketches = {}

    def _heed_changes(self) -> None:
        """Forget sketches of keys that somebody else has written over since."""
        if self._key is not None and self._written != version(self._key):
            self._sketches = {}

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Do as `GrowingLayer`."""
        if torch.compiler.is_compiling():
            return super().update(*args, **kwargs)
        self._heed_changes()
        handed_out = super().update(*args, **kwargs)
        self._written = version(self._key)  # type: ignore[arg-type]
        return handed_out

    def crop(self, tokens_to_remove: int) -> None:
        """Do as `GrowingLayer`; a page that is cut is sketched again once it is full."""
        super().crop(tokens_to_remove)
        self._attended = min(self._attended, self._total)
        for sketch in self._sketches.values():
            sketch.crop(self._end)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do as `GrowingLayer`, to the sketch too."""
        self._heed_changes()
        super().reorder_cache(beam_idx)
        self._written = None if self._key is None else version(self._key)
        for sketch in self._sketches.values():
            sketch.reorder(beam_idx)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: float | Tensor,
        options: AttentionOptions,
        backend: Backend,
    ) -> tuple[Tensor, Tensor | SparseRows | None]:
        """Run `hf_entmax.ops.attention.attend` over keys of this layer, reading only those that may have weight.

        ``module`` asks, through which the cache must have been filled; ``key`` and ``value`` are as `update` returned them.

        Raises:
            ValueError: if the cache was filled by another model, with another alpha or without the plugin, or if the
                module is in training mode.
        """
        self._admit(module, alpha)
        prompt = query.shape[2] > MOST_QUERIES
        why = None if prompt else self._why_dense(key, alpha, options)
        if prompt or why is not None:
            if why is not None and not traced():
                self.tally.add_dense(why, _count_pairs(query, key, options))
            return attend(query, key, value, alpha, options, backend)
        key, value = self._key[:, :, : self._end], self._value[:, :, : self._end]  # type: ignore[index]
        options = _shifted(options, self._first, key)
        self._heed_changes()
        runs = self.choice.runs()
        self._sketches = {run: sketch for run, sketch in self._sketches.items() if run in runs}
        parts = [self._attend_part(run, query, key, value, alpha, options, backend) for run in runs]
        step = torch.cat([step for _, step in parts], -1)
        self.tally.add(step)
        self.choice.saw(step[:2], 8 * key.element_size())
        return (parts[0][0] if len(parts) == 1 else torch.cat([out for out, _ in parts], 1)), None

    def _attend_part(
        self,
        run: tuple[int, int, int | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: float | Tensor,
        options: AttentionOptions,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        """Compute the output of adjacent key heads with equal bits, and their counts ``[3, heads]``; nonzero is -1 if unknown."""
        first, last, bits = run
        query, key, value, alpha, options = of_run(first, last, query, key, value, alpha, options)
        if bits is None:
            pairs = _count_pairs(query, key, options)
            out, _ = attend(query, key, value, alpha, options, backend)
            return out, torch.stack([pairs, pairs, torch.full_like(pairs, -1)])
        sketch = self._sketched(first, last, bits)
        out, counts = exact_attend(query, sketch, key, value, alpha, options, backend)
        step = torch.stack(counts).sum(1)
        if self.plan.verify:
            verify(self.tally, f"Layer {self.name}", query, sketch, key, value, alpha, options, out, step[2])
        return out, step

    def _admit(self, module: nn.Module, alpha: float | Tensor) -> None:
        if module.training:
            raise ValueError(
                f"ExactSparseCache decodes without dropout, but {type(module).__name__} is in training mode: call model.eval()."
            )
        if self._before > self._attended:
            raise ValueError(
                f"Layer {self.name} of ExactSparseCache holds {self._before - self._attended} keys that were not computed "
                "with this model's entmax attention: it was filled without the plugin. Make a new cache and let the "
                "patched model read the prompt, or call cache.reset()."
            )
        self._attended = self._total
        reader, own = getattr(module, "layer_idx", None), _identity(module)
        alpha = torch.as_tensor(alpha).detach()
        if reader not in self._readers:
            self._readers[reader] = (own, alpha.clone())
            self.choice.start(alpha, self._key.shape[1])  # type: ignore[union-attr]
            return
        other, before = self._readers[reader]
        if own != other:
            raise ValueError(
                f"Layer {self.name} of ExactSparseCache was filled by another model than the one that reads it now: make one "
                "cache for each model, or call cache.reset()."
            )
        if not torch.equal(alpha, before):
            raise ValueError(
                f"alpha changed while an ExactSparseCache was in use: layer {self.name} was filled with {_told(before)} and is "
                f"read with {_told(alpha)}, so that its keys are not those of this model. Make a new cache, or call "
                "cache.reset()."
            )

    def _why_dense(self, key: Tensor, alpha: float | Tensor, options: AttentionOptions) -> str | None:
        """Say why every key is to be read, or return None."""
        if options.need_weights:
            return "weights asked for"
        if options.dropout:
            return "dropout"
        if torch.compiler.is_compiling() or traced():
            return "compiled"
        if not self.holds(key):
            return "keys are not the buffer's"
        if bool(torch.as_tensor(alpha == 1).all()):
            return "softmax"
        if self._end < (_SHORTEST if self.choice.automatic else self.plan.page_size):
            return "few keys"
        return None if any(self.choice.bits) else "cheaper"

    def _sketched(self, first: int, last: int, bits: int) -> KeySketch:
        """Sketch all whole pages of some key heads."""
        key: Tensor = self._key[:, first:last]  # type: ignore[index]
        run = (first, last, bits)
        if run not in self._sketches:
            batch, heads, capacity, width = key.shape
            like = {"dtype": key.dtype, "device": key.device}
            sizes = {"bits": bits, "page_size": self.plan.page_size}
            self._sketches[run] = KeySketch.allocate(batch, heads, width, capacity, **sizes, **like)
        self._sketches[run].extend(key, self._end)
        return self._sketches[run]

    @property
    def is_asked(self) -> bool:
        """Whether attention comes to this layer for its keys, as far as one can tell."""
        return bool(self._readers) or not self._total

    def certificate(self) -> LayerCertificate:
        """Report what this layer read and proved."""
        held = 0
        if self._key is not None and self._value is not None:
            held = sum(t[:, :, : self._end].numel() * t.element_size() for t in (self._key, self._value))
        bits: list[int | None] = [None] * len(self.choice.bits)
        for first, last, own in self._sketches:
            bits[first:last] = [own] * (last - first)
        sizes = [sketch.nbytes * sketch.pages // max(1, sketch.norm.shape[2]) for sketch in self._sketches.values()]
        return self.tally.certificate(self.name, bits, sum(sizes), held)


def _count_pairs(query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
    """Count, int64 ``[H]``, the pairs of a query and a key that it may attend to, over the batch."""
    return options.visible_keys(query.shape[2], key.shape[2], query.device).expand(query.shape[:3]).sum((0, 2))


def _shifted(options: AttentionOptions, more: int, key: Tensor) -> AttentionOptions:
    """Shift the options by ``more`` keys in front that no query may see: they left the window but are still in the buffer."""
    if not more:
        return options
    padding = options.key_padding_mask
    if padding is None:
        padding = torch.ones(key.shape[0], key.shape[2] - more, dtype=torch.bool, device=key.device)
    # One entry along the keys goes for all of them: hidden keys may have that of the only visible one.
    terms = {
        name: term if term.shape[-1] == 1 else nn.functional.pad(term, (more, 0))
        for name, term in options.tensors().items()
        if name != "key_padding_mask"
    }
    return dataclasses.replace(options, key_padding_mask=nn.functional.pad(padding, (more, 0)), **terms)


_identities: weakref.WeakKeyDictionary[nn.Module, tuple[list[nn.Parameter], list[int], str]] = (
    weakref.WeakKeyDictionary()
)


def _identity(module: nn.Module) -> str:
    """Hash a few numbers of a module's weights: equal in a copy and in another process, different for other weights."""
    parameters, versions, digest = _identities.get(module, ([], [], ""))
    # Weights that were written to are looked at anew.
    if not digest or versions != [version(p) for p in parameters]:
        own = [(name, p) for name, p in module.named_parameters() if HEADS_MODULE not in name]
        parts: list[Any] = [type(module).__qualname__, getattr(module, "layer_idx", None)]
        for name, parameter in own:
            local = getattr(parameter, "to_local", lambda parameter=parameter: parameter)().detach()
            # Offloaded weights are elsewhere while the module does not run.
            start = [] if local.is_meta else local.flatten()[:4].tolist()
            parts.append((name, tuple(local.shape), start))
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        _identities[module] = [p for _, p in own], [version(p) for _, p in own], digest
    return digest


def _told(alpha: Tensor) -> str:
    return f"alpha={[round(a, 6) for a in alpha.reshape(-1).tolist()]}"
