"""How often is the answer of a model from text to text proved to be its most probable one?

    python -m recipes.lab.certified models/titles summ/scitldr-a/test.jsonl.gz --alphas 1 1.2 1.5 --texts 32 --out certified.csv
    python -m recipes.lab.certified runs/g2p/model words.tsv --beams 5 20 100 --out certified.csv

A row for every alpha of the output and width of the beam: for which share of the texts `hf_entmax.generation.beam_search` proves
its answer (``optimal``), knows all answers with a probability above zero (``exhaustive``), and how many prefixes it handed to the
model for a text; with ``--budget``, for which share the answer is proved once the others were searched best first (``exact``,
`hf_entmax.generation.exact_map`). Nothing is trained. Rows that the file has are not made again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich import print
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_entmax
from hf_entmax.analysis.reading.tables import read_rows
from hf_entmax.generation import beam_search, exact_map

from .rows import RowFile, made_by, pick

FIELDS = "model data texts output_alpha beams budget optimal exhaustive exact expansions vocabulary command hardware versions"


@torch.no_grad()
def measure(model: Any, batches: list[dict[str, Any]], budget: int, **search: Any) -> dict[str, Any]:
    """Measure the shares of a row, in %, and the median of the prefixes that a text took in the beam search.

    Args:
        model: an encoder-decoder.
        batches: one for each text.
        budget: prefixes to expand best first where the beam search proves nothing; 0 for none.
        search: what both searches take.
    """
    found = [beam_search(model, batch, **search)[0] for batch in batches]
    shares = {name: [getattr(one, name) for one in found] for name in ("optimal", "exhaustive")}
    if budget:
        pairs = zip(batches, found, strict=True)
        shares["exact"] = [one.optimal or exact_map(model, batch, budget, **search)[0].optimal for batch, one in pairs]
    middle = statistics.median(one.expansions for one in found)
    return {name: round(100 * statistics.fmean(own), 1) for name, own in shares.items()} | {"expansions": middle}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", help="folder or Hub id of an encoder-decoder; one that is patched already needs no --alphas"
    )
    parser.add_argument("texts_of", metavar="TEXTS", help="table, JSON lines or hub:OWNER/NAME@SPLIT")
    parser.add_argument("--column", default="source", help="of the texts")
    parser.add_argument("--texts", type=int, default=32, help="the first so many")
    parser.add_argument("--longest", type=int, default=256, help="tokens that are read of a text")
    parser.add_argument("--write", type=int, default=32, help="tokens that an answer has at most")
    parser.add_argument("--alphas", type=float, nargs="+", help="of the output; 1 is softmax. Default: the model's own")
    parser.add_argument("--beams", type=int, nargs="+", default=[5])
    parser.add_argument("--budget", type=int, default=0, help="prefixes to expand best first for a text; 0 for none")
    parser.add_argument("--out", type=Path, required=True, help="CSV file for the rows")
    args = parser.parse_args(arguments)
    results, same = RowFile(args.out, FIELDS), made_by("certified", "--out")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype=torch.float32).eval()
    own = (hf_entmax.entmax_config(model).output_alpha or 1.0) if hf_entmax.is_patched(model) else 1.0
    texts = [text for (text,) in read_rows(args.texts_of, (args.column,))[: args.texts]]
    cut = {"truncation": True, "max_length": args.longest, "return_tensors": "pt", "return_token_type_ids": False}
    batches = [dict(tokenizer(text, **cut)) for text in texts]
    for alpha in args.alphas or [own]:
        for beams in args.beams:
            row = {"model": Path(args.model).name, "data": args.texts_of, "texts": len(texts), "output_alpha": alpha}
            row |= {"beams": beams, "budget": args.budget}
            if pick(results.rows, **row):
                continue
            search = {"num_beams": beams, "max_new_tokens": args.write, "output_alpha": alpha}
            row |= measure(model, batches, args.budget, **search) | {"vocabulary": model.config.vocab_size}
            results.add(**row, **same)
            print(" ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
