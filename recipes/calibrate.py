"""How many attention weights of a pretrained model can be exactly zero without training one: alphas within budgets on the loss.

    python recipes/pretrained_folders.py smollm2 models/smollm2
    python recipes/calibrate.py --model models/smollm2 --out runs/smollm2-calibrated --temperature
    python recipes/pretrained_folders.py minilm models/minilm
    python recipes/calibrate.py --model models/minilm --pairs summ/scitldr-a/{split}.jsonl.gz --out runs/minilm-calibrated

Budgets are in percent of perplexity. A causal model is calibrated on blocks of the training text (``--data``) and judged on the
test text. A sentence encoder has no loss of its own: given ``--pairs`` of texts that mean the same (columns ``source`` and
``target``), it is the one such encoders are trained with, to find a text's partner among the others of its batch (InfoNCE, cosines
times 20); its embeddings are compared with those of the softmax model as well. Each budget makes, once, a row and ``OUT/BUDGET``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import rich
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from common.batches import evenly
from common.blocks import collate, cut, encode
from common.folder import say_processes
from common.heads import head_statistics
from common.results import columns, show
from common.row_file import Results, origin
from common.sentences import contrast, embeddings, pair_batch, read_text_pairs, spearman
from common.settings import option
from hf_entmax import calibrate_alphas, patch_model, softmax_attention
from hf_entmax.analysis.reading.tables import read_text
from hf_entmax.integration.patching import update_config

FIELDS = columns(
    "model data temperature budget calibration_tokens steps loss_before loss_after density_calibration heldout_tokens heldout_before",
    "heldout_after heldout_percent density cosine similarity_correlation accuracy_before accuracy alpha_median alpha_max",
    "heads heads_sparse heads_full seconds command hardware versions",
)
SPARSE, FULL = 0.1, 0.95  # a head keeps less than the one of its weights on the calibration text, or at least the other
NOT_IN_COMMAND = ("--out", "--results", "--budgets")


@dataclasses.dataclass
class Arguments:
    """What to calibrate on what."""

    model: str = dataclasses.field(metadata={"help": "a causal model, or with --pairs an encoder: folder or Hub id"})
    out: str = dataclasses.field(metadata={"help": "folder for the calibrated models"})
    results: str = option("", "CSV file for the rows (default: OUT/calibration.csv)")
    budgets: list[float] = option([0, 0.5, 1, 2, 5], "percent of perplexity")
    data: str = option("lm/wikitext-2/{split}.txt.gz", "text for causal models")
    pairs: str = option("", "pairs of texts for sentence encoders; {split} is train and test")
    block: int = option(512, "tokens in a block, or in the longest text")
    batch: int = option(0, "blocks (default 1) or pairs (default 32) in a batch")
    size: int = option(32, "batches to calibrate on, every fourth only to judge")
    heldout: int = option(48, "batches of test data")
    steps: int = option(60, "gradient steps on the alphas")
    temperature: bool = option(False, "set a temperature of each head beside its alpha")


def text_batches(args: Arguments, tokenizer: Any, split: str, count: int) -> list[dict[str, Tensor]]:
    """Cut whole blocks of running text, from all over it: blocks that follow each other say the same, and judge each other mildly."""
    size = args.batch or 1
    ids, _ = encode(read_text(args.data.replace("{split}", split)), tokenizer)
    blocks = evenly(cut(ids, args.block, full_only=True), count * size)
    return [collate(blocks[start : start + size]) for start in range(0, len(blocks), size)]


def pair_batches(args: Arguments, tokenizer: Any, split: str, count: int) -> list[dict[str, Tensor]]:
    """Make batches of `common.sentences.pair_batch`."""
    size = args.batch or 32
    pairs = read_text_pairs(args.pairs.replace("{split}", split), "source", "target")[: count * size]
    starts = range(0, len(pairs) - size + 1, size)
    return [pair_batch(pairs[start : start + size], tokenizer, args.block) for start in starts]


def pair_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Compute InfoNCE, nats per text."""
    return contrast(embeddings(model, batch))


