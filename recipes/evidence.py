"""Run a list of experiments one after another, each once; started again, it goes on where it stopped.

    python recipes/evidence.py recipes/configs/evidence.yaml                       # everything that has no row yet
    python recipes/evidence.py recipes/configs/evidence.yaml --only inflection --workers 2 --threads 1
    python recipes/evidence.py recipes/configs/evidence.yaml --list
    python recipes/evidence.py recipes/configs/evidence.yaml --curves            # dev scores of the runs, dev_curves.csv

The list names for each job a recipe and its options. A job is done when the CSV file of its group has a row with the
job's command; an unfinished one is resumed from its checkpoint. Rows are written by the recipes as they finish. A job that
fails is reported at the end, with the file that holds its output, and does not stop the others.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of a recipe.

    Attributes:
        group: names the CSV file of its rows, ``recipes/results/GROUP.csv``.
        recipe: file name of the script, without ``.py``.
        options: as given on the command line.
    """

    group: str
    recipe: str
    options: tuple[str, ...]

    @property
    def command(self) -> str:
        """As the recipe writes it into its row."""
        return shlex.join(["python", f"recipes/{self.recipe}.py", *self.options])

    @property
    def name(self) -> str:
        """Of its folder: the options that tell jobs apart; of a model's path, which may be long, a digest."""
        words = [word.lstrip("-") for word in self.options if word != "--config"]
        kept = [
            Path(word).stem if word.endswith(".yaml") else _digest(word) if word.endswith("/model") else word
            for word in words
        ]
        return f"{self.group}-" + "-".join(kept).replace("/", "_").replace(" ", "")

    def done(self, results: Path) -> bool:
        """Whether its row is there."""
        path = results / f"{self.group}.csv"
        if not path.exists():
            return False
        with path.open(newline="", encoding="utf-8") as lines:
            return any(row["command"] == self.command for row in csv.DictReader(lines))


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a list, in its order.

    An entry has ``group``, ``recipe``, ``options`` (fixed) and ``vary``: lists of option sets, of which every combination is
    a job, the last list varying fastest.

    Raises:
        ValueError: for an entry with other keys or without these.
    """
    jobs = []
    for place, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))):
        if unknown := set(entry) - {"group", "recipe", "options", "vary"}:
            raise ValueError(
                f"{path}, entry {place}: unknown keys {sorted(unknown)}; known: group, recipe, options, vary."
            )
        if missing := {"group", "recipe"} - set(entry):
            raise ValueError(f"{path}, entry {place}: {sorted(missing)} must be given.")
        for chosen in itertools.product(*entry.get("vary", [])):
            options: dict[str, Any] = dict(entry.get("options", {}))
            for more in chosen:
                options |= more
            words = [word for name, value in options.items() for word in (f"--{name}", *_words(value))]
            jobs.append(Job(entry["group"], entry["recipe"], tuple(words)))
    return jobs


def _digest(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()[:8]


def _words(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def run(job: Job, results: Path, folder: Path, threads: int) -> bool:
    """Run one job to its end; whether it succeeded."""
    out = folder / job.name
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{job.name}.txt"
    places = ["--out", str(out), "--results", str(results / f"{job.group}.csv"), "--resume", "True"]
    command = [sys.executable, str(ROOT / "recipes" / f"{job.recipe}.py"), *job.options, *places]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    print(f"start  {job.command}", flush=True)
    with output.open("a", encoding="utf-8") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    print(f"{'done ' if code == 0 else 'FAILED'}  {job.command}" + (f"  see {output}" if code else ""), flush=True)
    return code == 0


#: Columns of dev_curves.csv.
CURVES = ("group", "command", "step", "dev_score")


def curves(jobs: list[Job], results: Path, folder: Path) -> int:
    """Write the dev scores that finished runs have logged to ``dev_curves.csv``; of runs that are gone, its rows stay.

    Returns:
        How many runs were read.
    """
    path = results / "dev_curves.csv"
    rows: dict[str, list[dict[str, Any]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                rows.setdefault(row["command"], []).append(row)
    count = 0
    for job in jobs:
        log = folder / job.name / "log.jsonl"
        if not (job.done(results) and log.exists()):
            continue
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        # A run that was killed and went on has evaluated some steps twice, alike.
        scores = {entry["step"]: round(entry["dev_score"], 3) for entry in entries if "dev_score" in entry}
        rows[job.command] = [
            {"group": job.group, "command": job.command, "step": step, "dev_score": score}
            for step, score in sorted(scores.items())
        ]
        count += 1
    results.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, CURVES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for job in sorted(rows) for row in rows[job])
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", type=Path, help="YAML list of jobs")
    parser.add_argument("--only", action="append", help="group to run; repeatable")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--results", type=Path, default=ROOT / "recipes" / "results", help="folder of the CSV files")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="folder of the runs")
    parser.add_argument("--list", action="store_true", help="say what is done and what is open, run nothing")
    parser.add_argument("--curves", action="store_true", help="write the dev scores of the runs, run nothing")
    args = parser.parse_args()
    jobs = [job for job in read_jobs(args.jobs) if not args.only or job.group in args.only]
    if args.list:
        for job in jobs:
            print(f"{'done' if job.done(args.results) else 'open'}  {job.command}")
        return
    if args.curves:
        print(f"dev scores of {curves(jobs, args.results, args.folder)} runs in {args.results / 'dev_curves.csv'}")
        return

    def work(job: Job) -> bool:
        # Asked again when its turn comes: another queue may have done it meanwhile.
        return job.done(args.results) or run(job, args.results.resolve(), args.folder.resolve(), args.threads)

    with ThreadPoolExecutor(args.workers) as pool:
        outcomes = list(pool.map(work, jobs))
    if failed := [job.command for job, right in zip(jobs, outcomes, strict=True) if not right]:
        sys.exit(f"{len(failed)} of {len(jobs)} jobs failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
