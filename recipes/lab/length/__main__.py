"""Longer than trained on: attention mappings and length scaling, tested on inputs many times as long as those of training.

    python -m recipes.lab.length max_retrieval
    python -m recipes.lab.length max_retrieval --only softmax "entmax 1.5" --seeds 0 1 2
    python -m recipes.lab.length copy --seeds 0 1 2 --steps 3000 --batch 64      # likewise reverse, sort and retrieval
    python -m recipes.lab.length text --steps 3000 --batch 16 --width 128 --layers 3 --length 128      # bytes, no positions
    python -m recipes.lab.length text --model models/smollm2 --steps 0 --samples 16 --length 128       # patched, not trained

Each line of the table is trained with every seed (once where a pretrained model draws nothing). A line and seed that are in
the results, made by the same command but for ``--seeds``, ``--only`` and ``--results``, are not made again. On a CPU set
``MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000``: fewer returns of memory to the system halve the time.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich
import torch

from hf_entmax import alphas

from ..rows import RESULTS, RowFile, made_by
from . import retrieval, sequences
from . import text as long_text

FIELDS = "task row seed steps batch train_length loss trained accuracies alpha factor train_seconds command hardware versions"
#: How many times as long as in training.
FACTORS = {"max_retrieval": 256, "copy": 64, "reverse": 8, "sort": 8, "retrieval": 64, "text": 8}


#: The loss of training, the mean alpha, and what tests the model at every length.
Trained = tuple[float, float, Callable[[], dict[int, float]]]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(FACTORS))
    parser.add_argument("--results", type=Path, default=RESULTS / "length.csv")
    parser.add_argument("--only", nargs="+", help="lines of the table (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=512, help="tests at each length")
    parser.add_argument("--length", type=int, default=16, help="sequences: longest in training")
    parser.add_argument("--width", type=int, default=64, help="sequences: of the model")
    parser.add_argument("--heads", type=int, default=4, help="sequences: in a layer")
    parser.add_argument("--layers", type=int, default=2, help="sequences: of the model")
    parser.add_argument("--model", default="", help="text: a pretrained causal model, whose weights stay as they are")
    parser.add_argument("--data", default="lm/wikitext-2/{split}.txt.gz", help="text: {split} is train and test")
    return parser


def in_words(accuracies: dict[int, float]) -> str:
    """Write ``16=99.8 32=98.0 ...``."""
    return " ".join(f"{length}={value:.1f}" for length, value in accuracies.items())


def wanted(args: argparse.Namespace, rows: dict[str, Any]) -> list[str]:
    """List the lines to make.

    Raises:
        SystemExit: if one of them does not exist.
    """
    if unknown := [name for name in args.only or () if name not in rows]:
        raise SystemExit(f"There is no line {unknown}; there are {list(rows)}.")
    return args.only or list(rows)


def tested_at(task: str, length: int) -> list[int]:
    """List the length of training and its doubles."""
    return [length * 2**power for power in range(FACTORS[task].bit_length())]


def run_of(command: str) -> str:
    """Return a command without the options that say which lines it makes."""
    return re.sub(r" --(seeds|only)( (?!--)('[^']*'|\S+))*", "", command)


class Lines:
    """The results, and which lines they hold of runs with these arguments."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.results = args, RowFile(args.results, FIELDS)
        self.origin = made_by("length", "--results")
        same = [row for row in self.results.rows if run_of(row["command"]) == run_of(self.origin["command"])]
        self.there = {(row["row"], int(row["seed"])) for row in same}

    def has(self, row: str, seed: int) -> bool:
        """Tell whether a line is there."""
        return (row, seed) in self.there

    def add(self, accuracies: dict[int, float], row: str, seed: int, **values: Any) -> None:
        """Write a line that is not there and show it; learned is what is right half of the time where it was trained."""
        if self.has(row, seed):
            return
        learned = "" if self.args.task == "text" else accuracies[values["train_length"]] >= 50
        self.results.add(
            task=self.args.task, row=row, seed=seed, steps=self.args.steps, batch=self.args.batch, trained=learned,
            accuracies=in_words(accuracies), **self.origin, **values,
        )  # fmt: skip
        self.there.add((row, seed))
        rich.print(f"{row}, seed {seed}: {in_words(accuracies)}")


