"""How sparse a model is: its heads, in a few numbers per site, and its output, for the tables of the recipes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from hf_entmax.analysis import collect
from hf_entmax.generation import SamplingMetrics, support_size
from hf_entmax.ops import entmax


def head_statistics(
    model: Any, batches: Iterable[dict[str, Any]], only: Container[str] | None = None
) -> dict[str, float]:
    """Measure means over the heads, on every process alike.

    Args:
        model: patched or plain, not wrapped.
        batches: as `hf_entmax.analysis.collect` takes them.
        only: names of the numbers to return; default all.

    Returns:
        For every site ``density_SITE`` (share of the possible weights that are not zero), ``support_SITE`` (keys with
        nonzero weight per query), ``js_SITE`` (Jensen-Shannon diversity of the heads of a layer); ``density`` is the mean
        over the heads of all sites.

    Reference:
        Correia, Niculae, Martins 2019, figs. 4 and 6.
    """
    found = collect(model, list(batches), groups=["sparsity", "diversity"], progress=False)
    measures = {}
    heads: list[float] = []
    for site, density in found.density.items():
        measures[f"density_{site}"] = round(float(density.nanmean()), 4)
        measures[f"support_{site}"] = round(float(found.mean_support[site].nanmean()), 3)
        measures[f"js_{site}"] = round(float(found.head_diversity[site].nanmean()), 4)
        heads += density[~density.isnan()].tolist()
    measures["density"] = round(sum(heads) / len(heads), 4)
    return {name: value for name, value in measures.items() if only is None or name in only}


@torch.no_grad()
def output_support(members: Sequence[Any], batches: Iterable[dict[str, Any]]) -> float:
    """Count the symbols with a probability above 0 where the reference stands, on every process alike.

    Args:
        members: encoder-decoder models, not wrapped; the probabilities of several are averaged.
        batches: with ``labels`` ``[B, T]``, -100 for padding.

    Returns:
        The mean over all positions of all references; the size of the vocabulary for a softmax.

    Reference:
        Peters, Niculae, Martins 2019, table 3.
    """
    pairs = [(member, SamplingMetrics.for_model(member).alpha) for member in members]
    total = positions = 0.0
    for batch in batches:
        probs = sum(entmax(member(**batch).logits.float(), alpha) for member, alpha in pairs)
        count = int((batch["labels"] != -100).sum())
        total += count * float(support_size(probs, batch["labels"]))
        positions += count
    return round(total / positions, 3)
