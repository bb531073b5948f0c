"""What the layers of one site share within one batch: possible pairs, words, roles, gold annotation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.registry import ROLES, RoleInputs, role_targets
from hf_entmax.analysis.metrics.roles import (
    ALIGNMENT_ROLES,
    DEPENDENCY_ROLES,
    TEXT_ROLES,
    chance_sums,
    monotone_chance,
    monotone_mass,
    offset_targets,
    same_share,
)
from hf_entmax.analysis.metrics.weights import HeadWeights, word_indicator
from hf_entmax.analysis.reading.words import TokenTable, question_masks, word_ids
from hf_entmax.batches.prepare import BatchInfo

#: Query conventions of alignment: the step that predicts a target word, and the step that has just read it.
ALIGNMENT_STEPS = ("output", "input")
DependencyGold = tuple[Tensor, Tensor, Tensor | None]
AlignmentGold = tuple[dict[str, Tensor], Tensor, Tensor, Tensor]


@dataclass
class RoleTargets:
    """Target pairs of several roles, flattened for one matrix product per layer.

    Attributes:
        names: the roles.
        targets: [B, T_q * T_k, number of roles], 0 or 1, floating point.
        queries: float64 [number of roles], queries that have a target.
        chance: float64 [number of roles], mass of an even head on the targets, summed over queries.
        monotone: which of them is read off the weights themselves (`monotone_mass`), if any.
    """

    names: tuple[str, ...]
    targets: Tensor
    queries: Tensor
    chance: Tensor
    monotone: int | None = None

    @classmethod
    def build(cls, names: tuple[str, ...], targets: list[Tensor], pairs: Tensor) -> RoleTargets:
        """Stack bool targets [B, T_q, T_k], one per role."""
        stacked = torch.stack(targets)
        queries, chance = chance_sums(stacked, pairs)
        flat = stacked.flatten(2).permute(1, 2, 0).to(torch.float32)
        return cls(names, flat, queries.sum(-1), chance.sum(-1))

    def mass(self, weights: HeadWeights) -> Tensor:
        """Sum the mass on the targets of every role: float64 [H, number of roles] from weights [B, H, T_q, T_k] in either form."""
        mass = weights.target_sums(self.targets).sum(0)
        if self.monotone is not None:
            mass[:, self.monotone] = monotone_mass(weights)
        return mass


@dataclass
class SiteContext:
    """Everything about one batch that does not depend on the weights.

    Attributes:
        site: name of the site.
        pairs: bool [B, T_q, T_k], possible pairs.
        pair_counts: float64 [B].
        query_counts: float64 [B], queries with at least one possible key.
        shift: long [B], see :func:`hf_entmax.analysis.metrics.roles.offset_targets`.
        aligned: whether ``shift`` is zero throughout.
        per_sentence: rows of the batch are sentences (False for windows of an image).
        roles: the text roles.
        registered_roles: those that users registered, by name.
        words: long [B, T] or None.
        dependency: ``(word ids, heads, relations)`` or None, with their roles in ``dependency_roles``.
        alignment: ``(query words per step, key words, sure, possible)`` or None, roles in ``alignment_roles``.
    """

    site: str
    pairs: Tensor
    pair_counts: Tensor
    query_counts: Tensor
    shift: Tensor
    aligned: bool
    per_sentence: bool
    roles: RoleTargets | None = None
    registered_roles: dict[str, RoleTargets] = field(default_factory=dict)
    words: Tensor | None = None
    dependency: DependencyGold | None = None
    dependency_roles: RoleTargets | None = None
    alignment: AlignmentGold | None = None
    alignment_roles: RoleTargets | None = None


def build_context(
    site: str,
    shape: tuple[int, int, int],
    info: BatchInfo,
    groups: frozenset[str],
    table: TokenTable | None,
    interrogatives: Iterable[str],
) -> SiteContext:
    """Work out the context of a site from the shape (B, T_q, T_k) of the first weights seen there.

    Raises:
        ValueError: the masks of the batch do not fit the weights.
    """
    batch, num_queries, num_keys = shape
    (ids, query_mask), (_, key_mask) = info.sides(site)
    text = ids is not None
    query_mask = _fit(query_mask, (batch, num_queries), info, "queries", text)
    key_mask = _fit(key_mask, (batch, num_keys), info, "keys", info.input_ids is not None)
    pairs = query_mask.unsqueeze(-1) & key_mask.unsqueeze(-2)
    if site == "decoder_self":
        pairs = pairs.tril(num_keys - num_queries)
    first_key = key_mask.long().argmax(dim=1)
    shift = query_mask.long().argmax(dim=1) - first_key
    if site != "cross":
        shift = torch.full_like(shift, num_queries - num_keys)
    context = SiteContext(
        site=site,
        pairs=pairs,
        pair_counts=pairs.sum(dim=(-2, -1)).double(),
        query_counts=pairs.any(-1).sum(-1).double(),
        shift=shift,
        aligned=not bool(shift.any()),
        per_sentence=batch == info.size,
    )
    own_ids = ids if ids is not None and tuple(ids.shape) == (batch, num_queries) else None
    if "words" in groups and site != "cross" and own_ids is not None:
        context.words = _words(site, own_ids, query_mask, info, table)
    if "roles" in groups:
        context.roles = _text_roles(context, info, own_ids, key_mask, first_key, table, interrogatives)
        key_ids = info.input_ids if site == "cross" else own_ids
        found = {name: role_targets(name, RoleInputs(site, pairs, own_ids, key_ids, context.words)) for name in ROLES}
        context.registered_roles = {
            name: RoleTargets.build((name,), [targets], pairs) for name, targets in found.items() if targets is not None
        }
    if "dependency" in groups and site != "cross" and own_ids is not None:
        _add_dependency(context, info)
    if "alignment" in groups and site == "cross":
        _add_alignment(context, info, num_queries)
    return context


def _fit(mask: Tensor | None, shape: tuple[int, int], info: BatchInfo, what: str, text: bool) -> Tensor:
    if mask is not None and tuple(mask.shape) == shape:
        return mask
    if mask is not None and text:
        raise ValueError(
            f"the attention weights have {shape[1]} {what} for {shape[0]} rows, the mask of the batch is {list(mask.shape)}: "
            "cached keys, virtual tokens or several towers are not supported here. Collect from the model without them."
        )
    device = mask.device if mask is not None else next(v.device for v in info.inputs.values() if isinstance(v, Tensor))
    return torch.ones(shape, dtype=torch.bool, device=device)


def _words(site: str, ids: Tensor, mask: Tensor, info: BatchInfo, table: TokenTable | None) -> Tensor | None:
    of_decoder = info.decoder_ids is not None and site == "decoder_self"
    given = info.annotations.get("decoder_word_ids" if of_decoder else "word_ids")
    if given is not None:
        if tuple(given.shape) != tuple(ids.shape):
            raise ValueError(f"word_ids has shape {list(given.shape)}; this batch needs {list(ids.shape)}.")
        return given.masked_fill(~mask, -1)
    return None if table is None else word_ids(table, ids, mask)


def _text_roles(
    context: SiteContext,
    info: BatchInfo,
    ids: Tensor | None,
    key_mask: Tensor,
    first_key: Tensor,
    table: TokenTable | None,
    interrogatives: Iterable[str],
) -> RoleTargets:
    """Mark the keys of every role of :data:`TEXT_ROLES`; a role that cannot be found in this batch marks none."""
    cross, pairs, words = context.site == "cross", context.pairs, context.words
    key_ids = info.input_ids if cross else ids
    offsets = {"previous": -1, "current": 0, "next": 1}
    targets = {name: offset_targets(pairs, context.shift, offset) for name, offset in offsets.items()}
    first = torch.arange(pairs.shape[-1], device=pairs.device) == first_key.view(-1, 1)
    targets["first"] = pairs & first.unsqueeze(1)
    if cross:
        targets["diagonal"] = pairs & same_share(pairs)
    else:
        # The first query of a causal head has no choice, and any other head may mean itself there.
        targets["first"] &= ~first.unsqueeze(-1)
    elsewhere = ~torch.eye(*pairs.shape[1:], dtype=torch.bool, device=pairs.device)
    if not cross and words is not None:
        targets["subword"] = pairs & elsewhere & _equal(words, words)
    if table is not None and key_ids is not None and tuple(key_ids.shape) == tuple(key_mask.shape):
        known = key_ids.clamp(max=len(table) - 1).cpu()
        special = table.special[known].to(key_ids.device)
        tokens = key_ids.masked_fill(special | ~key_mask, -1)
        targets["special"] = pairs & special.unsqueeze(1)
        targets["punctuation"] = pairs & table.punctuation[known].to(key_ids.device).unsqueeze(1)
        if not cross:
            same = elsewhere & _equal(tokens, tokens)
            targets["repeated"] = pairs & same
            # Key k follows an earlier occurrence of the query's token: tokens[k - 1] == tokens[q] with k - 1 < q.
            targets["induction"] = pairs & torch.nn.functional.pad(same.tril()[..., :-1], (1, 0))
        elif ids is not None:  # query i reads token i and produces token i + 1
            read = ids.masked_fill(~pairs.any(-1), -1)
            targets["copy"] = pairs & _equal(torch.nn.functional.pad(read[:, 1:], (0, 1), value=-1), tokens)
        if not cross and words is not None:
            asking, question = question_masks(table, key_ids, words, key_mask, interrogatives)
            targets["question"] = pairs & asking.unsqueeze(-1) & question.unsqueeze(-2)
    nothing = torch.zeros_like(pairs)
    roles = RoleTargets.build(TEXT_ROLES, [targets.get(name, nothing) for name in TEXT_ROLES], pairs)
    if cross:  # depends on the head, and is read off its weights
        place = roles.monotone = TEXT_ROLES.index("monotone")
        queries, chance = monotone_chance(pairs)
        roles.queries[place], roles.chance[place] = queries.sum(), chance.sum()
    return roles


def _equal(queries: Tensor, keys: Tensor) -> Tensor:
    """Mark pairs [B, T_q, T_k] of equal ids; a negative id equals no other."""
    return (queries.unsqueeze(-1) == keys.unsqueeze(-2)) & (keys >= 0).unsqueeze(-2)


def _add_dependency(context: SiteContext, info: BatchInfo) -> None:
    heads, words = info.annotations.get("dependency_heads"), info.annotations.get("word_ids")
    if heads is None or words is None:
        return
    if tuple(words.shape) != (context.pairs.shape[0], context.pairs.shape[1]):
        return  # annotation of the source, while this site reads the target
    relations = info.annotations.get("dependency_relations")
    context.dependency = (words, heads, relations)
    # Head word of every token: -1 for roots and tokens outside words.
    padded = torch.cat([heads.new_full((heads.shape[0], 1), -1), heads], dim=1)
    head_of_token = padded.gather(1, (words + 1).clamp(max=heads.shape[1]))
    to_head = (head_of_token.unsqueeze(-1) == words.unsqueeze(-2)) & (head_of_token >= 0).unsqueeze(-1)
    targets = [context.pairs & to_head, context.pairs & to_head.transpose(-1, -2)]
    context.dependency_roles = RoleTargets.build(DEPENDENCY_ROLES, targets, context.pairs)


def _add_alignment(context: SiteContext, info: BatchInfo, num_queries: int) -> None:
    sure, source, target = (info.annotations.get(name) for name in ("sure_links", "source_words", "target_words"))
    if sure is None or source is None or target is None:
        return
    possible = info.annotations.get("possible_links")
    possible = sure if possible is None else possible | sure
    # target_words belong to the labels: query i predicts label i and reads label i - 1.
    steps = {"output": target, "input": torch.cat([torch.full_like(target[:, :1], -1), target[:, :-1]], dim=1)}
    context.alignment = (steps, source, sure, possible)
    targets = []
    for step in ALIGNMENT_STEPS:
        rows, columns = word_indicator(steps[step], sure.shape[1]), word_indicator(source, sure.shape[2])
        targets.append(context.pairs & ((rows @ possible.float() @ columns.transpose(1, 2)) > 0))
    context.alignment_roles = RoleTargets.build(ALIGNMENT_ROLES, targets, context.pairs)
