"""How many attention weights, and heads, a result owes to: a pretrained decoder, and the same made sparse.

    python recipes/pretrained_folders.py smollm2 models/smollm2
    python recipes/circuits.py --model models/smollm2 --out runs/circuits
    python recipes/circuits.py --model models/smollm2 --out runs/circuits --alpha 1.5      # sparse without any training
    python recipes/circuits.py --model runs/smollm2-sparse/model --out runs/circuits       # a sparse checkpoint

For each task, wording and sample of prompts (`hf_entmax.analysis.circuits.TASKS`) one row of ``--results``: how often the model does
the task, and the smallest circuits of edges and of heads that keep ``--share`` of the logit difference while everything else is
ablated as ``--ablation`` says. A row that is there is not made again. ``OUT/NAME.svg`` shows the circuit of the first prompt of
each task's first wording.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.results import columns, show
from common.row_file import Results, origin
from hf_entmax import patch_model
from hf_entmax.analysis import circuits, plots

FIELDS = columns(
    "model alpha task wording seed ablation share prompts tokens accuracy difference ablated missed edges_total edges",
    "edges_beyond_first heads heads_edges strongest seconds command hardware versions",
)
LISTS = ("--tasks", "--wordings", "--seeds")  # each of theirs makes rows of its own
NOT_IN_COMMAND = ("--out", "--results", *LISTS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal model, dense or sparse: folder or Hub id")
    parser.add_argument(
        "--alpha", type=float, help="patch it first: this alpha for all heads, softened by temperatures"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--results", type=Path, help="CSV file for the rows (default: OUT/circuits.csv)")
    parser.add_argument("--tasks", nargs="+", default=list(circuits.TASKS), choices=list(circuits.TASKS), help="which")
    parser.add_argument("--wordings", type=int, nargs="+", default=[0, 1], help="of 0, 1 and 2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the samples of prompts")
    parser.add_argument("--prompts", type=int, default=8, help="in a sample")
    parser.add_argument("--steps", type=int, default=5, help="of the integrated gradients")
    parser.add_argument(
        "--ablation", default="corrupted", choices=["zero", "mean", "corrupted"], help="of what is outside"
    )
    parser.add_argument("--share", type=float, default=0.9, help="of the logit difference that a circuit is to keep")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
    return parser.parse_args()


def main() -> None:
    args = parse()
    results = Results(args.results or args.out / "circuits.csv", FIELDS)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.alpha is not None:
        patch_model(model, alpha_init=args.alpha, length_scaling="constant", length_scaling_init="softmax")
    folder = Path(args.model)
    name = folder.parent.name if folder.name == "model" else folder.name
    same = origin(NOT_IN_COMMAND, LISTS)
    for task_name, wording, seed in itertools.product(args.tasks, args.wordings, args.seeds):
        if results.has(command=same["command"], task=task_name, wording=wording, seed=seed):
            continue
        start = time.perf_counter()
        task = circuits.TASKS[task_name](tokenizer, args.prompts, seed, wording)
        with torch.autocast(model.device.type, torch.bfloat16) if args.bf16 else contextlib.nullcontext():
            scores = circuits.attribute(model, task, ablation=args.ablation, steps=args.steps)
            edges, heads = (circuits.needed(scores, args.share, unit) for unit in ("edges", "heads"))
            row = {
                "accuracy": circuits.accuracy(model, task),
                "edges_total": scores.ablated.edges,
                "missed": scores.missed,
            }
        row |= {"difference": float(scores.ablated.full.mean()), "ablated": float(scores.ablated.empty.mean())}
        row |= {
            "edges": edges.edges,
            "edges_beyond_first": edges.beyond_first,
            "heads": heads.size,
            "heads_edges": heads.edges,
        }
        row = {key: round(value, 4) for key, value in row.items()}
        row |= {"prompts": args.prompts, "tokens": len(task.tokens[0]), "strongest": strongest(scores, 10)}
        row |= {"seconds": round(time.perf_counter() - start, 1), "ablation": args.ablation, "share": args.share}
        places = {"task": task_name, "wording": wording, "seed": seed}
        results.add(model=name, alpha="" if args.alpha is None else args.alpha, **places, **row, **same)
        show(places | row)
        if wording == args.wordings[0] and seed == args.seeds[0]:
            title = f"{name}, {task_name}"
            figure = plots.circuit(scores.edges(0, edges.size), task.tokens[0], title, answer(model, task, tokenizer))
            sparse = f"-{args.alpha:g}" if args.alpha is not None else ""
            figure.savefig(args.out / f"{name}{sparse}-{task_name.replace(' ', '-')}.svg")


def strongest(scores: circuits.EdgeScores, count: int) -> str:
    """Name, as ``LAYER.HEAD``, the heads with the highest absolute scores, strongest first: circuits of other samples can be compared."""
    sites = scores.ablated.sites
    heads = [
        (abs(float(x)), f"{sites[name].layer}.{head}")
        for name, own in scores.heads.items()
        for head, x in enumerate(own)
    ]
    return " ".join(name for _, name in sorted(heads, reverse=True)[:count])


@torch.no_grad()
def answer(model: Any, task: circuits.Task, tokenizer: Any) -> str:
    """Return what the model says next to the first prompt."""
    return tokenizer.decode([int(model(input_ids=task.batch["input_ids"][:1]).logits[0, -1].argmax())])


if __name__ == "__main__":
    main()
