"""The evaluations of a conversion: rows of ``curve.csv`` in its folder, and of one file beside the results of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from common.row_file import NOT_IN_COMMAND, Results, command
from common.settings import RunSettings


class Curve:
    """The evaluations of a run; what a resumed run did again stands once.

    Args:
        settings: of the run.
        fields: columns, ``command``, ``stage`` and ``step`` among them.

    Raises:
        ValueError: if a file has other columns or cannot be written.
    """

    def __init__(self, settings: RunSettings, fields: Sequence[str]) -> None:
        folder, results = Path(settings.out), Path(settings.results)
        self.own = Results(folder / "curve.csv", fields)
        shared = settings.results and not settings.smoke
        self.shared = Results(results.with_name(f"{results.stem}_curve.csv"), fields) if shared else None
        self.finished = (folder / "result.json").exists()

    def has(self, stage: str, step: int) -> bool:
        """Tell whether a point is there."""
        return self.own.has(stage=stage, step=step)

    def add(self, stage: str, step: int, found: dict[str, float]) -> None:
        """Keep a point, on the main process."""
        if PartialState().is_main_process and not self.has(stage, step):
            row: dict[str, Any] = {name: value for name, value in found.items() if name in self.own.fields}
            row |= {"command": command(NOT_IN_COMMAND, ("--report_to",)), "stage": stage, "step": step}
            self.own.add(**row)

    def share(self) -> None:
        """Add all points to the file beside the results; a finished run that is resumed only tests again."""
        if self.shared is None or not PartialState().is_main_process:
            return
        for row in self.own.rows:
            key = {name: row[name] for name in ("command", "stage", "step")}
            if not (self.finished and self.shared.has(**key)):
                self.shared.add(**row)
