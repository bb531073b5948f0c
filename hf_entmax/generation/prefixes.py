"""What may follow a prefix, for searches that jump between prefixes: each is computed once, one token at a time."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from hf_entmax.generation.members import Member

#: An input, by its place in the batch, and the tokens that follow its prompt.
Node = tuple[int, tuple[int, ...]]


class PrefixCache:
    """The keys and values of every prefix that one model, prepared for a batch of inputs, has read.

    A prefix is its parent and one token, so that each adds the keys and values of one token to a table, and what a model
    needs to read the next one is looked up there: the rows of its ancestors. Cross-attention's stay as they are, one per
    input. Where a model has a cache of another kind (sliding windows, states, none), prefixes are read whole.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.name = member.cache_name
        self.root = member.options.pop(self.name, None)
        self.reads_whole = False
        if self.root is None or not member.options.get("use_cache"):
            self._read_whole()
        #: Where the tokens of a prefix stand in the tables, in order.
        self.places: dict[Node, list[int]] = {}
        #: One pair per layer: ``[capacity, H, D]``.
        self.tables: list[tuple[Tensor, Tensor]] = []
        self.used = 0

    def after(self, nodes: Sequence[Node]) -> Tensor:
        """Compute logits ``[n, V]`` after prefixes of one length whose parents were all read before."""
        rows, length = [row for row, _ in nodes], len(nodes[0][1])
        if self.reads_whole:
            return self.member.forward_prefixes([tokens for _, tokens in nodes], 1, rows)[:, -1]
        if not length:
            return self._read_prompts(nodes)
        cache = self._gathered(nodes)
        logits = self._forward(nodes, cache, first=False)
        new = [(layer.keys[:, :, -1], layer.values[:, :, -1]) for layer in _self_layers(cache)]
        self._append(nodes, new)
        return logits

    def _read_whole(self) -> None:
        self.reads_whole = True
        self.member.options["use_cache"] = False

    def _forward(self, nodes: Sequence[Node], cache: Any, first: bool) -> Tensor:
        """Compute logits after the last tokens, read with the cache of everything before them."""
        member, rows = self.member, [row for row, _ in nodes]
        tokens = torch.tensor([tokens for _, tokens in nodes], dtype=torch.long).view(len(nodes), -1)
        options = {**member.options_after(rows, tokens.shape[1]), self.name: cache}
        inputs = member.model.prepare_inputs_for_generation(
            member.with_prompts(tokens, rows),
            next_sequence_length=None if first else 1,
            is_first_iteration=first,
            **options,
        )
        return member.model(**inputs, return_dict=True).logits[:, -1]

    def _read_prompts(self, nodes: Sequence[Node]) -> Tensor:
        """Read all prompts together, once."""
        everything = [(row, ()) for row in range(self.member.input_ids.shape[0])]
        logits = self._forward(everything, self.root, first=True)
        layers = _self_layers(self.root)
        cross: list[Any] = self.root.cross_attention_cache.layers if isinstance(self.root, EncoderDecoderCache) else []
        if any(type(layer) is not DynamicLayer or not layer.is_initialized for layer in (*layers, *cross)):
            self._read_whole()
        else:
            self.tables = [
                tuple(part.new_empty(64, part.shape[1], part.shape[3]) for part in (layer.keys, layer.values))  # type: ignore[misc]
                for layer in layers
            ]
            self.places = {node: [] for node in everything}
        return logits[[row for row, _ in nodes]]

    def _gathered(self, nodes: Sequence[Node]) -> Any:
        """Gather a cache of everything before the last token of each prefix."""
        device = self.tables[0][0].device
        rows = torch.tensor([row for row, _ in nodes], device=device)
        before = torch.tensor([self.places[row, tokens[:-1]] for row, tokens in nodes], dtype=torch.long, device=device)

        def joined(prompt: Tensor, table: Tensor) -> Tensor:
            own = table[before].transpose(1, 2)
            return torch.cat((prompt.index_select(0, rows), own), dim=2)

        def changed(thing: Any, **attributes: Any) -> Any:
            new = copy.copy(thing)
            for name, value in attributes.items():
                setattr(new, name, value)
            return new

        layers = [
            changed(layer, keys=joined(layer.keys, keys), values=joined(layer.values, values))
            for layer, (keys, values) in zip(_self_layers(self.root), self.tables, strict=True)
        ]
        if not isinstance(self.root, EncoderDecoderCache):
            return changed(self.root, layers=layers)
        own, other = self.root.self_attention_cache, self.root.cross_attention_cache
        read: list[Any] = other.layers
        cross = [changed(c, keys=c.keys.index_select(0, rows), values=c.values.index_select(0, rows)) for c in read]
        return changed(
            self.root,
            self_attention_cache=changed(own, layers=layers),
            cross_attention_cache=changed(other, layers=cross),
            is_updated=dict(self.root.is_updated),
        )

    def _append(self, nodes: Sequence[Node], new: list[tuple[Tensor, Tensor]]) -> None:
        end = self.used + len(nodes)
        if end > len(self.tables[0][0]):
            grown = []
            for pair in self.tables:
                larger = [part.new_empty(2 * end, *part.shape[1:]) for part in pair]
                for part, old in zip(larger, pair, strict=True):
                    part[: self.used] = old[: self.used]
                grown.append(tuple(larger))
            self.tables = grown
        for pair, parts in zip(self.tables, new, strict=True):
            for table, part in zip(pair, parts, strict=True):
                table[self.used : end] = part
        for place, (row, tokens) in enumerate(nodes, self.used):
            self.places[row, tokens] = [*self.places[row, tokens[:-1]], place]
        self.used = end


def _self_layers(cache: Any) -> list[Any]:
    """Return the layers of a decoder's attention to itself."""
    return cache.self_attention_cache.layers if isinstance(cache, EncoderDecoderCache) else cache.layers


def largest_group(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes of the most frequent length (the shortest of several): one pass reads them."""
    groups: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        groups[len(node[1])].append(node)
    return groups[max(groups, key=lambda length: (len(groups[length]), -length))]
