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
from rich.markup import escape
from torch import Tensor
from torch.optim import AdamW
from transformers import set_seed
from transformers.utils import logging as transformers_logging

import hf_entmax
from hf_entmax.analysis import AttentionStatistics, collect
from hf_entmax.analysis.collecting.examples import collect_examples
from hf_entmax.analysis.report import write_report
from hf_entmax.generation import HypothesisTree, beam_search, hypothesis_tree
from hf_entmax.quickstart import data, measure, models, show
from hf_entmax.quickstart.data import Question, Verb, source_text
from hf_entmax.quickstart.measure import labelled_batches
from hf_entmax.training import AlphaLoggingCallback, alpha_parameter_groups

#: Peak learning rates: of the small model's weights, of a given model's, of the alphas.
FINE_TUNE_LR, PRETRAINED_LR, ALPHA_LR = 1e-3, 1e-4, 5e-2
#: Alphas start in the middle of their range, where heads can go either way.
ALPHA_INIT = 1.5
#: How often each irregular past form is in the training data: a list of verbs has few of them, running text has many.
IRREGULAR_COPIES = 2
BETAS = (0.9, 0.98)
#: Of ``max_minutes``: when fine-tuning must be over. The rest is for measuring.
FINE_TUNE_UNTIL = 0.85
#: Held-out questions on which attention is measured; beside the example, whose attention the report shows whole; that are
#: searched with certificates; and, of those, how many of the most uncertain ones are shown with their answers.
ANALYSED, SHOWN, SEARCHED, UNCERTAIN = 256, 5, 400, 4


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
        questions: measure on so many held-out questions at most; by default all for the small model, 200 for a given
            one.
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
        return _Quickstart(settings | {"max_minutes": max_minutes, **counts}, out, console or Console()).run()


def training_questions(known: list[Verb]) -> list[Question]:
    """Every question about these verbs, those with irregular answers more than once."""
    asked = data.questions(known)
    return asked + (IRREGULAR_COPIES - 1) * [q for q in asked if q.groups[0] in ("irregular", "mixed")]


