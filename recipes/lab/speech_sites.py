"""What sparse attention costs a speech model that writes, site by site, before any training; and what exact decoding reads.

    python -m recipes.lab.speech_sites sites models/whisper-tiny.en data/dev/manifest.jsonl --alphas 1.1 1.5 --out sites.csv
    python -m recipes.lab.speech_sites sites models/whisper-base data/real/manifest.jsonl --sites cross --alphas 1.6 --out sites.csv
    python -m recipes.lab.speech_sites decoding runs/whisper-sparse/model data/test/manifest.jsonl --reference models/whisper-tiny.en

``sites`` patches one site at a time, and all of them together (``all``), each head with a temperature at which entmax starts
about as sharp as the softmax (``--sharp``: without), and measures error rates on greedy transcripts, the loss of what was said (nats
per token), and the share of the weights that are left. Rows that the file has are not made again.

``decoding`` writes each clip with an `ExactSparseCache` and without, and counts the tokens that are equal and
the keys that were read of those in the cross-attention's cache; times per token are medians over ``--clips`` clips, both ways and a
softmax ``--reference`` with SDPA in turns, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich import print

import hf_entmax
from hf_entmax.generation import ExactSparseCache

from .rows import RECIPES, SITES, RowFile, made_by, pick

sys.path.insert(0, str(RECIPES))  # recipes are scripts, and find what they share beside them
from common.audio import Clip, Collator, load_speech, read_clips
from common.batches import evenly
from common.heads import head_statistics
from speech import error_rates, labelled

#: So many clips of a table are looked at to see which weights are left.
SHOWN = 8
FIELDS = (
    "model sites alpha softened data clips wer cer loss density_encoder_self density_cross density_decoder_self "
    "command hardware versions"
)
DECODING = (
    "model data clips tokens equal keys keys_read keys_nonzero exact_ms dense_ms reference_ms exact_ratio "
    "command hardware versions"
)


@torch.no_grad()
def measure(
    model: Any, processor: Any, clips: list[Clip], language: str, known: dict[str, torch.Tensor] | None
) -> dict[str, Any]:
    """Error rates, loss and density of a model on some clips; what its encoder makes of them is kept in ``known``, if given."""
    collator = Collator(processor, model, known is not None)
    collator.known = known
    heard: list[str] = []
    loss = count = 0.0
    examples = labelled(clips, processor, model)
    for start in range(0, len(examples), 4):
        batch = collator(examples[start : start + 4])
        given = {name: value for name, value in batch.items() if name not in ("labels", "decoder_input_ids")}
        heard += processor.batch_decode(model.generate(**given, do_sample=False), skip_special_tokens=True)
        tokens = int((batch["labels"] != -100).sum())
        loss += tokens * float(model(**batch).loss)
        count += tokens
    collator.known, shown = None, evenly(examples, SHOWN)  # heads of the encoder are looked at too
    batches = [collator(shown[i : i + 4]) for i in range(0, len(shown), 4)]
    densities = head_statistics(model, batches, {f"density_{site}" for site in SITES})
    rates = error_rates(heard, clips, language)
    return {**{name: round(value, 2) for name, value in rates.items()}, "loss": round(loss / count, 4), **densities}


def sites(args: argparse.Namespace) -> None:
    """A row for the original, and one for every site and alpha."""
    results = RowFile(args.out, FIELDS)
    same = made_by("speech_sites", "--out", "--alphas", "--sites")
    wanted = [("", 1.0), *((site, alpha) for site in args.sites for alpha in args.alphas)]
    for table in args.tables:
        clips = read_clips(table, "audio", "text")[: args.clips]
        known: dict[str, torch.Tensor] = {}
        for site, alpha in wanted:
            row = {"model": Path(args.model).name, "data": Path(table).parent.name, "clips": len(clips)}
            row |= {"sites": site, "alpha": alpha, "softened": bool(site and not args.sharp)}
            if pick(results.rows, **row):
                continue
            processor, model = load_speech(args.model, args.language)
            if site:
                soft = {} if args.sharp else {"length_scaling": "constant", "length_scaling_init": "softmax"}
                chosen = None if site == "all" else tuple(site.split("+"))
                model = hf_entmax.patch_model(model, alpha=alpha, sites=chosen, **soft)
            dense_encoder = "encoder_self" not in site and site != "all"
            found = measure(model.eval(), processor, clips, args.language, known if dense_encoder else None)
            results.add(**row, **found, **same)
            print(" ".join(f"{name} {value}" for name, value in {**row, **found}.items()))


@torch.no_grad()
def decoding(args: argparse.Namespace) -> None:
    """One row: equal tokens, keys read, and times."""
    processor, model = load_speech(args.model, args.language)
    if not hf_entmax.is_patched(model):
        model = hf_entmax.patch_model(
            model, alpha=args.alphas[0], sites=("cross",), length_scaling="constant", length_scaling_init="softmax"
        )
    reference = load_speech(args.reference, args.language)[1] if args.reference else None
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "exact": (model, {}),
        "dense": (model, {}),
        **({"reference": (reference, {})} if reference is not None else {}),
    }
    (table,) = args.tables
    clips = read_clips(table, "audio", "text")[: args.clips]
    tokens = equal = 0
    counts = torch.zeros(3, dtype=torch.int64)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number, clip in enumerate(clips):
        written = {}
        for way in [list(ways), list(ways)[::-1]][number % 2]:
            own, options = ways[way]
            collator = Collator(processor, own, True)
            given = {"encoder_outputs": collator(labelled([clip], processor, own))["encoder_outputs"]}
            if way == "exact":
                # Whisper's generate does not give back the cache that it used.
                options = {"past_key_values": (cache := ExactSparseCache(own))}
            start = time.process_time()
            found = own.generate(**given, **options, do_sample=False, return_dict_in_generate=True)
            spent = time.process_time() - start
            ids = found["sequences"][0].tolist()
            written[way] = ids
            times[way].append(1000 * spent / max(1, len(ids)))
            if way == "exact":
                for layer in cache.certificate().layers:
                    if layer.name.startswith("cross"):
                        counts += torch.stack(
                            [layer.pairs.sum(), layer.read.sum(), (layer.nonzero + layer.dense).sum()]
                        )
        tokens += len(written["dense"])
        equal += sum(a == b for a, b in zip(written["dense"], written["exact"], strict=False))
    middle = {f"{way}_ms": round(statistics.median(values), 2) for way, values in times.items()}
    ratio = statistics.median(
        a / b for a, b in zip(times["exact"], times.get("reference", times["dense"]), strict=True)
    )
    row = {"model": Path(args.model).name, "data": Path(table).parent.name, "clips": len(clips), "tokens": tokens}
    row |= {"equal": equal, **dict(zip(("keys", "keys_read", "keys_nonzero"), counts.tolist(), strict=True))}
    row |= {**middle, "exact_ratio": round(ratio, 3)}
    print(" ".join(f"{name} {value}" for name, value in row.items()))
    RowFile(args.out, DECODING).add(**row, **made_by("speech_sites", "--out"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sites", "decoding"))
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("tables", nargs="+", help="tables of sound files and texts; one for decoding")
    parser.add_argument(
        "--sites", nargs="+", default=[*SITES, "all"], help="encoder_self, cross, ..., joined by +, or all"
    )
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.5])
    parser.add_argument("--sharp", action="store_true", help="without the temperature of each head")
    parser.add_argument("--clips", type=int, help="the first so many of each table; default: all")
    parser.add_argument("--language", default="en")
    parser.add_argument("--reference", help="softmax model to time beside")
    parser.add_argument("--out", type=Path, required=True, help="CSV file for the rows")
    args = parser.parse_args(arguments)
    {"sites": sites, "decoding": decoding}[args.what](args)


if __name__ == "__main__":
    main()
