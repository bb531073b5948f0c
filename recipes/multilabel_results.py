"""Scores of multilabel predictions, and the CSV file that collects them run by run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import common.results
from common.results import command, hardware, versions

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
#: Options that name folders of one machine.
PLACES = ("--data-dir", "--out")
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


class Results(common.results.Results):
    """The CSV file of a study; every row says by which command, where and with what it was made.

    Args:
        path: the file; it is made with its folders when the first row comes.

    Raises:
        ValueError: if the file exists with other columns.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, FIELDS)

    def add(self, **values: Any) -> None:
        """Append one row, on disk at once."""
        origin = {"command": command(PLACES), "hardware": hardware(), "versions": versions("scikit-learn")}
        super().add(**values, **origin)
