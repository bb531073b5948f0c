"""Can reading a prompt leave out tiles of keys before their scores are computed? A measurement that decides, without a kernel.

    python -m recipes.lab.prefill_tiles models/smollm2 --text valid.txt --length 4096

Queries and keys are those of some layers of the softmax model; a temperature-free alpha is searched for each layer at which a given
share of the weights is left. A page of keys is bounded by its smallest and largest value of each channel, which bounds the scores of
every query there: two numbers a channel and page in the place of one a key. A tile, so many queries by a page, can be left out if no
bound in it reaches the threshold of its query. Three shares of tiles remain: where weight is (no method leaves out more), where a
bound reaches the exact threshold (known only in hindsight), and where it reaches the largest score of the query's own and the first
page, less 1 / (alpha - 1): what a kernel could know in time.

The time of a kernel that leaves tiles out is at least that of the bounds, and of all that ours does but for the scores left out; both
parts are timed, in turn with our kernel and SDPA.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_entmax.bench.timing import interleaved_times
from hf_entmax.ops import entmax, entmax_attention

from .rows import RESULTS, RowFile, made_by
from .serving_speed import clock
from .texts import load_model, recorded, text_of

FIELDS = (
    "model layer length alpha nonzero queries page tiles_with_weight tiles_exact_threshold tiles_known_threshold bounds_ms scores_ms "
    "kernel_ms sdpa_ms at_least_ms ratio_to_kernel ratio_to_sdpa hardware command versions"
)


def shares(query: Tensor, key: Tensor, alpha: float, size: int, page: int) -> tuple[float, list[float]]:
    """Measure the share of nonzero weights, and of tiles that remain in each of the three ways, of every eighth block of queries."""
    heads, length, width = query.shape
    blocks = torch.arange(7, length // size, 8)[:, None]
    rows = (blocks * size + torch.arange(size)).flatten()
    seen = torch.arange(length) <= rows[:, None]
    scores = (query[:, rows] @ key.mT * width**-0.5).masked_fill_(~seen, -torch.inf)
    weights = entmax(scores, alpha)
    threshold = scores.masked_fill(weights == 0, torch.inf).amin(-1)
    pages = key.unflatten(1, (-1, page))
    low, high = pages.amin(2), pages.amax(2)
    chosen = query[:, rows]
    bound = (chosen.clamp(min=0) @ high.mT + chosen.clamp(max=0) @ low.mT) * width**-0.5
    own = scores.unflatten(-1, (-1, page)).amax(-1)
    known = torch.maximum(own.gather(-1, (rows // page).expand(heads, -1)[..., None])[..., 0], own[..., 0])
    begun = (torch.arange(0, length, page) <= rows[:, None]).unflatten(0, (-1, size)).any(1)
    ways = (
        (weights > 0).unflatten(-1, (-1, page)).any(-1),
        bound >= threshold[..., None],
        bound > (known - 1 / (alpha - 1))[..., None],
    )
    left = [float((way.unflatten(1, (-1, size)).any(2) & begun).sum() / (heads * begun.sum())) for way in ways]
    return float((weights > 0).sum() / (heads * seen.sum())), left


def alpha_for(query: Tensor, key: Tensor, share: float) -> float:
    """Find the alpha at which this share of the weights is left."""
    low, high = 1.01, 2.0
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(query, key, middle, 8, 32)[0] > share else (low, middle)
    return round((low + high) / 2, 3)


@torch.no_grad()
def measure(settings: Any) -> None:
    settings.alpha, settings.dtype = "1", "float32"
    model, file = load_model(settings, sparse=False), RowFile(settings.out / "prefill_tiles.csv", FIELDS)
    with recorded(model) as seen:
        model(torch.tensor([text_of(settings, settings.length)]), logits_to_keep=1, use_cache=False)
    for layer in settings.layers:
        query, key, value = (own[0] for own in seen[layer])
        key, value = (own.repeat_interleave(len(query) // len(own), 0) for own in (key, value))
        for share in settings.shares:
            alpha, four = alpha_for(query, key, share), (query[None], key[None], value[None])
            signs = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
            extremes = torch.cat([key, key], -1)[:, :: settings.page].mT.contiguous()
            parts: dict[str, Callable[[], object]] = {
                "bounds": partial(torch.matmul, signs, extremes),
                "scores": partial(torch.matmul, query, key.mT),
                "kernel": partial(entmax_attention, *four, alpha, is_causal=True),
                "sdpa": partial(scaled_dot_product_attention, *four, is_causal=True),
            }
            times = interleaved_times(parts, settings.trials, clock=clock)
            bounds, scores, kernel, sdpa = (statistics.median(own) for own in times.values())
            bounds, scores = bounds / 2, scores / 2  # the half that is causal
            nonzero, left = shares(query, key, alpha, settings.queries, settings.page)
            least = bounds + kernel - scores * (1 - left[2])
            row = dict(
                zip(("tiles_with_weight", "tiles_exact_threshold", "tiles_known_threshold"), left, strict=True),
                bounds_ms=bounds, scores_ms=scores, kernel_ms=kernel, sdpa_ms=sdpa, at_least_ms=least,
                ratio_to_kernel=least / kernel, ratio_to_sdpa=least / sdpa, nonzero=nonzero,
            )  # fmt: skip
            row = {name: round(number, 4) for name, number in row.items()}
            sizes = {"length": settings.length, "queries": settings.queries, "page": settings.page}
            file.add(
                model=Path(settings.model).name,
                layer=layer,
                alpha=alpha,
                **sizes,
                **row,
                **made_by("prefill_tiles", "--out"),
            )
            print({"layer": layer, "alpha": alpha, **row}, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.prefill_tiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder of a decoder")
    parser.add_argument("--text", type=Path, required=True, help="a text file to read from")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 22])
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.1, 0.04], help="of the weights that are to be left"
    )
    parser.add_argument("--queries", type=int, default=8, help="queries of a tile")
    parser.add_argument("--page", type=int, default=32, help="keys of a tile")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
