"""Check and measure everything on one GPU, unattended, part by part, within a budget of minutes.

    python -m recipes.lab.gpu --out gpu-results                      # everything, 25 minutes
    python -m recipes.lab.gpu --out gpu-results --minutes 9          # again and again: goes on where it stopped
    python -m recipes.lab.gpu --out gpu-results --parts correctness timings
    python -m recipes.lab.gpu --out gpu-tiny --tiny                 # a test of this program: tiny, in Triton's interpreter
    python -m recipes.lab.gpu --out gpu-results --parts compiled     # needs no GPU: registers, spills, shared memory

Each part is a process of its own with a limit: a crash or an error of the device costs that part the case it met, no other part
anything. Parts are listed in the order in which they run. What was found is in ``rows.jsonl``, a line for each case; what a part
printed in ``log.txt``; the tiles that were fastest in ``blocks.json``, which ``HF_ENTMAX_TRITON_BLOCKS`` names to the package (and
later parts use). A second run with the same ``--out`` leaves alone what is done.

The image may be older than the package: `ops` and `losses` need no Transformers, and the part "models" says so and stops where it
is older than 5.18. What the time should be, before anything is measured: see `recipes.lab.gpu.forecast`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from ..rows import ROOT
from .rows import Rows, read
from .setting import Setting

#: Parts: a module of this package with ``run(rows, setting)`` or ``run_PART``, and how many seconds it may take.
PARTS = {
    "environment": ("environment", 60.0), "correctness": ("correctness", 330.0), "sanitizer": ("correctness", 150.0),
    "tuning": ("tuning", 270.0), "timings": ("timings", 330.0), "losses": ("losses", 90.0), "models": ("models", 150.0),
    "profile": ("profile", 90.0), "decoding": ("decoding", 60.0), "compiled": ("compiled", 3600.0),
}  # fmt: skip
#: How often a part that crashes is begun again, and the seconds below which none is begun.
TRIES, LEAST = 3, 20.0


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m recipes.lab.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder of what is found")
    parser.add_argument("--minutes", type=float, default=25.0, help="budget of this run")
    # Compiling needs no GPU, whose time it would take: not asked for, not run.
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[name for name in PARTS if name != "compiled"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one part in this process
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    if given.only:
        part = importlib.import_module(f"recipes.lab.gpu.{PARTS[given.only][0]}")
        run = getattr(part, f"run_{given.only}", None) or part.run
        return run(Rows(out, given.only), Setting(out, given.tiny, 60 * given.minutes))
    end = time.monotonic() + 60 * given.minutes
    for name in [name for name in PARTS if name in given.parts]:
        run_part(name, out, given.tiny, end)
    summary(out)


def run_part(name: str, out: Path, tiny: bool, end: float) -> None:
    """Run a part in a process of its own until it is done, its tries are used up, or its time or ours is over."""
    seconds, rows = PARTS[name][1], Rows(out, name)
    if rows.seen.get("whole part") in ("finished", "given up"):
        return
    limit = min(seconds, end - time.monotonic())
    if limit < min(LEAST, seconds):
        return rows.write("whole part", "cut", reason=f"{max(limit, 0):.0f} s of the budget were left")
    stop = time.monotonic() + limit
    for _ in range(TRIES):
        left = stop - time.monotonic()
        with (out / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command_of(name, out, left / 60, tiny), cwd=ROOT, env=environment(out, tiny), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=max(left, 0.1))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Its own session: whatever it started goes with it, also when we are interrupted.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows = Rows(out, name, "cut" if code is None else "crashed")
        if code:
            rows.write("whole part", "crashed", reason=f"exit status {code}; see log.txt")
        elif code is None or "cut" in (status for case, status in rows.seen.items() if case != "whole part"):
            return rows.write("whole part", "cut", reason="its time was over; a further run goes on with what is left")
        else:
            return rows.write("whole part", "finished")
    rows.write("whole part", "given up", reason=f"it crashed {TRIES} times")


def command_of(name: str, out: Path, minutes: float, tiny: bool) -> list[str]:
    command = [sys.executable, "-m", "recipes.lab.gpu", "--out", str(out), "--only", name, "--minutes", str(minutes)]
    return [*command, *(["--tiny"] if tiny else [])]


def environment(out: Path, tiny: bool) -> dict[str, str]:
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables["TRITON_INTERPRET"] = "1" if tiny else "0"
    if (out / "blocks.json").exists():
        variables["HF_ENTMAX_TRITON_BLOCKS"] = str(out / "blocks.json")
    return variables


def summary(out: Path) -> None:
    """Print what came out: each part, what went wrong, and each figure that has a goal."""
    latest = {(line["part"], line["case"]): line for line in read(out)}
    cases = [key for key in latest if key[1] != "whole part"]
    for (part, case), line in latest.items():
        if case == "whole part":
            counts = dict(Counter(latest[key]["status"] for key in cases if key[0] == part))
            print(f"{part:12s} {line['status']:9s} {counts} {line.get('reason', '')}")
    for key in cases:
        line, named = latest[key], ": ".join(key)
        if line["status"] in ("failed", "crashed", "wrong"):
            print(f"{line['status'].upper()} {named}: {line.get('reason', '')[:200]}")
        for name, goal in line.get("goals", {}).items():
            met = "met" if goal["met"] else "MISSED"
            print(f"{named}: {name}: {goal['ratio']:.3g}, goal {goal['at_most']:g}, {met}")


if __name__ == "__main__":
    main()
