"""Small cases of every kernel under NVIDIA's compute-sanitizer: reads and writes out of bounds, races, unset memory."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .rows import Cut, Rows, Skip
from .setting import ROOT, Setting

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = ("half", "float32", "options", "rows")
#: Seconds that one case may take under one tool.
LIMIT = 60.0


def run(rows: Rows, setting: Setting) -> None:
    """Write the rows of this part."""
    with ThreadPoolExecutor(4) as pool:
        for tool in TOOLS:
            for case in CASES[-1:] if setting.tiny else CASES:
                pool.submit(rows.run, f"{tool} {case}", functools.partial(check, tool, case, setting))


def check(tool: str, case: str, setting: Setting) -> dict[str, Any]:
    """Run `kernels_once` under a tool; "wrong" if the tool found something or the results are off."""
    program = [sys.executable, "-m", "recipes.benchmarks.gpu.kernels_once", case, setting.device]
    found = shutil.which("compute-sanitizer")
    if found is None and not setting.tiny:
        raise Skip("compute-sanitizer is not on the PATH")
    if tool != TOOLS[0] and found is None:
        raise Skip("a tiny run without compute-sanitizer runs the cases once, plain")
    watched = [] if found is None else [found, "--tool", tool, "--error-exitcode", "99", "--print-limit", "5"]
    # Memory that PyTorch keeps for later use would hide what lies beyond a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limit = max(min(LIMIT, setting.left), 0.0)
    try:
        done = subprocess.run(
            [*watched, *program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise Cut(f"not done within {limit:.0f} s") from None
    text = done.stdout + done.stderr
    errors = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    status = "ok" if done.returncode == 0 else "wrong"
    return {"status": status, "summary": [a or b for a, b in errors], "reason": "" if status == "ok" else text[-1500:]}
