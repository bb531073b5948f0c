"""A plugin of pytest: writes each test down as it ends, and leaves out those that have passed before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .rows import Rows

#: Names the folder of the rows.
VARIABLE, PART = "HF_ENTMAX_GPU_ROWS", "correctness"


def _rows() -> Rows:
    return Rows(Path(os.environ[VARIABLE]), PART)


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
