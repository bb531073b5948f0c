"""How many tiles of keys does each pass of the forward kernel read? Counted in Triton's interpreter, without a GPU.

    TRITON_INTERPRET=1 python -m recipes.lab.gpu.visits --out visits.csv                        # scores of five kinds, 2048 keys
    TRITON_INTERPRET=1 python -m recipes.lab.gpu.visits --out visits.csv --kinds recency --length 8192
    TRITON_INTERPRET=1 python -m recipes.lab.gpu.visits --out visits.csv --model models/smollm2 --text book.txt

A row for each kind (or layer of a model) and alpha: tiles within the causal limit, and what each pass reads as a share of them; all
threshold passes together, and how many of them a block of queries makes. ``empty`` is the share without weight.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..rows import RowFile

FIELDS = "scores length alpha tiles maximum histogram threshold passes output empty"
#: Functions that the forward kernel calls between its passes, and the pass that is over when they return.
ENDS = {
    "first_threshold": "maximum", "histogram_bracket": "histogram", "threshold_step": "threshold", "_output_pass": "output"
}  # fmt: skip


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Tiles that the forward kernels read meanwhile by pass, and how many threshold ``passes`` were made."""
    from hf_entmax.ops.triton_gpu import forward

    found: Counter[str] = Counter()

    def watched(name: str, ended: str | None) -> Any:
        own = getattr(forward, name)

        def call(*arguments: Any) -> Any:
            result = own(*arguments)
            if ended is None:
                found["reading"] += 1
            else:
                found[ended] += found.pop("reading", 0)
                found["passes"] += ended == "threshold"
            return result

        return mock.patch.object(forward, name, call)

    with contextlib.ExitStack() as stack:
        for name, ended in {"score_tile": None, **ENDS}.items():
            stack.enter_context(watched(name, ended))
        yield found


def count(query: Tensor, key: Tensor, alpha: float | Tensor) -> dict[str, Any]:
    """Shares of the tiles within the causal limit that each pass reads: ``[B, H, T, D]``, equal lengths, scores unscaled."""
    from hf_entmax.ops.triton_gpu.blocks import Arguments, attention_blocks, on_support
    from hf_entmax.ops.triton_gpu.launch import attention_forward

    batch, heads, length, width = query.shape
    exact = float(alpha) if not isinstance(alpha, Tensor) else 0.0
    alphas = torch.full((heads,), exact) if not isinstance(alpha, Tensor) else alpha
    inputs = Arguments(query, key, key, alphas, None, None, None, None, exact, True, 0, 0.0, 1.0, 0.0)
    with counted() as found:
        flags = attention_forward(inputs, False, True, not exact)[4]
    blocks = attention_blocks(length, width, width, query.dtype)
    row, col = torch.arange(0, length, blocks.rows), torch.arange(0, length, blocks.cols)
    tiles = batch * heads * int((col[None] < row[:, None] + blocks.rows).sum())
    shares = {name: round(found[name] / tiles, 3) for name in ENDS.values()}
    shares = {name.removeprefix("_"): share for name, share in shares.items()}
    programs = batch * heads * len(row)
    return {
        "tiles": tiles,
        **shares,
        "passes": round(found["passes"] / programs, 2),
        "empty": round(1 - int(on_support(flags, len(col)).sum()) / tiles, 3),
    }


def scores(kind: str, length: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head in bfloat16 whose scores are of a kind.

    ``dense``, ``random``: normal, deviation 0.3 and 2. ``recency``: deviation 1.5, less a 128th for each token between. ``sink``: deviation
    1.5, and 6 more for the first key. ``topics``: stretches of 200 tokens share a direction and look at their own and one other.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    deviation = {"dense": 0.3, "random": 2.0, "recency": 1.5, "sink": 1.5, "topics": 1.0}[kind]
    query, key = draw(length, 60) * deviation * 60**-0.5, draw(length, 60)
    place, one = torch.arange(length), torch.ones(length)
    extra: tuple[list[Tensor], list[Tensor]] = ([], [])
    if kind == "recency":  # of numbers that bfloat16 has: 64 a + b
        far, near = place // 64, place % 64
        extra = [-far / 2, -near / 128, one, one], [one, one, far / 2, near / 128]
    elif kind == "sink":
        extra = [6 * one], [(place == 0).float()]
    elif kind == "topics":
        topic = (torch.rand(length, generator=generator) < 1 / 200).cumsum(0)
        count = int(topic[-1]) + 1
        centres, other = draw(count, 60), torch.randperm(count, generator=generator)
        query = 0.6 * query + 0.7 * (centres[topic] + centres[other][topic]) * 60**-0.5
        key = 0.6 * key + centres[topic]
    query, key = (torch.stack([*own.T, *more], 1) for own, more in zip((query, key), extra, strict=True))
    return query.bfloat16()[None, None], key.bfloat16()[None, None]


def of_model(folder: str, text: Path, length: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Queries, with the scale of the scores in them, and keys of every tenth layer of a model, over a text.

    A model with softmax is patched at alpha 1.5; one that was saved sparse runs with its own alphas and temperatures. Of query heads
    that share keys the first is taken.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_entmax
    from hf_entmax.integration.discovery import attention_sites
    from hf_entmax.integration.interface import heads_in_effect
    from hf_entmax.integration.scaled_query import scaled_query
    from hf_entmax.ops.options import AttentionOptions

    from ..long_context import recorded
    from ..texts import encode

    model = AutoModelForCausalLM.from_pretrained(folder)
    if not hf_entmax.is_patched(model):
        hf_entmax.patch_model(model, alpha=1.5)
    lines = text.read_text(encoding="utf-8").splitlines()
    ids = encode(lines, AutoTokenizer.from_pretrained(folder), length)
    with torch.no_grad(), recorded(model) as seen:
        model(torch.tensor([ids]))
    modules = {site.module.layer_idx: site.module for site in attention_sites(model)}
    options = AttentionOptions(is_causal=True)
    for layer in list(seen)[2::10]:
        query, key, _ = seen[layer]
        query = scaled_query(modules[layer], heads_in_effect(modules[layer]), query, length, options, None)
        query = query[:, :: query.shape[1] // key.shape[1]]
        yield f"{Path(folder).name}, layer {layer}", (query * query.shape[-1] ** -0.5).bfloat16(), key.bfloat16()


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m recipes.lab.gpu.visits", description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="CSV file of the rows")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kinds", nargs="*", default=["dense", "random", "recency", "sink", "topics"])
    parser.add_argument("--alphas", nargs="+", type=float, default=[1.5, 1.3])
    parser.add_argument("--model", help="folder of a causal language model: its queries and keys instead")
    parser.add_argument("--text", type=Path, help="what the model reads")
    given = parser.parse_args(arguments)
    results = RowFile(given.out, FIELDS)
    if given.model:
        problems = of_model(given.model, given.text, given.length)
    else:
        problems = ((kind, *scores(kind, given.length)) for kind in given.kinds)
    for name, query, key in problems:
        for alpha in given.alphas[: 1 if given.model else None]:
            # 1.5 is compiled for itself; any other is read from memory.
            number = alpha if alpha == 1.5 else torch.full((query.shape[1],), alpha)
            results.add(scores=name, length=given.length, alpha=alpha, **count(query, key, number))
            print(results.rows[-1], flush=True)


if __name__ == "__main__":
    main()
