"""Training speed of a recipe's settings: models of all settings trained side by side, a few steps of each in turn.

    python -m recipes.lab.training_speed translation --config recipes/configs/translation_multi30k.yaml
    python -m recipes.lab.training_speed inflection --config recipes/configs/inflection.yaml --steps 400

All models start alike, see the same batches in the same order and do a whole step (forward, backward, clipping, AdamW). On a CPU
the clock is the processor time of this process: other programs on the machine disturb it far less than they do the time on the
wall. A row gives the median time of a step and the median ratio to the softmax model's step on the same batch, with 20 and 80 %
quantiles, for an early and a late part of the steps, because sparsity grows with training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_entmax.analysis.reading.tables import read_pairs
from hf_entmax.bench.timing import interleaved_times, ratios

from .rows import RECIPES, RESULTS, RowFile, made_by

FIELDS = (
    "recipe attention output_alpha from_step to_step seconds_per_step tokens_per_second "
    "time_ratio time_ratio_20 time_ratio_80 loss clock command hardware versions"
)
#: Attention and output of the models, the baseline first.
SETTINGS = (("softmax", 1.0), ("1.5", 1.0), ("learned", 1.0), ("softmax", 1.5), ("1.5", 1.5), ("learned", 1.5))
#: Steps of one model before it is the next one's turn, and steps that nobody times.
TURN, WARM = 4, 8


def prepare(recipe: str, words: list[str]) -> tuple[Any, list[dict[str, list[int]]], Callable[..., Any]]:
    """Return the tokenizer and examples of a recipe, and what builds its model with some attention and output."""
    sys.path.insert(0, str(RECIPES))  # recipes are scripts, and find what they share beside them
    import inflection
    import translation
    from common.from_scratch import build_seq2seq, train_bpe
    from common.seq2seq import encode_pairs
    from common.settings import make_sparse, parse
    from common.words import build_tokenizer, encode, read_words

    def settings_of(attention: str, output: float) -> Any:
        chosen = ["--out", "runs/unused", "--attention", attention, "--output_alpha", str(output)]
        return parse(
            {"translation": translation, "inflection": inflection}[recipe].Settings, __doc__, [*words, *chosen]
        )

    settings = settings_of(*SETTINGS[0])
    if recipe == "translation":
        pairs = read_pairs(settings.train, settings.source, settings.target)
        tokenizer = train_bpe((side for pair in pairs for side in pair), settings.vocabulary)
        examples, _ = encode_pairs(pairs, tokenizer, settings.max_tokens)
        longest, more = settings.max_tokens, {"architecture": settings.architecture}
    else:
        learned = read_words(settings, "train")
        tokenizer = build_tokenizer(learned)
        examples = encode(learned, tokenizer)
        longest, more = (
            max(len(side) for example in examples for side in example.values()),
            {"decoder_start_token_id": 1},
        )

    def build(attention: str, output: float) -> tuple[Any, Any]:
        own = settings_of(attention, output)
        set_seed(own.seed)
        return make_sparse(build_seq2seq(own, len(tokenizer), longest, **more), own), own

    return tokenizer, examples, build


class Trainee:
    """One model and its place in the batches.

    Args:
        model: patched or not.
        settings: learning rate, its warm-up, decay and the largest norm of the gradient.
        batches: that it learns from, one after the other.
    """

    def __init__(self, model: Any, settings: Any, batches: list[dict[str, torch.Tensor]]) -> None:
        self.model, self.batches, self.norm = model.train(), batches, settings.clip_norm
        decayed = [p for p in model.parameters() if p.dim() > 1]  # neither biases nor norms nor alphas
        groups = [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, settings.lr, (0.9, 0.98), weight_decay=settings.weight_decay)
        rise = lambda step: min((step + 1) / settings.warmup, 1.0)  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rise)
        self.losses: list[float] = []

    def step(self) -> None:
        """Learn from the next batch."""
        batch = self.batches[len(self.losses)]
        loss = self.model(**{name: values.to(self.model.device) for name, values in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def batches_of(
    examples: list[Any], collate: Callable[[list[Any]], Any], size: int, count: int
) -> list[dict[str, torch.Tensor]]:
    """Make so many batches of examples of similar length, in random order."""
    lengths = [len(row["input_ids"]) + len(row["labels"]) for row in examples]
    order: list[int] = []
    while len(order) < size * count:
        order += list(LengthGroupedSampler(size, lengths=lengths, generator=torch.Generator().manual_seed(len(order))))
    return [dict(collate([examples[place] for place in order[size * i : size * (i + 1)]])) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("translation", "inflection"))
    parser.add_argument("--steps", type=int, default=200, help="of every model")
    parser.add_argument("--results", type=Path, default=RESULTS / "training_speed.csv", help="CSV file of the rows")
    args, rest = parser.parse_known_args()
    if args.steps < 4 * WARM:
        parser.error(f"--steps {args.steps}: at least {4 * WARM}.")
    results, device = RowFile(args.results, FIELDS), "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, examples, build = prepare(args.recipe, rest)
    models = {key: build(*key) for key in SETTINGS}
    (first, settings), half = models[SETTINGS[0]], args.steps // 2
    batches = batches_of(examples, DataCollatorForSeq2Seq(tokenizer, model=first), settings.batch_size, args.steps)
    trainees = {f"{key}": Trainee(model.to(device), own, batches) for key, (model, own) in models.items()}
    steps = {name: trainee.step for name, trainee in trainees.items()}
    clock = time.process_time
    times = interleaved_times(steps, args.steps - WARM, device, warm=WARM, turn=TURN, clock=clock)
    tokens = [
        sum(int((values != -100).sum()) for values in (batch["attention_mask"], batch["labels"])) for batch in batches
    ]
    base = times[f"{SETTINGS[0]}"]
    for start, stop in ((WARM, half), (half, args.steps)):
        part = slice(start - WARM, stop - WARM)
        for key in SETTINGS:
            own = times[f"{key}"][part]
            ratio = ratios(own, base[part])
            results.add(
                recipe=args.recipe, attention=key[0], output_alpha=key[1], from_step=start, to_step=stop,
                seconds_per_step=f"{statistics.median(own) / 1000:.4f}",
                tokens_per_second=round(1000 * sum(tokens[start:stop]) / sum(own)),
                time_ratio=f"{ratio.median:.3f}", time_ratio_20=f"{ratio.low:.3f}", time_ratio_80=f"{ratio.high:.3f}",
                loss=f"{statistics.mean(trainees[f'{key}'].losses[start:stop]):.3f}",
                clock="wall, GPU" if device == "cuda" else "CPU time", **made_by("training_speed", "--results"),
            )  # fmt: skip
            print("  ".join(f"{name} {results.rows[-1][name]}" for name in results.fields[1:10]))


if __name__ == "__main__":
    main()
