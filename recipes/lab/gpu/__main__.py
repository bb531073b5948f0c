"""Check and measure everything on one GPU, unattended, part by part, within a budget of minutes.

    python -m recipes.lab.gpu --out gpu-results                      # everything, 25 minutes
    python -m recipes.lab.gpu --out gpu-results --minutes 9          # again and again: goes on where it stopped
    python -m recipes.lab.gpu --out gpu-results --parts correctness timings
    python -m recipes.lab.gpu --out gpu-results --smollm2 models/smollm2
    python -m recipes.lab.gpu --out /tmp/tiny --tiny                 # a test of this program: tiny, in Triton's interpreter
    python -m recipes.lab.gpu --out gpu-results --parts compiled     # needs no GPU: registers, spills, shared memory

Each part is a process of its own with a limit: a crash or an error of the device costs that part the case it met, no other part
anything. Parts are listed in the order in which they run. What was found is in ``rows.jsonl``, a line for each case; what a part
printed in ``log.txt``; the tiles that were fastest in ``blocks.json``, which ``HF_ENTMAX_TRITON_BLOCKS`` names to the package (and
later parts use). A second run with the same ``--out`` leaves alone what is done.

The image may be older than the package: `ops` and `losses` need no Transformers. The parts that need Transformers 5.18 say so and
stop; to have them, install the wheels of transformers, tokenizers and huggingface_hub beforehand.

What the time should be, before anything is measured: see `recipes.lab.gpu.profile`.
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
from typing import NamedTuple

from .rows import Rows, read
from .setting import ROOT, Setting


class Part(NamedTuple):
    """A module of this package with ``run(rows, setting)``, and how long it may take."""

    module: str
    seconds: float
    tries: int = 3


PARTS = {
    "environment": Part("environment", 60),
    "correctness": Part("correctness", 330),
    "sanitizer": Part("sanitizer", 150),
    "tuning": Part("tuning", 270),
    "timings": Part("timings", 330),
    "losses": Part("loss_timings", 90),
    "models": Part("models", 150),
    "profile": Part("profile", 90),
    "decoding": Part("decoding", 60),
    "conversion": Part("conversion", 600),
    "compiled": Part("compiled", 3600),
}
#: Not asked for, not run: it needs no GPU, whose time it would take.
EXTRA = ("compiled",)
#: Less than this many seconds are not enough to begin a part.
LEAST = 20.0


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m recipes.lab.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder of what is found")
    parser.add_argument("--minutes", type=float, default=25.0, help="budget of this run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[name for name in PARTS if name not in EXTRA])
    parser.add_argument("--smollm2", type=Path, help="folder of the model to convert; without it nothing is converted")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one part in this process
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    smollm2 = given.smollm2.resolve() if given.smollm2 else None
    if given.only:
        part = importlib.import_module(f"recipes.lab.gpu.{PARTS[given.only].module}")
        part.run(Rows(out, given.only), Setting(out, given.tiny, 60 * given.minutes, smollm2))
        return
    end = time.monotonic() + 60 * given.minutes
    for name in [name for name in PARTS if name in given.parts]:
        run_part(name, out, given.tiny, smollm2, end)
    summary(out)


def run_part(name: str, out: Path, tiny: bool, smollm2: Path | None, end: float) -> None:
    """Run a part in a process of its own until it is done, its tries are used up, or its time or ours is over."""
    part, rows = PARTS[name], Rows(out, name)
    if rows.seen.get("whole part") in ("finished", "given up"):
        return
    limit = min(part.seconds, end - time.monotonic())
    if limit < min(LEAST, part.seconds):
        rows.write("whole part", "cut", reason=f"{max(limit, 0):.0f} s of the budget were left")
        return
    stop = time.monotonic() + limit
    for _ in range(part.tries):
        left = stop - time.monotonic()
        command = command_of(name, out, left / 60, tiny, smollm2)
        with (out / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(out, tiny), stdout=log, stderr=log, start_new_session=True
            )
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
        if code is None:
            reason = f"its {limit:.0f} s were over; a further run goes on with what is left"
            return rows.write("whole part", "cut", reason=reason)
        if code:
            rows.write("whole part", "crashed", reason=f"exit status {code}; see log.txt")
            continue
        if "cut" in (status for case, status in rows.seen.items() if case != "whole part"):
            return rows.write("whole part", "cut", reason="the time of a case was over; a further run tries it again")
        return rows.write("whole part", "finished")
    rows.write("whole part", "given up", reason=f"it crashed {part.tries} times")


def command_of(name: str, out: Path, minutes: float, tiny: bool, smollm2: Path | None) -> list[str]:
    command = [sys.executable, "-m", "recipes.lab.gpu", "--out", str(out), "--only", name]
    command += ["--minutes", str(minutes), *(["--tiny"] if tiny else [])]
    return [*command, *(["--smollm2", str(smollm2)] if smollm2 else [])]


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
    for (part, case), line in latest.items():
        if line["status"] in ("failed", "crashed", "wrong") and case != "whole part":
            print(f"{line['status'].upper()} {part}: {case}: {line.get('reason', '')[:200]}")
        for name, goal in line.get("goals", {}).items():
            met = "met" if goal["met"] else "MISSED"
            print(f"{part}: {case}: {name}: {goal['ratio']:.3g}, goal {goal['at_most']:g}, {met}")


if __name__ == "__main__":
    main()