@torch.no_grad()
def heldout(model: Any, batches: list[dict[str, Tensor]], pairs: bool) -> dict[str, Any]:
    """Measure the loss with softmax attention and without, and what became of embeddings."""
    loss = pair_loss if pairs else lambda model, batch: model(**batch, use_cache=False).loss  # nats per token
    size = (lambda b: len(b["input_ids"]) // 2) if pairs else (lambda b: int((b["labels"][:, 1:] != -100).sum()))
    count = sum(map(size, batches))
    after = sum(float(loss(model, batch)) for batch in batches) / len(batches)
    own = [embeddings(model, batch) for batch in batches] if pairs else []
    with softmax_attention(model):
        before = sum(float(loss(model, batch)) for batch in batches) / len(batches)
        plain = [embeddings(model, batch) for batch in batches] if pairs else []
    percent = 100 * math.expm1(after - before)
    found = {"heldout_tokens": count, "heldout_before": before, "heldout_after": after, "heldout_percent": percent}
    if pairs:
        matrices = [[a @ b.T for a, b in (part.chunk(2) for part in vectors)] for vectors in (plain, own)]
        correct = [torch.cat([m.argmax(1) == torch.arange(len(m)) for m in each]).float().mean() for each in matrices]
        similarities = [torch.cat([m.flatten() for m in each]) for each in matrices]
        cosines = torch.cat([(a * b).sum(-1) for a, b in zip(plain, own, strict=True)])
        found |= {"cosine": float(cosines.mean()), "similarity_correlation": spearman(torch.stack(similarities))}
        found |= {"accuracy_before": float(correct[0]), "accuracy": float(correct[1])}
    return found


def main(args: Arguments) -> None:
    say_processes("calibrate")
    out = Path(args.out)
    results = Results(Path(args.results) if args.results else out / "calibration.csv", FIELDS)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    make = pair_batches if args.pairs else text_batches
    batches, test = make(args, tokenizer, "train", args.size), make(args, tokenizer, "test", args.heldout)
    same = origin(NOT_IN_COMMAND, ("--budgets",))
    auto: Any = AutoModel if args.pairs else AutoModelForCausalLM
    for budget in args.budgets:
        if results.has(command=same["command"], budget=budget):
            continue
        model = auto.from_pretrained(args.model, dtype=torch.float32).eval()
        # Most passes look at all weights: the dense path has them at hand.
        patch_model(model, backend="torch", length_scaling="constant" if args.temperature else "none")
        start = time.perf_counter()
        say, loss = (lambda line: print(line, flush=True)), pair_loss if args.pairs else None
        found = calibrate_alphas(model, batches, math.log1p(budget / 100), loss=loss, steps=args.steps, progress=say)
        seconds = time.perf_counter() - start
        rich.print(found)
        update_config(model, backend="auto")
        model.save_pretrained(out / f"{budget:g}")
        tokenizer.save_pretrained(out / f"{budget:g}")
        heads, density = (torch.cat([v.flatten() for v in part.values()]) for part in (found.alphas, found.density))
        inputs = [{k: v for k, v in batch.items() if k != "labels"} for batch in test]
        measures = heldout(model, test, bool(args.pairs)) | {"density": head_statistics(model, inputs)["density"]}
        measures |= {"loss_before": found.loss_before, "loss_after": found.loss_after}
        row = {name: round(value, 5) if isinstance(value, float) else value for name, value in measures.items()}
        row |= {"density_calibration": round(found.mean_density, 4), "seconds": round(seconds, 1)}
        row |= {f"alpha_{name}": round(float(getattr(heads, name)()), 4) for name in ("median", "max")}
        counts = {"heads": ~density.isnan(), "heads_sparse": density < SPARSE, "heads_full": density >= FULL}
        row |= {name: int(chosen.sum()) for name, chosen in counts.items()}
        results.add(
            model=Path(args.model).name, data=args.pairs or args.data, temperature=args.temperature, budget=budget,
            calibration_tokens=found.tokens, steps=args.steps, **row, **same,
        )  # fmt: skip
        show({"budget": budget, **row})


if __name__ == "__main__":
    main(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
