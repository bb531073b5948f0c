"""Attention for one forward pass of the engine: which request has which queries, and where its keys lie."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_entmax.generation.serving.reader import PagedReader, Rows, can_sketch, page_of
from hf_entmax.integration.paged import PagedCall
from hf_entmax.ops.backends import available_backends
from hf_entmax.ops.exact.blocks import BlockTable
from hf_entmax.ops.options import AttentionOptions


@dataclasses.dataclass(frozen=True)
class Request:
    """The part of one request in a step.

    Attributes:
        name: its id in the engine.
        first: place of its first query in the row of all queries.
        queries: how many it has.
        past: how many of its tokens are in the cache already.
    """

    name: str
    first: int
    queries: int
    past: int

    @property
    def length(self) -> int:
        """Tokens of the request, those of this step included."""
        return self.past + self.queries

    @property
    def span(self) -> slice:
        """Its queries in the row of all."""
        return slice(self.first, self.first + self.queries)


class PagedStep:
    """One forward pass over the tokens of several requests.

    Every request is attended to by itself, over keys that are read through its own table of blocks: whatever else lies in the
    cache, of other requests or of nobody, is not looked at.

    Args:
        cache: the engine's paged cache.
        reader: what goes with it.
        batch: its requests in the order of their queries, ``FutureRequestState`` each.
        write_index: of each allocator, where the new keys go, int64 ``[T_q]``.
    """

    def __init__(self, cache: Any, reader: PagedReader, batch: Sequence[Any], write_index: Sequence[Tensor]) -> None:
        self.cache, self.reader, self._write_index = cache, reader, write_index
        counts = [future.query_length for future in batch]
        firsts = itertools.accumulate(counts, initial=0)
        self.requests = [
            # The engine has moved the position on to the end of this step.
            Request(future.state.request_id, first, count, future.state.position_offset - count)
            for future, first, count in zip(batch, firsts, counts, strict=False)
        ]
        self._visible: dict[int | None, Tensor] = {}
        self._rows: dict[int, Rows | None] = {}
        self._begun: set[int] = set()

    def visible_keys(self, module: nn.Module) -> Tensor:
        """Count the keys that each query of a module's layer may attend to, int64 ``[1, 1, T_q]``."""
        window = window_of(self.cache.layer_to_allocator[module.layer_idx])
        if window not in self._visible:
            counts = np.concatenate([np.arange(r.past + 1, r.length + 1) for r in self.requests])
            counts = counts if window is None else np.minimum(counts, window)
            self._visible[window] = torch.from_numpy(counts).to(self.cache.device)[None, None]
        return self._visible[window]

    def attend(self, call: PagedCall, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `hf_entmax.integration.paged.Step`."""
        layer: int = call.module.layer_idx  # type: ignore[assignment]
        allocator = self.cache.layer_to_allocator[layer]
        if value.shape[-1] != key.shape[-1]:
            raise NotImplementedError(
                f"{type(call.module).__name__} has keys of width {key.shape[-1]} and values of width {value.shape[-1]}: the "
                "engine's cache holds one width. Use model.generate with a padded batch."
            )
        window = window_of(allocator)
        # What slides out of a window is overwritten by what is stored now.
        before = {} if window is None else {r.name: self._ring(allocator, layer, r) for r in self.requests if r.past}
        nothing = self._write_index[allocator.index][:0]
        new = (key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1))
        allocator.update(*new, layer, nothing, self._write_index[allocator.index])
        if allocator.index not in self._begun:
            self._begun.add(allocator.index)
            self._note_writes(allocator)
        out = value.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        own = dataclasses.replace(options, is_causal=True, sliding_window=window)
        rows = self._decoding(allocator, call)
        if rows is not None:
            queries = query[0].transpose(0, 1)[rows.index][:, :, None]
            out[0, rows.index] = self.reader.layers[layer].attend(call, rows, queries, options)[:, :, 0]
        for request in self.requests:
            if rows is not None and request.queries == 1:
                continue
            at = request.span
            keys, values = key[:, :, at], value[:, :, at]
            if window is not None and request.past:
                past = before[request.name]
                keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
            elif request.past:
                keys, values = self._blocks(allocator, layer, request)
            out[:, at] = call.attend(query[:, :, at], keys, values, own).transpose(1, 2)
        if rows is None:
            self._count_dense(call, layer, query.shape[1], window)
        return out

    def _decoding(self, allocator: Any, call: PagedCall) -> Rows | None:
        """Return the requests with one query, where the paged kernel can take them."""
        if allocator.index not in self._rows:
            self._rows[allocator.index] = self._find_rows(allocator)
        rows = self._rows[allocator.index]
        softmax = call.backend == "torch"
        return None if rows is None or call.alpha is None or softmax or not paged_kernel(call.backend) else rows

    def _find_rows(self, allocator: Any) -> Rows | None:
        size = allocator.tokens_per_page
        single = [request for request in self.requests if request.queries == 1]
        if not single or window_of(allocator) is not None or not can_sketch(size) or self.cache.device.type != "cpu":
            return None
        tables = [allocator.block_table[request.name] for request in single]
        table = np.zeros((len(single), max(map(len, tables))), np.int32)
        for row, own in zip(table, tables, strict=True):
            row[: len(own)] = own
        lengths = np.array([request.length for request in single], np.int32)
        page = page_of(size)
        sketched = np.where(lengths >= self.reader.plan.shortest, lengths // page * page, 0).astype(np.int32)
        places = [request.first for request in single]
        together = places[-1] - places[0] == len(places) - 1
        table, lengths, sketched = (torch.from_numpy(numbers) for numbers in (table, lengths, sketched))
        blocks = BlockTable(table, lengths, sketched, size, allocator.block_physical_stride)
        return Rows(
            [request.name for request in single],
            np.array([self.reader.slot(request.name) for request in single]),
            blocks,
            slice(places[0], places[-1] + 1) if together else torch.tensor(places),
            sketched.numpy() > 0,
        )

    def _note_writes(self, allocator: Any) -> None:
        """Say which pages of the cache hold new keys."""
        size = allocator.tokens_per_page
        if window_of(allocator) is not None or not can_sketch(size):
            return
        page = page_of(size)
        for request in self.requests:
            number = np.arange(request.past // page, -(-request.length // page))
            table = np.asarray(allocator.block_table[request.name])
            per_block = size // page
            self.reader.forget(allocator, table[number // per_block] * per_block + number % per_block)

    def _count_dense(self, call: PagedCall, layer: int, heads: int, window: int | None) -> None:
        single = [request for request in self.requests if request.queries == 1]
        if single:
            why = "sliding window" if window else "no kernel that reads blocks" if call.alpha is not None else "mapping"
            slots = np.array([self.reader.slot(request.name) for request in single])
            lengths = np.array([min(request.length, window or request.length) for request in single], np.int64)
            self.reader.layers[layer].count_dense(why, slots, lengths, heads)

    def _blocks(self, allocator: Any, layer: int, request: Request) -> tuple[Tensor, Tensor]:
        """Gather all keys and values of a request ``[1, H_kv, T, D]``."""
        size = allocator.tokens_per_page
        table = allocator.block_table[request.name][: -(-request.length // size)]
        pages = torch.tensor(table, device=self.cache.device) * page_stride(allocator)
        return tuple(_rows(held[pages].flatten(0, 1)[: request.length]) for held in allocator._kv_page_views[layer])  # type: ignore[return-value]

    def _ring(self, allocator: Any, layer: int, request: Request) -> tuple[Tensor, Tensor]:
        """Gather those of a window that the queries of this step may see, before the new ones are stored."""
        window = allocator.sliding_window
        slots = np.arange(max(0, request.past - window + 1), request.past) % window
        table = np.asarray(allocator.block_table[request.name])
        page, offset = np.divmod(slots, allocator.tokens_per_page)
        index = torch.from_numpy(table[page] * allocator.block_physical_stride + offset).to(self.cache.device)
        return tuple(_rows(held[index]) for held in allocator._kv_token_views[layer])  # type: ignore[return-value]


@functools.cache
def paged_kernel(backend: str) -> bool:
    """Tell whether a kernel that reads keys in blocks runs here."""
    return backend in ("auto", "numba") and available_backends()["numba"].startswith("available")


def window_of(allocator: Any) -> int | None:
    """Return the window of an allocator's layers, or None."""
    return getattr(allocator, "sliding_window", None)


def page_stride(allocator: Any) -> int:
    """Pages of one layer from one block to the next: keys and values of all layers lie between."""
    return allocator.block_physical_stride // allocator.tokens_per_page


def _rows(tokens: Tensor) -> Tensor:
    """View ``[T, H_kv, D]`` as ``[1, H_kv, T, D]``."""
    return tokens.transpose(0, 1)[None]
