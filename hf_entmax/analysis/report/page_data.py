"""What the page knows: the numbers it shows, and attention weights packed small."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from torch import Tensor

from hf_entmax.analysis.collecting.examples import Example, Token
from hf_entmax.analysis.metrics.registry import STATISTICS
from hf_entmax.analysis.metrics.roles import CROSS_ROLE_NAMES, ROLE_NAMES, HeadRole
from hf_entmax.analysis.plots.style import SITE_COLOURS, SITE_NAMES
from hf_entmax.analysis.report.findings import Finding, compare, head_name, summarize
from hf_entmax.analysis.report.rows import head_rows, relation_rows, sentence_rows, site_rows
from hf_entmax.analysis.statistics.result import AttentionStatistics

#: Digits kept of every number in the page; the files beside it have all of them.
_DIGITS = 5


def build_payload(models: Sequence[AttentionStatistics], example_bytes: int) -> dict[str, Any]:
    """Collect everything that the scripts of the page read; packed attention takes up to ``example_bytes`` in all."""
    share = example_bytes // len(models)
    return {
        "sites": {name: {"name": SITE_NAMES[name], "colour": SITE_COLOURS[name]} for name in SITE_NAMES},
        "roles": ROLE_NAMES,
        "statistics": {name: STATISTICS[name].label if name in STATISTICS else name for name in _statistics(models)},
        "crossRoles": CROSS_ROLE_NAMES,
        "models": [_model(model, share) for model in models],
        "comparison": [_finding(f) for other in models[1:] for f in compare(models[0], other)],
    }


def _model(model: AttentionStatistics, example_bytes: int) -> dict[str, Any]:
    ranked = {
        site: [[value.ranked_roles(layer, head)[:5] for head in range(info.num_heads)] for layer, info in enumerate(value.layers)]
        for site, value in model.sites.items()
    }  # fmt: skip
    baselines = {site: list(value.dependency_baseline()) for site, value in model.sites.items()}
    return _rounded(
        {
            "name": model.name,
            "sentences": model.num_sentences,
            "tokens": model.num_tokens,
            "scores": model.scores,
            "findings": [_finding(finding) for finding in summarize(model)],
            "notes": model.notes,
            "heads": _columns(head_rows(model)),
            "sites": site_rows(model),
            "relations": relation_rows(model),
            "contrasts": sentence_rows(model, 12),
            "profiles": {site: value.distance_profile().tolist() for site, value in model.sites.items()},
            "ranked": ranked,
        }
    ) | {
        "info": model.info,
        "baselines": {site: found for site, found in baselines.items() if not math.isnan(found[1])},
        "examples": pack_examples(model.examples, example_bytes),
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns, which name each number once; what a row does not have becomes None."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _statistics(models: Sequence[AttentionStatistics]) -> list[str]:
    return list(dict.fromkeys(name for model in models for site in model.sites.values() for name in site.statistics))


def _finding(finding: Finding) -> dict[str, Any]:
    heads = [[*head, head_name(*head)] for head in finding.heads[:8]]
    return {"topic": finding.topic, "text": finding.text, "heads": heads, "more": max(len(finding.heads) - 8, 0)}


def _rounded(value: Any) -> Any:
    """Round the numbers in lists and rows to the digits of the page; NaN and infinities become None."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    if isinstance(value, HeadRole):
        return _rounded(list(astuple(value)))
    return (round(value, _DIGITS) if math.isfinite(value) else None) if isinstance(value, float) else value


def pack_examples(examples: Sequence[Example], room: int) -> list[dict[str, Any]]:
    """Pack examples in order until ``room`` bytes are used up; the first one always goes in."""
    packed: list[dict[str, Any]] = []
    used = 0
    for example in examples:
        sites = {
            name: {
                "queries": _tokens(site.queries),
                "keys": None if list(site.queries) == list(site.keys) else _tokens(site.keys),
                **pack_weights(site.weights),
            }
            for name, site in example.sites.items()
        }
        size = sum(len(site["bits"]) + len(site["values"]) for site in sites.values())
        if packed and used + size > room:
            break
        used += size
        packed.append({"text": example.text, "target": example.target, "sites": sites})
    return packed


def pack_weights(weights: Tensor) -> dict[str, Any]:
    """Pack weights [layers, heads, T_q, T_k] in [0, 1] as a bitmap of the nonzero ones and one byte for each of those.

    A byte v stands for v / 255; a nonzero weight never becomes zero. Both are base64 strings beside the ``shape``:
    ``bits`` (row-major, most significant bit first) and ``values``.
    """
    flat = weights.detach().float().cpu().numpy().ravel()
    nonzero = flat != 0
    values = np.clip(np.rint(flat[nonzero] * 255), 1, 255).astype(np.uint8)
    return {
        "shape": list(weights.shape),
        "bits": base64.b64encode(np.packbits(nonzero).tobytes()).decode("ascii"),
        "values": base64.b64encode(values.tobytes()).decode("ascii"),
    }


def _tokens(tokens: Sequence[Token]) -> list[list[Any]]:
    return [[token.text, int(token.continues), int(token.special)] for token in tokens]
