"""The end of a run: the card with the measured numbers, the row of results, the evaluations on the way, the upload."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from rich.markup import escape
from rich.table import Table

from common.results import Results, command, origin
from common.run import Run, write_atomically
from common.settings import RunSettings
from hf_entmax.analysis.reading.tables import HUB
from hf_entmax.integration.card import MARKER

#: Options that name places of one machine or change nothing in what is computed; a command that others can use leaves them
#: out.
NOT_IN_COMMAND = ("--out", "--results", "--resume", "--report_to", "--push_to_hub", "--log_steps", "--checkpoint_steps")

#: Of an evaluation: of the model that is converted, of the student before its first step, of the student as it learns.
STAGES = ("before", "patched", "training")


def name_of(where: str) -> str:
    """What a card calls the data: the data set of the Hub, else the folder that holds the files, else the file."""
    if where.startswith(HUB):
        return where.removeprefix(HUB).partition("@")[0].partition("#")[0]
    fixed = where.partition("{")[0]
    folder = Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    return folder.name or Path(where).name.partition(".")[0]


def names_of_sets(places: list[str]) -> list[str]:
    """Return what to call test sets: their files, or the whole paths where these are called alike."""
    short = [Path(where).name.partition(".")[0] for where in places]
    return short if len(set(short)) == len(short) else [where.replace("/", "_") for where in places]


def check_finish(settings: RunSettings, fields: Sequence[str]) -> None:
    """Say before training what would fail after it: the row of results, the upload.

    Raises:
        ValueError: if the results file has other columns or cannot be written, or if nobody is logged in to the Hub.
    """
    if settings.results and fields:
        Results(Path(settings.results), fields)
    try:
        if settings.push_to_hub:
            HfApi().whoami()
    except Exception as error:
        raise ValueError(
            f"--push_to_hub {settings.push_to_hub}: no access to the Hub ({error}). Log in with `hf auth login`, or leave it "
            "out."
        ) from error


def finish(
    run: Run, fields: Sequence[str], measures: dict[str, Any], *, task: str, data: str, main_measures: Sequence[str]
) -> None:
    """Say the numbers, write ``result.json``, the model card and the row of results, and upload the model if asked to.

    Args:
        run: the finished run.
        fields: columns of the results file; none where it takes other rows than this one.
        measures: the numbers.
        task: the Hub's name of the task, e.g. ``"translation"``.
        data: name of the data.
        main_measures: those that stand in the card's metadata.
    """
    if run.main:
        rich.print(table_of(measures))
        _write(run, fields, measures, task=task, data=data, main_measures=main_measures)
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()  # on every process: it closes the trackers and ends the processes' group


def table_of(measures: Mapping[str, Any]) -> Table:
    """Return a table with a row for each number that was measured."""
    table = Table("measure")
    table.add_column("value", overflow="fold")
    for name, value in measures.items():
        if value not in ("", None):
            table.add_row(escape(name), escape(str(value)))
    return table


def _write(run: Run, fields: Sequence[str], measures: dict[str, Any], **card: Any) -> None:
    row = {"attention": run.settings.attention, "output_alpha": run.settings.output_alpha, "seed": run.settings.seed}
    row |= {**measures, "processes": run.accelerator.num_processes}
    row |= origin(NOT_IN_COMMAND, ("--report_to",), ("accelerate",))
    finished = (run.folder / "result.json").exists()
    write_atomically(run.folder / "result.json", strict_json(row))
    model = run.folder / "model"
    write_card(model if model.exists() else run.folder, run.name, row, **card)  # an ensemble has no model of its own
    if run.settings.results and fields and not run.settings.smoke:
        book = Results(Path(run.settings.results), fields)
        # A finished run that is resumed only tests again.
        if not (finished and book.has(command=row["command"])):
            book.add(**row)
    if run.settings.push_to_hub:
        api = HfApi()
        api.create_repo(run.settings.push_to_hub, exist_ok=True)
        api.upload_folder(repo_id=run.settings.push_to_hub, folder_path=run.folder / "model")


def strict_json(row: dict[str, Any]) -> str:
    """JSON that every reader takes: a number that is not finite becomes null, and ``not_finite`` says what it was.

    {"perplexity": null, "not_finite": {"perplexity": "inf"}}
    """
    odd = {name: str(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    plain = {**row, **dict.fromkeys(odd)} | ({"not_finite": odd} if odd else {})
    return json.dumps(plain, indent=1, allow_nan=False)


def write_card(
    folder: Path, recipe: str, row: dict[str, Any], *, task: str, data: str, main_measures: Sequence[str]
) -> None:
    """Add the measured numbers to the model's card, or write one where ``save_pretrained`` wrote none."""
    path = folder / "README.md"
    results = [
        EvalResult(task_type=task, dataset_type=data, dataset_name=data, metric_type=name, metric_value=row[name])
        for name in main_measures
    ]
    table = ["| measure | value |", "|---|---|"]
    table += [f"| {name} | {value} |" for name, value in row.items() if value not in ("", None)]
    heading = f"\n## Results\n\nTrained by `recipes/{recipe}.py` of hf_entmax on "
    section = f"{heading}{data}.\n\n" + "\n".join(table) + "\n"
    if path.exists():
        # The line that marks the card as the plugin's goes: a later save_pretrained must not overwrite these numbers.
        card = ModelCard(path.read_text(encoding="utf-8").replace(MARKER + "\n", ""))
        card.text = card.text.partition(heading)[0].rstrip() + "\n" + section  # in place of what an earlier test found
    else:
        header = ModelCardData(library_name="transformers", tags=["hf_entmax"]).to_yaml()
        card = ModelCard(f"---\n{header}\n---\n\n# {recipe}\n\nA softmax baseline of hf_entmax's recipes.\n{section}")
    card.data.model_name = f"{recipe} {row['attention']}/{row['output_alpha']}"
    card.data.eval_results = results
    write_atomically(path, str(card))


def curve(run: Run, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The evaluations of a run, from its log, where what a resumed run did again stands once."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    path = run.folder / "log.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        if "dev_density" in entry:
            values = {name.removeprefix("dev_"): value for name, value in entry.items()}
            values["stage"] = STAGES[int(values.get("stage", 2))]
            values["command"] = command(NOT_IN_COMMAND, ("--report_to",))
            row = {name: values[name] for name in columns if name in values}
            rows.setdefault((row["stage"], row["step"]), row)
    return list(rows.values())


def shared_curve(settings: RunSettings, columns: Sequence[str]) -> Results:
    """The evaluations of all runs, beside their results."""
    results = Path(settings.results)
    return Results(results.with_name(f"{results.stem}_curve.csv"), columns)


def write_curve(run: Run, columns: Sequence[str]) -> None:
    """``curve.csv`` of the run, and its rows beside the results; to be called right before `finish`."""
    if not run.main:
        return
    rows = curve(run, columns)
    path = run.folder / "curve.csv"
    path.unlink(missing_ok=True)
    own = Results(path, columns)
    for row in rows:
        own.add(**row)
    if not run.settings.results or run.settings.smoke:
        return
    book = shared_curve(run.settings, columns)
    finished = (run.folder / "result.json").exists()
    for row in rows:
        # As in `finish`: a finished run that is resumed only tests again, any other is a run of its own.
        if not (finished and book.has(command=row["command"], stage=row["stage"], step=row["step"])):
            book.add(**row)
