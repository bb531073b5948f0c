"""All numbers of an analysis as plain rows, and as CSV and JSON files."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_entmax.analysis.statistics.result import AttentionStatistics
from hf_entmax.analysis.statistics.sentences import LENGTH_CLASSES
from hf_entmax.analysis.statistics.site import SiteStatistics

Row = dict[str, Any]


def head_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per head with every number measured; what was not measured is None.

    Fractions are in [0, 1], entropies and importances in nats, distances in tokens.
    """
    rows = []
    for name, site in statistics.sites.items():
        columns = _head_columns(statistics, name, site)
        roles = site.best_roles()
        relations = site.relation_accuracy()
        counts = site.relation_counts()
        for row, layer, head in _heads(name, site):
            row |= {key: number(values[layer, head]) for key, values in columns.items()}
            row |= _best_relation(site, relations, counts, layer, head)
            role = roles[layer][head]
            row["role"] = role.role if role else None
            row |= {f"role_{what}": getattr(role, what, None) for what in ("strength", "score", "chance", "evidence")}
            rows.append(row | {"module": site.layers[layer].name})
    return rows


def _heads(name: str, site: SiteStatistics) -> Iterator[tuple[Row, int, int]]:
    """Yield the first columns of a row for every head of a site, with its layer and number."""
    for layer, info in enumerate(site.layers):
        for head in range(info.num_heads):
            yield {"site": name, "layer": layer, "head": head}, layer, head


def _head_columns(statistics: AttentionStatistics, name: str, site: SiteStatistics) -> dict[str, Tensor]:
    columns = {"alpha": statistics.alphas[name]} if name in statistics.alphas else {}
    plain = ("density", "mean_support", "entropy", "max_weight", "sentence_density_std", "mean_distance")
    columns |= {what: getattr(site, what)() for what in plain}
    columns |= {what: site.statistic(what) for what in site.statistics}
    for offset, word in ((-1, "previous"), (0, "current"), (1, "next")):
        columns[f"confidence_{word}"] = site.positional_confidence(offset)
        if name != "cross":
            columns[f"confidence_median_{word}"] = site.positional_median(offset)
            columns[f"argmax_share_{word}"] = site.positional_share(offset)
    if name != "cross":
        merging = {"subword_merging": site.subword_merging(), "subword_merging_multi": site.subword_merging(2)}
        columns |= {**merging, "interrogation": site.interrogation()}
    columns |= {f"{kind}_mass": site.sink_mass(kind) for kind in ("special", "first", "punctuation")}
    if "dependency_hits" in site.sums:
        columns["dependency_accuracy"] = site.dependency_accuracy()
        columns["dependent_accuracy"] = site.dependency_accuracy("to_dependent")
    if "links" in site.sums:
        for step in ("output", "input"):
            for method in ("argmax", "support", "threshold"):
                columns[f"aer_{method}_{step}"] = site.alignment_error_rate(method, step)
            names = (f"alignment_{what}_support_{step}" for what in ("precision", "recall"))
            columns |= dict(zip(names, site.alignment_precision_recall("support", step), strict=True))
    for method, per_site in statistics.importance.items():
        if name in per_site:
            columns[f"importance_{method}"] = per_site[name]
    return columns


def _best_relation(site: SiteStatistics, relations: Tensor, counts: Tensor, layer: int, head: int) -> Row:
    """Find the dependency relation that this head finds best, among those seen at least 20 times."""
    if "relation_hits" not in site.sums:
        return {}
    usable = (counts >= 20) & ~relations[layer, head].isnan()
    if not bool(usable.any()):
        return {"best_relation": None, "best_relation_accuracy": None}
    best = int(relations[layer, head].masked_fill(~usable, -1.0).argmax())
    return {"best_relation": site.relations[best], "best_relation_accuracy": number(relations[layer, head, best])}


def layer_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per site and layer: means over heads, and the diversity of the heads."""
    rows = []
    for name, site in statistics.sites.items():
        columns = _means(site, "density", "mean_support", "entropy", "head_diversity")
        alpha = statistics.alphas.get(name)
        for layer, info in enumerate(site.layers):
            row = {"site": name, "layer": layer, "heads": info.num_heads}
            row |= {key: number(values[layer].nanmean()) for key, values in columns.items()}
            rows.append(row | {"alpha": None if alpha is None else number(alpha[layer].nanmean())})
    return rows


def site_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per site: means over layers and heads."""
    rows = []
    for name, site in statistics.sites.items():
        columns = _means(site, "density", "mean_support", "entropy", "max_weight", "head_diversity")
        alpha = statistics.alphas.get(name)
        alpha = None if alpha is None else alpha[~alpha.isnan()]
        row = {"site": name, "layers": site.num_layers, "heads": sum(info.num_heads for info in site.layers)}
        row |= {"tokens": statistics.num_tokens.get(name, 0)}
        row |= {key: number(values.nanmean()) for key, values in columns.items()}
        for what in ("mean", "min", "max"):
            row[f"alpha_{what}"] = None if alpha is None or not len(alpha) else number(getattr(alpha, what)())
        rows.append(row)
    return rows


