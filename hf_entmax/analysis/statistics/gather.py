"""Adding up the statistics of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
    """Replaces the statistics of every process by those of all together.

    Args:
        statistics: of this process; changed in place.
        layers: its layers by site. A process that saw no batch may know fewer.
        accelerator: connects the processes.
        error: what stopped this process, or None.

    Returns:
        The first error of any process, or None.
    """
    if accelerator.num_processes == 1:
        return error
    from accelerate.utils import gather_object

    remarks = {
        "error": None if error is None else str(error),
        "layers": layers,
        "num_sentences": statistics.num_sentences,
        "num_tokens": statistics.num_tokens,
        "notes": statistics.notes,
        "extremes": statistics.extremes,
    }
    everyone = gather_object([remarks])
    for name, site in statistics.sites.items():
        most = max((other["layers"].get(name, []) for other in everyone), key=len)
        _widen(site.sums, len(site.layers), len(most))
        site.layers = list(most)
    _reduce(statistics, accelerator)

    statistics.num_sentences = sum(other["num_sentences"] for other in everyone)
    tokens: dict[str, int] = {}
    for other in everyone:
        for site, count in other["num_tokens"].items():
            tokens[site] = tokens.get(site, 0) + count
    statistics.num_tokens = tokens
    statistics.notes = list(dict.fromkeys(note for other in everyone for note in other["notes"]))
    statistics.extremes = {}
    for other in everyone:
        for site, extremes in other["extremes"].items():
            if site in statistics.extremes:
                statistics.extremes[site].merge(extremes)
            else:
                statistics.extremes[site] = extremes
    for extremes in statistics.extremes.values():
        wanted = extremes.wanted()
        extremes.texts = {index: text for index, text in sorted(extremes.texts.items()) if index in wanted}
    first = next((other["error"] for other in everyone if other["error"] is not None), None)
    return error if error is not None or first is None else ValueError(first)


def _widen(sums: dict[str, Tensor], have: int, need: int) -> None:
    if have == need:
        return
    for key, value in sums.items():
        sums[key] = torch.cat([value, value.new_zeros(need - have, *value.shape[1:])])


def _reduce(statistics: AttentionStatistics, accelerator: Accelerator) -> None:
    """Sums all tensors of all sites in one float64 message."""
    keys = [(site, key) for site in sorted(statistics.sites) for key in sorted(statistics.sites[site].sums)]
    if not keys:
        return
    flat = torch.cat([statistics.sites[site].sums[key].flatten() for site, key in keys])
    flat = accelerator.reduce(flat.to(accelerator.device), reduction="sum").cpu()  # type: ignore[union-attr]
    position = 0
    for site, key in keys:
        shape = statistics.sites[site].sums[key].shape
        size = shape.numel()
        statistics.sites[site].sums[key] = flat[position : position + size].reshape(shape).clone()
        position += size
