"""What ``analyze`` and ``bench`` can be asked for. Each option stands here once, with the help of the command line.

The module imports nothing heavy, so that the command line shows its help at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of `hf_entmax.analysis.analyze.analyze`."""

    task: Annotated[
        str | None,
        Option(
            help="seq2seq, causal-lm, masked-lm, sequence-classification, token-classification or feature-extraction; "
            "default: from the model."
        ),
    ] = None
    compare: Annotated[
        list[str] | None, Option(help="Another model to show side by side; repeatable.", metavar="MODEL2")
    ] = None
    names: Annotated[
        list[str] | None,
        Option(
            "--name",
            help="What to call each model, in order; repeatable. Default: the ends of their paths that tell them apart.",
            metavar="NAME",
        ),
    ] = None
    conllu: Annotated[
        Path | None, Option(help="Treebank in CoNLL-U: attention to gold dependency heads.", metavar="F")
    ] = None
    alignments: Annotated[
        Path | None,
        Option(help="Gold word alignments (JSON lines, Pharaoh): error rate of cross-attention.", metavar="F"),
    ] = None
    out: Annotated[
        Path,
        Option(help="Folder of the report, the tables and the sums; files in it are overwritten.", metavar="DIR"),
    ] = Path("attention-report")
    max_sentences: Annotated[int, Option(help="Read at most this many sentences of each file.")] = 2000
    batch_size: Annotated[int, Option(help="Sentences per batch.")] = 16
    max_length: Annotated[int | None, Option(help="Longest sequence in tokens; default: the model's.")] = None
    source_column: Annotated[str | None, Option(help="Column or field of the text.")] = None
    target_column: Annotated[str | None, Option(help="Column or field of the target text.")] = None
    split: Annotated[str | None, Option(help="Split of a Hub data set.")] = None
    dataset_config: Annotated[str | None, Option(help="Configuration of a Hub data set, such as de-en.")] = None
    language: Annotated[str, Option(help="Language of the question words (ISO 639-1).")] = "en"
    importance: Annotated[str, Option(help="none, gradient, masking (one pass per head) or both.")] = "gradient"
    importance_sentences: Annotated[int, Option(help="Sentences used for head importance.")] = 64
    num_examples: Annotated[int, Option("--examples", help="Sentences kept for the viewer.")] = 6
    decode: Annotated[
        int,
        Option(
            help="Tokens to generate after the text with ExactSparseCache, to say how many keys of the cache are read. Models "
            "that are not patched, or not made for that many, are left out."
        ),
    ] = 0
    figures: Annotated[bool, Option(help="Draw figures (needs matplotlib).")] = True
    device: Annotated[str | None, Option(help="cpu, cuda, ...; default: the best there is.")] = None
    title: Annotated[str | None, Option(help="Heading of the report.")] = None


@dataclass(frozen=True)
class BenchOptions:
    """Options of `hf_entmax.bench.run`; the one without help is for callers from Python, whose ``alpha`` may be a range too."""

    out: Annotated[Path | None, Option(help="Folder for the CSV and the plot; default: print only.")] = None
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[
        str, Option(help="Of attention: float32, bfloat16 or float16. Models and losses are timed in float32.")
    ] = "float32"
    repeats: Annotated[int, Option(help="Rounds over all implementations.")] = 15
    budget: Annotated[
        float, Option(help="Seconds per case and mode after which no round begins; three are always run.")
    ] = 20.0
    implementations: Annotated[
        list[str] | None, Option("--implementation", help="Compare with this one only; repeatable.")
    ] = None
    lengths: Annotated[
        list[int] | None, Option("--length", help="A sequence length of a grid of your own; repeatable.")
    ] = None
    sharpness: tuple[float, ...] = (1.0, 3.0)
    alpha: Annotated[float | None, Option(help="One alpha for that grid; default: learned, 1.3 to 2.")] = None
    causal: Annotated[bool, Option(help="Causal attention in that grid.")] = False
    classes: Annotated[list[int] | None, Option(help="Losses over this many classes instead; repeatable.")] = None
    rows: Annotated[int, Option(help="Rows of their batches.")] = 2048
    only: Annotated[list[str] | None, Option("--case", help="Only cases with this in their name; repeatable.")] = None
