"""Exact running sums of one site: float64, added layer by layer and batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.annotation import ALIGNMENT_METHODS, alignment_counts, alignment_links, dependency_hits
from hf_entmax.analysis.metrics.position import argmax_counts, fold_distances
from hf_entmax.analysis.metrics.registry import STATISTICS, query_sums
from hf_entmax.analysis.metrics.sparsity import divergence_sums, entropy_sums, largest_sums, support_counts
from hf_entmax.analysis.metrics.weights import HeadWeights, keep_pairs
from hf_entmax.analysis.metrics.words import mean_between_words, merging_sums
from hf_entmax.analysis.statistics.context import (
    ALIGNMENT_STEPS,
    AlignmentGold,
    DependencyGold,
    RoleTargets,
    SiteContext,
)
from hf_entmax.ops.sparse_rows import SparseRows

GROUPS = ("sparsity", "diversity", "position", "roles", "statistics", "words", "dependency", "alignment")
OFFSETS = (-1, 0, 1)
CONFIDENCE_BINS = 200
DIRECTIONS = ("to_head", "to_dependent")


@dataclass(frozen=True)
class SumOptions:
    """What is summed, and how finely.

    Attributes:
        groups: a subset of :data:`GROUPS`.
        max_distance: distances kept apart, in tokens.
        num_relations: dependency relations told apart.
        alignment_threshold: weight above which a link counts under the method "threshold".
        density_threshold: weights must exceed it to count as nonzero; 0 = any nonzero weight.
    """

    groups: frozenset[str]
    max_distance: int = 10
    num_relations: int = 0
    alignment_threshold: float = 0.1
    density_threshold: float = 0.0


class SiteSums:
    """Running sums of all layers of one site, on a device; ``num_heads`` are those of every layer."""

    def __init__(self, site: str, num_heads: list[int], options: SumOptions, device: torch.device) -> None:
        self.site = site
        self.num_heads = list(num_heads)
        self.options = options
        # Apple's GPUs know no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.sums: dict[str, Tensor] = {}

    def add_row(self, num_heads: int) -> int:
        """Add a layer (a module called several times in one pass stands for several) and return its index."""
        self.num_heads.append(num_heads)
        return len(self.num_heads) - 1

    def finished(self) -> dict[str, Tensor]:
        """Return the sums on the CPU, [layers, ...]; zeros for layers that were never seen."""
        return {name: grown(sums, (len(self.num_heads), *sums.shape[1:])).cpu() for name, sums in self.sums.items()}

    def _add(self, name: str, row: int, value: Tensor) -> None:
        value = value.to(device=self.device, dtype=torch.float64)
        sums = self.sums.get(name, value.new_zeros(0, *value.shape))
        sums = self.sums[name] = grown(sums, (row + 1, *value.shape))
        # A layer may have fewer heads than the widest.
        sums[(row, *(slice(size) for size in value.shape))] += value

    def update(self, row: int, observed: Tensor | SparseRows, context: SiteContext) -> Tensor | None:
        """Add the weights [B, H, T_q, T_k] of layer ``row`` and one batch, dense or sparse: the sums are the same.

        Returns the density of every sentence and head [B, H] (float64), or None when sparsity is not wanted.
        """
        groups = self.options.groups
        weights = keep_pairs(observed, context.pairs)
        densities = None
        if "sparsity" in groups or "diversity" in groups:
            head_entropy = entropy_sums(weights)
            if "sparsity" in groups:
                densities = self._sparsity(row, weights, context, head_entropy)
            if "diversity" in groups:
                self._add("divergence", row, divergence_sums(weights, head_entropy).sum())
                self._add("divergence_queries", row, context.query_counts.sum())
        if "position" in groups:
            self._position(row, weights, context)
        if "roles" in groups and context.roles is not None:
            self._roles("role", row, weights, context.roles)
            for name, targets in context.registered_roles.items():
                self._roles(f"role:{name}", row, weights, targets)
        for name, spec in STATISTICS.items() if "statistics" in groups else ():
            if self.site in spec.sites:
                sums, queries = query_sums(spec, weights, context.pairs)
                self._add(f"statistic:{name}", row, sums)
                self._add(f"statistic:{name}:queries", row, queries)
        if "words" in groups and context.words is not None:
            several, num_several, single, num_single = merging_sums(weights, context.words)
            self._add("merging_several", row, several.sum(0))
            self._add("merging_single", row, single.sum(0))
            self._add("words_several", row, num_several.sum())
            self._add("words_single", row, num_single.sum())
        if "dependency" in groups and context.dependency is not None and context.dependency_roles is not None:
            self._dependency(row, weights, context.dependency)
            self._roles("dependency_role", row, weights, context.dependency_roles)
        if "alignment" in groups and context.alignment is not None and context.alignment_roles is not None:
            self._alignment(row, weights, context.alignment)
            self._roles("alignment_role", row, weights, context.alignment_roles)
        return densities

    def _sparsity(self, row: int, weights: HeadWeights, context: SiteContext, head_entropy: Tensor) -> Tensor:
        counts = support_counts(weights, self.options.density_threshold)
        has_pairs = context.pair_counts > 0
        densities = counts / context.pair_counts.clamp(min=1.0).unsqueeze(-1)
        self._add("support", row, counts.sum(0))
        self._add("pairs", row, context.pair_counts.sum())
        self._add("queries", row, context.query_counts.sum())
        self._add("sentences", row, has_pairs.sum())
        self._add("entropy", row, head_entropy.sum(0))
        self._add("largest", row, largest_sums(weights).sum(0))
        counted = densities[has_pairs]
        self._add("sentence_density", row, counted.sum(0))
        self._add("sentence_density_sq", row, counted.square().sum(0))
        return densities.masked_fill(~has_pairs.unsqueeze(-1), math.nan)

    def _position(self, row: int, weights: HeadWeights, context: SiteContext) -> None:
        # Left padding that differs between source and target: every sentence has its own zero.
        mass, distances = weights.offset_sums(None if context.aligned else context.shift)
        self._add("distance", row, fold_distances(mass, distances, self.options.max_distance))
        self._add("mass", row, mass.sum(-1))
        self._add("absolute_distance", row, (mass * distances.abs()).sum(-1))
        if context.site == "cross" or weights.shape[2] != weights.shape[3]:
            return
        argmax = weights.row_argmax()
        hits, counts, histograms = [], [], []
        for offset in OFFSETS:
            exists = context.pairs.diagonal(offset, dim1=-2, dim2=-1)
            hits.append(argmax_counts(argmax, context.pairs, offset).sum(0))
            counts.append(exists.sum().double())
            confidence = weights.diagonal(offset).transpose(0, 1).flatten(1)
            histograms.append(_histogram(confidence, exists.flatten().double().expand_as(confidence)))
        self._add("argmax_hits", row, torch.stack(hits, -1))
        self._add("argmax_queries", row, torch.stack(counts, -1))
        self._add("confidence_histogram", row, torch.stack(histograms, 1))

    def _roles(self, prefix: str, row: int, weights: HeadWeights, roles: RoleTargets) -> None:
        self._add(f"{prefix}_mass", row, roles.mass(weights))
        self._add(f"{prefix}_queries", row, roles.queries)
        self._add(f"{prefix}_chance", row, roles.chance)

    def _dependency(self, row: int, weights: HeadWeights, gold: DependencyGold) -> None:
        words, heads, relations = gold
        num_words = heads.shape[1]
        attention = mean_between_words(weights, words, words, num_words, num_words)
        steps = torch.arange(num_words, device=heads.device)
        present = (words.unsqueeze(-1) == steps).any(1)
        # A head word whose tokens were cut off cannot be found.
        head_present = present.gather(1, heads.clamp(min=0)) & (heads >= 0)
        heads = heads.masked_fill(~(present & head_present), -1)
        counted = heads >= 0
        hits = [dependency_hits(attention, heads, direction)[0] for direction in DIRECTIONS]
        relation_hits = [_by_relation(found, relations, self.options.num_relations) for found in hits]
        self._add("dependency_hits", row, torch.stack([found.double().sum(dim=(0, 2)) for found in hits], -1))
        self._add("dependency_words", row, counted.double().sum())
        self._add("relation_hits", row, torch.stack(relation_hits, 1))
        self._add("relation_words", row, _by_relation(counted.unsqueeze(1), relations, self.options.num_relations)[0])
        distance = self.options.max_distance
        offsets = (heads - steps).clamp(-distance - 1, distance + 1) + distance + 1
        self._add("dependency_offsets", row, torch.bincount(offsets[counted], minlength=2 * distance + 3))

    def _alignment(self, row: int, weights: HeadWeights, gold: AlignmentGold) -> None:
        steps, source, sure, possible = gold
        cells = []
        for step in ALIGNMENT_STEPS:
            attention = mean_between_words(weights, steps[step], source, sure.shape[1], sure.shape[2])
            for method in ALIGNMENT_METHODS:
                threshold = self.options.alignment_threshold if method == "threshold" else None
                counts = alignment_counts(alignment_links(attention, method, threshold), sure, possible)
                cells.append(torch.stack([value.sum(0) for value in counts[:3]]))
        shape = (len(ALIGNMENT_STEPS), len(ALIGNMENT_METHODS))
        tables = torch.stack(cells, -1).unflatten(-1, shape)  # [3, H, steps, methods]
        for name, table in zip(("links_sure", "links_possible", "links"), tables, strict=True):
            self._add(name, row, table)
        self._add("sure", row, sure.sum().expand(len(ALIGNMENT_STEPS)))


def _histogram(shares: Tensor, weights: Tensor) -> Tensor:
    """Add up the weights of shares in [0, 1] by bins of even width: both [H, n], to float64 [H, bins]."""
    places = (shares * CONFIDENCE_BINS).long().clamp(0, CONFIDENCE_BINS - 1)
    return weights.new_zeros(len(shares), CONFIDENCE_BINS).scatter_add_(1, places, weights)


def _by_relation(hits: Tensor, relations: Tensor | None, num_relations: int) -> Tensor:
    """Count bool hits [B, H, W] by the relation of each word: float64 [H, number of relations]."""
    out = torch.zeros(hits.shape[1], num_relations, dtype=torch.float64, device=hits.device)
    if relations is None or not num_relations:
        return out
    flat = hits.transpose(0, 1).flatten(1).double()
    known = (relations >= 0).flatten()
    return out.index_add_(1, relations.clamp(min=0).flatten(), flat * known)


def grown(sums: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pad a tensor with zeros where it is smaller than ``shape``."""
    missing = [max(wanted - size, 0) for wanted, size in zip(shape, sums.shape, strict=True)]
    return torch.nn.functional.pad(sums, [size for after in reversed(missing) for size in (0, after)])
