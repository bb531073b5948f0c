"""What the quickstart measures of a model on held-out verbs, and the tables that it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_entmax.analysis import AttentionStatistics
from hf_entmax.generation import HypothesisTree, SearchResult, beam_search, hypothesis_tree, support_size
from hf_entmax.ops import entmax
from hf_entmax.quickstart import data
from hf_entmax.quickstart.data import GROUPS, Question, batches, labelled_batches, source_text

NUM_BEAMS = 5
#: The most uncertain of the questions searched, which are shown with their answers.
UNCERTAIN = 4


def answers(model: Any, tokenizer: Any, asked: Sequence[Question], console: Console) -> list[tuple[Question, str]]:
    """Answer every question greedily."""
    model.eval()
    given = []
    for part, inputs in track(list(batches(asked, tokenizer)), "answering held-out questions", console=console):
        tokens = model.generate(**inputs.to(model.device), num_beams=1, do_sample=False)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        given += [(question, text.strip()) for question, text in zip(part, texts, strict=True)]
    return given


def accuracy(given: Iterable[tuple[Question, str]]) -> dict[str, dict[str, Any]]:
    """Count right answers per group, their total, and the share, None without questions; any variant of the table is right."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for question, answer in given:
        total.update(question.groups)
        right.update(question.groups if answer in question.answers else ())
    share = lambda group: right[group] / total[group] if total[group] else None  # noqa: E731
    return {group: {"right": right[group], "total": total[group], "share": share(group)} for group in GROUPS}


def search(
    model: Any, tokenizer: Any, asked: list[Question], output_alpha: float, console: Console
) -> tuple[dict[str, Any], HypothesisTree]:
    """Search held-out questions with certificates; show the tree of the ambiguous verb, and the most uncertain questions."""
    found: list[tuple[Question, SearchResult]] = []
    for part, inputs in track(list(batches(asked, tokenizer, 128)), "searching with certificates", console=console):
        found += zip(part, beam_search(model, inputs.to(model.device), num_beams=NUM_BEAMS), strict=True)

    def text(tokens: Any) -> str:
        return "" if tokens is None else str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    known = [len(result) for _, result in found if result.exhaustive]
    proved = {
        "total": len(found),
        "optimal": sum(result.optimal for _, result in found) / len(found),
        "exhaustive": len(known) / len(found),
        "single": known.count(1) / len(found),
        "right": sum(text(result.best) in question.answers for question, result in found) / len(found),
        "hypotheses": sum(known) / len(known) if known else None,
        "support": _support(model, tokenizer, [question for question, _ in found], output_alpha),
    }
    number = lambda value: "-" if value is None else f"{value:.2f}"  # noqa: E731
    rows = [
        ("answer certified as the most probable one", percent(proved["optimal"])),
        ("all answers with nonzero probability are known", percent(proved["exhaustive"])),
        ("all probability on a single answer", percent(proved["single"])),
        ("mean number of answers, where all are known", number(proved["hypotheses"])),
        ("mean number of possible characters per step", number(proved["support"])),
        ("best answer of the search is right", percent(proved["right"])),
    ]
    title = f"Sparse output (alpha {output_alpha:g}), beam of {NUM_BEAMS} on {len(found)} held-out questions"
    console.print(_table(title, ["measure"], ["value"], rows, show_header=False))

    verb = next(v for v in data.read_verbs() if v.lemma == data.AMBIGUOUS_VERB)
    ambiguous = next(q for q in data.questions([verb]) if len(q.answers) > 1)
    (_, inputs), *_ = batches([ambiguous], tokenizer)
    result = beam_search(model, inputs.to(model.device), num_beams=NUM_BEAMS)[0]
    tree = hypothesis_tree(result, tokenizer)
    title = f"{source_text(ambiguous, tokenizer)} (in training: {' and '.join(ambiguous.answers)})"
    console.print(title, tree.to_text(), sep="\n", markup=False)
    open_questions = [(q, r) for q, r in found if r.exhaustive and 2 <= len(r) <= 6]
    uncertain = sorted(open_questions, key=lambda pair: pair[1].probabilities[0])[:UNCERTAIN]
    listed = {}
    for question, found_there in [(ambiguous, result), *uncertain]:
        told = zip(found_there.sequences, found_there.probabilities, found_there.finished, strict=True)
        listed[source_text(question, tokenizer)] = {
            text(tokens): probability for tokens, probability, ends in told if ends
        }
    if uncertain:
        rows = [(question, _listed(found_there)) for question, found_there in list(listed.items())[1:]]
        title = "Answers that the model holds possible, with their probabilities"
        console.print(_table(title, ["question", "answers"], [], rows))
    return {**proved, "hypotheses_of": listed}, tree


@torch.no_grad()
def _support(model: Any, tokenizer: Any, asked: Sequence[Question], alpha: float) -> float:
    """Count the tokens with nonzero probability per step, on average along the first right answers."""
    possible, steps = 0.0, 0
    for batch in labelled_batches(asked, tokenizer, 512):
        batch = batch.to(model.device)
        count = int((batch["labels"] != -100).sum())
        probs = entmax(model(**batch).logits.float(), alpha)
        possible += count * support_size(probs, batch["labels"]).item()
        steps += count
    return possible / steps


def _table(
    title: str, left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]], **options: Any
) -> Table:
    table = Table(title=title, **options)
    for name in (*left, *right):
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def accuracy_table(columns: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Show the results of `accuracy` side by side, a group in each row."""
    first = next(iter(columns.values()))
    rows = [
        (meaning, str(first[group]["total"]), *(percent(scores[group]["share"]) for scores in columns.values()))
        for group, meaning in GROUPS.items()
    ]
    return _table("Accuracy on held-out verbs (no lemma seen in training)", ["group"], ["questions", *columns], rows)


def site_table(before: AttentionStatistics, after: AttentionStatistics) -> Table:
    """Show density and head diversity of each site and layer, and the alphas of each layer."""
    numbers = ["layer", "density", "diversity before", "diversity after"]
    caption = "density: share of nonzero weights; diversity: Jensen-Shannon divergence of the heads in nats"
    table = _table("Attention on held-out verbs", ["site"], numbers, [], caption=caption)
    table.add_column("alpha per head")
    for site, density in after.density.items():
        diversity = [before.head_diversity_nats[site], after.head_diversity_nats[site]]
        row = lambda d, js: (percent(float(d.nanmean())), *(f"{float(one.nanmean()):.3f}" for one in js))  # noqa: E731
        table.add_row(site.replace("_", " "), "all", *row(density, diversity), "", style="bold")
        for layer, own in enumerate(density):
            shown = (
                [f"{float(a):.2f}" for a in after.alphas[site][layer] if a == a]
                if site in after.alphas
                else ["softmax"]
            )
            alphas = " ".join(shown[:8]) + (" ..." if len(shown) > 8 else "")
            table.add_row("", str(layer), *row(own, [one[layer] for one in diversity]), alphas)
        table.add_section()
    return table


def _listed(found: dict[str, float], limit: int = 4) -> str:
    shown = ", ".join(f"{text} {percent(p)}" for text, p in list(found.items())[:limit])
    return shown + (f", and {len(found) - limit} more" if len(found) > limit else "")


def percent(share: float | None) -> str:
    """Write a share in [0, 1] with one decimal, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"
