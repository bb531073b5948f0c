"""``hf-entmax``: the quickstart, patching, analysis, benchmarks and a look at the installation, from the shell."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from hf_entmax._version import __version__
from hf_entmax.doctor import check_folder, examine_installation, examine_model, saved_config, table
from hf_entmax.options import AnalysisOptions, BenchOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Adaptive sparse attention for Hugging Face Transformers.",
)
_console = Console()


def _show_version(wanted: bool) -> None:
    if wanted:
        _console.print(f"hf_entmax {__version__}", highlight=False)
        raise typer.Exit


def _with_options(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the annotated fields of a dataclass as options."""
    hints = get_type_hints(options, include_extras=True)
    own = [
        (f.name, f.default, hints[f.name])
        for f in dataclasses.fields(options)
        if get_origin(hints[f.name]) is Annotated
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(name, keyword, default=value, annotation=hint) for name, value, hint in own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Adaptive sparse attention for Hugging Face Transformers."""


@app.command()
def patch(
    model: Annotated[str, Argument(help="A Hub id or a directory.")],
    out: Annotated[Path, Option(help="Where the patched model is written; must be empty or new.")],
    alpha: Annotated[str, Option(help='"learned", or a fixed number >= 1.')] = "learned",
    alpha_init: Annotated[str | None, Option(help='Where learned alphas start: a number, or "normal".')] = None,
    tie: Annotated[str, Option(help="none, layer, site or model.")] = "none",
    site: Annotated[
        list[str] | None, Option(help="encoder_self, cross or decoder_self; repeatable; default all.")
    ] = None,
    layer: Annotated[list[int] | None, Option(help="Layer to patch, from 0; repeatable; default all.")] = None,
    exclude: Annotated[list[str] | None, Option(help="Attention module to leave alone; repeatable.")] = None,
    output_alpha: Annotated[float | None, Option(help="Entmax loss and sparse generation at this alpha.")] = None,
    mapping: Annotated[str, Option(help="entmax, or a mapping of hf_entmax.ops.controllable.")] = "entmax",
    length_scaling: Annotated[
        str, Option(help="none, constant, log or adaptive: a learned factor of the scores.")
    ] = "none",
    length_scaling_init: Annotated[str, Option(help="Where that starts: identity or paper.")] = "identity",
    backend: Annotated[str, Option(help="Who computes the attention: auto, torch, numba or triton.")] = "auto",
    auto_class: Annotated[
        str | None, Option(help="Class to load with, e.g. AutoModelForSeq2SeqLM; default: the checkpoint's own.")
    ] = None,
    push_to_hub: Annotated[str | None, Option(help="Also push to this Hub id.")] = None,
) -> None:
    """Load a pretrained model, replace its softmax attention by entmax, and save it."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: name a new directory, so that nothing is overwritten.")
    from transformers import AutoTokenizer

    import hf_entmax

    options: dict[str, Any] = {
        "alpha": alpha if alpha == "learned" else _number("--alpha", alpha),
        "tie": tie,
        "mapping": mapping,
        "length_scaling": length_scaling,
        "length_scaling_init": length_scaling_init,
    }
    if alpha_init is not None:
        options["alpha_init"] = alpha_init if alpha_init == "normal" else _number("--alpha-init", alpha_init)
    options |= {"sites": site or None, "layers": layer or None, "exclude": exclude or (), "output_alpha": output_alpha}
    loaded = _load(model, auto_class)
    hf_entmax.patch_model(loaded, backend=backend, **options)
    loaded.save_pretrained(out)
    try:
        AutoTokenizer.from_pretrained(model).save_pretrained(out)
    except (OSError, ValueError) as error:
        _console.print(f"[yellow]No tokenizer was copied:[/] {escape(str(error))}")
    _console.print(_alpha_table(loaded, escape(f"{type(loaded).__name__} in {out}")))
    if push_to_hub:
        loaded.push_to_hub(push_to_hub)


@app.command()
def doctor(
    model: Annotated[
        str | None, Argument(help="Hub id, directory or model_type: whether that model can be patched.")
    ] = None,
    compile: Annotated[bool, Option("--compile", help="Compile the CPU kernels now, for good.")] = False,
    check: Annotated[
        bool, Option("--check", help="Compare the fused kernels with the dense path, case by case.")
    ] = False,
) -> None:
    """Say what is installed, which backends can run here and why others cannot, and whether patching works."""
    well = examine_installation(_console, compile, check) if model is None else examine_model(model, _console)
    if not well:
        raise typer.Exit(1)


