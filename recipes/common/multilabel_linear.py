"""Linear models for several labels at once: the study of Laha et al. 2018 on Mulan's data and synthetic documents."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.multilabel_config import METHODS, WITH_THRESHOLD, LinearConfig
from common.multilabel_data import Split, read_mulan, split_rows, synthetic_documents
from common.multilabel_scores import MultilabelResults, f1, score
from hf_entmax.losses.multilabel import multilabel_loss, multilabel_predict, multilabel_probabilities


def mappings_of(method: str, config: LinearConfig) -> list[str]:
    """List the mapping specifications among which a method is tuned."""
    mapping, candidates, _ = METHODS[method]
    return [mapping.format(value) for value in (getattr(config, candidates) if candidates else [None])]


def fit(data: Split, included: Tensor, l2: Tensor, mapping: str, config: LinearConfig, seed: int) -> Tensor:
    """Train ``G`` linear models at once, each on its own rows.

    Args:
        data: ``N`` rows with ``F`` features.
        included: bool ``[G, N]``, the training rows of each model.
        l2: ``[G]``.
        mapping: the loss.
        config: steps and learning rate.
        seed: of the initialisation.

    Returns:
        Weights ``[G, F + 1, K]``, the bias last.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([data.features, torch.ones(len(data), 1)], dim=1)
    weights = 0.01 * torch.randn(len(l2), x.shape[1], data.labels.shape[1], generator=generator)
    weights.requires_grad_()
    optimiser = torch.optim.Adam([weights], lr=config.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, config.steps)
    rows = included & (data.labels.sum(-1) > 0)
    labels = data.labels.expand(len(l2), -1, -1)
    for _ in range(config.steps):
        optimiser.zero_grad()
        losses = multilabel_loss(x @ weights, labels, mapping, reduction="none")
        fitted = (losses * rows).sum(1) / rows.sum(1).clamp(min=1)
        (fitted + l2 / 2 * weights[:, :-1].square().sum((1, 2))).sum().backward()
        optimiser.step()
        schedule.step()
    return weights.detach()


def logits_of(data: Split, weights: Tensor) -> Tensor:
    """Compute logits ``[..., N, K]`` for weights ``[..., F + 1, K]``."""
    return data.features @ weights[..., :-1, :] + weights[..., -1:, :]


def tune_and_test(
    train: Split, test: Split, method: str, config: LinearConfig, seed: int, n_scored: int, trained: dict | None = None
) -> tuple[Tensor, Tensor, dict[str, Any], float]:
    """Choose hyper-parameters on held-out training rows, train on all of them, predict the test rows.

    Args:
        train: training rows.
        test: test rows; their labels are not used.
        method: a name in ``METHODS``.
        config: the candidates.
        seed: of the split and the initialisation.
        n_scored: how many of the labels count in the scores (the first ones).
        trained: models of the same rows and seed, kept for methods that differ in their prediction alone.

    Returns:
        Probabilities and predictions of the test rows ``[N, K]``, what was chosen, and its validation micro-F1.
    """
    trained = {} if trained is None else trained
    folds = max(config.folds, 4)
    fold = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)) % folds
    held_out = torch.stack([fold == i for i in range(config.folds)])
    grid = torch.tensor(config.l2)
    thresholds: list[float | None] = list(config.thresholds) if method in WITH_THRESHOLD else [None]
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    for mapping in mappings_of(method, config):
        included = ~held_out.repeat(len(grid), 1)
        if mapping not in trained:
            trained[mapping] = fit(train, included, grid.repeat_interleave(config.folds), mapping, config, seed)
        weights = trained[mapping]
        logits = logits_of(train, weights).unflatten(0, (len(grid), config.folds))
        # Every row is predicted by the model of the fold that left it out; rows never left out do not count.
        rows = held_out.any(0)
        pooled = (logits * held_out[:, :, None]).sum(1)[:, rows]
        truth = train.labels[rows]
        for threshold, (i, l2) in itertools.product(thresholds, enumerate(config.l2)):
            predicted = multilabel_predict(pooled[i], mapping, threshold=threshold)
            micro = f1(predicted[:, :n_scored], truth[:, :n_scored])
            if micro > best[0]:
                best = micro, {"mapping": mapping, "l2": l2, "threshold": threshold}
    validation, chosen = best
    everything = torch.ones(1, len(train), dtype=torch.bool)
    final = chosen["mapping"], chosen["l2"]
    if final not in trained:
        trained[final] = fit(train, everything, torch.tensor([final[1]]), final[0], config, seed)
    logits = logits_of(test, trained[final][0])
    probs = multilabel_probabilities(logits, chosen["mapping"])
    predicted = multilabel_predict(logits, chosen["mapping"], threshold=chosen["threshold"])
    return probs, predicted, chosen, validation


