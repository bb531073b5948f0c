"""The sampling measures as a metric of the ``evaluate`` library, which loads this file by its path, without the Hub.

import evaluate
from hf_entmax.generation import SAMPLING_METRIC

metric = evaluate.load(SAMPLING_METRIC)
metric.add_batch(predictions=probs, references=labels)         # probs [n, V], labels [n]
metric.compute(epsilon=1e-6)                                   # epsilon_perplexity, sparsemax_score, ...
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import torch

from hf_entmax.generation.metrics import EPSILON, epsilon_perplexity, jensen_shannon, sparsemax_score, support_size


class SamplingMetric(evaluate.Metric):
    """Epsilon-perplexity, sparsemax score, Jensen-Shannon divergence and support size of predicted distributions.

    Reference:
        Martins, Marinho, Martins 2020, sec. 4.
    """

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Sequence(datasets.Value("float32")), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description="Measures of predicted distributions that allow for probabilities of exactly zero.",
            citation="Martins, Marinho, Martins 2020. Sparse Text Generation.",
            inputs_description="predictions: probabilities over the vocabulary; references: indices of the words that came.",
            features=datasets.Features(features),
        )

    def _compute(self, *, predictions: Any, references: Any, epsilon: float = EPSILON) -> dict[str, float]:
        probs, labels = torch.as_tensor(predictions), torch.as_tensor(references)
        return {
            "epsilon_perplexity": float(epsilon_perplexity(probs, labels, epsilon)),
            "sparsemax_score": float(sparsemax_score(probs, labels)),
            "jensen_shannon": float(jensen_shannon(probs, labels)),
            "support_size": float(support_size(probs, labels)),
        }
