"""Adding up the statistics of several processes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from hf_entmax.analysis.statistics.accumulate import grown
from hf_entmax.analysis.statistics.result import AttentionStatistics
from hf_entmax.analysis.statistics.site import LayerInfo

if TYPE_CHECKING:
    from accelerate import Accelerator


def gather_collection(
    statistics: AttentionStatistics,
    layers: dict[str, list[LayerInfo]],
    accelerator: Accelerator,
    error: Exception | None,
) -> Exception | None:
    """Replaces the statistics of every process, in place, by those of all together.

    ``layers`` are this process's by site (one that saw no batch may know fewer), ``error`` what stopped it. Returns the
    first error of any process, or None.
    """
    if accelerator.num_processes == 1:
        return error
    from accelerate.utils import gather_object

    mine = (statistics, layers, None if error is None else str(error))
    everyone: list[tuple[AttentionStatistics, dict[str, list[LayerInfo]], str | None]] = gather_object([mine])
    parts = [other for other, _, _ in everyone]
    for name, site in statistics.sites.items():
        site.layers = list(max((known.get(name, []) for _, known, _ in everyone), key=len))
        sums = [part.sites[name].sums for part in parts]
        site.sums = {}
        for key in dict.fromkeys(key for one in sums for key in one):
            found = [one[key] for one in sums if key in one]
            widest = (len(site.layers), *(max(sizes) for sizes in zip(*(one.shape[1:] for one in found), strict=True)))
            site.sums[key] = torch.stack([grown(one, widest) for one in found]).sum(0)
    statistics.num_sentences = sum(part.num_sentences for part in parts)
    statistics.num_tokens = dict(sum((Counter(part.num_tokens) for part in parts), Counter()))
    statistics.notes = list(dict.fromkeys(note for part in parts for note in part.notes))
    statistics.extremes = {}
    for part in parts:
        for site, extremes in part.extremes.items():
            if site in statistics.extremes:
                statistics.extremes[site].merge(extremes)
            else:
                statistics.extremes[site] = extremes
    for extremes in statistics.extremes.values():
        wanted = extremes.wanted()
        extremes.texts = {index: text for index, text in sorted(extremes.texts.items()) if index in wanted}
    first = next((text for _, _, text in everyone if text is not None), None)
    return error if error is not None or first is None else ValueError(first)