def with_extra_label(data: Split) -> Split:
    """Give rows without labels a label of their own, the last one."""
    empty = (data.labels.sum(-1, keepdim=True) == 0).float()
    return Split(data.features, torch.cat([data.labels, empty], dim=1))


def linear_tasks(config: LinearConfig) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield every run of a linear study as its key in the results and a function that makes its (train, test) rows."""
    if config.study == "mulan":
        for name, seed, empty in itertools.product(config.datasets, config.seeds, config.empty_rows):
            if empty == "ignore" or not bool((read_mulan(name)[0].labels.sum(-1) > 0).all()):
                setting = f"l2={config.l2[0]:g}" if len(config.l2) == 1 else "l2 tuned"
                key = {"dataset": name, "setting": setting, "seed": seed, "empty_rows": empty}
                yield key, lambda name=name: read_mulan(name)
        return
    near = {mu: tuple(c for c in (mu - 1, mu, mu + 1) if 1 <= c <= 10) for mu in config.mean_labels}
    axes: list[tuple[str, int, tuple[int, ...] | None, int, int]]
    axes = [("mean_labels", mu, counts, mu, 2000) for mu, counts in near.items()]
    axes += [("label_range", r, tuple(range(5 - r, 5 + r + 1)), 5, 2000) for r in config.label_ranges]
    axes += [("length", length, None, 5, length) for length in config.lengths]
    for (axis, setting, counts, mean, length), seed in itertools.product(axes, config.seeds):

        def make(counts: Any = counts, mean: int = mean, length: int = length, seed: int = seed) -> tuple[Split, Split]:
            data = synthetic_documents(counts, mean_labels=mean, length=length, seed=seed, n_samples=config.n_samples)
            train, test = split_rows(data, (0.8, 0.2), seed)
            centre, spread = train.features.mean(0), train.features.std(0).clamp(min=1e-6)
            return tuple(Split((part.features - centre) / spread, part.labels) for part in (train, test))  # type: ignore[return-value]

        yield {"dataset": axis, "setting": setting, "seed": seed, "empty_rows": "ignore"}, make


def run_linear(config: LinearConfig, results: MultilabelResults) -> None:
    """Do all runs of a linear study that the results do not hold yet."""
    for key, make in linear_tasks(config):
        todo = [m for m in config.methods if not results.has(study=config.study, method=m, **key)]
        if not todo:
            continue
        train, test = make()
        n_labels = test.labels.shape[1]
        if key["empty_rows"] == "extra_label":
            train = with_extra_label(train)
        trained: dict[Any, Tensor] = {}
        for method in todo:
            start = time.perf_counter()
            found = tune_and_test(train, test, method, config, key["seed"], n_labels, trained)
            probs, predicted, chosen, validation = found
            seconds = time.perf_counter() - start
            labelled = test.labels.sum(-1) > 0
            subsets = {"all": torch.ones_like(labelled)} | ({} if bool(labelled.all()) else {"labelled": labelled})
            for name, rows in subsets.items():
                # The extra label takes mass, but is no label of the data: probabilities are renormalised without it.
                kept = probs[rows, :n_labels]
                kept = kept / kept.sum(-1, keepdim=True).clamp(min=1e-12)
                scores = score(kept, predicted[rows, :n_labels], test.labels[rows])
                row = {"study": config.study, "method": method, "test_rows": name, **key, **scores}
                row |= {"validation_micro_f1": round(validation, 4), "chosen": json.dumps(chosen)}
                results.add(**row, n_train=len(train), n_test=int(rows.sum()), seconds=round(seconds, 1))
                where = f"{key['dataset']:12} {key['setting']!s:5} seed {key['seed']}"
                print(f"{where} {method:20} {name:9} {scores}", flush=True)