def max_retrieval(args: argparse.Namespace, made: Lines) -> None:
    """Train all seeds of each line at once and test them at every length."""
    lengths = tested_at(args.task, retrieval.TRAINED_AT)
    for name in wanted(args, retrieval.ROWS):
        lines: dict[str, Any] = {name: None} | (retrieval.AT_TEST if name == "softmax" else {})
        seeds = [seed for seed in args.seeds if not all(made.has(line, seed) for line in lines)]
        if not seeds:
            continue
        start = time.perf_counter()
        model = retrieval.Retrieval(retrieval.ROWS[name], seeds)
        loss = retrieval.train(model, args.steps, args.batch, args.lr)
        seconds = (time.perf_counter() - start) / len(seeds)
        alphas = torch.as_tensor(model.alphas()).detach().expand(len(seeds)).tolist()
        # A line that is there is tested too: each test draws from what the last one left.
        for line, mapping in lines.items():
            tested = {length: model.accuracy(length, args.samples, mapping) for length in lengths}
            for place, seed in enumerate(seeds):
                factors = {n: float(model.factor(n)[place]) for n in (lengths[0], lengths[-1])}
                made.add(
                    {n: found[place] for n, found in tested.items()}, row=line, seed=seed,
                    train_length=retrieval.TRAINED_AT, loss=f"{loss[place]:.4f}", alpha=f"{alphas[place]:.3f}",
                    factor=" ".join(f"{n}={value:.3f}" for n, value in factors.items()),
                    train_seconds="" if mapping else f"{seconds:.0f}",
                )  # fmt: skip


def sequence(args: argparse.Namespace, made: Lines) -> None:
    """Train one decoder for each line and seed.

    Raises:
        SystemExit: if a test asks for more pairs than there are keys.
    """
    lengths = tested_at(args.task, args.length)
    if args.task == "retrieval" and lengths[-1] > sequences.KEYS:
        most = sequences.KEYS // FACTORS[args.task]
        raise SystemExit(
            f"--length {args.length} is tested at up to {lengths[-1]} pairs, but there are {sequences.KEYS} keys: "
            f"retrieval takes --length 2 to {most}."
        )

    def one(name: str, seed: int) -> Trained:
        model = sequences.Decoder(sequences.ROWS[name], args.width, args.heads, args.layers)
        loss = sequences.train(model, args.task, seed, args.steps, args.batch, args.length, args.lr)
        tests = lambda: {n: sequences.exact_match(model, args.task, n, args.samples, seed) for n in lengths}  # noqa: E731
        return loss, statistics.fmean(model.alphas()), tests

    each(args, made, "", one)


def seeds_of(args: argparse.Namespace, row: sequences.Row) -> list[int]:
    """List the seeds that make a difference to a line: one where a pretrained model is patched with nothing drawn or trained."""
    trained = args.steps > 0 and (row.alpha == "learned" or row.scaling != "none")
    drawn = (row.scaling, row.init) == ("adaptive", "paper")
    return args.seeds if trained or drawn or not args.model else args.seeds[:1]


def text(args: argparse.Namespace, made: Lines) -> None:
    """Measure perplexity by position up to eight times the length of training: ``accuracies`` holds perplexities.

    Raises:
        SystemExit: if the test text is shorter than that.
    """
    longest = FACTORS["text"] * args.length
    train, test = (long_text.read(args.data, split, args.model) for split in ("train", "test"))
    if len(test) <= longest:
        raise SystemExit(f"--length {args.length} is tested at up to {longest} tokens; the test text has {len(test)}.")

    def one(name: str, seed: int) -> Trained:
        model = long_text.build(sequences.ROWS[name], args.model, args.width, args.heads, args.layers)
        loss = long_text.train(
            model, train, args.length, args.batch, args.steps, args.lr, seed, numbers_only=bool(args.model)
        )
        tests = lambda: long_text.perplexity_by_position(model, test, longest, args.length, args.samples)  # noqa: E731
        return loss, float(alphas(model)["decoder_self"].mean()), tests

    each(args, made, f"{Path(args.model).name or 'bytes'}: ", one)


def each(args: argparse.Namespace, made: Lines, called: str, one: Callable[[str, int], Trained]) -> None:
    """Train and test every line and seed that is not there."""
    for seed in args.seeds:
        for name in wanted(args, sequences.ROWS):
            if made.has(called + name, seed) or seed not in seeds_of(args, sequences.ROWS[name]):
                continue
            start = time.perf_counter()
            torch.manual_seed(seed)
            loss, alpha, tests = one(name, seed)
            seconds = "" if math.isnan(loss) else f"{time.perf_counter() - start:.0f}"
            made.add(
                tests(), row=called + name, seed=seed, train_length=args.length, loss=f"{loss:.4f}", alpha=f"{alpha:.3f}",
                train_seconds=seconds,
            )  # fmt: skip


def main() -> None:
    args = parser().parse_args()
    {"max_retrieval": max_retrieval, "text": text}.get(args.task, sequence)(args, Lines(args))


if __name__ == "__main__":
    main()
