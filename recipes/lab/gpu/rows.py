"""What a part found, a line of JSON for each case: named before it runs, so that a crash is known and not repeated.

This module is also a plugin of pytest (so it imports no torch): it writes each test down as it ends, and leaves out those that
have passed before.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Names the folder of the rows to the plugin.
VARIABLE = "HF_ENTMAX_GPU_ROWS"


class Skip(Exception):
    """A case cannot run here; the message says why."""


class Cut(Exception):
    """The time of a case was over; a further run tries it again."""


class Rows:
    """The lines of one part in ``rows.jsonl``.

    Args:
        out: the folder.
        part: its name.
        ended: what became of a case that was begun and not ended: "crashed", or "cut" where its time was over; only that
            is run again.
    """

    def __init__(self, out: Path, part: str, ended: str = "crashed") -> None:
        self.path, self.part = out / "rows.jsonl", part
        self.seen: dict[str, str] = {}
        for line in read(out):
            if line["part"] == part:
                self.seen[line["case"]] = line["status"]
        for case in [case for case, status in self.seen.items() if status == "started"]:
            self.write(case, ended, reason="the process ended before the case did")

    def write(self, case: str, status: str, **values: Any) -> None:
        """Add a line, on the disk when this returns."""
        self.seen[case] = status
        line = {"part": self.part, "case": case, "status": status, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if status != "started":
            told = {key: value for key, value in values.items() if key != "traceback"}
            print(f"{self.part}: {case}: {status} {json.dumps(told)[:400]}", flush=True)

    def run(self, case: str, function: Callable[[], dict[str, Any]]) -> None:
        """Run a case that was not run before and write what it returns.

        Raises:
            SystemExit: after an error of the device, which is of no use to this process any more.
        """
        if self.seen.get(case, "cut") != "cut":
            return
        self.write(case, "started")
        start = time.perf_counter()
        try:
            values = function()
        except Skip as reason:
            self.write(case, "skipped", reason=str(reason))
        except Cut as reason:
            self.write(case, "cut", reason=str(reason))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            self.write(case, "failed", reason=text, traceback=traceback.format_exc()[-4000:])
            if "CUDA error" in text and "out of memory" not in text:
                raise SystemExit(f"{self.part}: {case}: the device gave up: {text}") from error
            if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        else:
            values = {"status": "ok", **values}
            self.write(case, values.pop("status"), seconds=round(time.perf_counter() - start, 2), **values)


def read(out: Path) -> list[dict[str, Any]]:
    """All lines so far; one that a crash cut short is left out."""
    path = out / "rows.jsonl"
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _rows() -> Rows:
    return Rows(Path(os.environ[VARIABLE]), "correctness")


def _name(node: str) -> str:
    return node.rpartition("/")[2]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    passed = {case for case, status in _rows().seen.items() if status == "ok"}
    items[:] = [item for item in items if _name(item.nodeid) not in passed]


def pytest_runtest_logreport(report: Any) -> None:
    # Under pytest-xdist every report reaches the first process, which alone writes.
    if "PYTEST_XDIST_WORKER" in os.environ or (report.outcome == "passed" and report.when != "call"):
        return
    status = {"passed": "ok", "skipped": "skipped"}.get(report.outcome, "wrong")
    reason = "" if status == "ok" else str(report.longrepr)[-1500:]
    seconds = round(getattr(report, "duration", 0.0), 2)
    _rows().write(_name(report.nodeid), status, seconds=seconds, reason=reason, **dict(report.user_properties))