def _means(site: SiteStatistics, *names: str) -> dict[str, Tensor]:
    """Return statistics of a site by name, and the diversity of its heads in nats."""
    columns = {name: getattr(site, name)() for name in names}
    return columns | {"head_diversity_nats": site.head_diversity(normalize=False)}


def census_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per self-attention site and offset: how many heads are positional, and their median confidence."""
    rows = []
    for name, site in statistics.sites.items():
        for offset in (-1, 0, 1) if name != "cross" else ():
            census = site.positional_census(offset)
            row = {"site": name, "offset": offset, "positional_heads": len(census["heads"])}
            row |= {"median_confidence": number(census["median"])}
            row |= {"median_confidence_all_heads": number(census["median_all"])}
            rows.append(row | {"heads": " ".join(f"{layer}.{head}" for layer, head in census["heads"])})
    return rows


def role_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per head and role: score, chance, strength, evidence."""
    return [
        row | asdict(role)
        for name, site in statistics.sites.items()
        for row, layer, head in _heads(name, site)
        for role in site.ranked_roles(layer, head)
    ]


def distance_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per head and distance: the share of its mass there; ``inf`` gathers all greater distances."""
    rows = []
    for name, site in statistics.sites.items():
        profile = site.distance_profile()
        distances = ["-inf", *range(-site.max_distance, site.max_distance + 1), "inf"]
        for row, layer, head in _heads(name, site):
            shares = zip(distances, map(number, profile[layer, head]), strict=True)
            rows += [row | {"distance": distance, "mass": share} for distance, share in shares]
    return rows


def relation_rows(statistics: AttentionStatistics) -> list[Row]:
    """Make one row per dependency relation: how often it occurs and which head finds it best."""
    rows = []
    for name, site in statistics.sites.items():
        accuracy = site.relation_accuracy()
        for place, (relation, count) in enumerate(zip(site.relations, site.relation_counts().tolist(), strict=True)):
            if count:
                flat = accuracy[..., place].nan_to_num(-1.0).flatten()
                best = int(flat.argmax())
                layer, head = divmod(best, site.num_heads)
                row = {"site": name, "relation": relation, "count": int(count), "best_layer": layer, "best_head": head}
                rows.append(row | {"accuracy": number(flat[best])})
    return rows


def sentence_rows(statistics: AttentionStatistics, limit: int = 200) -> list[Row]:
    """List sentences of similar length of which a head is sparse in one and dense in the other, the widest contrasts first."""
    rows = []
    for name, extremes in statistics.extremes.items():
        for row, layer, head in _heads(name, statistics.sites[name]) if name in statistics.sites else ():
            for pair in extremes.pairs(layer, head):
                longest = [*LENGTH_CLASSES[:-1], None][pair.length_class]
                names = ("sparse_density", "sparse_text", "dense_density", "dense_text")
                texts = {what: getattr(pair, what) for what in names}
                rows.append(row | {"gap": pair.gap, "longest": longest} | texts)
    # In the shortest sentences a single weight makes a great difference; they come last.
    return sorted(rows, key=lambda row: (row["longest"] == LENGTH_CLASSES[0], -row["gap"]))[:limit]


TABLES = {
    "heads": head_rows,
    "layers": layer_rows,
    "sites": site_rows,
    "positions": census_rows,
    "roles": role_rows,
    "distances": distance_rows,
    "relations": relation_rows,
    "sentences": sentence_rows,
}


def write_tables(models: Sequence[AttentionStatistics], folder: Path, stem: str = "report") -> list[Path]:
    """Write every table as CSV (all models in one file, told apart by a column) and everything as one JSON file.

    ``stem`` names the JSON file; other than "report" it also goes before the names of the CSV files. Returns the files;
    a table without rows is not written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "" if stem == "report" else f"{stem}-"
    record: dict[str, Any] = {"models": []}
    for model in models:
        entry = {"name": model.name, "num_sentences": model.num_sentences, "num_tokens": model.num_tokens}
        entry |= {"scores": model.scores, "notes": model.notes, "info": model.info}
        record["models"].append(entry | {name: make(model) for name, make in TABLES.items()})
    written = []
    for name in TABLES:
        rows = [{"model": entry["name"], **row} for entry in record["models"] for row in entry[name]]
        if rows:
            path = folder / f"{prefix}{name}.csv"
            columns = list(dict.fromkeys(key for row in rows for key in row))
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            written.append(path)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    written.append(path)
    return written


def number(value: Any) -> float | None:
    """Convert to a Python float, or None for NaN and infinities, which JSON does not know."""
    value = float(value)
    return value if math.isfinite(value) else None
