"""Longer than trained on: attention mappings and length scaling, tested on inputs many times as long as those of training.

    python recipes/length.py max_retrieval
    python recipes/length.py max_retrieval --only softmax "entmax 1.5" --seeds 0 1 2

Each line of the table is trained with every seed; a line that is in the results with all seeds is not made again. On a CPU set
``MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000``: fewer returns of memory to the system halve the time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import rich
import torch

from common import retrieval
from common.results import Results, columns, command, hardware, versions

FIELDS = columns(
    "task row seed steps batch train_length loss trained accuracies alpha factor seconds command hardware versions"
)
RETRIEVAL_LENGTHS = [16 * 2**power for power in range(9)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["max_retrieval"])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "length.csv")
    parser.add_argument("--only", nargs="+", help="lines of the table (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=512, help="tests at each length")
    return parser.parse_args()


def in_words(accuracies: dict[int, float]) -> str:
    """``16=99.8 32=98.0 ...``."""
    return " ".join(f"{length}={value:.1f}" for length, value in accuracies.items())


def max_retrieval(args: argparse.Namespace, results: Results) -> None:
    """Train all seeds of each line at once and test them at every length."""
    names = args.only or list(retrieval.ROWS)
    if unknown := [name for name in names if name not in retrieval.ROWS]:
        raise SystemExit(f"There is no line {unknown}; there are {list(retrieval.ROWS)}.")
    for name in names:
        seeds = [
            seed for seed in args.seeds if not results.has(task="max_retrieval", row=name, seed=seed, steps=args.steps)
        ]
        if not seeds:
            continue
        start = time.perf_counter()
        model = retrieval.Retrieval(retrieval.ROWS[name], seeds)
        loss = retrieval.train(model, args.steps, args.batch, args.lr)
        seconds = (time.perf_counter() - start) / len(seeds)
        lines: dict[str, Any] = {name: None} | (retrieval.AT_TEST if name == "softmax" else {})
        for line, mapping in lines.items():
            tested = {length: model.accuracy(length, args.samples, mapping) for length in RETRIEVAL_LENGTHS}
            alpha = torch.as_tensor(model.alphas()).detach().expand(len(seeds)).tolist()
            for place, seed in enumerate(seeds):
                accuracies = {length: values[place] for length, values in tested.items()}
                factors = {
                    length: float(model.factor(length)[place])
                    for length in (RETRIEVAL_LENGTHS[0], RETRIEVAL_LENGTHS[-1])
                }
                results.add(
                    task="max_retrieval", row=line, seed=seed, steps=args.steps, batch=args.batch, train_length=retrieval.TRAINED_AT,
                    loss=f"{loss[place]:.4f}", trained=accuracies[retrieval.TRAINED_AT] >= 50, accuracies=in_words(accuracies),
                    alpha=f"{alpha[place]:.3f}", factor=" ".join(f"{k}={v:.3f}" for k, v in factors.items()),
                    seconds=f"{seconds:.0f}", command=command(("--results",)), hardware=hardware(), versions=versions(),
                )  # fmt: skip
                rich.print(f"{line}, seed {seed}: {in_words(accuracies)}")


def main() -> None:
    args = parse()
    results = Results(args.results, FIELDS)
    {"max_retrieval": max_retrieval}[args.task](args, results)


if __name__ == "__main__":
    main()
