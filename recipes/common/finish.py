"""The end of a run: the card with the measured numbers, the row of results, the evaluations on the way, the upload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich
from huggingface_hub import HfApi
from rich.markup import escape
from rich.table import Table

from common.results import NOT_IN_COMMAND, Results, command, origin, strict_json, write_card
from common.run import Run, write_atomically
from common.settings import RunSettings

#: Of an evaluation: of the model that is converted, of the student before its first step, of the student as it learns.
STAGES = ("before", "patched", "training")


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
