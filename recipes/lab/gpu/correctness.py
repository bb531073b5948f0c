"""The tests of the kernels, on the device, against float64: a row for each, with its error as a share of what is allowed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from . import rows as plugin
from .rows import Rows
from .setting import PROCESSES, ROOT, Setting

FILES = ("tests/ops/test_triton_cuda.py", "tests/ops/triton_cases.py")
#: What a tiny run is content with.
TINY = ("-k", "test_no_gradient_of_the_gradient or test_auto_chooses")
#: Most of the time goes into compiling kernels, on the CPU. A process whose device gave up ends and is replaced.
WORKERS = ("-n", str(PROCESSES), "--max-worker-restart", "50")


def run(rows: Rows, setting: Setting) -> None:
    """Have pytest write the rows of this part."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin.__name__]
    if setting.tiny:
        command += [*TINY, "-p", "no:xdist"]
    elif importlib.util.find_spec("xdist"):
        command += WORKERS
    # A pytest that started this program must not be taken for the one that it starts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment[plugin.VARIABLE] = str(setting.out)
    done = subprocess.run([*command, *FILES], cwd=ROOT, env=environment)
    # 1: tests failed, and have their rows; 5: all had passed before.
    if done.returncode not in (0, 1, 5):
        raise SystemExit(f"pytest ended with {done.returncode}")
