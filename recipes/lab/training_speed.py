"""Training speed of a recipe's settings: models of all settings trained side by side, a few steps of each in turn.

    python -m recipes.lab.training_speed translation --config recipes/configs/translation_multi30k.yaml
    python -m recipes.lab.training_speed inflection --config recipes/configs/inflection.yaml --steps 400

All models start alike, see the same batches in the same order and do the whole step of the recipe (forward, backward,
clipping, AdamW). On a CPU the clock is the processor time of this process: other programs on the machine disturb it far less
than they do the time on the wall. A row gives the median time of a step and the median ratio to the softmax model's step on
the same batch, with 20 and 80 % quantiles, for an early and a late part of the steps, because sparsity grows with training.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import DataCollatorForSeq2Seq

import inflection
import translation
from common.batches import Batches
from common.from_scratch import build_seq2seq, train_bpe
from common.results import Results, columns, hardware, versions
from common.run import Run
from common.seq2seq import encode_pairs
from common.settings import parse
from common.training import Training, count_tokens, make_sparse
from hf_entmax.analysis.reading.tables import read_pairs

from .rows import RESULTS

FIELDS = columns(
    "recipe attention output_alpha from_step to_step seconds_per_step tokens_per_second",
    "time_ratio time_ratio_20 time_ratio_80 loss clock command hardware versions",
)
#: Attention and output of the models, the baseline first.
SETTINGS = (("softmax", 1.0), ("1.5", 1.0), ("learned", 1.0), ("softmax", 1.5), ("1.5", 1.5), ("learned", 1.5))
# Steps of one model before it is the next one's turn, and steps that nobody times.
_TURN, _WARM = 4, 8


def clock() -> float:
    """Seconds of this process on the CPU; on the wall, all kernels done, where there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def translation_training(settings: Any, run: Run) -> Training:
    """As `recipes/translation.py` sets it up."""
    pairs = read_pairs(settings.train, settings.source, settings.target)
    set_seed(settings.seed)
    tokenizer = train_bpe((side for pair in pairs for side in pair), settings.vocabulary)
    model = build_seq2seq(settings, len(tokenizer), settings.max_tokens, settings.architecture)
    examples, _ = encode_pairs(pairs, tokenizer, settings.max_tokens)
    return _training(run, make_sparse(model, settings), tokenizer, examples)


def inflection_training(settings: Any, run: Run) -> Training:
    """As `recipes/inflection.py` sets it up."""
    words = inflection.read_words(settings, "train")
    set_seed(settings.seed)
    tokenizer = inflection.build_tokenizer(words)
    examples = inflection.encode(words, tokenizer)
    longest = max(len(side) for example in examples for side in example.values())
    return _training(run, inflection.build_model(settings, tokenizer, longest), tokenizer, examples)


def _training(run: Run, model: Any, tokenizer: Any, examples: list[Any]) -> Training:
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    batches = Batches.for_training(run, examples, collate, lambda row: len(row["input_ids"]) + len(row["labels"]))
    return Training(run, model, tokenizer, batches, lambda _: {"score": 0.0})  # nothing is evaluated here


def batches_of(training: Training, first: int, count: int) -> list[list[dict[str, Any]]]:
    """The parts of ``count`` steps from step ``first`` on."""
    epoch, place = divmod(first, len(training.batches))
    rest = (training.batches.epoch(later) for later in itertools.count(epoch + 1))
    steps = itertools.chain(training.batches.epoch(epoch, place), itertools.chain.from_iterable(rest))
    return list(itertools.islice(steps, count))


def measure(trainings: list[Training], steps: int) -> tuple[list[list[float]], list[list[float]], list[int]]:
    """Seconds and loss of every step, by model, and the tokens of every step."""
    seconds: list[list[float]] = [[] for _ in trainings]
    losses: list[list[float]] = [[] for _ in trainings]
    tokens: list[int] = []
    for first in range(0, steps, _TURN):
        parts = batches_of(trainings[0], first, min(_TURN, steps - first))
        tokens += [sum(map(count_tokens, part)) for part in parts]
        for place, training in enumerate(trainings):
            for part in parts:
                began = clock()
                loss = training.step(part)["loss"]
                seconds[place].append(clock() - began)
                losses[place].append(loss)
        print(f"\r{first + len(parts)}/{steps} steps", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds, losses, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    recipes = {"translation": (translation.Settings, translation_training)}
    recipes["inflection"] = inflection.Settings, inflection_training
    parser.add_argument("recipe", choices=recipes)
    parser.add_argument("--steps", type=int, default=200, help="of every model")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "training_speed.csv", help="CSV file that grows by the rows"
    )
    args, rest = parser.parse_known_args()
    if args.steps < 4 * _WARM:
        parser.error(f"--steps {args.steps}: at least {4 * _WARM}.")
    results = Results(args.results, FIELDS)
    settings_class, build = recipes[args.recipe]
    with tempfile.TemporaryDirectory() as folder:
        trainings = []
        for attention, output in SETTINGS:
            out = ["--out", f"{folder}/{attention}-{output}", "--attention", attention, "--output_alpha", str(output)]
            settings = parse(settings_class, __doc__, [*rest, *out])
            trainings.append(build(settings, Run(settings, args.recipe)))
            trainings[-1].model.train()
        seconds, losses, tokens = measure(trainings, args.steps)
    called = shlex.join(["python", "-m", "recipes.lab.training_speed", args.recipe, "--steps", str(args.steps), *rest])
    half = args.steps // 2
    for first, last in ((_WARM, half), (half, args.steps)):
        for (attention, output), times, loss in zip(SETTINGS, seconds, losses, strict=True):
            ratios = [own / base for own, base in zip(times[first:last], seconds[0][first:last], strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=5)
            row = {"attention": attention, "output_alpha": output, "from_step": first, "to_step": last}
            row |= {"seconds_per_step": f"{statistics.median(times[first:last]):.4f}"}
            row |= {"tokens_per_second": round(sum(tokens[first:last]) / sum(times[first:last]))}
            row |= {"time_ratio_20": f"{low:.3f}", "time_ratio_80": f"{high:.3f}"}
            row |= {
                "time_ratio": f"{statistics.median(ratios):.3f}",
                "loss": f"{statistics.mean(loss[first:last]):.3f}",
            }
            row |= {"clock": "wall, GPU" if torch.cuda.is_available() else "CPU time", "command": called}
            results.add(recipe=args.recipe, **row, hardware=hardware(), versions=versions("accelerate"))
    for row in results.rows[-2 * len(SETTINGS) :]:
        print("  ".join(f"{name} {row[name]}" for name in FIELDS[1:10]))


if __name__ == "__main__":
    main()
