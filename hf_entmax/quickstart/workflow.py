"""The quickstart, top to bottom: patch a softmax model of English verbs, fine-tune, save, load, search, look at its heads."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch.optim import AdamW
from transformers import set_seed
from transformers.utils import logging as transformers_logging

import hf_entmax
from hf_entmax.analysis import AttentionStatistics, collect, write_report
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.generation import HypothesisTree
from hf_entmax.quickstart import data, measures, models
from hf_entmax.quickstart.data import Question, labelled_batches
from hf_entmax.training import AlphaLoggingCallback, alpha_parameter_groups

#: Peak learning rates: of the small model's weights, of a given model's, of the alphas.
FINE_TUNE_LR, PRETRAINED_LR, ALPHA_LR = 1e-3, 1e-4, 5e-2
#: Alphas start in the middle of their range, where heads can go either way.
ALPHA_INIT = 1.5
#: Share of ``max_minutes`` after which fine-tuning must be over. The rest is for measuring.
FINE_TUNE_UNTIL = 0.85
#: Held-out questions whose attention is measured, that the report shows, that are searched with certificates.
ANALYSED, SHOWN, SEARCHED = 256, 6, 400
#: Panels of the figure of attention maps; models with more cross-attention heads show the first layers.
MOST_MAPS = 12


def run(
    out_dir: str | Path = "quickstart-output",
    model: str | None = None,
    *,
    output_alpha: float | None = 1.5,
    seed: int = 0,
    max_minutes: float = 30.0,
    steps: int = 600,
    batch_size: int | None = None,
    questions: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Make a softmax model of English verbs adaptively sparse, and look at what became of it.

    A small character-level BART, trained with softmax and part of this package (it stands in for a pretrained model), is patched
    with one call, fine-tuned with the Seq2SeqTrainer, saved, and loaded in a fresh process that must give the same logits.
    Verbs are held out by lemma. Prints tables and writes, into ``out_dir``: ``model/`` (the patched model with its
    tokenizer), ``base/`` (the softmax model), ``figures/``, ``report.html`` with the numbers of every head, and
    ``results.json``. Needs no network.

    Args:
        out_dir: created; files of an earlier run are overwritten.
        model: an encoder-decoder on the Hub or in a directory that is used, with its own tokenizer, in place of the
            small one. Its accuracy before is that of the checkpoint as it is.
        output_alpha: alpha of the output loss and of ``generate()``, >= 1; ``None`` keeps the output a softmax.
        seed: of the order of the batches, and of what is measured.
        max_minutes: an emergency brake, > 0: a training that is not over by its share of this time is stopped, which is
            said. Otherwise the steps alone decide, and two runs on one machine give the same numbers.
        steps: optimiser steps after patching, >= 1.
        batch_size: pairs per step; by default 64 for the small model, 32 for a given one.
        questions: measure on at most this many held-out questions; by default all for the small model, 200 for a given one.
        console: of ``rich``, where everything is printed.

    Returns:
        What ``results.json`` holds.

    Raises:
        ValueError: if an argument is out of range, or ``model`` is no encoder-decoder or cannot be patched.
        RuntimeError: if the reloaded model does not give the same logits.
    """
    small = model is None
    batch_size = (64 if small else 32) if batch_size is None else batch_size
    questions = (None if small else 200) if questions is None else questions
    counts = {"steps": steps, "batch_size": batch_size, "questions": questions}
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} is not allowed: give an integer >= 1.")
    if not max_minutes > 0:
        raise ValueError(f"max_minutes={max_minutes!r} is not allowed: give a number of minutes > 0.")
    hf_entmax.EntmaxConfig(output_alpha=output_alpha)
    out = Path(out_dir)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out_dir={out} is a file: name a directory.")
    out.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"out_dir": str(out), "model": model, "output_alpha": output_alpha, "seed": seed}
    transformers_logging.disable_progress_bar()
    set_seed(seed)
    with _threads(1 if small else torch.get_num_threads()):
        return _run(settings | {"max_minutes": max_minutes, **counts}, out, console or Console())


