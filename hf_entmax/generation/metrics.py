"""How well sparse probabilities predict text: measures that allow for probabilities of exactly zero."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_entmax.generation.members import output_alpha_of
from hf_entmax.integration.labels import shifts_labels
from hf_entmax.losses.targets import check_labels
from hf_entmax.ops.candidates import solve_rows

EPSILON = 1e-6

#: For ``evaluate.load``: the measures below as one metric, without the Hub.
SAMPLING_METRIC = str(Path(__file__).with_name("evaluate_metric.py"))
NAMES = ("epsilon_perplexity", "sparsemax_score", "jensen_shannon", "support_size")


def epsilon_perplexity(probs: Tensor, labels: Tensor, epsilon: float = EPSILON, ignore_index: int = -100) -> Tensor:
    r"""Compute the perplexity after adding a little to every probability: finite also where the model ruled the word out.

        eps-ppl = exp(-mean_t log p_eps(y_t)),     p_eps(y) = (p(y) + eps) / (1 + eps V)

    Args:
        probs: ``[..., V]``, floating point, rows that sum to 1.
        labels: class indices ``[...]``.
        epsilon: what is added, ``> 0``. Values are comparable for one epsilon only.
        ignore_index: positions with this label are left out.

    Returns:
        Scalar, at least 1; NaN if there is no position. Differentiable in ``probs``.

    Raises:
        ValueError: for ``epsilon`` not above 0, shapes that do not fit, or labels out of range.

    Reference:
        Martins, Marinho, Martins 2020, sec. 4.
    """
    _check_epsilon(epsilon)
    reached, _ = _reached(probs, labels, ignore_index)
    return _epsilon_log(reached, epsilon, probs.shape[-1]).mean().neg().exp()


def sparsemax_score(probs: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    r"""Compute one minus the sparsemax loss of the probabilities, a generalised accuracy.

        sp = mean_t [p_t(y_t) + (1 - ||p_t||^2) / 2]

    Args:
        probs: ``[..., V]``, floating point, rows that sum to 1.
        labels: class indices ``[...]``.
        ignore_index: positions with this label are left out.

    Returns:
        Scalar in [0, 1]: 1 where the label has all the mass, 0 where another word has it. Differentiable in ``probs``.

    Raises:
        ValueError: for shapes that do not fit, or labels out of range.

    Reference:
        Martins, Marinho, Martins 2020, sec. 4.
    """
    reached, rows = _reached(probs, labels, ignore_index)
    return (reached + 0.5 * (1.0 - rows.square().sum(-1))).mean()


def jensen_shannon(probs: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    r"""Compute the Jensen-Shannon divergence between the probabilities and the label.

        JS = mean_t [H((p_t + e_y) / 2) - H(p_t) / 2],     a function of p_t(y_t) alone

    Args:
        probs: ``[..., V]``, floating point, rows that sum to 1.
        labels: class indices ``[...]``.
        ignore_index: positions with this label are left out.

    Returns:
        Scalar in nats, between 0 and ``log 2``. Differentiable in ``probs``.

    Raises:
        ValueError: for shapes that do not fit, or labels out of range.

    Reference:
        Martins, Marinho, Martins 2020, sec. 4.
    """
    return _divergence(_reached(probs, labels, ignore_index)[0]).mean()


def support_size(probs: Tensor, labels: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Return the mean number of words with a probability above 0.

    Args:
        probs: ``[..., V]``.
        labels: ``[...]``; positions with ``ignore_index`` are left out. None counts all positions.
        ignore_index: see ``labels``.

    Returns:
        Scalar. Not differentiable.

    Raises:
        ValueError: as :func:`epsilon_perplexity`.

    Reference:
        Peters, Niculae, Martins 2019, table 3.
    """
    rows = probs if labels is None else _reached(probs, labels, ignore_index)[1]
    return (rows > 0).sum(-1).float().mean()


