"""Attention of a few sentences in full, for the viewer and for attention maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_entmax.analysis.reading.words import TokenTable, table_or_note, word_ids
from hf_entmax.batches.prepare import evaluation_mode, prepare_batch
from hf_entmax.integration.discovery import AttentionSite
from hf_entmax.integration.observe import AttentionCall, observe_attention

_FEWEST_TOKENS = 7


@dataclass(frozen=True)
class Token:
    """One token as it is shown.

    Attributes:
        text: without marks of the tokenizer.
        continues: belongs to the same word as the token before it.
        special: no part of the text.
    """

    text: str
    continues: bool = False
    special: bool = False


@dataclass
class SiteExample:
    """Attention of all heads of a site on one sentence.

    Attributes:
        queries: tokens of the rows.
        keys: tokens of the columns.
        weights: float32 [layers, heads, T_q, T_k]; heads that a layer does not have are zero.
    """

    queries: list[Token]
    keys: list[Token]
    weights: Tensor


@dataclass
class Example:
    """One sentence (pair) with the attention of every site.

    Attributes:
        text: the source, or the only, sentence.
        target: the target sentence, or "".
        sites: attention by site.
    """

    text: str
    target: str = ""
    sites: dict[str, SiteExample] = field(default_factory=dict)


def collect_examples(
    model: Any, batches: Iterable[Mapping[str, Any]], tokenizer: Any, limit: int = 6, max_tokens: int = 40
) -> list[Example]:
    """Run single sentences and keep all their attention weights.

    Args:
        model: a Transformers model.
        batches: as for :func:`hf_entmax.analysis.collect`.
        tokenizer: names the tokens.
        limit: largest number of sentences.
        max_tokens: skip sentences with more tokens on either side; if all are longer, the shortest one is taken.

    Returns:
        At most ``limit`` examples.
    """
    table, _ = table_or_note(tokenizer)
    examples: list[Example] = []
    few: list[dict[str, Any]] = []
    shortest: tuple[int, dict[str, Any]] | None = None
    for batch in batches:
        size = next(int(value.shape[0]) for value in batch.values() if isinstance(value, Tensor))
        for place in range(size):
            single = {key: value[place : place + 1] for key, value in batch.items() if isinstance(value, Tensor)}
            length = _longest(single)
            if shortest is None or length < shortest[0]:
                shortest = (length, single)
            if length > max_tokens:
                continue
            if length < _FEWEST_TOKENS:  # too little to see, unless there is nothing else
                few = few if len(few) >= limit else [*few, single]
                continue
            examples.append(run_sentence(model, single, tokenizer, table))
            if len(examples) == limit:
                return examples
    examples += [run_sentence(model, single, tokenizer, table) for single in few[: limit - len(examples)]]
    if not examples and shortest is not None:
        examples.append(run_sentence(model, shortest[1], tokenizer, table))
    return examples


def _longest(single: Mapping[str, Tensor]) -> int:
    lengths = [0]
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if mask in single:
            lengths.append(int(single[mask].sum()))
        elif ids in single:
            lengths.append(single[ids].shape[1])
    if "labels" in single:
        lengths.append(int((single["labels"] != -100).sum()))
    return max(lengths)


@torch.no_grad()
def run_sentence(
    model: Any,
    single: dict[str, Any],
    tokenizer: Any,
    table: TokenTable | None,
    wanted: Callable[[AttentionSite], bool] = lambda site: True,
) -> Example:
    """Run one sentence, a batch of one row, and keep the attention of the modules that are wanted."""
    info = prepare_batch(model, single)
    seen: dict[str, list[Tensor]] = {}

    def keep(call: AttentionCall) -> None:
        if not wanted(call.site):
            return
        site = call.site.site
        info.learn_padding(call)
        kept = call.weights[0].float().cpu()
        for dim, (_, mask) in enumerate(info.sides(site), start=1):
            if mask is not None and mask.shape[1] == kept.shape[dim]:
                kept = kept.index_select(dim, mask[0].cpu().nonzero().flatten())
        seen.setdefault(site, []).append(kept)

    with evaluation_mode(model), observe_attention(model, keep):
        model(**info.inputs)
    example = Example(text=_text(info.input_ids, info.mask, tokenizer))
    if info.decoder_ids is not None:
        example.target = _text(info.decoder_ids, info.decoder_mask, tokenizer)
    for site, layers in seen.items():
        weights = pad_sequence(layers, batch_first=True)
        sides = zip(info.sides(site), weights.shape[2:], strict=True)
        queries, keys = (_tokens(*side, tokenizer, table, length) for side, length in sides)
        example.sites[site] = SiteExample(queries, keys, weights)
    return example


def in_seconds(model: Any, encoder: Any, recordings: Sequence[Any], tokenizer: Any, step: float = 0.1) -> list[Example]:
    """Run recordings one by one and keep their attention with the frames of ``step`` seconds in one: keys summed, queries averaged.

    Args:
        model: a speech model that writes.
        encoder: a `hf_entmax.analysis.reading.speech.SpeechEncoder`.
        recordings: its records.
        tokenizer: names the tokens.
        step: seconds; what nobody says at the end of what a model is given is left out.
    """
    table, _ = table_or_note(tokenizer)
    examples = []
    width = max(1, round(step / encoder.seconds))
    for recording in recordings:
        for batch in encoder.texts([recording]):
            example = run_sentence(model, batch, tokenizer, table)
            count = -(-encoder.heard(recording) // width)
            times = [Token(f"{place * width * encoder.seconds:.1f}") for place in range(count)]
            for name, site in example.sites.items():
                if name != "decoder_self":
                    site.weights = _pooled(site.weights, -1, width, count)
                    site.keys = times
                if name == "encoder_self":
                    site.weights = _pooled(site.weights, -2, width, count) / width
                    site.queries = times
            examples.append(example)
    return examples


def _pooled(weights: Tensor, dim: int, width: int, count: int) -> Tensor:
    """Sum ``width`` rows or columns after the other, of ``count`` such groups from the first on."""
    flat = weights.movedim(dim, -1)
    missing = max(0, width * count - flat.shape[-1])
    flat = torch.nn.functional.pad(flat, (0, missing))[..., : width * count]
    return flat.unflatten(-1, (count, width)).sum(-1).movedim(-1, dim).contiguous()


def _row(ids: Tensor, mask: Tensor | None) -> Tensor:
    return (ids[0] if mask is None else ids[0][mask[0]]).cpu()


def _text(ids: Tensor | None, mask: Tensor | None, tokenizer: Any) -> str:
    return "" if ids is None else tokenizer.decode(_row(ids, mask).tolist(), skip_special_tokens=True)


def _tokens(
    ids: Tensor | None, mask: Tensor | None, tokenizer: Any, table: TokenTable | None, length: int
) -> list[Token]:
    row = None if ids is None else _row(ids, mask)
    if row is None or len(row) != length:
        return [Token(str(place)) for place in range(length)]
    names = tokenizer.convert_ids_to_tokens(row.tolist())
    if table is None or int(row.max()) >= len(table):
        return [Token(name) for name in names]
    words = word_ids(table, row.unsqueeze(0))[0].tolist()
    tokens = []
    for place, index in enumerate(row.tolist()):
        continues = place > 0 and words[place] >= 0 and words[place] == words[place - 1]
        text = table.surface[index].strip("Ġ ▁") or table.surface[index]
        tokens.append(Token(text if text.strip() else names[place], continues, bool(table.special[index])))
    return tokens
