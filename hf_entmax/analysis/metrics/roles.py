"""Roles that a head may play, as sets of (query, key) pairs, and the name that explains a head best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.weights import HeadWeights

#: Role -> its name in tables and legends, and what such a head looks at. In the order in which the sums are kept: roles
#: found in any text first, then those of gold annotation.
_ROLES = {
    "previous": ("previous token", "the previous token"),
    "current": ("same token", "the token itself"),
    "next": ("next token", "the next token"),
    "first": ("first token", "the first token"),
    "special": ("special tokens", "special tokens"),
    "punctuation": ("punctuation", "punctuation"),
    "subword": ("subword merging", "the other subwords of the same word"),
    "repeated": ("repeated token", "other occurrences of the same token"),
    "induction": ("induction", "what followed an earlier occurrence of the same token"),
    "question": ("interrogation", "the question mark from the word that asks"),
    "copy": ("copying", "the source tokens equal to the token being produced"),
    "diagonal": ("same relative position", "the source token at the same relative position"),
    "monotone": ("monotone alignment", "one of the two source tokens after the one it looked at before"),
    "dependency_head": ("dependency head", "the syntactic head"),
    "dependent": ("dependent", "a syntactic dependent"),
    "aligned_output": ("alignment (output)", "the source words aligned with the word being produced"),
    "aligned_input": ("alignment (input)", "the source words aligned with the word just read"),
}
ROLE_NAMES = {role: name for role, (name, _) in _ROLES.items()}
ROLE_PHRASES = {role: phrase for role, (_, phrase) in _ROLES.items()}
DEPENDENCY_ROLES = ("dependency_head", "dependent")
ALIGNMENT_ROLES = ("aligned_output", "aligned_input")
TEXT_ROLES = tuple(role for role in _ROLES if role not in (*DEPENDENCY_ROLES, *ALIGNMENT_ROLES))

#: Which of two roles names a head when both explain it equally well: the more telling one. In a causal site the token
#: before a subword is a subword of the same word, so that a head that keeps a distance also merges words; a head that
#: looks at the question mark also looks at punctuation. In cross-attention between equal sequences the same position is
#: also the same relative position, and a step ahead of what was looked at before.
PRECEDENCE = (
    "question", "copy", "previous", "next", "aligned_output", "aligned_input", "dependency_head", "dependent", "subword",
    "current", "diagonal", "monotone", "induction", "repeated", "first", "special", "punctuation",
)  # fmt: skip
#: Keys ahead of the one looked at before that a monotone head may move to.
MONOTONE_STEPS = 2
#: Strengths closer than this count as equal.
TIE = 0.05

# In cross-attention an offset is a distance between target and source positions.
CROSS_ROLE_PHRASES = {
    "previous": "the source position one before the target position",
    "current": "the source position equal to the target position",
    "next": "the source position one after the target position",
    "first": "the first source token",
}
CROSS_ROLE_NAMES = {"previous": "position − 1", "current": "same position", "next": "position + 1"}


@dataclass(frozen=True)
class HeadRole:
    """How well one role explains one head.

    Attributes:
        role: a key of :data:`ROLE_NAMES`.
        score: mean mass on the keys of the role, over the queries that have any, in [0, 1].
        chance: the score of a head that spreads its weight evenly.
        strength: ``(score - chance) / (1 - chance)``: 0 = an even head, 1 = nothing but this role.
        evidence: number of queries that had a key of the role.
    """

    role: str
    score: float
    chance: float
    strength: float
    evidence: int


def strength(score: Tensor, chance: Tensor) -> Tensor:
    """Score corrected for chance as in Cohen's kappa; NaN where an even head would score 1 already."""
    return torch.where(chance < 1.0, (score - chance) / (1.0 - chance).clamp(min=1e-12), float("nan"))


def best_role(roles: Sequence[HeadRole]) -> HeadRole | None:
    """Choose the role that explains a head best; among those within :data:`TIE` of the strongest :data:`PRECEDENCE` decides."""
    if not roles:
        return None
    strongest = max(role.strength for role in roles)
    tied = [role for role in roles if role.strength >= strongest - TIE]
    # A role that somebody registered says more than ours.
    return min(tied, key=lambda role: PRECEDENCE.index(role.role) if role.role in PRECEDENCE else -1)


def offset_targets(pairs: Tensor, shift: Tensor, offset: int) -> Tensor:
    """Mark the key at a fixed distance, key minus query position, of every query: bool [B, T_q, T_k].

    ``shift``, long [B], is what must be added to ``key index - query index`` so that first real key and first real query
    are at distance 0 (left padding that differs between source and target).
    """
    queries, keys = (torch.arange(size, device=pairs.device) for size in pairs.shape[-2:])
    distance = keys - queries.unsqueeze(-1)
    return pairs & ((distance + shift.view(-1, 1, 1)) == offset)


def same_share(pairs: Tensor) -> Tensor:
    """Marks, of ``pairs`` bool [B, T_q, T_k], the key at the same relative position as the query."""
    queries, positions = pairs.any(-1), pairs.any(-2)
    place, count = queries.cumsum(-1) - 1, queries.sum(-1, keepdim=True).clamp(min=1)
    share = (2 * place + 1) * positions.sum(-1, keepdim=True) // (2 * count)  # floor((i + 1/2) S / T)
    return share.unsqueeze(-1) == (positions.cumsum(-1) - 1).unsqueeze(1)


def monotone_mass(weights: HeadWeights) -> Tensor:
    r"""Sum the mass that cross-attention moves on to, one or two keys after the key that the query before looked at most.

        sum_i  sum_{s = 1, 2}  p_i(a_{i-1} + s),          a_i = argmax_j p_i(j)

    1 per query for a head that reads the source token by token; 0 for one that stays where it is. float64 [H] from weights
    [B, H, T_q, T_k].
    """
    before = torch.nn.functional.pad(weights.row_argmax()[..., :-1], (1, 0), value=-1)
    return weights.window_sums((before + 1).masked_fill(before < 0, -1), MONOTONE_STEPS).double().sum(dim=(0, 2))


def monotone_chance(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Count the queries that follow another one, and sum the `monotone_mass` of an even head: float64 [B] each."""
    keys = pairs.sum(dim=-1).double()
    follows = (keys > 0) & torch.nn.functional.pad(keys[:, :-1] > 0, (1, 0))
    return follows.sum(-1).double(), ((MONOTONE_STEPS / keys.clamp(min=MONOTONE_STEPS)) * follows).sum(-1)


def chance_sums(targets: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Count the queries with a target, and sum the mass that an even head would give to the targets: float64 [..., B] each.

    ``targets`` are bool [..., B, T_q, T_k], a subset of ``pairs`` [B, T_q, T_k].
    """
    marked = targets.sum(dim=-1).double()
    possible = pairs.sum(dim=-1).double().clamp(min=1.0)
    return (marked > 0).sum(dim=-1).double(), (marked / possible).sum(dim=-1)
