"""The findings of an analysis in plain sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_entmax.analysis.metrics.registry import STATISTICS
from hf_entmax.analysis.metrics.roles import CROSS_ROLE_PHRASES, ROLE_PHRASES, HeadRole
from hf_entmax.analysis.plots.style import site_title
from hf_entmax.analysis.statistics.result import AttentionStatistics

HeadName = tuple[str, int, int]


@dataclass(frozen=True)
class Finding:
    """One sentence of the summary.

    Attributes:
        topic: a word or two, as a heading.
        text: the sentence.
        heads: heads it is about, the clearest first.
    """

    topic: str
    text: str
    heads: tuple[HeadName, ...] = ()


def head_name(site: str, layer: int, head: int) -> str:
    """Return the short name of a head, such as ``encoder 2.5`` for layer 2, head 5 (both from 0)."""
    return f"{_short(site)} {layer}.{head}"


def _short(site: str) -> str:
    return site.removesuffix("_self")


def percent(value: float) -> str:
    """Format a fraction as a percentage: two digits below 10 %, whole numbers above."""
    if math.isnan(value):
        return "–"
    shown = 100 * value
    return f"{shown:.0f} %" if shown >= 9.95 or shown == 0 else f"{shown:.1f} %"


def summarize(statistics: AttentionStatistics) -> list[Finding]:
    """Say in words what the heads of a model do, the general first. What was not measured is not mentioned."""
    findings = [_sparsity(statistics), _alpha(statistics)]
    if scaling := statistics.info.get("length_scaling"):
        findings.append(Finding("length scaling", scaling))
    findings += [*_positions(statistics), _near(statistics), *_roles(statistics)]
    findings += [say(statistics) for say in (_dependency, _alignment, _diversity, _importance, _ambiguity, _decoding)]
    findings += [_resting(statistics), *_registered(statistics)]
    return [finding for finding in findings if finding is not None]


def _near(statistics: AttentionStatistics) -> Finding | None:
    """List local heads of an encoder that hears sound."""
    seconds, site = statistics.info.get("frame_seconds"), statistics.sites.get("encoder_self")
    flat = _flat({"encoder_self": site.distance_profile()[..., 1:-1].sum(-1)}) if seconds and site else []
    if not (seconds and site and flat):
        return None
    near = sorted(((share, name) for share, name in flat if share >= 0.5), reverse=True)
    text = f"The encoder hears sound, in frames of {1000 * seconds:g} ms. "
    text += f"{len(near)} of {len(flat)} of its heads give half of their weight or more to frames within "
    text += f"{site.max_distance * seconds:.1f} s; the most local is {head_name(*max(flat)[1])} ({percent(max(flat)[0])}), the widest "
    text += f"{head_name(*min(flat)[1])} ({percent(min(flat)[0])})."
    return Finding("local heads", text, tuple(name for _, name in near))


def compare(first: AttentionStatistics, second: AttentionStatistics) -> list[Finding]:
    """Say in words how two models differ."""
    findings = []
    for site in first.sites:
        if site not in second.sites:
            continue
        own = first.sites[site], second.sites[site]
        density = [float(one.density().nanmean()) for one in own]
        diversity = [float(one.head_diversity().nanmean()) for one in own]
        if any(map(math.isnan, density)):
            continue
        text = f"{site_title(site)}: {first.name} keeps {percent(density[0])} of the possible weights, "
        text += f"{second.name} {percent(density[1])}"
        if not any(map(math.isnan, diversity)):
            text += f"; the heads of a layer differ by {diversity[0]:.2f} against {diversity[1]:.2f}"
            text += " (Jensen-Shannon divergence, units of log heads)"
        findings.append(Finding(f"{_short(site)} compared", text + "."))
    counts = [sum(role is not None for _, role in all_roles(model)) for model in (first, second)]
    text = f"{counts[0]} of {first.num_heads} heads of {first.name} have a clear role, "
    text += f"{counts[1]} of {second.num_heads} of {second.name}."
    return [*findings, Finding("roles compared", text)]


def all_roles(statistics: AttentionStatistics) -> list[tuple[HeadName, HeadRole | None]]:
    """List every head of a model with the role that explains it best, if one does."""
    result = []
    for name, site in statistics.sites.items():
        for layer, row in enumerate(site.best_roles()):
            result += [((name, layer, head), role) for head, role in enumerate(row)]
    return result


def _flat(values: dict[str, Tensor]) -> list[tuple[float, HeadName]]:
    """Return all finite values with the names of their heads."""
    result = []
    for site, tensor in values.items():
        for layer, row in enumerate(tensor.tolist()):
            result += [(value, (site, layer, head)) for head, value in enumerate(row) if not math.isnan(value)]
    return result


def _sparsity(statistics: AttentionStatistics) -> Finding | None:
    flat = _flat(statistics.density)
    if not flat:
        return None
    per_site = [f"{_short(site)} {percent(float(value.nanmean()))}" for site, value in statistics.density.items()]
    mean = sum(value for value, _ in flat) / len(flat)
    support = [value for value, _ in _flat(statistics.mean_support)]
    text = f"{percent(mean)} of the possible weights are not zero"
    text += f" ({', '.join(per_site)})" if len(per_site) > 1 else ""
    text += f"; a query looks at {sum(support) / len(support):.1f} keys on average."
    low, high = min(flat), max(flat)
    if high[0] - low[0] > 0.02:
        text += f" The sparsest head, {head_name(*low[1])}, keeps {percent(low[0])}, "
        text += f"the densest, {head_name(*high[1])}, {percent(high[0])}."
        return Finding("sparsity", text, (low[1], high[1]))
    return Finding("sparsity", text)


def _alpha(statistics: AttentionStatistics) -> Finding | None:
    flat = _flat(statistics.alphas)
    if not flat:
        return None
    values = [value for value, _ in flat]
    low, high = min(flat), max(flat)
    if high[0] - low[0] < 1e-6:
        return Finding("alpha", f"All {len(values)} heads have alpha = {values[0]:.2f}.")
    near_softmax = sum(value < 1.1 for value in values)
    near_sparsemax = sum(value > 1.9 for value in values)
    text = (
        f"Alpha lies between {low[0]:.2f} ({head_name(*low[1])}) and {high[0]:.2f} ({head_name(*high[1])}), "
        f"{sum(values) / len(values):.2f} on average; {near_softmax} of {len(values)} heads are close to softmax (below 1.1), "
        f"{near_sparsemax} close to or beyond sparsemax (above 1.9)."
    )
    return Finding("alpha", text, (low[1], high[1]))


def _positions(statistics: AttentionStatistics) -> list[Finding]:
    findings = []
    own = {name: site for name, site in statistics.sites.items() if name != "cross"}
    total = sum(info.num_heads for site in own.values() for info in site.layers)
    for offset, where in ((-1, "the previous token"), (0, "the token itself"), (1, "the next token")):
        heads: list[tuple[float, HeadName]] = []
        for name, site in own.items():
            census = site.positional_census(offset)
            pairs = zip(census["confidences"], census["heads"], strict=True)
            heads += [(confidence, (name, layer, head)) for confidence, (layer, head) in pairs]
        if not heads:
            continue
        heads.sort(key=lambda entry: -entry[0])
        median = float(torch.tensor([confidence for confidence, _ in heads]).quantile(0.5))
        verb = "looks" if len(heads) == 1 else "look"
        confidence = f"{percent(median)} confidence" + (" (median)" if len(heads) > 1 else "")
        text = f"{len(heads)} of {total} self-attention heads {verb} at {where} with {confidence}; "
        text += f"the surest is {head_name(*heads[0][1])} at {percent(heads[0][0])}."
        findings.append(Finding("position", text, tuple(name for _, name in heads)))
    return findings


def _roles(statistics: AttentionStatistics) -> list[Finding]:
    named = all_roles(statistics)
    by_role: dict[tuple[str, bool], list[tuple[HeadRole, HeadName]]] = {}
    for name, role in named:
        if role is not None:
            by_role.setdefault((role.role, name[0] == "cross"), []).append((role, name))
    findings = []
    for (role, cross), members in sorted(by_role.items(), key=lambda item: -len(item[1])):
        if role in ("previous", "current", "next") and not cross:
            continue  # the census says more about these
        members.sort(key=lambda entry: -entry[0].score)
        own = ROLE_PHRASES.get(role, role)
        phrase = CROSS_ROLE_PHRASES.get(role, own) if cross else own
        best, where = members[0]
        subject = f"{len(members)} {'cross-attention ' if cross else ''}head{'s are' if len(members) > 1 else ' is'}"
        text = f"{subject} best explained by looking at {phrase}; {head_name(*where)} gives it {percent(best.score)} of its weight"
        text += f" ({percent(best.chance)} would be chance)." if best.chance > 0.005 else "."
        findings.append(Finding("role", text, tuple(name for _, name in members)))
    without = sum(role is None for _, role in named)
    if named and any("role_mass" in site.sums for site in statistics.sites.values()):
        findings.append(Finding("role", f"{without} of {len(named)} heads have no single role."))
    return findings


def _resting(statistics: AttentionStatistics) -> Finding | None:
    """List heads that put no weight beside the first token and the query itself, at half of the queries or more."""
    flat = _flat({name: site.statistic("firing") for name, site in statistics.sites.items()})
    resting = sorted((share, name) for share, name in flat if share <= 0.5)
    if not resting:
        return None
    shares = torch.tensor([share for share, _ in resting])
    text = f"{len(resting)} of {len(flat)} self-attention heads rest at half of the queries or more: they give the first token and "
    text += f"the query itself all their weight. They fire at {percent(float(shares.quantile(0.5)))} of the queries (median); "
    text += f"{head_name(*resting[0][1])} at {percent(resting[0][0])}."
    return Finding("resting", text, tuple(name for _, name in resting))


def _registered(statistics: AttentionStatistics) -> list[Finding]:
    names = dict.fromkeys(name for site in statistics.sites.values() for name in site.statistics if name != "firing")
    findings = []
    for name in names:
        flat = _flat({key: site.statistic(name) for key, site in statistics.sites.items()})
        if flat:
            label, (low, least), (high, most) = (
                STATISTICS[name].label if name in STATISTICS else name,
                min(flat),
                max(flat),
            )
            mean = sum(value for value, _ in flat) / len(flat)
            text = f"{mean:.3g} on average over {len(flat)} heads, from {low:.3g} ({head_name(*least)}) to {high:.3g} "
            findings.append(Finding(label, text + f"({head_name(*most)}).", (most, least)))
    return findings


def _dependency(statistics: AttentionStatistics) -> Finding | None:
    flat = _flat({name: site.dependency_accuracy() for name, site in statistics.sites.items()})
    if not flat:
        return None
    best, where = max(flat)
    offset, baseline = statistics.sites[where[0]].dependency_baseline()
    text = f"{head_name(*where)} finds the syntactic head of {percent(best)} of the words"
    if not math.isnan(baseline):
        words = f"{abs(offset)} word{'s' if abs(offset) != 1 else ''} {'back' if offset < 0 else 'ahead'}"
        text += f" (always looking {words}: {percent(baseline)})"
    return Finding("syntax", text + ".", (where,))


def _alignment(statistics: AttentionStatistics) -> Finding | None:
    site = statistics.sites.get("cross")
    if site is None or "links" not in site.sums:
        return None
    rates = [
        (rate, method, step, head)
        for method in ("argmax", "support")
        for step in ("output", "input")
        for rate, head in _flat({"cross": site.alignment_error_rate(method, step)})
    ]
    if not rates:
        return None
    rate, method, step, where = min(rates)
    reading = "its nonzero weights" if method == "support" else "its largest weight"
    when = "when the word is predicted" if step == "output" else "when the word has just been read"
    sides = "words and the time they were said" if statistics.info.get("frame_seconds") else "source and target"
    text = f"{head_name(*where)} aligns {sides} best: an alignment error rate of {percent(rate)} by {reading}, {when}."
    return Finding("alignment", text, (where,))


def _diversity(statistics: AttentionStatistics) -> Finding | None:
    entries = []
    for name, values in statistics.head_diversity.items():
        entries += [(value, name, layer) for layer, value in enumerate(values.tolist()) if not math.isnan(value)]
    if len(entries) < 2:
        return None
    low, high = min(entries), max(entries)
    text = f"Heads differ most in {_short(high[1])} layer {high[2]} (Jensen-Shannon divergence, JS: {high[0]:.2f} of at most 1) "
    return Finding("diversity", text + f"and least in {_short(low[1])} layer {low[2]} ({low[0]:.2f}).")


def _importance(statistics: AttentionStatistics) -> Finding | None:
    for method in ("masking", "gradient"):
        flat = _flat(statistics.importance.get(method, {}))
        if not flat:
            continue
        best, where = max(flat)
        if method == "masking":
            spare = sum(value <= 0.001 for value, _ in flat)
            text = (
                f"Removing {head_name(*where)} hurts most: the loss rises by {best:.3f} nats per token. "
                f"{spare} of {len(flat)} heads can each be removed for at most 0.001."
            )
        else:
            text = f"The loss is most sensitive to {head_name(*where)} (gradient {best:.3g} nats per token)."
        return Finding("importance", text, (where,))
    return None


def _ambiguity(statistics: AttentionStatistics) -> Finding | None:
    pairs = []
    for name, extremes in statistics.extremes.items():
        for layer, info in enumerate(statistics.sites[name].layers):
            for head in range(info.num_heads):
                told = (p for p in extremes.pairs(layer, head) if p.length_class and p.sparse_text and p.dense_text)
                pairs += [(pair.gap, name, pair) for pair in list(told)[:1]]
    if not pairs:
        return None
    gap, name, pair = max(pairs, key=lambda entry: entry[0])
    if gap < 0.1:
        return None
    where = (name, pair.layer, pair.head)
    text = (
        f"{head_name(*where)} depends most on the sentence: it keeps {percent(pair.sparse_density)} of its weights in "
        f"“{_cut(pair.sparse_text)}” and {percent(pair.dense_density)} in “{_cut(pair.dense_text)}”."
    )
    return Finding("ambiguity", text, (where,))


def _cut(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _decoding(statistics: AttentionStatistics) -> Finding | None:
    found = statistics.info.get("decoding")
    if not found:
        return None
    heads = [row for row in found["heads"] if row["keys_total"]]
    total, read = (sum(row[name] for row in heads) for name in ("keys_total", "keys_read"))
    if not total:
        return None
    shares = sorted((row["keys_read"] / row["keys_total"], _cached_head(row)) for row in heads)
    text = f"Generating {found['tokens']} tokens after {found['text_tokens']}, {percent(read / total)} of the cached keys were "
    text += f"read in full and {percent(1 - read / total)} proved to have weight zero from 4 bits of each number; least was read "
    text += f"by {shares[0][1]} ({percent(shares[0][0])}), most by {shares[-1][1]} ({percent(shares[-1][0])})."
    return Finding("decoding", text)


def _cached_head(row: Any) -> str:
    """Return the name of the head that a row of a certificate is about."""
    site, layer = row["layer"].split()
    return head_name("decoder" if site == "self" else site, int(layer), row["head"])
