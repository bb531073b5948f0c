"""How far words that a speech model hears are from where they were said; and a picture of them.

    python -m recipes.lab.word_times models/whisper-tiny.en data/real/manifest.jsonl data/test/manifest.jsonl --alphas 1 1.6 --out times.csv
    python -m recipes.lab.word_times runs/whisper-sparse/model data/real/manifest.jsonl --out times.csv --words words.jsonl
    python -m recipes.lab.word_times models/whisper-tiny.en data/real/manifest.jsonl --alphas 1.6 --draw 0003 words.png

Clips are those of the tables whose lines have ``words`` (a word, its start and its end in seconds), as `spoken_text` writes them.
A model with softmax attention is patched, in its cross-attention, with each of ``--alphas`` and a temperature for each head; 1 is
the anchor, the softmax model with Transformers' ``return_token_timestamps``, a token lasting from the time of the one before to its own,
as in ``pipeline(..., return_timestamps="word")``. Words that were said and heard are matched in their order; a row has the
quantiles of the errors of these, in ms. ``--words`` keeps each word.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich import print

import hf_entmax
from hf_entmax.analysis import plots
from hf_entmax.analysis.reading.tables import find
from hf_entmax.generation import word_times
from hf_entmax.generation.word_times import word_parts

from .rows import RECIPES, RowFile, made_by

sys.path.insert(0, str(RECIPES))  # recipes are scripts, and find what they share beside them
from common.audio import RATE, load_speech, read_audio

Times = list[tuple[str, float, float]]
QUANTILES = (50, 90, 95)
ENDS = [f"{end}_{share}" for end in ("start", "end") for share in QUANTILES]
FIELDS = f"model attention data clips said words {' '.join(ENDS)} command hardware versions"


def anchor(model: Any, processor: Any, samples: np.ndarray) -> Times:
    """The words of a softmax model, by the times that Transformers gives their tokens."""
    given = processor.feature_extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_token_timestamps=True, return_attention_mask=True
    )
    found = model.generate(**given, return_token_timestamps=True)
    ids, times = found["sequences"][0].tolist(), found["token_timestamps"][0].tolist()
    places, parts = word_parts(ids, processor.tokenizer)
    words: Times = []
    for text, size, spoken in parts:
        own, places = places[:size], places[size:]
        if spoken:
            words.append((text, times[max(0, own[0] - 1)], times[own[-1]]))
    return words


def matched(said: Times, heard: Times) -> list[tuple[int, int]]:
    """Places of the words that are the same in both, in their order."""
    plain = [[re.sub(r"[^\w']", "", word).lower() for word, *_ in words] for words in (said, heard)]
    blocks = difflib.SequenceMatcher(None, *plain, autojunk=False).get_matching_blocks()
    return [(block.a + place, block.b + place) for block in blocks for place in range(block.size)]


def timed_clips(table: str) -> list[tuple[Path, Times]]:
    """The recordings of a table whose words have times."""
    folder = find(table).parent
    records = [json.loads(line) for line in find(table).read_text(encoding="utf-8").splitlines()]
    return [(folder / record["audio"], record["words"]) for record in records if record.get("words")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("tables", nargs="+", help="JSON lines with audio, text and words")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.6], help="of a softmax model; 1 is the anchor")
    parser.add_argument("--language", default="en")
    parser.add_argument("--out", type=Path, help="CSV file for the rows")
    parser.add_argument("--words", type=Path, help="JSON lines for the matched words")
    parser.add_argument("--draw", nargs=2, metavar=("CLIP", "PNG"), help="draw this clip with the last of --alphas")
    args = parser.parse_args(arguments)
    sparse = hf_entmax.is_patched(load_speech(args.model, args.language)[1])
    for alpha in ["own"] if sparse else args.alphas:
        processor, model = load_speech(args.model, args.language)
        if alpha not in ("own", 1):
            soft: dict[str, Any] = {"length_scaling": "constant", "length_scaling_init": "softmax"}
            model = hf_entmax.patch_model(model, alpha=alpha, sites=("cross",), **soft)
        model = model.eval()
        for table in args.tables:
            errors, words = [], 0
            clips = timed_clips(table)
            for path, said in clips:
                samples = read_audio(path)
                if alpha == 1:
                    heard = anchor(model, processor, samples)
                else:
                    found = word_times(model, processor, samples, sampling_rate=RATE)
                    heard = [(word.word, word.start, word.end) for word in found]
                    if args.draw and path.stem == args.draw[0]:
                        plots.word_times(found, samples, RATE, truth=said).savefig(args.draw[1])
                words += len(said)
                for own, other in matched(said, heard):
                    errors.append([1000 * (b - a) for a, b in zip(said[own][1:], heard[other][1:], strict=True)])
                    if args.words:
                        line = {"clip": str(path), "alpha": alpha, "said": said[own], "heard": heard[other]}
                        with args.words.open("a", encoding="utf-8") as lines:
                            lines.write(json.dumps(line) + "\n")
            found = np.quantile(np.abs(errors), np.array(QUANTILES) / 100, axis=0).T.round().astype(int).flatten()
            row = {"model": args.model, "attention": alpha, "data": Path(table).parent.name, "clips": len(clips)}
            row |= {"said": words, "words": len(errors), **dict(zip(ENDS, found.tolist(), strict=True))}
            print(" ".join(f"{name} {value}" for name, value in row.items()))
            if args.out:
                RowFile(args.out, FIELDS).add(**row, **made_by("word_times", "--out", "--words", "--draw"))


if __name__ == "__main__":
    main()
