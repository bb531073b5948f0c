"""The tests of the kernels, on the device, against float64: a row for each, with its error as a share of what is allowed.

This module is also a plugin of pytest: it writes each test down as it ends, and leaves out those that have passed before.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .rows import Rows
from .setting import PROCESSES, ROOT, Setting

#: Names the folder of the rows.
VARIABLE = "HF_ENTMAX_GPU_ROWS"
FILES = ("tests/ops/test_triton_cuda.py", "tests/ops/triton_cases.py")
#: What a tiny run is content with.
TINY = ("-k", "test_no_gradient_of_the_gradient or test_auto_chooses")
#: Most of the time goes into compiling kernels, on the CPU. A process whose device gave up ends and is replaced.
WORKERS = ("-n", str(PROCESSES), "--max-worker-restart", "50")


def run(rows: Rows, setting: Setting) -> None:
    """Have pytest write the rows of this part."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", __name__]
    if setting.tiny:
        command += [*TINY, "-p", "no:xdist"]
    elif importlib.util.find_spec("xdist"):
        command += WORKERS
    # A pytest that started this program must not be taken for the one that it starts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment[VARIABLE] = str(setting.out)
    done = subprocess.run([*command, *FILES], cwd=ROOT, env=environment)
    # 1: tests failed, and have their rows; 5: all had passed before.
    if done.returncode not in (0, 1, 5):
        raise SystemExit(f"pytest ended with {done.returncode}")


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