def _run(settings: dict[str, Any], out: Path, console: Console) -> dict[str, Any]:
    given, output_alpha, seed = (settings[name] for name in ("model", "output_alpha", "seed"))
    start = last = time.monotonic()
    seconds: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[name], last = round(now - last, 1), now

    verbs = data.read_verbs()
    known, unknown = data.split_verbs(verbs)  # the split that the small model was trained with
    held_out = _sample(data.questions(unknown, known), settings["questions"], seed)
    console.print(
        f"[bold]1. Data[/]: {len(verbs):,} English verbs; {len(known):,} to learn from, {len(unknown)} held out, "
        f"{len(held_out):,} questions about those."
    )

    console.print("[bold]2. A softmax model[/]:", escape(given or "a small BART of characters, part of this package."))
    if given is None:
        tokenizer: Any = data.build_tokenizer(verbs)
        model: Any = models.pretrained_bart(tokenizer)
        _save(model, tokenizer, out / "base")
    else:
        model, tokenizer = models.load_pretrained(given)
    pairs = data.training_set(data.training_questions(known), tokenizer)
    lap("softmax model")
    before = _measure(model, tokenizer, held_out, "softmax", seed, console)
    lap("measuring it")

    console.print("[bold]3. Patch[/]: model = hf_entmax.patch_model(model)")
    model = hf_entmax.patch_model(model, alpha_init=ALPHA_INIT, output_alpha=output_alpha)

    console.print("[bold]4. Fine-tune[/] with the Seq2SeqTrainer")
    lr = FINE_TUNE_LR if given is None else PRETRAINED_LR
    end = start + FINE_TUNE_UNTIL * 60 * settings["max_minutes"]
    steps_done = models.train(
        model, tokenizer, pairs, AdamW(alpha_parameter_groups(model, lr=lr, alpha_lr=ALPHA_LR), betas=models.BETAS),
        title="training with entmax", out_dir=out / "model", steps=settings["steps"],
        max_seconds=max(1.0, end - time.monotonic()), batch_size=settings["batch_size"], seed=seed + 1, console=console,
        callbacks=[AlphaLoggingCallback(labelled_batches(held_out[:16], tokenizer)[0])],
    )  # fmt: skip
    lap("fine-tuning")

    console.print("[bold]5. Save[/]: model.save_pretrained(directory)")
    _save(model, tokenizer, out / "model")
    console.print("[bold]6. Reload[/] in a fresh process")
    with console.status("loading the model there"):
        difference = models.check_reload(model, out / "model", labelled_batches(held_out[:32], tokenizer)[0])
    console.print(f"The largest difference of a logit is {difference:.2g}.")
    lap("saving and reloading")

    console.print("[bold]7. What became of it[/]")
    after = _measure(model, tokenizer, held_out, "entmax", seed, console)
    (accuracy_before, softmax), (accuracy_after, sparse) = before, after
    console.print(measures.accuracy_table({"softmax": accuracy_before, "entmax, fine-tuned": accuracy_after}))
    console.print(measures.site_table(softmax, sparse))
    lists = lambda values: {site: tensor.tolist() for site, tensor in values.items()}  # noqa: E731
    results: dict[str, Any] = {
        "settings": settings,
        "steps_done": {"entmax": steps_done},
        "versions": {"hf_entmax": hf_entmax.__version__, "torch": torch.__version__},
        "verbs": {"train": len(known), "held_out": len(unknown), "questions": len(held_out)},
        "accuracy": {"before": accuracy_before, "after": accuracy_after},
        "density": lists(sparse.density),
        "head_diversity_nats": {
            "before": lists(softmax.head_diversity_nats),
            "after": lists(sparse.head_diversity_nats),
        },
        "alpha": lists(hf_entmax.alphas(model)),
        "reload": {"largest_difference_of_a_logit": difference},
    }
    lap("measuring")
    tree = None
    if output_alpha is not None:
        results["output"], tree = measures.search(
            model, tokenizer, _sample(held_out, SEARCHED, seed), output_alpha, console
        )
        lap("searching")
    with console.status("drawing the figures and the report"):
        results["files"] = [str(path) for path in _draw(out, softmax, sparse, tree, console)]
    lap("figures and report")
    total = time.monotonic() - start
    results["seconds"] = {**seconds, "total": round(total, 1)}
    target = out / "results.json"
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    done = f"{steps_done:,} of {settings['steps']:,} steps with entmax"
    console.print(escape(f"Done in {total:.0f} s: {done}. Numbers: {target}; model: {out / 'model'}"))
    return results


