"""What a finished run says: its row in a CSV file, with its origin, and the numbers in the model's card."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

import hf_entmax
from common.settings import RunSettings
from hf_entmax.analysis.reading.tables import HUB
from hf_entmax.bench.timing import device_name
from hf_entmax.integration.card import MARKER

#: The last columns of every table of runs.
END = "steps best_step train_seconds tokens_per_second processes command hardware versions"

#: Options that name places of one machine or change nothing in what is computed; a command that others can use leaves them
#: out.
NOT_IN_COMMAND = ("--out", "--results", "--resume", "--report_to", "--push_to_hub", "--log_steps", "--checkpoint_steps")


def columns(*names: str) -> tuple[str, ...]:
    """Names between blanks, as a tuple."""
    return tuple(" ".join(names).split())


class Results:
    """A CSV file that grows by a row for each finished run, and knows which runs it holds.

    Args:
        path: the file; it is made with its folders when the first row comes.
        fields: its columns.

    Raises:
        ValueError: if the file exists with other columns, or cannot be written.
    """

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        self.path = path
        self.fields = tuple(fields)
        self.rows: list[dict[str, str]] = []
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        if (path.is_dir() if there == path else not there.is_dir()) or not os.access(there, os.W_OK):
            raise ValueError(f"{path} cannot be written, because of {there}: give another file for the results.")
        if path.exists() and path.stat().st_size:
            with path.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                if tuple(reader.fieldnames or ()) != self.fields:
                    raise ValueError(
                        f"{path} has the columns {reader.fieldnames}, not {list(self.fields)}: use another file."
                    )
                self.rows = list(reader)

    def has(self, **key: Any) -> bool:
        """Whether a run is there already; what is not given may be anything."""
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, **values: Any) -> None:
        """Append one row, on disk at once."""
        if unknown := sorted(set(values) - set(self.fields)):
            raise ValueError(f"{self.path}: no columns for {unknown}.")
        row = {name: str(values.get(name, "")) for name in self.fields}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as lines:
            with contextlib.suppress(ImportError, OSError):  # Windows, and file systems that know no locks
                import fcntl

                fcntl.flock(lines, fcntl.LOCK_EX)  # other runs append to it too
            writer = csv.DictWriter(lines, self.fields, lineterminator="\n")
            if not lines.seek(0, os.SEEK_END):
                writer.writeheader()
            writer.writerow(row)
            lines.flush()
            os.fsync(lines.fileno())
        self.rows.append(row)


def hardware() -> str:
    """The processor or GPU, and how many threads were used."""
    names = [device_name("cpu"), *([device_name("cuda")] if torch.cuda.is_available() else [])]
    return f"{' + '.join(names)}, {torch.get_num_threads()} thread(s)"


def command(without: Sequence[str] = (), lists: Sequence[str] = ()) -> str:
    """How the recipe was called.

    Args:
        without: options to leave out with their value (folders of this machine).
        lists: those of them that take any number of values.
    """
    kept = []
    skip = 0  # so many values may still belong to an option that is left out
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        if name in without:
            skip = 0 if equals else len(sys.argv) if name in lists else 1
        elif skip and not word.startswith("--"):
            skip -= 1
        else:
            kept.append(word)
            skip = 0
    return shlex.join(["python", f"recipes/{Path(sys.argv[0]).name}", *kept])


def origin(without: Sequence[str] = (), lists: Sequence[str] = (), packages: Sequence[str] = ()) -> dict[str, str]:
    """By which command (see `command`), on what and with which versions a row was made."""
    return {"command": command(without, lists), "hardware": hardware(), "versions": versions(*packages)}


def versions(*more: str) -> str:
    """Versions of what computed the numbers; ``more`` names further packages."""
    named = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", *more)]
    return ", ".join([f"hf_entmax {hf_entmax.__version__}", *named, f"python {platform.python_version()}"])


def finish(settings: RunSettings, recipe: str, fields: Sequence[str], measures: dict[str, Any], **card: Any) -> None:
    """Say the numbers, write ``result.json``, the model card and the row of results, and upload the model if asked to.

    Args:
        settings: of the recipe.
        recipe: its name.
        fields: columns of the results file; none where it takes other rows than this one.
        measures: the numbers.
        card: see `write_card`.
    """
    state, folder = PartialState(), Path(settings.out)
    model = folder / "model" if (folder / "model").exists() else folder  # an ensemble has no model of its own
    if state.is_main_process:
        row = {"attention": settings.attention, "output_alpha": settings.output_alpha, "seed": settings.seed}
        row |= {"mapping_options": settings.mapping_options} if "mapping_options" in fields else {}
        row |= {**measures, "processes": state.num_processes}
        show(measures)
        row |= origin(NOT_IN_COMMAND, ("--report_to",), ("accelerate",))
        finished = (folder / "result.json").exists()
        (folder / "result.json").write_text(strict_json(row), encoding="utf-8")
        write_card(model, recipe, row, **card)
        if settings.results and fields and not settings.smoke:
            book = Results(Path(settings.results), fields)
            # A finished run that is resumed only tests again.
            if not (finished and book.has(command=row["command"])):
                book.add(**row)
        if settings.push_to_hub:
            HfApi().create_repo(settings.push_to_hub, exist_ok=True)
            HfApi().upload_folder(repo_id=settings.push_to_hub, folder_path=model, ignore_patterns="training_args.bin")
    state.wait_for_everyone()


def show(measures: dict[str, Any]) -> None:
    """Print every number that was measured, on the main process."""
    PartialState().print("\n".join(f"{name:24} {value}" for name, value in measures.items() if value not in ("", None)))


def strict_json(row: dict[str, Any]) -> str:
    """JSON that every reader takes: a number that is not finite becomes null, and ``not_finite`` says what it was.

    {"perplexity": null, "not_finite": {"perplexity": "inf"}}
    """
    odd = {name: str(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps({**row, **dict.fromkeys(odd)} | ({"not_finite": odd} if odd else {}), indent=1, allow_nan=False)


def write_card(
    folder: Path, recipe: str, row: dict[str, Any], *, task: str, data: str, main_measures: Sequence[str]
) -> None:
    """Add the measured numbers to the model's card, or write one where ``save_pretrained`` wrote none.

    Args:
        folder: of the model.
        recipe: its name.
        row: the numbers.
        task: the Hub's name of the task, e.g. ``"translation"``.
        data: name of the data.
        main_measures: those that stand in the card's metadata.
    """
    path, heading = folder / "README.md", f"\n## Results\n\nTrained by `recipes/{recipe}.py` of hf_entmax on "
    if path.exists():
        # The line that marks the card as the plugin's goes: a later save_pretrained must not overwrite these numbers.
        card = ModelCard(path.read_text(encoding="utf-8").replace(MARKER + "\n", ""))
    else:
        header = ModelCardData(library_name="transformers", tags=["hf_entmax"]).to_yaml()
        card = ModelCard(f"---\n{header}\n---\n\n# {recipe}\n\nA softmax baseline of hf_entmax's recipes.\n")
    table = "".join(f"| {name} | {value} |\n" for name, value in row.items() if value not in ("", None))
    text = card.text.partition(heading)[0].rstrip()  # without what an earlier test found
    card.text = f"{text}\n{heading}{data}.\n\n| measure | value |\n|---|---|\n{table}"
    card.data.model_name = f"{recipe} {row['attention']}/{row['output_alpha']}"
    kind = {"task_type": task, "dataset_type": data, "dataset_name": data}
    card.data.eval_results = [EvalResult(**kind, metric_type=name, metric_value=row[name]) for name in main_measures]
    card.save(path)


def name_of(where: str) -> str:
    """What a card calls the data: the data set of the Hub, else the folder that holds the files, else the file."""
    if where.startswith(HUB):
        return where.removeprefix(HUB).partition("@")[0].partition("#")[0]
    fixed = where.partition("{")[0]
    folder = Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    return folder.name or Path(where).name.partition(".")[0]
