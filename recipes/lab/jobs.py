"""A list of experiments, run one after another, each once.

The list names for each job a recipe and its options. A job is done when the CSV file of its group has a row with the job's
command; an unfinished one is resumed from its checkpoint. Rows are written by the recipes as they finish. A job that fails is
reported at the end, with the file that holds its output, and does not stop the others.
"""

from __future__ import annotations

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

from .rows import ROOT, Rows, grouped

JOBS = ROOT / "recipes" / "lab" / "jobs.yaml"
#: Groups whose alphas are logged over training.
LOGGED = ("translation_enja", "translation_enja_fast", "inflection_trajectory", "inflection_trajectory_fast")


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of a recipe.

    Attributes:
        group: names the CSV file of its rows, ``recipes/lab/results/GROUP.csv``.
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
        name = f"{self.group}-" + "-".join(kept).replace("/", "_").replace(" ", "")
        return name if len(name) < 200 else f"{name[:180]}-{_digest(name)}"  # file names have an end

    def done(self, results: Path) -> bool:
        """Tell whether its row is there."""
        return bool(Rows(results)(self.group, command=self.command))


def _digest(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()[:8]


def read_jobs(path: Path = JOBS) -> list[Job]:
    """Read the jobs of a list, in its order.

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
            words: list[str] = []
            for name, value in options.items():
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
            jobs.append(Job(entry["group"], entry["recipe"], tuple(words)))
    return jobs


def run(job: Job, results: Path, folder: Path, threads: int) -> bool:
    """Run one job to its end; whether it succeeded."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{job.name}.txt"
    command = [sys.executable, str(ROOT / "recipes" / f"{job.recipe}.py"), *job.options]
    command += ["--out", str(folder / job.name), "--results", str(results / f"{job.group}.csv"), "--resume", "True"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    print(f"start  {job.command}", flush=True)
    with output.open("a", encoding="utf-8") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    print(f"{'done ' if code == 0 else 'FAILED'}  {job.command}" + (f"  see {output}" if code else ""), flush=True)
    return code == 0


def run_all(jobs: list[Job], results: Path, folder: Path, workers: int = 1, threads: int = 1) -> list[Job]:
    """Run what has no row yet; returns the jobs that failed."""

    def work(job: Job) -> bool:
        # Asked again when its turn comes: another queue may have done it meanwhile.
        return job.done(results) or run(job, results.resolve(), folder.resolve(), threads)

    with ThreadPoolExecutor(workers) as pool:
        return [job for job, right in zip(jobs, pool.map(work, jobs), strict=True) if not right]


def curves(jobs: list[Job], results: Path, folder: Path) -> int:
    """Write the dev scores that finished runs have logged to ``dev_curves.csv``; of runs that are gone, its rows stay.

    Returns:
        How many runs were read.
    """
    rows: dict[str, list[Any]] = {key[0]: own for key, own in grouped(Rows(results)("dev_curves"), "command").items()}
    count = 0
    for job in jobs:
        state = folder / job.name / "trainer_state.json"
        if not (job.done(results) and state.exists()):
            continue
        entries = json.loads(state.read_text(encoding="utf-8"))["log_history"]
        scores = {entry["step"]: round(entry["eval_score"], 3) for entry in entries if "eval_score" in entry}
        same = {"group": job.group, "command": job.command}
        rows[job.command] = [{**same, "step": step, "dev_score": score} for step, score in sorted(scores.items())]
        count += 1
    results.mkdir(parents=True, exist_ok=True)
    with (results / "dev_curves.csv").open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, ("group", "command", "step", "dev_score"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for command in sorted(rows) for row in rows[command])
    return count


def alphas(jobs: list[Job], results: Path, folder: Path) -> dict[str, int]:
    """Write the alphas that the runs behind figure 2 have logged beside their rows: how many steps, by group.

    All of the first thousand steps are kept, then every hundredth, and the last.
    """
    kept = {}
    for job in jobs:
        log = folder / job.name / "alphas.jsonl"
        if not (job.group in LOGGED and job.done(results) and log.exists()):
            continue
        lines = {json.loads(line)["step"]: line + "\n" for line in log.read_text(encoding="utf-8").splitlines()}
        steps = [step for step in sorted(lines) if step <= 1000 or step % 100 == 0 or step == max(lines)]
        (results / f"{job.group}.jsonl").write_text("".join(lines[step] for step in steps), encoding="utf-8")
        kept[job.group] = len(steps)
    return kept