def _sample(asked: list[Question], most: int | None, seed: int) -> list[Question]:
    return list(asked) if most is None or len(asked) <= most else random.Random(seed).sample(asked, most)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _measure(
    model: Any, tokenizer: Any, held_out: list[Question], name: str, seed: int, console: Console
) -> tuple[dict[str, dict[str, Any]], AttentionStatistics]:
    """Measure accuracy by group and attention; the first sentence that the report shows is the most telling one."""
    scores = measures.accuracy(measures.answers(model, tokenizer, held_out, console))
    analysed = labelled_batches(_sample(held_out, ANALYSED, seed), tokenizer)
    groups = ("sparsity", "diversity", "position", "roles")
    with console.status("measuring its attention"):
        statistics = collect(model, analysed, tokenizer=tokenizer, groups=groups, name=name)
        pasts = [q for q in held_out if q.slot == "past" and q.groups[0] == "regular"]
        doubled = [q for q in pasts if len(q.answers[0]) == len(q.lemma) + 3]  # the answer changes the stem
        first = max(doubled or held_out, key=lambda q: (len(q.lemma), q.lemma))
        shown = [first, *[question for question in held_out if question is not first][: SHOWN - 1]]
        examples = (labelled_batches([question], tokenizer)[0] for question in shown)
        statistics.examples = collect_examples(model, examples, tokenizer)
    shares = {f"accuracy on {group} verbs": scores[group]["share"] for group in ("regular", "irregular")}
    statistics.scores = {name: share for name, share in shares.items() if share is not None}
    return scores, statistics


def _draw(
    out: Path, before: AttentionStatistics, after: AttentionStatistics, tree: HypothesisTree | None, console: Console
) -> list[Path]:
    """Draw the figures, where matplotlib is installed, and the report, whose figures compare the two models."""
    folder, files = out / "figures", []
    try:
        for name, figure in _figures(out / "model" / "alphas.jsonl", after, tree).items():
            folder.mkdir(parents=True, exist_ok=True)
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1])
        console.print(escape(f"Figures: {', '.join(file.name for file in files)} in {folder}"))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        said = escape(f"{error}. Install matplotlib: pip install 'hf_entmax[figures]'")
        console.print(f"[yellow]No figures were drawn[/]: {said}")
    report = write_report([after, before], out / "report.html", title="English verbs: entmax and softmax")
    console.print(escape(f"Report with every head: {report}"))
    return [*files, report]


def _figures(trajectory: Path, after: AttentionStatistics, tree: HypothesisTree | None) -> dict[str, Any]:
    """Draw what the report does not have: alpha over training, cross-attention of the first example, the hypothesis tree."""
    from hf_entmax.analysis import plots

    cross, alphas = after.examples[0].sites["cross"], after.alphas["cross"]
    queries, keys = ([token.text for token in tokens] for tokens in (cross.queries, cross.keys))
    heads = [(layer, head) for layer, row in enumerate(cross.weights) for head in range(len(row))][:MOST_MAPS]
    maps = [(f"{i}.{j}  α {alphas[i, j]:.2f}", cross.weights[i, j], queries, keys) for i, j in heads]
    figures: dict[str, Any] = {
        "alpha_per_head": plots.alpha_per_head(after),
        "alpha_over_training": plots.alpha_trajectories(trajectory),
        "attention_maps": plots.attention_maps(maps, columns=4),
    }
    return figures if tree is None else figures | {"hypothesis_tree": tree.to_figure()}


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use this many threads; one for the small model.

    Its operations are too short to be shared, and threads that wait for each other make it many times slower wherever
    something else runs.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
