"""Look at one head on a sentence of one's own, and run a model without some heads: the steps after the report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_entmax.analysis.collecting.examples import Token, run_sentence
from hf_entmax.analysis.reading.words import table_or_note
from hf_entmax.integration.discovery import AttentionSite, attention_sites
from hf_entmax.integration.observe import AttentionCall, observe_attention

if TYPE_CHECKING:
    import networkx
    import pandas
    from matplotlib.figure import Figure

Head = tuple[int, int] | tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class HeadView:
    """The attention of one head on one sentence.

    Attributes:
        site: ``"encoder_self"``, ``"cross"`` or ``"decoder_self"``.
        layer: from 0.
        head: from 0.
        weights: float32 ``[T_q, T_k]``; rows sum to 1.
        queries: tokens of the rows.
        keys: tokens of the columns.
    """

    site: str
    layer: int
    head: int
    weights: Tensor
    queries: list[Token]
    keys: list[Token]

    @property
    def density(self) -> float:
        """Share of the pairs that one could attend to, and does: of those not after the query in a causal head."""
        return int((self.weights > 0).sum()) / max(1, int(self._possible.sum()))

    @property
    def fires(self) -> list[int]:
        """Positions of the queries that put any weight beside the first key and themselves.

        Half of the heads of a language model rest on the first token. With exact zeros one can say when they do not.
        """
        return self._elsewhere.gt(0).any(1).nonzero().flatten().tolist()

    @property
    def frame(self) -> pandas.DataFrame:
        """A row for each weight that is not zero: positions, tokens and weight, strongest first.

        Raises:
            ImportError: if pandas is not installed.
        """
        return self._frame(self.weights)

    @property
    def elsewhere(self) -> pandas.DataFrame:
        """The rows of `frame` whose key is neither the first one nor the query itself.

        That is what a resting head does when it fires, and which tokens wake it.

        Raises:
            ImportError: if pandas is not installed.
        """
        return self._frame(self._elsewhere)

    def graph(self) -> networkx.DiGraph:
        """Return a directed graph from queries to the keys that they attend to.

        Nodes are ``("query", position)`` and ``("key", position)`` with their token as ``text``; in self-attention both are one node,
        its position. Edges have a ``weight``.

        Raises:
            ImportError: if NetworkX is not installed.
        """
        graph = _needed("networkx").DiGraph()
        sides = (("query", self.queries), ("key", self.keys))
        name = (lambda side, place: (side, place)) if self.site == "cross" else (lambda side, place: place)
        for side, tokens in sides:
            graph.add_nodes_from((name(side, place), {"text": token.text}) for place, token in enumerate(tokens))
        for row, column in self.weights.nonzero().tolist():
            graph.add_edge(name("query", row), name("key", column), weight=float(self.weights[row, column]))
        return graph

    def figure(self) -> Figure:
        """Draw the weights as a map in which every one that is not zero is outlined; needs matplotlib."""
        from hf_entmax.analysis import plots

        queries, keys = ([token.text for token in side] for side in (self.queries, self.keys))
        return plots.attention_map(
            self.weights, queries, keys, f"{self.site.replace('_', ' ')} {self.layer}.{self.head}"
        )

    @property
    def _elsewhere(self) -> Tensor:
        """Return the weights beside the first key and the queries themselves, ``[T_q, T_k]``."""
        elsewhere = self.weights.clone()
        elsewhere[:, 0] = 0
        if self.site != "cross":
            elsewhere.fill_diagonal_(0)
        return elsewhere

    def _frame(self, weights: Tensor) -> pandas.DataFrame:
        rows, columns = weights.nonzero(as_tuple=True)
        found = {
            "query_position": rows.tolist(),
            "query": [self.queries[row].text for row in rows.tolist()],
            "key_position": columns.tolist(),
            "key": [self.keys[column].text for column in columns.tolist()],
            "weight": weights[rows, columns].tolist(),
        }
        frame = _needed("pandas").DataFrame(found).sort_values("weight", ascending=False, kind="stable")
        return frame.reset_index(drop=True)

    @property
    def _possible(self) -> Tensor:
        """Mark the pairs that may have weight, bool ``[T_q, T_k]``."""
        every = torch.ones_like(self.weights, dtype=torch.bool)
        return every.tril() if self.site == "decoder_self" else every


def head(
    model: Any,
    layer: int,
    head: int,
    data: str | Mapping[str, Any],
    *,
    tokenizer: Any = None,
    site: str | None = None,
) -> HeadView:
    """Look at one head on one sentence.

    The attention of no other layer is kept.

    Args:
        model: any Transformers model whose attention goes through the attention interface, patched or not.
        layer: of the head, from 0.
        head: from 0.
        data: a text, or for an encoder-decoder a batch of one row with ``labels`` or ``decoder_input_ids``.
        tokenizer: makes a batch of the text and names its tokens; by default that of the folder or Hub id that the model came
            from.
        site: needed where a model has several: ``"encoder_self"``, ``"cross"`` or ``"decoder_self"``.

    Raises:
        ValueError: if there is no such head, the batch has more than one row, or no tokenizer lies beside the model.

    Examples:
        >>> view = head(model, 3, 1, "The cat sat.")  # doctest: +SKIP
        >>> view.frame.head(), view.fires  # doctest: +SKIP
    """
    tokenizer = _tokenizer_of(model) if tokenizer is None else tokenizer
    chosen = _site(model, layer, head, site)
    batch = dict(tokenizer(data, return_tensors="pt")) if isinstance(data, str) else dict(data)
    rows = {int(value.shape[0]) for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    if rows != {1}:
        raise ValueError(f"the batch has {sorted(rows)} rows; give one sentence.")
    found = run_sentence(model, batch, tokenizer, table_or_note(tokenizer)[0], lambda own: own.name == chosen.name)
    example = found.sites[chosen.site]
    return HeadView(chosen.site, layer, head, example.weights[0, head], example.queries, example.keys)


@contextlib.contextmanager
def ablated(model: Any, heads: Head | Iterable[Head], factor: float = 0.0) -> Iterator[None]:
    """Multiply the output of some heads by a factor for a while, 0 takes them out.

        with ablated(model, [(3, 1), (5, 0)]):
            loss = model(**batch).loss

    Blocks may be nested, their factors multiply; the model is not changed. Only what the calling thread runs is affected.

    Args:
        model: any Transformers model whose attention goes through the attention interface.
        heads: ``(layer, head)``, or ``(site, layer, head)`` where the model has several sites; one or several.
        factor: of their output, finite.

    Raises:
        ValueError: if there is no such head, or one is named twice.
    """
    if not torch.isfinite(torch.tensor(float(factor))):
        raise ValueError(f"factor={factor!r} is not allowed: give a finite number, 0 to take heads out.")
    listed = [heads] if isinstance(heads, tuple) and not isinstance(heads[0], tuple) else list(heads)  # type: ignore[list-item]
    chosen: dict[str, list[int]] = {}
    for entry in listed:
        *where, layer, number = entry  # type: ignore[misc]
        site = _site(model, layer, number, where[0] if where else None)  # type: ignore[arg-type]
        if number in chosen.setdefault(site.name, []):
            raise ValueError(f"head {entry} is named twice.")
        chosen[site.name].append(number)  # type: ignore[arg-type]

    def gate(call: AttentionCall) -> Tensor | None:
        if call.site.name not in chosen:
            return None
        values = torch.ones(1, 1, call.site.num_heads, 1, device=next(model.parameters()).device)
        values[:, :, chosen[call.site.name]] = factor
        return values

    with observe_attention(model, gate=gate):
        yield


def _site(model: Any, layer: int, number: int, name: str | None) -> AttentionSite:
    sites = attention_sites(model)
    present = list(dict.fromkeys(site.site for site in sites))
    if name is None and len(present) > 1:
        raise ValueError(f"this model has several sites: name one of {present}.")
    if name is not None and name not in present:
        raise ValueError(f"site={name!r} is not one of this model's: {present}.")
    own = [site for site in sites if name in (None, site.site)]
    if not 0 <= layer < len(own):
        raise ValueError(f"layer={layer} does not exist: this model has layers 0 to {len(own) - 1} there.")
    if not 0 <= number < own[layer].num_heads:
        raise ValueError(f"head={number} does not exist: layer {layer} has heads 0 to {own[layer].num_heads - 1}.")
    return own[layer]


def _tokenizer_of(model: Any) -> Any:
    where = getattr(model, "name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer was found where the model came from ({where!r}): give tokenizer=.") from error


def _needed(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"this needs {package}: pip install {package}") from None
