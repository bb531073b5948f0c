import math

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from datasets import Dataset

import hf_entmax
from hf_entmax.generation import (
    SamplingMetrics,
    epsilon_perplexity,
    jensen_shannon,
    sampling_metrics,
    sparsemax_score,
    support_size,
)
from hf_entmax.ops import entmax


def test_by_hand():
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    labels = torch.tensor([0, 3, -100])
    eps = 0.01
    logs = [math.log((0.5 + eps) / (1 + 4 * eps)), math.log(eps / (1 + 4 * eps))]
    assert epsilon_perplexity(probs, labels, eps).item() == pytest.approx(math.exp(-sum(logs) / 2))
    assert sparsemax_score(probs, labels).item() == pytest.approx(((0.5 + 0.25) + 0.0) / 2)
    entropy = lambda p: -sum(x * math.log(x) for x in p if x > 0)  # noqa: E731
    first = entropy([0.75, 0.25]) - 0.5 * entropy([0.5, 0.5])
    assert jensen_shannon(probs, labels).item() == pytest.approx((first + math.log(2)) / 2)
    assert support_size(probs, labels).item() == pytest.approx(1.5)
    assert support_size(probs).item() == pytest.approx(7 / 3)
    certain = torch.eye(4)[None]
    right = torch.arange(4)[None]
    assert sparsemax_score(certain, right).item() == 1.0 and jensen_shannon(certain, right).item() == 0.0


def test_against_the_definitions_over_all_words():
    probs = torch.cat(
        (torch.randn(40, 7, dtype=torch.float64).softmax(-1), entmax(torch.randn(40, 7).double() * 3, 2.0))
    )
    labels = torch.randint(7, (80,))
    scores, divergences, logs = [], [], []
    for p, y in zip(probs.tolist(), labels.tolist(), strict=True):
        e = [float(j == y) for j in range(7)]
        scores.append(1.0 - 0.5 * sum((a - b) ** 2 for a, b in zip(p, e, strict=True)))
        middle = [0.5 * (a + b) for a, b in zip(p, e, strict=True)]
        to_middle = lambda q, m=middle: sum(a * math.log(a / b) for a, b in zip(q, m, strict=True) if a > 0)  # noqa: E731
        divergences.append(0.5 * to_middle(p) + 0.5 * to_middle(e))
        smoothed = [a + 0.01 for a in p]
        logs.append(math.log(smoothed[y] / sum(smoothed)))
    assert sparsemax_score(probs, labels).item() == pytest.approx(sum(scores) / 80, abs=1e-12)
    assert jensen_shannon(probs, labels).item() == pytest.approx(sum(divergences) / 80, abs=1e-12)
    assert epsilon_perplexity(probs, labels, 0.01).item() == pytest.approx(math.exp(-sum(logs) / 80), abs=1e-10)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("classes", [9, 3000])
def test_from_logits_equals_from_probabilities(alpha, classes):
    logits, labels = torch.randn(3, 5, classes) * 2, torch.randint(classes, (3, 5))
    labels[0, 2:] = -100
    probs = entmax(logits, alpha)
    assert sampling_metrics(logits, labels, alpha, epsilon=1e-4) == pytest.approx(
        {
            "epsilon_perplexity": epsilon_perplexity(probs, labels, 1e-4).item(),
            "sparsemax_score": sparsemax_score(probs, labels).item(),
            "jensen_shannon": jensen_shannon(probs, labels).item(),
            "support_size": support_size(probs, labels).item(),
        },
        rel=1e-3,
    )


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_in_the_trainer(family, tmp_path):
    model = hf_entmax.patch_model(tiny.build(family), output_alpha=1.5)
    batch = tiny.inputs(family, batch=5, labels=True)
    batch["labels"][1, 3:] = -100
    metrics = SamplingMetrics.for_model(model, epsilon=1e-3)
    assert metrics.alpha == 1.5 and metrics.shift == (family == "llama")
    kept = []

    def preprocess(logits, labels):
        kept.append(metrics.preprocess_logits_for_metrics(logits, labels))
        return kept[-1]

    trainer = tf.Trainer(
        model,
        tf.TrainingArguments(tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True),
        eval_dataset=Dataset.from_dict({k: v.tolist() for k, v in batch.items()}),
        compute_metrics=metrics.compute_metrics,
        preprocess_logits_for_metrics=preprocess,
    )
    found = trainer.evaluate()
    with torch.no_grad():
        logits = model(**batch).logits
    labels = batch["labels"]
    if family == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    for name, value in sampling_metrics(logits, labels, 1.5, epsilon=1e-3).items():
        assert found[f"eval_{name}"] == pytest.approx(value, rel=1e-4), name
    assert all(rows.shape[-1] == 4 for rows in kept)


@pytest.mark.works_with("evaluate", "hf_entmax.generation.SAMPLING_METRIC as a metric that evaluate.load takes")
def test_as_a_metric_of_evaluate():
    import evaluate

    from hf_entmax.generation import SAMPLING_METRIC

    probs, labels = torch.randn(6, 5).softmax(-1), torch.randint(5, (6,))
    metric = evaluate.load(SAMPLING_METRIC)  # by its path: nothing is asked of the Hub
    metric.add_batch(predictions=probs[:4].tolist(), references=labels[:4].tolist())
    metric.add_batch(predictions=probs[4:].tolist(), references=labels[4:].tolist())
    found = metric.compute(epsilon=0.01)
    assert found["epsilon_perplexity"] == pytest.approx(epsilon_perplexity(probs, labels, 0.01).item(), rel=1e-5)
    assert found["sparsemax_score"] == pytest.approx(sparsemax_score(probs, labels).item(), rel=1e-5)
    assert found["jensen_shannon"] == pytest.approx(jensen_shannon(probs, labels).item(), rel=1e-5)
    assert found["support_size"] == 5.0


def test_bad_input():
    probs = torch.full((2, 4), 0.25)
    with pytest.raises(ValueError, match="epsilon=0"):
        epsilon_perplexity(probs, torch.tensor([0, 1]), 0)
    with pytest.raises(ValueError, match="labels hold 4"):
        sparsemax_score(probs, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="do not fit"):
        jensen_shannon(probs, torch.tensor([0]))
    with pytest.raises(ValueError, match="epsilon"):
        SamplingMetrics(epsilon=-1.0)
