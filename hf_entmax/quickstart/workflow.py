"""The steps of the quickstart, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging as transformers_logging

import hf_entmax
from hf_entmax.analysis import AttentionStatistics, collect
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.analysis.report import write_report
from hf_entmax.generation import HypothesisTree, beam_search, hypothesis_tree
from hf_entmax.quickstart import tables
from hf_entmax.quickstart.base import load_pretrained, small_bart
from hf_entmax.quickstart.data import (
    AMBIGUOUS_VERB,
    Question,
    batches,
    build_tokenizer,
    read_verbs,
    source_text,
    split_verbs,
    training_set,
)
from hf_entmax.quickstart.data import questions as questions_about
from hf_entmax.quickstart.evaluate import Score, accuracy, answers, labelled_batches, on_device
from hf_entmax.quickstart.reload import check_reload
from hf_entmax.quickstart.search import NUM_BEAMS, certificates, hypotheses, search
from hf_entmax.quickstart.stages import train
from hf_entmax.training import AlphaLoggingCallback, alpha_parameter_groups

#: Peak learning rates: of the small model from scratch, of its weights after patching, of a given model, of the alphas.
BASE_LR, FINE_TUNE_LR, PRETRAINED_LR, ALPHA_LR = 3e-3, 1e-3, 1e-4, 2e-2
#: Alphas start in the middle of their range, where heads can go either way.
ALPHA_INIT = 1.5
#: How often each irregular past form is in the training data: a list of verbs has few of them, running text has many.
IRREGULAR_COPIES = 2
BETAS = (0.9, 0.98)
#: Of ``max_minutes``: when the softmax stage, and when fine-tuning, must be over. The rest is for measuring.
BASE_UNTIL, FINE_TUNE_UNTIL = 0.4, 0.85
#: Held-out questions on which attention is measured.
ANALYSED = 512
#: Held-out questions beside the example whose attention the report shows whole.
SHOWN = 5
#: Held-out questions that are searched with certificates.
SEARCHED = 800
#: Of those, how many of the most uncertain ones are shown with their answers.
UNCERTAIN = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of :func:`hf_entmax.quickstart.run`, checked."""

    out_dir: Path
    model: str | None
    output_alpha: float | None
    seed: int
    max_minutes: float
    base_steps: int
    steps: int
    batch_size: int
    questions: int | None

    def __post_init__(self) -> None:
        for name in ("base_steps", "steps", "batch_size", "questions"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is not allowed: give an integer >= 1.")
        if not self.max_minutes > 0:
            raise ValueError(f"max_minutes={self.max_minutes!r} is not allowed: give a number of minutes > 0.")
        hf_entmax.EntmaxConfig(output_alpha=self.output_alpha)
        if self.out_dir.exists() and not self.out_dir.is_dir():
            raise ValueError(f"out_dir={self.out_dir} is a file: name a directory.")


class _Clock:
    """Seconds of each step, and how much of the budget is left."""

    def __init__(self, max_minutes: float) -> None:
        self.start = self.last = time.monotonic()
        self.budget = 60 * max_minutes
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self.last, 1)
        self.last = now

    def until(self, share: float) -> float:
        """Seconds left until this share of the budget is spent; at least one."""
        return max(1.0, self.start + share * self.budget - time.monotonic())

    @property
    def total(self) -> float:
        return round(time.monotonic() - self.start, 1)


def run_workflow(settings: Settings, console: Console | None = None) -> dict[str, Any]:
    """All steps; see :func:`hf_entmax.quickstart.run`."""
    console = console or Console()
    clock = _Clock(settings.max_minutes)
    transformers_logging.disable_progress_bar()
    set_seed(settings.seed)
    settings.out_dir.mkdir(parents=True, exist_ok=True)
    with _threads(settings):
        return _run(settings, console, clock)


