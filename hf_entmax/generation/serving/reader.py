"""Sketches beside the engine's paged cache, and what every request read and proved with them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_entmax.generation.bits import BitChoice, Bits, of_run
from hf_entmax.generation.cache_reads import Certificate, LayerCertificate, Tally
from hf_entmax.generation.verification import verify
from hf_entmax.integration.paged import PagedCall
from hf_entmax.ops.exact import KeySketch
from hf_entmax.ops.exact.blocks import BlockTable
from hf_entmax.ops.exact.paged import paged_attention
from hf_entmax.ops.options import AttentionOptions

# Keys of a page of the sketch, at most; smaller where blocks are.
_PAGE = 32
# With fewer keys than this reading all of them takes no longer than the sketch.
SHORTEST = 1024
# What is counted of a request, by layer: pairs, read and nonzero of sparse heads, pairs of dense ones.
_COUNTS = 4


@dataclasses.dataclass(frozen=True)
class ServingPlan:
    """What a server was asked for, in ``cache_config`` of its generation configuration.

    Attributes:
        bits: of a sketch, as for `hf_entmax.generation.ExactSparseCache`; None reads every key.
        verify: compare every step with dense weights and raise where they differ; slow, for checks.
        shortest: keys from which on a sketch is read.
    """

    bits: Bits | None = "auto"
    verify: bool = False
    shortest: int = SHORTEST

    def __post_init__(self) -> None:
        if self.bits not in ("auto", None, 2, 4, 6, 8) or isinstance(self.bits, (bool, float)):
            raise ValueError(
                f'bits={self.bits!r} is not allowed: choose 2, 4, 6 or 8, "auto", or None to read every key.'
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The requests of a step that decode one token, for all layers of one kind.

    Attributes:
        names: of the requests.
        slots: where each is counted.
        blocks: where their keys lie.
        index: places of their queries in the row of all queries.
        sparse: which have a sketch, bool ``[B]``.
    """

    names: list[str]
    slots: np.ndarray
    blocks: BlockTable
    index: slice | Tensor
    sparse: np.ndarray

    @functools.cached_property
    def any_sparse(self) -> bool:
        """Whether one of them has a sketch."""
        return bool(self.sparse.any())

    @functools.cached_property
    def only_sparse(self) -> Tensor | None:
        """Which of them have a sketch, int64 ``[n]``; None for all."""
        return None if self.sparse.all() else torch.from_numpy(np.flatnonzero(self.sparse))

    @functools.cached_property
    def last_slot(self) -> int:
        """The largest of the slots."""
        return int(self.slots.max())

    @functools.cached_property
    def pages(self) -> np.ndarray:
        """The places of all their sketched pages."""
        page = page_of(self.blocks.size)
        tables, counts = self.blocks.tables.numpy(), self.blocks.sketched.numpy() // page
        per_block, number = self.blocks.size // page, np.arange(int(counts.max()))
        places = tables[:, number // per_block].astype(np.int64) * per_block + number % per_block
        return places[number < counts[:, None]]


class LayerReader:
    """Decoding of one attention layer over the paged cache.

    Args:
        name: for errors and certificates.
        allocator: of the engine, for layers of this kind.
        layer: number of the layer.
        plan: what was asked for.
    """

    def __init__(self, name: str, allocator: Any, layer: int, plan: ServingPlan) -> None:
        self.name, self.plan, self.layer, self._allocator = name, plan, layer, allocator
        self.tally, self.choice = Tally(), BitChoice(plan.bits or "auto")
        # First head, one past the last, bits -> the sketch of all blocks, and which of its pages are those of the keys there.
        self._sketches: dict[tuple[int, int, int], tuple[KeySketch, np.ndarray]] = {}
        self.book = np.zeros((0, _COUNTS, 0), np.int64)
        self.steps = np.zeros((0, 2), np.int64)  # of each request: those that read a sketch, and others

    def forget(self, pages: np.ndarray) -> None:
        """Note that keys of these pages are others now."""
        for _, fresh in self._sketches.values():
            fresh[pages] = False

    def attend(self, call: PagedCall, rows: Rows, query: Tensor, options: AttentionOptions) -> Tensor:
        """Compute the output ``[B, H, 1, D_v]`` for one query of each of several requests ``[B, H, 1, D]``, counted."""
        key, value = (held.transpose(0, 1)[None] for held in self._allocator._kv_token_views[self.layer])
        if not self.choice.bits:
            self.choice.start(call.alpha, key.shape[1])  # type: ignore[arg-type]
            if self.plan.bits is None:
                self.choice.bits = [None] * key.shape[1]
        outs, steps = [], []
        runs = self.choice.runs()
        self._sketches = {run: kept for run, kept in self._sketches.items() if run in runs}
        for run in runs:
            out, step = self._run(run, call, rows, query, key, value, options)
            outs.append(out)
            steps.append(step)
        step = steps[0] if len(steps) == 1 else torch.cat(steps, -1)
        total = self._count(rows, step)
        if rows.any_sparse and self.choice.automatic:
            looked_at = total[:2] if rows.only_sparse is None else step[:2, rows.only_sparse].sum(1)
            self.choice.saw(looked_at, 8 * key.element_size())
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _run(
        self,
        run: tuple[int, int, int | None],
        call: PagedCall,
        rows: Rows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Compute the output of neighbouring key heads of the same bits, and their counts ``[3, B, heads]``, nonzero -1 if all is read."""
        first, last, bits = run
        assert call.alpha is not None
        query, key, value, alpha, options = of_run(first, last, query, key, value, call.alpha, options)
        sketch = None
        if bits is not None and rows.any_sparse:
            sketch = self._sketched((first, last, bits), rows, key)
        out, counts = paged_attention(query, key, value, alpha, rows.blocks, sketch, options, call.backend)
        step = torch.stack(tuple(counts))
        if sketch is None:
            step[2] = -1
        elif self.plan.verify:
            for b, name in enumerate(rows.names):
                own, index = sketch.select(rows.blocks.pages(b, sketch.page_size)), rows.blocks.rows(b)
                step_of = query[b : b + 1], own, key[:, :, index], value[:, :, index], alpha, options, out[b : b + 1]
                verify(self.tally, f"Layer {self.name}, request {name}", *step_of, step[2, b])
        return out, step

    def _sketched(self, run: tuple[int, int, int], rows: Rows, key: Tensor) -> KeySketch:
        """Return the sketch of some key heads, with all pages that are going to be read."""
        first, last, bits = run
        blocks = rows.blocks
        page = page_of(blocks.size)
        if run not in self._sketches:
            pages = self._allocator.cache_tensor.shape[0] // self._allocator.tokens_per_block * (blocks.size // page)
            like = {"dtype": key.dtype, "device": key.device}
            # Memory that is asked for and not written to costs nothing yet.
            sketch = KeySketch.allocate(1, last - first, key.shape[3], pages * page, bits=bits, page_size=page, **like)
            self._sketches[run] = sketch, np.zeros(pages, bool)
        sketch, fresh = self._sketches[run]
        known = fresh[rows.pages]
        if not known.all():
            stale = np.unique(rows.pages[~known])
            for some in np.array_split(stale, -(-len(stale) // sketch.pages_at_once)):
                block, within = np.divmod(some, blocks.size // page)
                index = (block * blocks.stride + within * page)[:, None] + np.arange(page)
                keys = key[0].transpose(0, 1)[torch.from_numpy(index.ravel())]
                sketch.put(keys.transpose(0, 1)[None], torch.from_numpy(some))
            fresh[stale] = True
        return sketch

    def _count(self, rows: Rows, step: Tensor) -> Tensor:
        """Add the counts ``[3, B, H]`` of a step to those of the layer and of each request; return their sum ``[3, H]``."""
        total, numbers = step.sum(1), step.cpu().numpy().transpose(1, 0, 2)
        self._make_room(rows.last_slot, numbers.shape[2])
        # A head is read in full for all requests or for none.
        dense = numbers[0, 2] < 0
        whole, some = dense.all(), dense.any()
        self.steps[rows.slots, int(whole)] += 1
        self.book[rows.slots, :3] += np.where(dense, 0, numbers) if some else numbers
        if some:
            self.book[rows.slots, 3] += np.where(dense, numbers[:, 0], 0)
        if whole:
            why = (
                "every key asked for" if self.plan.bits is None else "few keys" if any(self.choice.bits) else "cheaper"
            )
            self.tally.add_dense(why, total[0])
        else:
            total[2].clamp_(min=-1)
            self.tally.add(total)
        return total

    def count_dense(self, why: str, slots: np.ndarray, pairs: np.ndarray, heads: int) -> None:
        """Count queries ``[B]`` for which all of their ``pairs`` were read by the dense kernels."""
        self._make_room(int(slots.max()), heads)
        self.book[slots, 3] += pairs[:, None]
        self.steps[slots, 1] += 1
        self.tally.add_dense(why, torch.full((heads,), int(pairs.sum())))

    def _make_room(self, slot: int, heads: int) -> None:
        if slot >= len(self.book) or self.book.shape[2] != heads:
            book, steps = np.zeros((2 * slot + 8, _COUNTS, heads), np.int64), np.zeros((2 * slot + 8, 2), np.int64)
            if self.book.shape[2] == heads:
                book[: len(self.book)], steps[: len(self.steps)] = self.book, self.steps
            self.book, self.steps = book, steps

    def clear(self, slot: int) -> None:
        """Forget what was counted of a request."""
        if slot < len(self.book):
            self.book[slot], self.steps[slot] = 0, 0

    def certificate(self, slot: int | None = None) -> LayerCertificate:
        """Return what the layer read and proved, for one request or for all."""
        if slot is None:
            held = sum(
                int(fresh.sum()) * sketch.nbytes // max(1, sketch.norm.shape[2])
                for sketch, fresh in self._sketches.values()
            )
            return self.tally.certificate(self.name, self._bits(), held, 0)
        heads = self.book.shape[2]
        found = self.book[slot] if slot < len(self.book) else np.zeros((_COUNTS, heads), np.int64)
        steps = self.steps[slot].tolist() if slot < len(self.steps) else [0, 0]
        counted, read, nonzero, dense = torch.from_numpy(found.copy()).unbind()
        bits = self._bits()
        return LayerCertificate(
            self.name,
            max(filter(None, bits), default=None),
            tuple(own for own in bits for _ in range(heads // len(bits))) if bits else (),
            steps[0],
            {"every key read": steps[1]} if steps[1] else {},
            counted + dense,
            read + dense,
            dense,
            nonzero,
            torch.zeros(0, 3, heads, dtype=torch.int64),
            0,
            0,
        )

    def _bits(self) -> list[int | None]:
        return self.choice.bits or [None]


class PagedReader:
    """All layers of a model over one paged cache.

    Args:
        cache: the engine's.
        plan: what was asked for.
    """

    def __init__(self, cache: Any, plan: ServingPlan) -> None:
        self.plan = plan
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self.layers = {
            layer: LayerReader(f"self {layer}", allocator, layer, plan)
            for layer, allocator in sorted(cache.layer_to_allocator.items())
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedReader:
        """Itself: the engine copies requests, which name their reader."""
        return self

    def slot(self, name: str) -> int:
        """Return where a request is counted."""
        if name not in self._slots:
            self._slots[name] = self._free.pop() if self._free else len(self._slots)
        return self._slots[name]

    def forget_blocks(self, allocator: Any, blocks: list[int]) -> None:
        """Note that the keys of whole blocks are others now."""
        per_block = allocator.tokens_per_page // page_of(allocator.tokens_per_page)
        self.forget(allocator, (np.asarray(blocks, np.int64)[:, None] * per_block + np.arange(per_block)).ravel())

    def forget(self, allocator: Any, pages: np.ndarray) -> None:
        """Note that the keys of these pages are others now, in all layers of an allocator."""
        for layer in allocator.layer_indices:
            self.layers[layer].forget(pages)

    def certificate(self, name: str | None = None) -> Certificate:
        """Return what was read and proved for one request, or for all that there were."""
        slot = None if name is None else self._slots.get(name, -1)
        layers = self.layers.values()
        found = tuple(layer.certificate(slot) for layer in layers) if slot is None or slot >= 0 else ()
        checked = [layer.tally for layer in layers] if slot is None else []
        return Certificate(found, {}, sum(t.violations for t in checked), sum(t.verified for t in checked))

    def finish(self, name: str) -> Certificate:
        """Return the certificate of a request that is over, and forget its counts."""
        found = self.certificate(name)
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)
            for layer in self.layers.values():
                layer.clear(slot)
        return found


def page_of(block: int) -> int:
    """Keys of a page of the sketch of blocks of so many keys."""
    return min(_PAGE, block)


def can_sketch(block: int) -> bool:
    """Tell whether blocks of so many keys are whole pages of a sketch, and found by shifts."""
    return block >= 16 and block & (block - 1) == 0
