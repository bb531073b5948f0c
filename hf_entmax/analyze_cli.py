"""``hf-entmax analyze``: the analysis from the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option


def analyze_command(
    model: Annotated[str, Argument(help="A Hub id or a directory; patched or plain softmax.")],
    data: Annotated[
        str | None,
        Option(
            help="Text to run: .txt, .tsv, .csv or .jsonl (also .gz), or a Hub data set. Default: the gold data.",
            metavar="FILE_OR_HUB",
        ),
    ] = None,
    task: Annotated[
        str | None,
        Option(
            help="seq2seq, causal-lm, masked-lm, sequence-classification, token-classification or feature-extraction; "
            "default: from the model."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None, Option(help="Another model to show side by side; repeatable.", metavar="MODEL2")
    ] = None,
    name: Annotated[
        list[str] | None,
        Option(help="What to call each model, in order; repeatable. Default: ends of paths.", metavar="NAME"),
    ] = None,
    conllu: Annotated[
        Path | None, Option(help="Treebank in CoNLL-U: attention to gold dependency heads.", metavar="F")
    ] = None,
    alignments: Annotated[
        Path | None,
        Option(help="Gold word alignments (JSON lines, Pharaoh): error rate of cross-attention.", metavar="F"),
    ] = None,
    out: Annotated[Path, Option(help="Folder of the report, the tables and the sums.", metavar="DIR")] = Path(
        "attention-report"
    ),
    max_sentences: Annotated[int, Option(help="Read at most so many sentences of each file.")] = 2000,
    batch_size: Annotated[int, Option(help="Sentences per batch.")] = 16,
    max_length: Annotated[int | None, Option(help="Longest sequence in tokens; default: the model's.")] = None,
    source_column: Annotated[str | None, Option(help="Column or field of the text.")] = None,
    target_column: Annotated[str | None, Option(help="Column or field of the target text.")] = None,
    split: Annotated[str | None, Option(help="Split of a Hub data set.")] = None,
    dataset_config: Annotated[str | None, Option(help="Configuration of a Hub data set, such as de-en.")] = None,
    language: Annotated[str, Option(help="Language of the words that ask (ISO 639-1).")] = "en",
    importance: Annotated[str, Option(help="none, gradient, masking (one pass per head) or both.")] = "gradient",
    importance_sentences: Annotated[int, Option(help="Sentences used for head importance.")] = 64,
    examples: Annotated[int, Option(help="Sentences kept for the viewer.")] = 6,
    decode: Annotated[
        int, typer.Option(help="Tokens to generate after the text, to say how many keys of the cache are read.")
    ] = 0,
    score: Annotated[
        list[str] | None,
        Option(
            help="How good the models are, to stand beside their density: accuracy=0.91,0.90 with one number per model; "
            "repeatable.",
            metavar="NAME=NUMBERS",
        ),
    ] = None,
    figures: Annotated[bool, Option(help="Draw figures (needs matplotlib).")] = True,
    device: Annotated[str | None, Option(help="cpu, cuda, ...; default: the best there is.")] = None,
    title: Annotated[str | None, Option(help="Heading of the report.")] = None,
) -> None:
    """Say what every attention head does: statistics, roles, figures and one report to open in a browser."""
    options = locals()  # named as the arguments of `analyze`, but for some
    options |= {"compare": compare or (), "names": options.pop("name") or None, "num_examples": options.pop("examples")}
    options["scores"] = dict(map(_score, options.pop("score") or ()))
    from hf_entmax.analysis.analyze import analyze

    errors = Console(stderr=True)
    result = analyze(**options, warn=lambda text: errors.print(f"[yellow]{escape(text)}[/]"))
    if result.report is None:  # not the main process
        return
    from hf_entmax.analysis.report.findings import summarize

    console = Console()
    for statistics in result.statistics:
        console.print(_site_table(statistics))
        for finding in summarize(statistics):
            console.print(f"[bold]{finding.topic:>12}[/]  {escape(finding.text)}")
        for note in statistics.notes:
            console.print(f"[yellow]{'note':>12}[/]  {escape(note)}")
    console.print(f"\nReport: {escape(str(result.report.resolve()))}")
    if result.problems:
        errors.print(f"[red]{len(result.problems)} part(s) are missing from the report, see above.[/]")
        raise typer.Exit(1)


def _score(text: str) -> tuple[str, list[float]]:
    name, _, numbers = text.partition("=")
    try:
        return name.strip(), [float(part) for part in numbers.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--score {text!r}: write NAME=NUMBER, for two models NAME=NUMBER,NUMBER.") from error


def _site_table(statistics) -> Table:
    from hf_entmax.analysis.report.findings import percent
    from hf_entmax.analysis.report.rows import site_rows

    table = Table("site", title=f"{escape(statistics.name)}: {statistics.num_sentences:,} sentences")
    for name in ("layers", "heads", "density", "keys per query", "Jensen-Shannon (log heads)", "mean alpha"):
        table.add_column(name, justify="right")
    for row in site_rows(statistics):
        density = "–" if row["density"] is None else percent(row["density"])
        digits = {"mean_support": 1, "head_diversity": 3, "alpha_mean": 3}
        numbers = ("–" if row[name] is None else f"{row[name]:.{places}f}" for name, places in digits.items())
        table.add_row(row["site"], str(row["layers"]), str(row["heads"]), density, *numbers)
    return table