def _run(settings: Settings, console: Console, clock: _Clock) -> dict[str, Any]:
    verbs = read_verbs()
    known, unknown = split_verbs(verbs, settings.seed)
    held_out = _sample(questions_about(unknown, known), settings.questions, settings.seed)
    console.print(
        f"[bold]1. Data[/]: {len(verbs):,} English verbs; {len(known):,} to learn from, {len(unknown)} held out, "
        f"{len(held_out):,} questions about those."
    )
    console.print(
        "[bold]2. A softmax model[/]: "
        + ("a small BART of characters, from scratch." if settings.model is None else settings.model)
    )
    if settings.model is None:
        tokenizer: PreTrainedTokenizerBase = build_tokenizer(verbs)
        model: PreTrainedModel = small_bart(tokenizer)  # type: ignore[arg-type]
    else:
        model, tokenizer = load_pretrained(settings.model)
    asked = questions_about(known)
    asked += (IRREGULAR_COPIES - 1) * [question for question in asked if question.groups[0] in ("irregular", "mixed")]
    data = training_set(asked, tokenizer)
    steps_done: dict[str, int] = {}
    common: dict[str, Any] = {"batch_size": settings.batch_size, "console": console}
    if settings.model is None:
        optimizer = AdamW(model.parameters(), lr=BASE_LR, betas=BETAS, weight_decay=0.0)
        base_dir = settings.out_dir / "base"
        steps_done["softmax"] = train(
            model, tokenizer, data, optimizer, title="training with softmax", out_dir=base_dir, steps=settings.base_steps,
            max_seconds=clock.until(BASE_UNTIL), seed=settings.seed, **common,
        )  # fmt: skip
        model.save_pretrained(base_dir)
        tokenizer.save_pretrained(base_dir)
    clock.lap("softmax model")
    before = accuracy(answers(model, tokenizer, held_out, console, "answering held-out questions"))
    analysed = labelled_batches(_sample(held_out, ANALYSED, settings.seed), tokenizer)
    shown = labelled_batches(_shown(held_out), tokenizer)
    softmax_statistics = _statistics(model, tokenizer, analysed, shown, before, "softmax")
    clock.lap("measuring it")

    console.print("[bold]3. Patch[/]: model = hf_entmax.patch_model(model)")
    model = hf_entmax.patch_model(model, alpha_init=ALPHA_INIT, output_alpha=settings.output_alpha)

    console.print("[bold]4. Fine-tune[/] with the Seq2SeqTrainer")
    lr = FINE_TUNE_LR if settings.model is None else PRETRAINED_LR
    model_dir = settings.out_dir / "model"
    callback = AlphaLoggingCallback(labelled_batches(held_out[:16], tokenizer)[0])
    steps_done["entmax"] = train(
        model, tokenizer, data, AdamW(alpha_parameter_groups(model, lr=lr, alpha_lr=ALPHA_LR), betas=BETAS), title="training with entmax",
        out_dir=model_dir, steps=settings.steps, max_seconds=clock.until(FINE_TUNE_UNTIL), seed=settings.seed + 1,
        callbacks=[callback], **common,
    )  # fmt: skip
    clock.lap("fine-tuning")

    console.print("[bold]5. Save[/]: model.save_pretrained(directory)")
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    difference = check_reload(model, model_dir, labelled_batches(held_out[:32], tokenizer)[0])
    console.print(f"[bold]6. Reload[/] in a fresh process: the largest difference of a logit is {difference:.2g}.")
    clock.lap("saving and reloading")

    console.print("[bold]7. What became of it[/]")
    after = accuracy(answers(model, tokenizer, held_out, console, "answering held-out questions"))
    statistics = _statistics(model, tokenizer, analysed, shown, after, "entmax")
    console.print(tables.accuracy_table({"softmax": before, "entmax, fine-tuned": after}))
    console.print(tables.site_table(softmax_statistics, statistics))
    results: dict[str, Any] = {
        "settings": {**dataclasses.asdict(settings), "out_dir": str(settings.out_dir)},
        "steps_done": steps_done,
        "versions": {"hf_entmax": hf_entmax.__version__, "torch": torch.__version__},
        "verbs": {"train": len(known), "held_out": len(unknown), "questions": len(held_out)},
        "accuracy": {
            name: {group: {**dataclasses.asdict(score), "share": score.share} for group, score in scores.items()}
            for name, scores in (("before", before), ("after", after))
        },
        "density": {site: values.tolist() for site, values in statistics.density.items()},
        "head_diversity_nats": {
            name: {site: values.tolist() for site, values in s.head_diversity_nats.items()}
            for name, s in (("before", softmax_statistics), ("after", statistics))
        },
        "alpha": {site: values.tolist() for site, values in hf_entmax.alphas(model).items()},
        "reload": {"largest_difference_of_a_logit": difference},
    }
    clock.lap("measuring")
    tree = None
    if settings.output_alpha is not None:
        results["output"], tree = _search(model, tokenizer, held_out, settings, console)
        clock.lap("searching")
    results["files"] = [
        str(path)
        for path in _write_figures(
            settings, model, tokenizer, (softmax_statistics, statistics), held_out, tree, console
        )
    ]
    clock.lap("figures and report")
    results["seconds"] = {**clock.seconds, "total": clock.total}
    target = settings.out_dir / "results.json"
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    planned = {"softmax": settings.base_steps, "entmax": settings.steps}
    done = ", ".join(f"{steps:,} of {planned[name]:,} steps with {name}" for name, steps in steps_done.items())
    console.print(f"Done in {clock.total:.0f} s: {done}. Numbers: {target}; model: {model_dir}")
    return results


