"""``hf-entmax``: the quickstart, patching, analysis, benchmarks and a look at the installation, from the shell."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from hf_entmax._version import __version__
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
    if model is not None:
        return _examine(model)
    import torch
    import transformers

    import hf_entmax

    versions = {"hf_entmax": hf_entmax.__version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {package: _version(package) for package in ("accelerate", "peft", "numba", "triton", "matplotlib")}
    _console.print(_table("Versions", ("package", "version"), versions.items()))
    states = ((name, escape(str(state))) for name, state in hf_entmax.available_backends().items())
    _console.print(_table("Backends", ("backend", "state"), states))
    if compile:
        _compile_kernels()
    wrong = check and not _check_kernels()
    try:
        _round_trip()
    except Exception as error:
        _console.print(f"[red]Patching a small model failed:[/] {type(error).__name__}: {escape(str(error))}")
        raise typer.Exit(1) from error
    _console.print("Patched, trained, saved and loaded a small model: [green]works[/].")
    if wrong:
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
    model: Annotated[str, Argument(help="A Hub id or a directory; patched or plain softmax.")],
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


def _check_folder(model: str) -> None:
    looks_like_a_folder = model.startswith((".", "~", "/")) or model.count("/") > 1 or Path(model).is_absolute()
    if looks_like_a_folder and not Path(model).is_dir():
        raise ValueError(f"There is no folder {model}: give one that holds a saved model, or a Hub id (owner/name).")


def _load(model: str, auto_class: str | None) -> Any:
    import transformers

    _check_folder(model)
    if auto_class is None:
        config = _config(model)
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


def _config(model: str) -> Any:
    """Load the configuration of a model, at once from the cache where the Hub cannot be reached."""
    import transformers

    there = Path(model).is_dir() or _hub_answers()
    try:
        return transformers.AutoConfig.from_pretrained(model, local_files_only=not there)
    except OSError as error:
        if there:
            raise
        raise FileNotFoundError(
            f"{model} is no folder, no model_type of Transformers and not in the cache of the Hub, which cannot be reached from "
            "here: give a folder that holds a saved model, or a model_type such as llama."
        ) from error


def _hub_answers(seconds: float = 3.0) -> bool:
    """Try to connect once; Transformers would retry for most of a minute."""
    import os
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if any(
        os.environ.get(name)
        for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True  # whether a proxy reaches the Hub, it says itself
    address = urlsplit(constants.ENDPOINT)
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True


def _examine(model: str) -> None:
    """Say of a model, built from its configuration without weights, what patching reaches and what stays a softmax."""
    import torch
    import transformers

    import hf_entmax
    from hf_entmax.integration.discovery import attention_sites, check_supported
    from hf_entmax.integration.model_classes import model_classes

    _check_folder(model)
    if model in transformers.CONFIG_MAPPING and not Path(model).exists():
        config = transformers.AutoConfig.for_model(model)
    else:
        config = _config(model)
    name = (config.architectures or [""])[0]
    found = [getattr(transformers, name)] if hasattr(transformers, name) else model_classes(config)
    if not found:
        raise ValueError(
            f"Transformers has no model for configurations of model_type {config.model_type!r} alone: "
            "give the model that it is a part of."
        )
    try:
        with torch.device("meta"):
            built = found[0](config)
    except ImportError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{found[0].__name__} cannot be built from this configuration. {said}") from error
    try:
        check_supported(built)
    except ValueError as error:
        _console.print(f"[red]No:[/] {escape(str(error))}")
        raise typer.Exit(1) from error
    heads: dict[str, list[int]] = {}
    for site in attention_sites(built):
        heads.setdefault(site.site, []).append(site.num_heads)
    rows = ((site, str(len(own)), str(sum(own))) for site, own in heads.items())
    title = f"{type(built).__name__} can be patched"
    _console.print(_table(title, ("site", "attention modules", "heads"), rows))
    kept = hf_entmax.unpatched_softmax(built)
    _console.print(escape("Keeps a softmax: " + ", ".join(kept)) if kept else "Nothing keeps a softmax.")


def _compile_kernels() -> None:
    from hf_entmax.ops import backends

    module = backends.kernel_package("numba")
    if isinstance(module, str):
        raise ValueError(f"The CPU kernels cannot be compiled: {module}.")
    with _console.status("Compiling the CPU kernels: about twenty seconds, once for this machine") as status:
        folder = module.compile_kernels(lambda name: status.update(f"Compiled: {name}"))
    kept = f"kept in {folder}" if folder else "which could not be kept: set NUMBA_CACHE_DIR to a writable directory"
    _console.print(f"CPU kernels: compiled, {escape(kept)}.", highlight=False)


def _check_kernels() -> bool:
    """Print how far every fused kernel of this machine is from the dense path; tell if all are right."""
    import torch

    from hf_entmax.ops import backends, self_check

    devices = {"numba": (torch.device("cpu"), platform.processor() or platform.machine())}
    if torch.cuda.is_available():
        devices["triton"] = (torch.device("cuda"), torch.cuda.get_device_name())
    right = True
    for name, (device, kind) in devices.items():
        module = backends.kernel_package(name)
        if isinstance(module, str):
            _console.print(f"The {name} backend is not checked: {escape(module)}.")
            continue
        rows = []
        with _console.status(f"Checking the {name} backend: some seconds, a minute where kernels are compiled"):
            for case, parts in itertools.groupby(self_check.findings(module, device), lambda finding: finding.case):
                worst = max(parts, key=lambda finding: (not finding.right, finding.error))
                right &= worst.right
                error = worst.raised or f"{worst.error:.1e} ({worst.part})"
                verdict = "[green]right[/]" if worst.right else "[red]wrong[/]"
                rows.append((case, escape(error), f"{worst.allowed:.0e}", verdict))
        title = f"{name} on {kind}: largest difference from float64"
        _console.print(_table(escape(title), ("case", "difference", "allowed", ""), rows))
    return right


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def _alpha_table(model: Any, title: str) -> Table:
    import hf_entmax

    config = hf_entmax.entmax_config(model)
    rows = [(config.mapping, "", "", str(dict(config.mapping_options)))]
    if config.mapping == "entmax":
        rows = [(site, *map(str, a.shape), f"{a.nanmean():.3f}") for site, a in hf_entmax.alphas(model).items()]
    return _table(title, ("site", "layers", "heads", "alpha"), rows)


def _round_trip() -> None:
    import tempfile

    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    import hf_entmax

    sizes: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)
    config = BartConfig(**sizes, vocab_size=16, max_position_embeddings=16)
    model = hf_entmax.patch_model(BartForConditionalGeneration(config))
    ids = torch.arange(3, 12)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        model.save_pretrained(directory)
        again = BartForConditionalGeneration.from_pretrained(directory)
        if not torch.equal(again(input_ids=ids, labels=ids).logits, model(input_ids=ids, labels=ids).logits):
            raise RuntimeError("the loaded model computes other logits than the saved one")


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed"


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
