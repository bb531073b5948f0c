"""What the heads of the trained models do: the tables in recipes/lab/results/head_analysis and head_analysis_inflection.

The models are those that the jobs train, in the folder where they train them: of translation softmax, 1.5 and learned alpha,
all with a softmax output, of inflection the same attention with output alpha 1.5 and three seeds. The text is written beside
the report, so that `hf-entmax analyze MODEL --data TEXT` sees the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_entmax.analysis import plots
from hf_entmax.analysis.analyze import analyze
from hf_entmax.analysis.reading.tables import find, languages_of, read_pairs, read_rows

from .jobs import Job
from .rows import FIGURES

ATTENTION = ("softmax", "1.5", "learned")

#: Of the analysis, what the page and the findings are made from.
TABLES = ("sites.csv", "heads.csv", "positions.csv")


class Study(NamedTuple):
    """Models to look at, and the text to look at them with."""

    folder: str  # of the tables, in the folder of results
    group: str
    models: dict[str, dict[str, str]]  # their names, and the options of the jobs that train them
    text: Callable[[], list[tuple[str, str]]]  # pairs of what the encoder and the decoder read
    options: Callable[[], dict[str, Any]]  # of the analysis
    figures: dict[str, Callable[[Any], Any]] = {}  # noqa: RUF012 - file names, and how they are drawn


def captions_and_questions(captions: int = 800, questions: int = 600) -> list[tuple[str, str]]:
    """Read the first captions of Multi30k's test set of 2016, then German questions of Tatoeba's dev and test sets, each once."""
    pairs = read_pairs("mt/multi30k_task1_raw/test_2016_flickr.{lang}.gz", "de", "en")[:captions]
    asked: dict[str, str] = {}
    for split in ("dev", "test"):
        for english, german in read_rows(f"mt/tatoeba_de-en/{split}.en-de.tsv.gz", ("en", "de")):
            if german.endswith("?"):
                asked.setdefault(german, english)
    return [*pairs, *list(asked.items())[:questions]]


def words(count: int = 100, split: str = "dev", languages: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Read words of the twelve languages, or of some: language, tags and lemma; the form.

    Args:
        count: so many, the first, of each language; 0 for all.
        split: dev or test.
        languages: default: all.
    """
    files = f"morph/typology12/{{language}}/{split}.tsv.gz"
    found = []
    for language in languages or languages_of(files):
        rows = read_rows(files.format(language=language), ("lemma", "form", "tags"))
        for lemma, form, tags in rows[: count or None]:
            # As recipes/inflection.py writes its questions.
            found.append((f"<{language}>" + "".join(f"<{tag}>" for tag in tags.split(";")) + lemma, form))
    return found


def gold() -> dict[str, Any]:
    """Name the files with the syntax of the source language, and word alignments."""
    treebank, alignments = find("ud/German-PUD/de_pud-ud-test.conllu.gz"), find("alignments/de-en.jsonl.gz")
    return {"conllu": treebank, "alignments": alignments, "language": "de"}


STUDIES = {
    "translation": Study(
        "head_analysis", "translation",
        {kind: {"attention": kind, "output_alpha": "1.0", "seed": "0"} for kind in ATTENTION},
        captions_and_questions, gold, {"heads_diversity": plots.head_diversity},
    ),
    "inflection": Study(
        "head_analysis_inflection", "inflection",
        {f"{k}-{seed}": {"attention": k, "output_alpha": "1.5", "seed": seed} for k in ATTENTION for seed in "012"},
        words, lambda: {"batch_size": 100},
    ),
}  # fmt: skip


def job_of(jobs: Sequence[Job], group: str, wanted: dict[str, str]) -> Job:
    """Return the one job of a group with these options.

    Raises:
        ValueError: if the list has none, or several.
    """
    found = []
    for job in jobs:
        given = dict(zip(job.options[::2], job.options[1::2], strict=False))
        if job.group == group and all(given.get(f"--{name}") == value for name, value in wanted.items()):
            found.append(job)
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs of the group {group} have {wanted}; exactly one must.")
    return found[0]


def trained(job: Job, folder: Path) -> Path:
    """Return the folder of the model that a job has trained.

    Raises:
        FileNotFoundError: if it has not.
    """
    model = folder / job.name / "model"
    if not model.is_dir():
        raise FileNotFoundError(f"there is no {model}: train first, python -m recipes.lab run --only {job.group}.")
    return model


def study(name: str, jobs: list[Job], results: Path, folder: Path, figures: Path = FIGURES) -> None:
    """Analyse the models of a study; write its tables and its figures.

    Raises:
        FileNotFoundError: for a model that has not been trained, or data that are not there.
    """
    chosen = STUDIES[name]
    models = [trained(job_of(jobs, chosen.group, wanted), folder) for wanted in chosen.models.values()]
    pairs, options = chosen.text(), chosen.options()
    out = folder / chosen.folder
    out.mkdir(parents=True, exist_ok=True)
    text = out / "sentences.tsv"
    text.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    options |= {"compare": models[1:], "names": list(chosen.models), "max_sentences": len(pairs)}
    result = analyze(models[0], text, out=out, **options)
    if result.problems:
        raise RuntimeError("the analysis is not complete: " + " ".join(result.problems))
    (results / chosen.folder).mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        shutil.copyfile(out / table, results / chosen.folder / table)
    for figure, draw in chosen.figures.items():
        draw(result.statistics).savefig(figures / f"{figure}.png", dpi=150)
    print(f"wrote {', '.join(TABLES)} to {results / chosen.folder}; report: {result.report}")
