"""The numbers of one site, derived from its exact sums: ratios are taken here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.annotation import ALIGNMENT_METHODS, error_rate
from hf_entmax.analysis.metrics.position import positional_census
from hf_entmax.analysis.metrics.roles import (
    ALIGNMENT_ROLES,
    DEPENDENCY_ROLES,
    TEXT_ROLES,
    HeadRole,
    best_role,
    strength,
)
from hf_entmax.analysis.metrics.sparsity import normalize_divergence
from hf_entmax.analysis.statistics.accumulate import CONFIDENCE_BINS, DIRECTIONS, OFFSETS
from hf_entmax.analysis.statistics.context import ALIGNMENT_STEPS


@dataclass(frozen=True)
class LayerInfo:
    """One layer of a site.

    Attributes:
        name: dotted name of its attention module.
        layer: number within the site, from 0.
        num_heads: number of query heads.
    """

    name: str
    layer: int
    num_heads: int


def _mean(numerator: str, denominator: str, meaning: str) -> Callable[[SiteStatistics], Tensor]:
    """Make a method that divides a sum [layers, heads] by a count [layers]."""

    def method(self: SiteStatistics) -> Tensor:
        return self._per_head(numerator, denominator)

    method.__doc__ = meaning
    return method


@dataclass
class SiteStatistics:
    """Statistics of all layers and heads of one attention site.

    Methods return tensors [layers, heads] in float64 unless said otherwise; the function of the same name in
    `hf_entmax.analysis` defines the statistic. NaN stands for "not measured": the means were missing (no tokenizer, no gold
    data), nothing was counted, or a layer has fewer heads than another.

    Attributes:
        site: "encoder_self", "cross" or "decoder_self".
        layers: its layers in order.
        sums: the exact sums, float64 on the CPU, first dimension = layer.
        max_distance: distances kept apart in :meth:`distance_profile`.
        relations: dependency relations in the order of :meth:`relation_accuracy`.
    """

    site: str
    layers: list[LayerInfo]
    sums: dict[str, Tensor] = field(default_factory=dict)
    max_distance: int = 10
    relations: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Heads of the widest layer."""
        return max((layer.num_heads for layer in self.layers), default=0)

    @property
    def head_exists(self) -> Tensor:
        """Bool [layers, heads]; False where a layer has fewer heads than the widest."""
        counts = torch.tensor([layer.num_heads for layer in self.layers]).unsqueeze(-1)
        return torch.arange(self.num_heads) < counts

    def _nan(self, *trailing: int) -> Tensor:
        return torch.full((self.num_layers, self.num_heads, *trailing), float("nan"), dtype=torch.float64)

    def _measured(self, name: str, value: Callable[[dict[str, Tensor]], Tensor], *trailing: int) -> Tensor:
        """Apply ``value`` to the sums where ``name`` is among them; return NaN otherwise."""
        return self._mask(value(self.sums)) if name in self.sums else self._nan(*trailing)

    def _per_head(self, numerator: str, denominator: str) -> Tensor:
        """Divide a sum [layers, heads, ...] by a count [layers, ...]."""
        return self._measured(numerator, lambda sums: sums[numerator] / sums[denominator].unsqueeze(1))

    def _mask(self, values: Tensor) -> Tensor:
        exists = self.head_exists.view(self.num_layers, self.num_heads, *[1] * (values.dim() - 2))
        return values.masked_fill(~exists, float("nan"))

    density = _mean("support", "pairs", "Fraction of the possible weights that are not zero, per head.")
    mean_support = _mean("support", "queries", "Mean number of keys with nonzero weight per query.")
    entropy = _mean("entropy", "queries", "Mean entropy of the rows in nats.")
    max_weight = _mean("largest", "queries", "Mean largest weight of a row.")
    sentence_density_mean = _mean(
        "sentence_density", "sentences", "Mean over sentences of the density of one sentence."
    )

    def sentence_density_std(self) -> Tensor:
        """Return the standard deviation over sentences of the density of one sentence: how much a head's sparsity depends on the input."""
        variance = self._per_head("sentence_density_sq", "sentences") - self.sentence_density_mean().square()
        return variance.clamp(min=0.0).sqrt()

    @property
    def statistics(self) -> list[str]:
        """Names of the statistics that were measured by :meth:`statistic`."""
        names = [key.removeprefix("statistic:") for key in self.sums if key.startswith("statistic:")]
        return [name for name in names if not name.endswith(":queries")]

    def statistic(self, name: str) -> Tensor:
        """Return the mean over queries of ``"firing"`` or of what was registered, see :func:`hf_entmax.analysis.register_statistic`."""
        return self._per_head(f"statistic:{name}", f"statistic:{name}:queries")

    def head_diversity(self, normalize: bool = True) -> Tensor:
        """Return the Jensen-Shannon divergence between the heads of each layer, [layers]."""
        if "divergence" not in self.sums:
            return torch.full((self.num_layers,), float("nan"), dtype=torch.float64)
        nats = (self.sums["divergence"] / self.sums["divergence_queries"]).clamp(min=0.0)
        pairs = zip(nats, self.layers, strict=True)
        return torch.stack([normalize_divergence(value, layer.num_heads, normalize) for value, layer in pairs])

    def positional_confidence(self, offset: int = -1) -> Tensor:
        """Return the mean weight at offset -1, 0 or +1."""
        if "argmax_queries" not in self.sums:
            return self._role_score(_offset_role(offset))
        mass = self.sums["distance"][..., self.max_distance + 1 + offset]
        return self._mask(mass / self.sums["argmax_queries"][:, None, OFFSETS.index(offset)])

    def positional_share(self, offset: int = -1) -> Tensor:
        """Return the fraction of queries whose largest weight is at offset -1, 0 or +1."""
        at = (..., OFFSETS.index(offset))
        return self._measured("argmax_hits", lambda s: s["argmax_hits"][at] / s["argmax_queries"].unsqueeze(1)[at])

    def positional_median(self, offset: int = -1) -> Tensor:
        """Return the median over the queries of the weight at offset -1, 0 or +1, to within half a percent."""
        if "confidence_histogram" not in self.sums:
            return self._nan()
        histogram = self.sums["confidence_histogram"][:, :, OFFSETS.index(offset)]
        total = histogram.sum(-1, keepdim=True)
        place = (histogram.cumsum(-1) < total / 2).sum(-1).double()
        return self._mask(((place + 0.5) / CONFIDENCE_BINS).masked_fill(total[..., 0] == 0, float("nan")))

    def positional_census(self, offset: int = -1) -> dict[str, Any]:
        """List the heads that are positional for an offset of -1, 0 or +1."""
        return positional_census(self.positional_confidence(offset), self.positional_share(offset))

    def distance_profile(self) -> Tensor:
        """Return the share of the mass at every distance, [layers, heads, 2 D + 3]."""
        return self._measured("distance", lambda s: s["distance"] / s["mass"].unsqueeze(-1), 2 * self.max_distance + 3)

    def mean_distance(self) -> Tensor:
        """Return the mean absolute distance between query and key in tokens, weighted by attention."""
        return self._measured("absolute_distance", lambda s: s["absolute_distance"] / s["mass"])

    def subword_merging(self, min_pieces: int = 1) -> Tensor:
        """Return the subword-merging score."""
        sizes = ("several",) if min_pieces == 2 else ("several", "single")
        total = lambda sums, what: torch.stack([sums[f"{what}_{size}"] for size in sizes]).sum(0)  # noqa: E731
        return self._measured("merging_several", lambda s: total(s, "merging") / total(s, "words").unsqueeze(-1))

    def interrogation(self) -> Tensor:
        """Return the mean weight on the final question mark from words that ask."""
        return self._role_score("question")

    def sink_mass(self, kind: str = "special") -> Tensor:
        """Return the mean mass on "special" tokens, the "first" token (from the others) or "punctuation"."""
        if kind not in ("special", "first", "punctuation"):
            raise ValueError(f"kind is {kind!r}; allowed are 'special', 'first' and 'punctuation'.")
        return self._role_score(kind)

    def dependency_accuracy(self, direction: str = "to_head") -> Tensor:
        """Return the fraction of words whose largest weight is on the gold head."""
        at = (..., DIRECTIONS.index(direction))
        ratio = lambda s: s["dependency_hits"][at] / s["dependency_words"].unsqueeze(-1)  # noqa: E731
        return self._measured("dependency_hits", ratio)

    def relation_accuracy(self, direction: str = "to_head") -> Tensor:
        """Return the dependency accuracy by relation, [layers, heads, relations]."""
        ratio = lambda s: s["relation_hits"][:, :, DIRECTIONS.index(direction)] / s["relation_words"].unsqueeze(1)  # noqa: E731
        return self._measured("relation_hits", ratio, len(self.relations))

    def relation_counts(self) -> Tensor:
        """Return the number of annotated words per relation, [relations]."""
        counts = self.sums.get("relation_words")
        return torch.zeros(len(self.relations), dtype=torch.float64) if counts is None or not len(counts) else counts[0]

    def dependency_baseline(self) -> tuple[int, float]:
        """Return the best fixed distance and its accuracy, which a head reaches by always looking that number of words away."""
        counts = self.sums.get("dependency_offsets")
        if counts is None or not len(counts) or not float(counts[0].sum()):
            return 0, float("nan")
        inner = counts[0, 1:-1]
        best = int(inner.argmax())
        return best - self.max_distance, float(inner[best] / counts[0].sum())

    def _links(self, method: str, step: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        if method not in ALIGNMENT_METHODS or step not in ALIGNMENT_STEPS:
            raise ValueError(
                f"no alignment by method={method!r}, step={step!r}; methods are {', '.join(ALIGNMENT_METHODS)}, "
                f"steps are {', '.join(ALIGNMENT_STEPS)}."
            )
        if "links" not in self.sums:
            return None
        at = (Ellipsis, ALIGNMENT_STEPS.index(step), ALIGNMENT_METHODS.index(method))
        names = ("links_sure", "links_possible", "links")
        on_sure, on_possible, links = (self.sums[name][at] for name in names)
        return on_sure, on_possible, links, self.sums["sure"][:, None, ALIGNMENT_STEPS.index(step)]

    def alignment_error_rate(self, method: str = "argmax", step: str = "output") -> Tensor:
        """Return the alignment error rate of cross-attention; see :func:`hf_entmax.analysis.alignment_error_rate`.

        Args:
            method: "argmax", "threshold" or "support".
            step: "output": read a target word's links at the step that predicts it; "input": one step later, where it
                has just been read.
        """
        counts = self._links(method, step)
        return self._nan() if counts is None else self._mask(error_rate(*counts))

    def alignment_precision_recall(self, method: str = "argmax", step: str = "output") -> tuple[Tensor, Tensor]:
        """Return precision against possible links and recall of sure links, each [layers, heads]."""
        counts = self._links(method, step)
        if counts is None:
            return self._nan(), self._nan()
        on_sure, on_possible, links, sure = counts
        return self._mask(on_possible / links), self._mask(on_sure / sure)

    def _role_score(self, role: str) -> Tensor:
        return self.role_scores().get(role, (self._nan(),))[0]

    def role_scores(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return ``{role: (score [layers, heads], chance [layers], queries [layers])}`` of all roles measured."""
        result = {}
        roles = {"role": TEXT_ROLES, "dependency_role": DEPENDENCY_ROLES, "alignment_role": ALIGNMENT_ROLES}
        for prefix, names in roles.items():
            if f"{prefix}_mass" not in self.sums:
                continue
            mass, queries, chance = (self.sums[f"{prefix}_{part}"] for part in ("mass", "queries", "chance"))
            for place, name in enumerate(names[: mass.shape[-1]]):  # older files know fewer roles
                score = self._mask(mass[..., place] / queries[:, None, place])
                result[name] = (score, chance[:, place] / queries[:, place], queries[:, place])
        for prefix in [
            key.removesuffix("_mass") for key in self.sums if key.startswith("role:") and key.endswith("_mass")
        ]:
            mass, queries, chance = (self.sums[f"{prefix}_{part}"][..., 0] for part in ("mass", "queries", "chance"))
            result[prefix.removeprefix("role:")] = (self._mask(mass / queries[:, None]), chance / queries, queries)
        return result

    def ranked_roles(self, layer: int, head: int) -> list[HeadRole]:
        """Return all roles measured for one head, the best explanation first."""
        roles = []
        for name, (score, chance, queries) in self.role_scores().items():
            value = strength(score[layer, head], chance[layer])
            if queries[layer] > 0 and not bool(value.isnan()):
                numbers = float(score[layer, head]), float(chance[layer]), float(value)
                roles.append(HeadRole(name, *numbers, int(queries[layer])))
        return sorted(roles, key=lambda role: -role.strength)

    def best_roles(self, min_strength: float = 0.5, min_evidence: int = 5) -> list[list[HeadRole | None]]:
        """Return the role that explains each head best, ``[layers][heads]``.

        Args:
            min_strength: how far above chance a role must be, in (0, 1]; below it a head has no role (None).
            min_evidence: queries needed before a role may be given to a head.
        """
        fits = lambda role: role.strength >= min_strength and role.evidence >= min_evidence  # noqa: E731
        return [
            [best_role(list(filter(fits, self.ranked_roles(layer, head)))) for head in range(info.num_heads)]
            for layer, info in enumerate(self.layers)
        ]


def _offset_role(offset: int) -> str:
    if offset not in OFFSETS:
        raise ValueError(f"offset is {offset}; -1, 0 and +1 are kept, other distances stand in distance_profile().")
    return {-1: "previous", 0: "current", 1: "next"}[offset]
