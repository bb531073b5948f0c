"""Scores of multilabel predictions, and the CSV file that collects them run by run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scipy.spatial.distance import jensenshannon
from sklearn.metrics import f1_score
from torch import Tensor

from common.row_file import Results, origin
from hf_entmax.losses.multilabel import multilabel_predict

KEY = ("study", "dataset", "setting", "method", "seed", "empty_rows", "test_rows")
MEASURES = ("micro_f1", "macro_f1", "jsd", "support", "predicted_labels", "true_labels", "validation_micro_f1")
FIELDS = (*KEY, *MEASURES, "chosen", "n_train", "n_test", "seconds", "command", "hardware", "versions")


def f1(predicted: Tensor, labels: Tensor, average: str = "micro") -> float:
    """Compute F1 with the counts pooled over the labels (micro), or per label, averaged (macro).

    Args:
        predicted: bool ``[N, K]``.
        labels: 0/1 ``[N, K]``; a label that occurs in neither counts 0.
        average: micro or macro.
    """
    return float(f1_score(labels.int().numpy(), predicted.int().numpy(), average=average, zero_division=0))


def jensen_shannon(probs: Tensor, labels: Tensor) -> float:
    """Compute the mean Jensen-Shannon divergence (in nats, at most log 2) between predictions and the uniform label distributions.

    Args:
        probs: ``[N, K]``.
        labels: 0/1 ``[N, K]``; rows without a label have no distribution and are left out.
    """
    keep = labels.sum(-1) > 0
    return float((jensenshannon(probs[keep].double(), labels[keep].double(), axis=1) ** 2).mean())


def score(probs: Tensor, predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute all scores of one test set; ``probs`` and ``predicted`` ``[N, K]``."""
    return {
        "micro_f1": round(f1(predicted, labels), 4),
        "macro_f1": round(f1(predicted, labels, "macro"), 4),
        "jsd": round(jensen_shannon(probs, labels), 4),
        "support": round(float((probs > 0).sum(-1).double().mean()), 3),
        "predicted_labels": round(float(predicted.sum(-1).double().mean()), 3),
        "true_labels": round(float(labels.sum(-1).double().mean()), 3),
    }


#: Outputs of which no probability is 0.
DENSE = ("softmax", "entmax(alpha=1)")


def best_threshold(logits: Tensor, labels: Tensor, output: str, candidates: list[float]) -> tuple[float, float | None]:
    """Return the best validation micro-F1 and its threshold; None, the support, for sparse outputs."""
    options: list[float | None] = list(candidates) if output in DENSE else [None]
    scores = [f1(multilabel_predict(logits, output, threshold=t), labels) for t in options]
    best = max(range(len(options)), key=scores.__getitem__)
    return scores[best], options[best]


class MultilabelResults(Results):
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
        super().add(**values, **origin(("--out",), packages=("scikit-learn",)))
