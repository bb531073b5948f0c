"""The evaluations of a conversion: quality against sparsity, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.finish import NOT_IN_COMMAND
from common.results import Results, command
from common.run import Run
from common.settings import RunSettings

#: Of an evaluation: of the model that is converted, of the student before its first step, of the student as it learns.
STAGES = ("before", "patched", "training")


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