@app.command()
def quickstart(
    out: Annotated[Path, Option(help="Where model, figures and results are written.")] = Path("quickstart-output"),
    model: Annotated[
        str | None, Option(help="A pretrained encoder-decoder (Hub id or directory) instead of the small one.")
    ] = None,
    output_alpha: Annotated[float, Option(help="alpha of the output loss; 1 is cross-entropy.")] = 1.5,
    seed: Annotated[int, Option(help="Seed of weights, order and split.")] = 0,
    max_minutes: Annotated[float, Option(help="When a training is stopped before its last step.")] = 30.0,
) -> None:
    """Patch, train, save, load and look at a model of English verbs: the whole path in a few minutes, offline."""
    from hf_entmax.quickstart import run

    run(out, model=model, output_alpha=output_alpha, seed=seed, max_minutes=max_minutes)


@app.command()
@_with_options(BenchOptions)
def bench(
    preset: Annotated[str, Option(help="quick, targets, grid, decoding, model, losses or losses-small.")] = "quick",
    threads: Annotated[int | None, Option(help="Default: what PyTorch takes.")] = None,
    **options: Any,
) -> None:
    """Time attention implementations or losses side by side, after checking that they are right."""
    import torch

    from hf_entmax.bench import run

    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads} is not allowed: give at least 1.")
        torch.set_num_threads(threads)
    say = lambda line: _console.print(line, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    run(preset, report=say, **options)


@app.command()
@_with_options(AnalysisOptions)
def analyze(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="Hub ids or directories, patched or plain softmax; the checkpoints of a training, say.",
        ),
    ],
    data: Annotated[
        str | None,
        Option(
            help="Text to run: .txt, .tsv, .csv or .jsonl (also .gz), or a Hub data set. Default: the gold data.",
            metavar="FILE_OR_HUB",
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        Option(
            help="How good the models are, to stand beside their density: accuracy=0.91,0.90 with one number per model; "
            "repeatable.",
            metavar="NAME=NUMBERS",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Say what every attention head does: statistics, roles, figures and one report to open in a browser."""
    scores = dict(map(_score, score or ()))
    from hf_entmax.analysis.analyze import analyze
    from hf_entmax.analysis.report.findings import summarize

    errors = Console(stderr=True)
    model, *others = models
    options["compare"] = [*others, *(options["compare"] or ())]
    result = analyze(
        model, data, scores=scores, warn=lambda text: errors.print(f"[yellow]{escape(text)}[/]"), **options
    )
    if result.report is None:  # not the main process
        return
    for statistics in result.statistics:
        _console.print(_site_table(statistics))
        for finding in summarize(statistics):
            _console.print(f"[bold]{finding.topic:>12}[/]  {escape(finding.text)}")
        for note in statistics.notes:
            _console.print(f"[yellow]{'note':>12}[/]  {escape(note)}")
    _console.print(f"\nReport: {escape(str(result.report.resolve()))}")
    if result.problems:
        errors.print(f"[red]{len(result.problems)} part(s) are missing from the report, see above.[/]")
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """Start the server of Transformers where patched models load: `transformers serve`, all of whose options it takes."""
    import hf_entmax  # noqa: F401  (a patched checkpoint loads where it is imported)
    from hf_entmax.generation.serving.server import prepare_server

    prepare_server()
    from transformers.cli.transformers import app as theirs

    theirs(["serve", *context.args], prog_name="hf-entmax")


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


def _load(model: str, auto_class: str | None) -> Any:
    import transformers

    check_folder(model)
    if auto_class is None:
        config = saved_config(model)
        names = getattr(config, "architectures", None) or []
        if not names:
            raise ValueError(
                f"The configuration of {model} names no architecture: give --auto-class, e.g. AutoModelForSeq2SeqLM."
            )
        auto_class = names[0]
    loader = getattr(transformers, str(auto_class), None)
    if loader is None:
        raise ValueError(f"transformers has no class {auto_class!r}: give --auto-class, e.g. AutoModelForCausalLM.")
    return loader.from_pretrained(model)


def _alpha_table(model: Any, title: str) -> Table:
    import hf_entmax

    config = hf_entmax.entmax_config(model)
    rows = [(config.mapping, "", "", str(dict(config.mapping_options)))]
    if config.mapping == "entmax":
        rows = [(site, *map(str, a.shape), f"{a.nanmean():.3f}") for site, a in hf_entmax.alphas(model).items()]
    return table(title, ("site", "layers", "heads", "alpha"), rows)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} {text!r} is neither a number nor one of the words that it takes.") from None


def main() -> None:
    """Run the command line; mistakes of use end in one line instead of a traceback."""
    try:
        app()
    except (ValueError, TypeError, ImportError, FileNotFoundError, OSError) as error:
        _console.print(f"[red]Error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
