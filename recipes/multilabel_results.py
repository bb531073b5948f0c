"""Scores of multilabel predictions, and the CSV file that collects them run by run."""

from __future__ import annotations

import csv
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_entmax

FIELDS: tuple[str, ...] = (
    "study",
    "dataset",
    "setting",
    "method",
    "seed",
    "empty_rows",
    "test_rows",
    "micro_f1",
    "macro_f1",
    "jsd",
    "support",
    "predicted_labels",
    "true_labels",
    "validation_micro_f1",
    "chosen",
    "n_train",
    "n_test",
    "seconds",
    "command",
    "hardware",
    "versions",
)
KEY = ("study", "dataset", "setting", "method", "seed", "empty_rows", "test_rows")


def f1_scores(predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Micro- and macro-averaged F1.

        F1 = 2 TP / (2 TP + FP + FN), the counts pooled over the labels (micro), or F1 per label, averaged (macro)

    Args:
        predicted: bool ``[..., N, K]``.
        labels: 0/1 ``[..., N, K]``.

    Returns:
        Two tensors ``[...]``; a label that occurs in neither counts 0.
    """
    truth = labels == 1
    hits = (predicted & truth).sum(-2).double()
    sizes = predicted.sum(-2).double() + truth.sum(-2).double()
    macro = torch.where(sizes > 0, 2 * hits / sizes.clamp(min=1), 0.0).mean(-1)
    return 2 * hits.sum(-1) / sizes.sum(-1).clamp(min=1), macro


def jensen_shannon(probs: Tensor, labels: Tensor) -> float:
    """Mean Jensen-Shannon divergence (in nats, at most log 2) between predictions and the uniform label distributions.

    Args:
        probs: ``[N, K]``.
        labels: 0/1 ``[N, K]``; rows without a label have no distribution and are left out.
    """
    keep = labels.sum(-1) > 0
    p, q = probs[keep].double(), labels[keep].double()
    q = q / q.sum(-1, keepdim=True)
    entropy = lambda x: torch.special.entr(x).sum(-1)  # noqa: E731
    return float((entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).mean())


def score(probs: Tensor, predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """All scores of one test set; ``probs`` and ``predicted`` ``[N, K]``."""
    micro, macro = f1_scores(predicted, labels)
    return {
        "micro_f1": round(float(micro), 4),
        "macro_f1": round(float(macro), 4),
        "jsd": round(jensen_shannon(probs, labels), 4),
        "support": round(float((probs > 0).sum(-1).double().mean()), 3),
        "predicted_labels": round(float(predicted.sum(-1).double().mean()), 3),
        "true_labels": round(float(labels.sum(-1).double().mean()), 3),
    }


def hardware() -> str:
    """The processor, and how many threads were used."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    if torch.cuda.is_available():
        name += f" + {torch.cuda.get_device_name()}"
    return f"{name}, {torch.get_num_threads()} thread(s)"


def command(arguments: list[str]) -> str:
    """How the recipe was called, without the folders of this machine."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(("--data-dir", "--out")):
            kept.append(argument)
        skip = argument in ("--data-dir", "--out")
    return shlex.join(["python", "recipes/multilabel.py", *kept])


def versions() -> str:
    """Versions of what computed the numbers."""
    import sklearn
    import transformers

    return (
        f"hf_entmax {hf_entmax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"scikit-learn {sklearn.__version__}, python {platform.python_version()}"
    )


class Results:
    """A CSV file that grows by a row for each finished run, and knows which runs it holds.

    Args:
        path: the file; it is made with its folders when the first row comes.

    Raises:
        ValueError: if the file exists with other columns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                if tuple(reader.fieldnames or ()) != FIELDS:
                    raise ValueError(
                        f"{path} has the columns {reader.fieldnames}, not {list(FIELDS)}: use another --out."
                    )
                self.rows = list(reader)

    def has(self, **key: Any) -> bool:
        """Whether a run is there already; what is not given may be anything."""
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, **values: Any) -> None:
        """Append one row, on disk at once."""
        values |= {"command": command(sys.argv[1:]), "hardware": hardware(), "versions": versions()}
        row = {name: str(values.get(name, "")) for name in FIELDS}
        if unknown := sorted(set(values) - set(FIELDS)):
            raise ValueError(f"no columns for {unknown}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, FIELDS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)
