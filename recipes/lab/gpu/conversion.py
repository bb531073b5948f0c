"""What goes on as long as there is time: SmolLM2 made sparse, then the jobs that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from .rows import Cut, Rows, Skip
from .setting import ROOT, Setting, too_old

#: Eight times the 2.4 million tokens of WikiText-2, within the loss of the softmax model.
OPTIONS = (
    *("--attention", "learned", "--schedule", "abrupt", "--release", "1.01"),
    *("--loss_budget", "0", "--loss_rate", "0.2", "--alpha_lr", "0.05", "--mixed_precision", "bf16"),
    *("--train_tokens", "2500000", "--epochs", "8", "--batch_size", "16", "--checkpoint_steps", "200"),
)


def run(rows: Rows, setting: Setting) -> None:
    rows.run("smollm2", lambda: convert(setting))
    rows.run("evidence", lambda: evidence(setting))


def start(command: list[str], setting: Setting) -> dict[str, Any]:
    """Run a recipe for what is left of the time; it resumes from its last checkpoint when this is run again."""
    if (reason := too_old("transformers", (5, 18))) is not None:
        raise Skip(reason)
    if "HF_ENTMAX_DATA" not in os.environ:
        raise Skip("HF_ENTMAX_DATA names no folder of data: see recipes/data/README.md")
    try:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=max(setting.left, 1.0))
    except subprocess.TimeoutExpired:
        raise Cut("the time was over; a further run goes on from the last checkpoint") from None
    return {"status": "ok" if done.returncode == 0 else "failed", "exit_status": done.returncode}


def convert(setting: Setting) -> dict[str, Any]:
    if setting.smollm2 is None:
        raise Skip("no folder of the model was given (--smollm2)")
    command = ["recipes/convert.py", "--config", "recipes/configs/convert_smollm2.yaml", "--resume", "True", *OPTIONS]
    command += ["--model", str(setting.smollm2), "--out", str(setting.out / "smollm2-sparse")]
    return start(command, setting)


def evidence(setting: Setting) -> dict[str, Any]:
    if setting.tiny:
        raise Skip("not in a tiny run")
    jobs = ["--jobs", "recipes/lab/jobs_gpu.yaml", "--folder", str(setting.out / "runs")]
    return start(["-m", "recipes.lab", "run", *jobs, "--results", str(setting.out), "--workers", "3"], setting)