def _statistics(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    analysed: list[dict[str, Tensor]],
    shown: list[dict[str, Tensor]],
    scores: dict[str, Score],
    name: str,
) -> AttentionStatistics:
    groups = ("sparsity", "diversity", "position", "roles")
    statistics = collect(model, analysed, tokenizer=tokenizer, groups=groups, name=name)
    statistics.examples = collect_examples(model, shown, tokenizer)
    statistics.scores = {
        f"accuracy on {group} verbs": share
        for group in ("regular", "irregular")
        if (share := scores[group].share) is not None
    }
    return statistics


def _search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[Question],
    settings: Settings,
    console: Console,
) -> tuple[dict[str, Any], HypothesisTree]:
    """Certificates on held-out questions, the tree of the ambiguous verb, and the most uncertain questions."""
    found = search(model, tokenizer, _sample(held_out, SEARCHED, settings.seed), console)
    proved = certificates(model, tokenizer, found)
    console.print(tables.output_table(proved, float(settings.output_alpha or 1.0)))
    verb = next(v for v in read_verbs() if v.lemma == AMBIGUOUS_VERB)
    asked = next(q for q in questions_about([verb]) if len(q.answers) > 1)
    result = beam_search(model, on_device(next(iter(batches([asked], tokenizer)))[1], model), num_beams=NUM_BEAMS)[0]
    tree = hypothesis_tree(result, tokenizer)
    console.print(
        f"{source_text(asked, tokenizer)} (in training: {' and '.join(asked.answers)})",
        tree.to_text(),
        sep="\n",
        markup=False,
    )
    known = [(q, r) for q, r in found if r.exhaustive and 2 <= len(r) <= 6]
    uncertain = sorted(known, key=lambda pair: pair[1].probabilities[0])[:UNCERTAIN]
    rows = [(source_text(q, tokenizer), hypotheses(tokenizer, r)) for q, r in [(asked, result), *uncertain]]
    if uncertain:
        console.print(tables.hypothesis_table(rows[1:]))
    return {**dataclasses.asdict(proved), "hypotheses_of": {question: dict(listed) for question, listed in rows}}, tree


def _write_figures(
    settings: Settings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    statistics: tuple[AttentionStatistics, AttentionStatistics],
    held_out: list[Question],
    tree: HypothesisTree | None,
    console: Console,
) -> list[Path]:
    example = _example(held_out)
    batch = {key: tensor.to(model.device) for key, tensor in labelled_batches([example], tokenizer)[0].items()}
    try:
        from hf_entmax.quickstart.figures import write_figures

        files = write_figures(
            settings.out_dir / "figures",
            model,
            tokenizer,
            statistics,
            settings.out_dir / "model" / "alphas.jsonl",
            batch,
            tree,
        )
        console.print(f"Figures: {', '.join(file.name for file in files)} in {settings.out_dir / 'figures'}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        files = []
        console.print(f"[yellow]No figures were drawn[/]: {error}. Install them with: pip install 'hf_entmax[figures]'")
    report = write_report(
        [statistics[1], statistics[0]],
        settings.out_dir / "report.html",
        title="English verbs: entmax and softmax",
        figures=bool(files),
    )
    console.print(f"Report with every head: {report}")
    return [*files, report]


def _example(held_out: list[Question]) -> Question:
    """The question of the attention maps: one whose answer changes the stem, if one is held out."""
    doubled = [
        q for q in held_out if q.slot == "past" and q.groups[0] == "regular" and len(q.answers[0]) == len(q.lemma) + 3
    ]
    return max(doubled or held_out, key=lambda q: (len(q.lemma), q.lemma))


def _shown(held_out: list[Question]) -> list[Question]:
    """Questions whose attention the report shows whole, of the softmax model and of the patched one."""
    first = _example(held_out)
    return [first, *[question for question in held_out if question is not first][:SHOWN]]


def _sample(asked: list[Question], most: int | None, seed: int) -> list[Question]:
    if most is None or len(asked) <= most:
        return list(asked)
    return random.Random(seed).sample(asked, most)


@contextlib.contextmanager
def _threads(settings: Settings) -> Iterator[None]:
    """One thread for the small model.

    Its operations are too short to be shared, and threads that wait for each other make it many times slower wherever
    something else runs.
    """
    previous = torch.get_num_threads()
    if settings.model is None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