def position_metrics(
    logits: Tensor, labels: Tensor, alpha: float = 1.5, *, epsilon: float = EPSILON, ignore_index: int = -100
) -> Tensor:
    """Compute the four measures at every position, holding the probabilities of only a few positions at a time.

    Arguments and errors are those of :func:`sampling_metrics`; positions with ``ignore_index`` get NaN.

    Returns:
        float32 ``[..., 4]``: ``log p_eps(y)``, sparsemax score, Jensen-Shannon divergence, support size. Averaging the
        last three gives the measures, ``exp(-mean)`` of the first the epsilon-perplexity.
    """
    _check_epsilon(epsilon)
    shape, classes = labels.shape, logits.shape[-1]
    labels, kept = _check_labels(logits, labels, ignore_index)
    result = torch.full((labels.numel(), 4), math.nan, device=logits.device)
    where = kept.nonzero().squeeze(-1)
    flat = logits.reshape(-1, classes)
    for rows in where.split(max(1, (1 << 22) // max(classes, 1))):
        solution = solve_rows(flat[rows], alpha - 1.0)
        probs, targets = solution.probs, labels[rows]
        if solution.rows is None:
            reached = probs.gather(1, targets[:, None]).squeeze(-1)
            squares, support = probs.square().sum(-1), (probs > 0).sum(-1)
        else:
            hit = torch.where(solution.columns == targets[solution.rows], probs, 0.0)
            reached, squares = probs.new_zeros((2, rows.numel())).unbind(0)
            reached.index_add_(0, solution.rows, hit)
            squares.index_add_(0, solution.rows, probs.square())
            support = torch.bincount(solution.rows, minlength=rows.numel())
        score = reached + 0.5 * (1.0 - squares)
        columns = (_epsilon_log(reached, epsilon, classes), score, _divergence(reached), support)
        result[rows] = torch.stack([column.float() for column in columns], dim=-1)
    return result.view(*shape, 4)


def sampling_metrics(
    logits: Tensor, labels: Tensor, alpha: float = 1.5, *, epsilon: float = EPSILON, ignore_index: int = -100
) -> dict[str, float]:
    """Compute all four measures of a model's logits.

    Args:
        logits: ``[..., V]``, floating point, aligned with the labels: a causal model predicts ``labels[:, 1:]`` by
            ``logits[:, :-1]``.
        labels: class indices ``[...]``.
        alpha: of the output probabilities, ``>= 1``.
        epsilon: as for :func:`epsilon_perplexity`, ``> 0``.
        ignore_index: positions with this label are left out.

    Returns:
        ``epsilon_perplexity``, ``sparsemax_score``, ``jensen_shannon`` (nats) and ``support_size``.

    Raises:
        ValueError: as :func:`epsilon_perplexity`.

    Reference:
        Martins, Marinho, Martins 2020, sec. 4.
    """
    found = position_metrics(logits, labels, alpha, epsilon=epsilon, ignore_index=ignore_index)
    return summarise(found[labels.to(found.device) != ignore_index])


def summarise(rows: Tensor) -> dict[str, float]:
    """Return the four measures from the rows of :func:`position_metrics`, ``[n, 4]``; NaN if there are none."""
    means = rows.double().mean(0).tolist()
    return {NAMES[0]: math.exp(-means[0]), **dict(zip(NAMES[1:], means[1:], strict=True))}


@dataclasses.dataclass(eq=False)
class SamplingMetrics:
    """The four measures for ``Trainer``, which then keeps four numbers per position instead of the logits.

        metrics = SamplingMetrics.for_model(model)
        Trainer(..., compute_metrics=metrics.compute_metrics,
                preprocess_logits_for_metrics=metrics.preprocess_logits_for_metrics)

    Args:
        alpha: of the output probabilities, ``>= 1``.
        shift: True for causal models, whose position ``t`` predicts label ``t + 1``.
        epsilon: as for :func:`epsilon_perplexity`.
        ignore_index: as for :func:`epsilon_perplexity`.
    """

    alpha: float = 1.5
    _: dataclasses.KW_ONLY
    shift: bool = False
    epsilon: float = EPSILON
    ignore_index: int = -100

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> SamplingMetrics:
        """Make one with the alpha of a model's output and the alignment of its labels; ``options`` override."""
        return cls(**{"alpha": output_alpha_of(model, None), "shift": shifts_labels(model), **options})

    def preprocess_logits_for_metrics(self, logits: Any, labels: Tensor) -> Tensor:
        """Compute four numbers per position, ``[B, T, 4]``, from the logits ``[B, T, V]`` (or what starts with them)."""
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        labels = self._aligned(labels)
        return position_metrics(logits, labels, self.alpha, epsilon=self.epsilon, ignore_index=self.ignore_index)

    def compute_metrics(self, prediction: Any) -> dict[str, float]:
        """Return the measures, from an ``EvalPrediction`` of the above."""
        rows, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
        return summarise(rows[self._aligned(labels) != self.ignore_index])

    def _aligned(self, labels: Tensor) -> Tensor:
        return F.pad(labels[..., 1:], (0, 1), value=self.ignore_index) if self.shift else labels


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon} is not allowed: it is added to every probability and must be above 0.")


def _check_labels(scores: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Flatten the labels, and mark which of them count."""
    if labels.is_floating_point():
        raise TypeError(f"labels must hold class indices (integers), not {labels.dtype}.")
    return check_labels(labels.to(scores.device), scores.shape[:-1], scores.shape[-1], ignore_index)  # type: ignore[return-value]


def _reached(probs: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the labels ``[n]``, and the rows they stand in ``[n, V]``, at positions that count."""
    flat, kept = _check_labels(probs, labels, ignore_index)
    rows = probs.reshape(-1, probs.shape[-1])[kept]
    return rows.gather(1, flat[kept][:, None]).squeeze(-1), rows


def _epsilon_log(reached: Tensor, epsilon: float, classes: int) -> Tensor:
    return ((reached + epsilon) / (1.0 + epsilon * classes)).log()


def _divergence(reached: Tensor) -> Tensor:
    """Return ``H((p + e_y)/2) - H(p)/2``: all terms but those of the label cancel."""
    middle = 0.5 * (1.0 + reached)
    return 0.5 * (1.0 - reached) * math.log(2.0) + 0.5 * torch.special.xlogy(reached, reached) - middle * middle.log()
