"""The tests of the kernels, on the device, against float64: a row for each, with its error as a share of what is allowed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from .rows import Rows
from .setting import ROOT, Setting

FILES = ("tests/ops/triton_cases.py", "tests/ops/test_triton_cuda.py")
#: What a tiny run is content with.
TINY = ("-k", "test_no_gradient_of_the_gradient or test_auto_chooses")
WORKERS = 8


def run(rows: Rows, setting: Setting) -> None:
    """Write the rows of this part."""
    report = setting.out / "correctness.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if setting.tiny:
        command += [*TINY, "-p", "no:xdist"]
    elif importlib.util.find_spec("xdist"):
        # Most of the time goes into compiling kernels, on the CPU. A process whose device gave up ends and is replaced.
        command += ["-n", str(WORKERS), "--max-worker-restart", "50"]
    done = subprocess.run([*command, *FILES], cwd=ROOT)
    collect(rows, report)
    if not any(status == "ok" for status in rows.seen.values()):
        raise SystemExit(f"no test passed; pytest ended with {done.returncode}")


def collect(rows: Rows, report: Path) -> None:
    """Rows of the cases in pytest's report."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).rpartition('.')[2]}.{case.get('name')}"
        problem = next(
            (case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
        )
        values: dict[str, object] = {"seconds": round(float(case.get("time", 0)), 2)}
        for item in case.iter("property"):
            values[str(item.get("name"))] = float(str(item.get("value")))
        status = "ok"
        if problem is not None:
            status = "skipped" if problem.tag == "skipped" else "wrong"
            values["reason"] = f"{problem.get('message')}\n{problem.text}"[-1500:]
        rows.write(name, status, **values)
