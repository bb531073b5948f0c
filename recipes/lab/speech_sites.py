"""What sparse attention costs a speech model that writes, site by site, before any training; and what exact decoding reads.

    python -m recipes.lab.speech_sites sites models/whisper-tiny.en data/dev/manifest.jsonl --alphas 1.1 1.5 --out sites.csv
    python -m recipes.lab.speech_sites sites models/whisper-base data/real/manifest.jsonl --sites cross --alphas 1.6 --out sites.csv
    python -m recipes.lab.speech_sites sites models/whisper-tiny.en data/dev/manifest.jsonl --budget 0.05 \
        --calibrate data/train/manifest.jsonl --out sites.csv
    python -m recipes.lab.speech_sites heads models/whisper-tiny.en data/real/manifest.jsonl --out heads.png
    python -m recipes.lab.speech_sites decoding runs/whisper-sparse/model data/test/manifest.jsonl --reference models/whisper-tiny.en

``sites`` patches one site at a time, and all of them together (``all``), each head with a temperature at which entmax starts
about as sharp as the softmax (``--sharp``: without), and measures error rates on greedy transcripts, the loss of what was said (nats
per token), and the share of the weights that are left. With ``--budget`` the alphas are learned ones that `calibrate_alphas` sets on
the first twelve clips of ``--calibrate``, within so many nats per token. Rows that the file has are not made again.

``heads`` draws the softmax weights of every head of the encoder on the first clip, and says how many frames they spread over.

``decoding`` writes each clip with an `ExactSparseCache` and without, and counts the tokens that are equal and
the keys that were read of those in the cross-attention's cache; times per token are medians over ``--clips`` clips, both ways and a
softmax ``--reference`` with SDPA in turns, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich import print

import hf_entmax
from hf_entmax.batches.prepare import frame_seconds
from hf_entmax.generation import ExactSparseCache
from hf_entmax.integration.observe import observe_attention
from hf_entmax.training import calibrate_alphas

from .rows import RECIPES, SITES, RowFile, made_by, pick

sys.path.insert(0, str(RECIPES))  # recipes are scripts, and find what they share beside them
from common.audio import RATE, Clip, Collator, error_rates, labelled, load_speech, read_clips
from common.batches import evenly
from common.heads import head_statistics

#: So many clips of a table are looked at to see which weights are left.
SHOWN = 8
#: So many clips calibrate.
CALIBRATING = 12
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
    if collator.known is not None:
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
    same = made_by("speech_sites")
    alphas = [f"calibrated {args.budget:g}"] if args.budget else args.alphas
    wanted = [("", 1.0), *((site, alpha) for site in args.sites for alpha in alphas)]
    for table in args.tables:
        clips = read_clips(table, "audio", "text")[: args.clips]
        known: dict[str, torch.Tensor] = {}
        for site, alpha in wanted:
            row = {"model": Path(args.model).name, "data": Path(table).parent.name, "clips": len(clips)}
            row |= {"sites": site, "alpha": alpha, "softened": bool(site) and not args.sharp}
            if pick(results.rows, **row):
                continue
            processor, model = load_speech(args.model, args.language)
            dense_encoder = "encoder_self" not in site and site != "all"  # it hears each clip once
            if site:
                soft: dict[str, Any] = (
                    {} if args.sharp else {"length_scaling": "constant", "length_scaling_init": "softmax"}
                )
                chosen = None if site == "all" else tuple(site.split("+"))
                learned = {"alpha": "learned", "alpha_init": 1.01} if args.budget else {"alpha": alpha}
                model = hf_entmax.patch_model(model, sites=chosen, **learned, **soft)
                if args.budget:
                    own = labelled(read_clips(args.calibrate, "audio", "text")[:CALIBRATING], processor, model)
                    collator = Collator(processor, model, dense_encoder)
                    with torch.enable_grad():
                        calibrate_alphas(model, [collator([clip]) for clip in own], args.budget, steps=args.steps)
            found = measure(model.eval(), processor, clips, args.language, known if dense_encoder else None)
            # The command of this row alone: rows that a file has are not made again, so that any of them can be asked for.
            words = [
                "sites",
                args.model,
                table,
                *(["--sites", site] if site else ["--sites"]),
                *(["--alphas", f"{alpha:g}"] if site and not args.budget else []),
                *(["--budget", f"{args.budget:g}", "--calibrate", args.calibrate] if site and args.budget else []),
                *(["--steps", str(args.steps)] if site and args.budget else []),
            ]
            words += [*(["--sharp"] if args.sharp else []), *(["--clips", str(args.clips)] if args.clips else [])]
            results.add(
                **row, **found, **same | {"command": shlex.join(["python", "-m", "recipes.lab.speech_sites", *words])}
            )
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


@torch.no_grad()
def heads(args: argparse.Namespace) -> None:
    """A picture of the encoder's heads on one clip."""
    processor, model = load_speech(args.model, args.language)
    clip = read_clips(args.tables[0], "audio", "text")[0]
    collator = Collator(processor, model, False)
    seen: dict[int, torch.Tensor] = {}

    def keep(call: Any) -> None:
        if call.site.site == "encoder_self":
            seen[call.site.layer] = call.weights[0].float()

    with observe_attention(model.eval(), keep):
        model.get_encoder()(**collator.features([clip]))
    seconds = frame_seconds(model, processor.feature_extractor)
    heard = math.ceil(len(clip.read()) / RATE / seconds)
    figure, axes = plt.subplots(len(seen), len(seen[0]), figsize=(1.6 * len(seen[0]), 1.85 * len(seen)), squeeze=False)
    for layer, weights in seen.items():
        spread = torch.special.entr(weights).sum(-1)[:, :heard].exp().median(-1).values.tolist()
        size = weights.shape[-1] // 5 * 5
        tenths = weights[:, :size, :size].unflatten(-1, (-1, 5)).sum(-1).unflatten(-2, (-1, 5)).mean(-2)
        for head, image in enumerate(tenths):
            axis = axes[layer, head]
            axis.imshow(image.clamp(max=0.1).sqrt().numpy(), cmap="magma")
            axis.set_title(f"{layer}.{head}: {spread[head]:.0f} frames", fontsize=9)
            axis.set_axis_off()
        print(f"layer {layer}: {' '.join(f'{frames:.0f}' for frames in spread)}")
    figure.tight_layout(pad=0.4)
    figure.savefig(args.out, dpi=50)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sites", "heads", "decoding"))
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("tables", nargs="+", help="tables of sound files and texts; one for decoding")
    parser.add_argument(
        "--sites",
        nargs="*",
        default=[*SITES, "all"],
        help="encoder_self, cross, ..., joined by +, or all; none for the original alone",
    )
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.5])
    parser.add_argument("--sharp", action="store_true", help="without the temperature of each head")
    parser.add_argument("--budget", type=float, help="calibrate learned alphas within so many nats per token instead")
    parser.add_argument("--calibrate", help="table of the clips to calibrate on")
    parser.add_argument("--steps", type=int, default=0, help="gradient steps of the calibration")
    parser.add_argument("--clips", type=int, help="the first so many of each table; default: all")
    parser.add_argument("--language", default="en")
    parser.add_argument("--reference", help="softmax model to time beside")
    parser.add_argument("--out", type=Path, required=True, help="CSV file for the rows, or the picture")
    args = parser.parse_args(arguments)
    {"sites": sites, "heads": heads, "decoding": decoding}[args.what](args)


if __name__ == "__main__":
    main()
