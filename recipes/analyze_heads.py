"""What did the heads learn? The analysis of C19 section 5, step by step.

    python recipes/analyze_heads.py MODEL --data pairs.tsv --out report
    python recipes/analyze_heads.py MODEL --compare SOFTMAX_MODEL --data pairs.tsv \
        --conllu en_pud-ud-test.conllu.gz --alignments de-en.jsonl.gz --out report
    accelerate launch recipes/analyze_heads.py MODEL --data pairs.tsv --out report

`hf-entmax analyze` does the same with every option; this script shows the parts, to take and to change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rich
from accelerate import Accelerator
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_entmax  # noqa: F401 - patched checkpoints load only with it
from common.folder import say_processes
from hf_entmax.analysis import collect, plots, write_report
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.analysis.collecting.importance import head_importance
from hf_entmax.analysis.reading.alignments import read_alignments
from hf_entmax.analysis.reading.conllu import read_conllu
from hf_entmax.analysis.reading.data import read_data
from hf_entmax.analysis.reading.encode import Encoder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an encoder-decoder model: Hub id or folder")
    parser.add_argument("--compare", action="append", default=[], help="another one, side by side; repeatable")
    parser.add_argument("--data", required=True, help="sentence pairs: .tsv, .jsonl or a Hub data set")
    parser.add_argument("--conllu", help="treebank of the source language")
    parser.add_argument("--alignments", help="gold word alignments, source to target")
    parser.add_argument("--out", type=Path, default=Path("attention-report"))
    parser.add_argument("--max-sentences", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16)
    return parser.parse_args()


def analyse(name: str, args: argparse.Namespace, accelerator: Accelerator):
    if not AutoConfig.from_pretrained(name).is_encoder_decoder:
        raise SystemExit(f"{name} is no encoder-decoder model; `hf-entmax analyze` handles the other kinds.")
    model = AutoModelForSeq2SeqLM.from_pretrained(name).to(accelerator.device)
    tokenizer = AutoTokenizer.from_pretrained(name)
    records = read_data(args.data, limit=args.max_sentences)
    encoder = Encoder(model, tokenizer, args.batch_size)
    options = {"tokenizer": tokenizer, "accelerator": accelerator, "name": Path(name).name, "progress": True}

    # 1. Density, diversity, positions, words: one pass, one layer's weights at a time.
    statistics = collect(model, encoder.texts(records), **options)

    # 2. Gold annotation: syntax in the encoder, alignment in cross-attention.
    if args.conllu:
        treebank = read_conllu(args.conllu)[: args.max_sentences]
        groups, sites = ["dependency"], ["encoder_self"]
        statistics.update(collect(model, encoder.dependencies(treebank), groups=groups, sites=sites, **options))
    if args.alignments:
        pairs = read_alignments(args.alignments)[: args.max_sentences]
        statistics.update(collect(model, encoder.alignments(pairs), groups=["alignment"], sites=["cross"], **options))

    # 3. What the loss says about each head.
    batches = encoder.texts(records[:64], labels=True)
    statistics.importance["gradient"] = head_importance(model, batches, accelerator=accelerator, progress=True)

    # 4. A few sentences in full, for the viewer.
    statistics.examples = collect_examples(model, encoder.texts(records[:50]), tokenizer)
    statistics.notes += encoder.remarks()
    return statistics


def main() -> None:
    args = parse()
    accelerator = Accelerator()
    say_processes("analyze_heads", accelerator)
    models = [analyse(name, args, accelerator) for name in [args.model, *args.compare]]
    if not accelerator.is_main_process:
        return
    report = write_report(models, args.out)
    plots.density_histograms(models).savefig(report.parent / "density.pdf")
    plots.head_diversity(models).savefig(report.parent / "diversity.pdf")
    print(f"Open {report.resolve()} in a browser.")
    table = Table("model", "site", "density", "JS diversity of heads")
    for statistics in models:
        for site, density in statistics.density.items():
            diversity = statistics.head_diversity[site]
            table.add_row(escape(statistics.name), site, f"{density.nanmean():.1%}", f"{diversity.nanmean():.3f}")
    rich.print(table)


if __name__ == "__main__":
    main()
