"""Pretrained models on other and on longer texts than they were made sparse on: perplexity, density, facts planted in the text.

    python -m recipes.lab.length.pretrained runs/smollm2-sparse/model runs/smollm2-softmax/model models/smollm2 \
        --text lm/wikitext-2/test.txt.gz --lengths 1024 2048 4096 --samples 4 --bf16
    python -m recipes.lab.length.pretrained ... --text lm/tinyshakespeare/input.txt.gz --lengths 512 --samples 24 --bf16

Perplexity is that of whole blocks, and of buckets of 512 positions. Density is the share of the possible weights that are not
zero, mean over heads; ``density_beyond_first`` leaves out the weights on the first token, where many heads rest. Into each block
four sentences like *The code of Lisbon is 4812.* are put, at an eighth, three, five and seven eighths of it. At its end each is
asked for. It counts as found where the next tokens are the code, each the likeliest, and ``choice`` is how often its code is
likelier than those of the other three (by chance a quarter). Everything else is measured without facts. All models read the same
blocks, spread evenly over the text.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
from pathlib import Path
from typing import Any

import torch
from rich import print
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_entmax
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.integration.observe import AttentionCall, observe_attention

from ..rows import RESULTS, RowFile, made_by, pick
from ..texts import encode
from .text import perplexity_by_position

FIELDS = (
    "model text length samples perplexity density density_beyond_first perplexities facts found choice nats command hardware "
    "versions"
)
PLACES = (1 / 8, 3 / 8, 5 / 8, 7 / 8)
CITIES = ("Lisbon", "Prague", "Cairo", "Lima", "Oslo", "Dublin", "Seoul", "Athens")
_BUCKET = 512


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="+", help="causal models with one tokenizer, dense or sparse: folders or Hub ids"
    )
    parser.add_argument("--text", default="lm/wikitext-2/test.txt.gz", help="running text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="multiples of 512")
    parser.add_argument("--samples", type=int, default=4, help="blocks of each length")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
    parser.add_argument("--results", type=Path, default=RESULTS / "length_pretrained.csv")
    args = parser.parse_args()
    if any(length < _BUCKET or length % _BUCKET for length in args.lengths):
        parser.error(f"--lengths {args.lengths} must be multiples of {_BUCKET}.")
    return args


def planted(ids: Tensor, tokenizer: Any, seed: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Put four facts into a block, and a question with its answer for each: ids ``[N]``, and pairs of ids.

    Args:
        ids: of the block, ``[N]``.
        tokenizer: of the model.
        seed: of the facts.
    """
    draw = random.Random(seed)
    encoded = lambda text: torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    parts, asked, last = [], [], 0
    for city, place in zip(draw.sample(CITIES, len(PLACES)), PLACES, strict=True):
        question, answer = encoded(f"\nThe code of {city} is"), encoded(f" {draw.randrange(1000, 10000)}")
        end = int(place * len(ids))
        parts += [ids[last:end], question, answer, encoded(".\n")]
        asked.append((question, answer))
        last = end
    return torch.cat([*parts, ids[last:]]), asked


@torch.no_grad()
def ask(model: Any, ids: Tensor, asked: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[bool], list[bool]]:
    """Return for each question after a text: nats of its answer, whether it is the likeliest, and likelier than the other answers."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    nats, found, chosen = [], [], []
    for place, (question, _) in enumerate(asked):
        own = []
        for _, answer in asked:
            row = torch.cat([question, answer])[None]
            logits = model(input_ids=row, past_key_values=copy.deepcopy(cache), use_cache=True).logits
            told = logits[0, len(question) - 1 : -1].float()
            own.append((float(F.cross_entropy(told, answer, reduction="sum")), bool((told.argmax(-1) == answer).all())))
        nats.append(own[place][0])
        found.append(own[place][1])
        chosen.append(own[place][0] == min(value for value, _ in own))
    return nats, found, chosen


def facts(model: Any, tokenizer: Any, ids: Tensor, length: int, samples: int) -> dict[str, Any]:
    """Measure what a model finds of the facts planted in blocks of a text: how many there are, shares found and chosen, mean nats."""
    starts = torch.linspace(0, len(ids) - length - 1, samples).long().tolist()
    nats, found, chosen = [], [], []
    for seed, start in enumerate(starts):
        more = ask(model, *planted(ids[start : start + length], tokenizer, seed))
        for total, own in zip((nats, found, chosen), more, strict=True):
            total += own
    mean = lambda values: round(sum(values) / len(values), 4)  # noqa: E731
    return {"facts": len(found), "found": mean(found), "choice": mean(chosen), "nats": mean(nats)}


def read_through(model: Any, ids: Tensor, length: int, samples: int) -> dict[str, Any]:
    """Measure the perplexity of blocks of a text, by position too, and the density of the attention on them."""
    possible = kept = first = 0

    def look(call: AttentionCall) -> None:
        nonlocal possible, kept, first
        nonzero = call.weights > 0
        possible += call.weights.shape[1] * (length * (length + 1) // 2)
        kept += int(nonzero.sum())
        first += int(nonzero[..., 0].sum())

    with observe_attention(model, look) if hf_entmax.is_patched(model) else contextlib.nullcontext():
        buckets = perplexity_by_position(model, ids, length, _BUCKET, samples)
    mean = math.exp(sum(map(math.log, buckets.values())) / len(buckets))
    heads_queries = possible * 2 // (length + 1)
    shares = {"density": 1.0, "density_beyond_first": 1.0}
    if possible:
        # The first token is a possible key of every query.
        shares = {"density": kept / possible, "density_beyond_first": (kept - first) / (possible - heads_queries)}
    row = {"perplexity": round(mean, 3), **{name: round(value, 5) for name, value in shares.items()}}
    return row | {"perplexities": " ".join(f"{n}={value:.2f}" for n, value in buckets.items())}


def main() -> None:
    args = parse()
    results, same = RowFile(args.results, FIELDS), made_by("length.pretrained", "--results")
    tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    longest = max(args.lengths)
    ids = torch.tensor(encode(read_text(args.text), tokenizer, 10**7))
    if len(ids) <= args.samples * longest:
        raise SystemExit(f"{args.text} has {len(ids)} tokens: too few for {args.samples} blocks of {longest}.")
    text = "/".join(Path(args.text).parts[-2:])
    for where in args.models:
        path = Path(where)
        name = path.parent.name if path.name == "model" else path.name
        todo = [n for n in args.lengths if not pick(results.rows, model=name, length=n, command=same["command"])]
        if not todo:
            continue
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        with torch.autocast("cpu", torch.bfloat16) if args.bf16 else contextlib.nullcontext():
            for length in todo:
                row = read_through(model, ids, length, args.samples)
                row |= facts(model, tokenizer, ids, length, args.samples)
                results.add(model=name, text=text, length=length, samples=args.samples, **row, **same)
                print(f"{name}, {length} tokens: {row}")


if __name__ == "__main__":
    main()