class _Quickstart:
    """One run: what its steps share."""

    def __init__(self, settings: dict[str, Any], out: Path, console: Console) -> None:
        self.settings, self.out, self.console, self.print = settings, out, console, console.print
        self.start = self.last = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.steps_done: dict[str, int] = {}

    def lap(self, name: str) -> None:
        """Write down how long the step took that ends here, s."""
        now = time.monotonic()
        self.seconds[name], self.last = round(now - self.last, 1), now

    def sample(self, asked: list[Question], most: int | None) -> list[Question]:
        if most is None or len(asked) <= most:
            return list(asked)
        return random.Random(self.settings["seed"]).sample(asked, most)

    def run(self) -> dict[str, Any]:
        given, output_alpha, seed = (self.settings[name] for name in ("model", "output_alpha", "seed"))
        verbs = data.read_verbs()
        known, unknown = data.split_verbs(verbs)  # the split that the small model was trained with
        self.held_out = self.sample(data.questions(unknown, known), self.settings["questions"])
        self.print(
            f"[bold]1. Data[/]: {len(verbs):,} English verbs; {len(known):,} to learn from, {len(unknown)} held out, "
            f"{len(self.held_out):,} questions about those."
        )
        self.print("[bold]2. A softmax model[/]:", escape(given or "a small BART of characters, part of this package."))
        if given is None:
            self.tokenizer: Any = data.build_tokenizer(verbs)
            self.model: Any = models.pretrained_bart(self.tokenizer)
        else:
            self.model, self.tokenizer = models.load_pretrained(given)
        self.pairs = data.training_set(training_questions(known), self.tokenizer)
        if given is None:
            self.save("base")
        self.lap("softmax model")
        before, softmax_statistics = self.measure("softmax")
        self.lap("measuring it")

        self.print("[bold]3. Patch[/]: model = hf_entmax.patch_model(model)")
        self.model = hf_entmax.patch_model(self.model, alpha_init=ALPHA_INIT, output_alpha=output_alpha)

        self.print("[bold]4. Fine-tune[/] with the Seq2SeqTrainer")
        lr = FINE_TUNE_LR if given is None else PRETRAINED_LR
        callback = AlphaLoggingCallback(labelled_batches(self.held_out[:16], self.tokenizer)[0])
        optimizer = AdamW(alpha_parameter_groups(self.model, lr=lr, alpha_lr=ALPHA_LR), betas=BETAS)
        self.train("entmax", "model", optimizer, self.settings["steps"], seed + 1, FINE_TUNE_UNTIL, callback)
        self.lap("fine-tuning")

        self.print("[bold]5. Save[/]: model.save_pretrained(directory)")
        self.save("model")
        probe = labelled_batches(self.held_out[:32], self.tokenizer)[0]
        difference = models.check_reload(self.model, self.out / "model", probe)
        self.print(f"[bold]6. Reload[/] in a fresh process: the largest difference of a logit is {difference:.2g}.")
        self.lap("saving and reloading")

        self.print("[bold]7. What became of it[/]")
        after, statistics = self.measure("entmax")
        self.print(show.accuracy_table({"softmax": before, "entmax, fine-tuned": after}))
        self.print(show.site_table(softmax_statistics, statistics))
        lists = lambda values: {site: tensor.tolist() for site, tensor in values.items()}  # noqa: E731
        both = {"before": (before, softmax_statistics), "after": (after, statistics)}
        results: dict[str, Any] = {
            "settings": self.settings,
            "steps_done": self.steps_done,
            "versions": {"hf_entmax": hf_entmax.__version__, "torch": torch.__version__},
            "verbs": {"train": len(known), "held_out": len(unknown), "questions": len(self.held_out)},
            "accuracy": {
                name: {group: dataclasses.asdict(score) | {"share": score.share} for group, score in scores.items()}
                for name, (scores, _) in both.items()
            },
            "density": lists(statistics.density),
            "head_diversity_nats": {name: lists(own.head_diversity_nats) for name, (_, own) in both.items()},
            "alpha": lists(hf_entmax.alphas(self.model)),
            "reload": {"largest_difference_of_a_logit": difference},
        }
        self.lap("measuring")
        tree = None
        if output_alpha is not None:
            results["output"], tree = self.search()
            self.lap("searching")
        results["files"] = [str(path) for path in self.draw(softmax_statistics, statistics, tree)]
        self.lap("figures and report")
        total = time.monotonic() - self.start
        results["seconds"] = {**self.seconds, "total": round(total, 1)}
        target = self.out / "results.json"
        target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        planned = {"entmax": self.settings["steps"]}
        done = ", ".join(f"{n:,} of {planned[name]:,} steps with {name}" for name, n in self.steps_done.items())
        self.print(escape(f"Done in {total:.0f} s: {done}. Numbers: {target}; model: {self.out / 'model'}"))
        return results

    def train(
        self, name: str, folder: str, optimizer: AdamW, steps: int, seed: int, until: float, *callbacks: Any
    ) -> None:
        end = self.start + until * 60 * self.settings["max_minutes"]
        self.steps_done[name] = models.train(
            self.model, self.tokenizer, self.pairs, optimizer, title=f"training with {name}", out_dir=self.out / folder,
            steps=steps, max_seconds=max(1.0, end - time.monotonic()), batch_size=self.settings["batch_size"], seed=seed,
            console=self.console, callbacks=callbacks,
        )  # fmt: skip

    def save(self, folder: str) -> None:
        self.model.save_pretrained(self.out / folder)
        self.tokenizer.save_pretrained(self.out / folder)

    def measure(self, name: str) -> tuple[dict[str, measure.Score], AttentionStatistics]:
        """Accuracy and attention of the model as it stands."""
        scores = measure.accuracy(measure.answers(self.model, self.tokenizer, self.held_out, self.console))
        batches = labelled_batches(self.sample(self.held_out, ANALYSED), self.tokenizer)
        groups = ("sparsity", "diversity", "position", "roles")
        statistics = collect(self.model, batches, tokenizer=self.tokenizer, groups=groups, name=name)
        first = self.example
        shown = [first, *[question for question in self.held_out if question is not first][:SHOWN]]
        statistics.examples = collect_examples(self.model, labelled_batches(shown, self.tokenizer), self.tokenizer)
        shares = {f"accuracy on {group} verbs": scores[group].share for group in ("regular", "irregular")}
        statistics.scores = {name: share for name, share in shares.items() if share is not None}
        return scores, statistics

    @property
    def example(self) -> Question:
        """The question of the attention maps: one whose answer changes the stem, if one is held out."""
        pasts = [q for q in self.held_out if q.slot == "past" and q.groups[0] == "regular"]
        doubled = [q for q in pasts if len(q.answers[0]) == len(q.lemma) + 3]
        return max(doubled or self.held_out, key=lambda q: (len(q.lemma), q.lemma))

    def search(self) -> tuple[dict[str, Any], HypothesisTree]:
        """Certificates on held-out questions, the tree of the ambiguous verb, and the most uncertain questions."""
        model, tokenizer = self.model, self.tokenizer
        found = measure.search(model, tokenizer, self.sample(self.held_out, SEARCHED), self.console)
        proved = measure.certificates(model, tokenizer, found)
        self.print(show.output_table(proved, float(self.settings["output_alpha"] or 1.0)))
        verb = next(v for v in data.read_verbs() if v.lemma == data.AMBIGUOUS_VERB)
        asked = next(q for q in data.questions([verb]) if len(q.answers) > 1)
        (_, inputs), *_ = data.batches([asked], tokenizer)
        result = beam_search(model, measure.on_device(inputs, model), num_beams=measure.NUM_BEAMS)[0]
        tree = hypothesis_tree(result, tokenizer)
        title = f"{source_text(asked, tokenizer)} (in training: {' and '.join(asked.answers)})"
        self.print(title, tree.to_text(), sep="\n", markup=False)
        known = [(q, r) for q, r in found if r.exhaustive and 2 <= len(r) <= 6]
        uncertain = sorted(known, key=lambda pair: pair[1].probabilities[0])[:UNCERTAIN]
        rows = [(source_text(q, tokenizer), measure.hypotheses(tokenizer, r)) for q, r in [(asked, result), *uncertain]]
        if uncertain:
            self.print(show.hypothesis_table(rows[1:]))
        listed = {question: dict(answers) for question, answers in rows}
        return {**dataclasses.asdict(proved), "hypotheses_of": listed}, tree

    def draw(self, before: AttentionStatistics, after: AttentionStatistics, tree: HypothesisTree | None) -> list[Path]:
        """The figures, where matplotlib is installed, and the report."""
        batch: dict[str, Tensor] = measure.on_device(labelled_batches([self.example], self.tokenizer)[0], self.model)
        maps = collect_examples(self.model, [batch], self.tokenizer, limit=1)[0].sites["cross"]
        folder, log, files = self.out / "figures", self.out / "model" / "alphas.jsonl", []
        try:
            files = show.write_figures(folder, before, after, log, maps, tree)
            self.print(escape(f"Figures: {', '.join(file.name for file in files)} in {folder}"))
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "matplotlib":
                raise
            said = escape(f"{error}. Install matplotlib: pip install 'hf_entmax[figures]'")
            self.print(f"[yellow]No figures were drawn[/]: {said}")
        title, path = "English verbs: entmax and softmax", self.out / "report.html"
        report = write_report([after, before], path, title=title)
        self.print(escape(f"Report with every head: {report}"))
        return [*files, report]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads; one for the small model.

    Its operations are too short to be shared, and threads that wait for each other make it many times slower wherever
    something else runs.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
