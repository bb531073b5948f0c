r"""The support of entmax as a conformal prediction set: non-conformity scores, their quantile, the sets.

A label has a probability above 0 in ``entmax(z / T, alpha)`` exactly if the temperature ``T`` is above

    s(z, y) = (alpha - 1) * || (z - z_y)_+ ||_p,     p = 1 / (alpha - 1),     (x)_+ = max(x, 0)

(for sparsemax the sum of the gaps to all better labels). This temperature is the non-conformity score of the label. If
``T`` is above the ``ceil((n + 1)(1 - delta))``-th smallest score of ``n`` held-out labels, the support holds the label
of the next example with probability at least ``1 - delta``, whatever the model, as long as all examples are exchangeable.

Reference:
    Campos, Cálem, Sklaviadis, Figueiredo, Martins 2025, Sparse Activations as Conformal Predictors;
    Vovk, Gammerman, Shafer 2005 (split conformal prediction).
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from hf_entmax.ops.solve import exact_dtype

#: How far the temperature lies above the quantile, relative, and the lowest temperature (in the unit of the logits): a
#: support holds the labels *below* its temperature. Both only widen sets.
SLACK = 1e-6


def support_temperature(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    r"""Return the temperature above which ``entmax(logits / T, alpha)`` gives a label a probability above 0.

        s(z, y) = (alpha - 1) * || (z - z_y)_+ ||_p,     p = 1 / (alpha - 1)

    Args:
        logits: floating point ``[..., V]``; ``-inf`` marks impossible labels.
        labels: int64 ``[...]``, between 0 and ``V - 1``.
        alpha: above 1.

    Returns:
        ``[...]`` in float64 (float32 where the device has no other), in the unit of the logits: 0 for the label with the
        largest logit, ``inf`` for an impossible one. Not differentiable.

    Raises:
        ValueError: for alpha not above 1 (the support of softmax is everything), or logits that hold NaN or ``+inf``.

    Reference:
        Campos et al. 2025, the score of gamma-entmax, times ``gamma - 1`` so that it is a temperature.
    """
    check_sparse(alpha)
    _check_logits(logits)
    scores = logits.detach().to(exact_dtype(logits))
    return _above(scores, scores.gather(-1, labels[..., None]), alpha).squeeze(-1)


def _above(scores: Tensor, value: Tensor, alpha: float) -> Tensor:
    """Return the score ``[..., 1]`` of labels with the logits ``value`` ``[..., 1]``."""
    gaps = (scores - value.clamp(min=torch.finfo(scores.dtype).min)).clamp_(min=0.0)
    largest = gaps.amax(-1, keepdim=True)
    # Divided by the largest gap, no power overflows, and what underflows would not be seen in the sum.
    shares = gaps / largest.masked_fill(largest == 0, 1.0)
    norm = largest * shares.pow(1.0 / (alpha - 1.0)).sum(-1, keepdim=True).pow(alpha - 1.0)
    return ((alpha - 1.0) * norm).masked_fill(value == -math.inf, math.inf)


def support_at(logits: Tensor, temperature: float, alpha: float) -> Tensor:
    """Return the support of ``entmax(logits / temperature, alpha)``, by the scores of `support_temperature`.

    Probabilities tell the same, up to those that are too small for a floating-point number.

    Args:
        logits: floating point ``[..., V]``.
        temperature: above 0.
        alpha: above 1.

    Returns:
        bool ``[..., V]``; at least the label with the largest logit is True in every row.

    Raises:
        ValueError: as `support_temperature`, and for a temperature that is not above 0 and finite.
    """
    check_sparse(alpha)
    _check_logits(logits)
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} is not allowed: it must be finite and above 0.")
    scores = logits.detach().to(exact_dtype(logits))
    # One gap alone puts a label outside from here on. Scores rise with the rank: the last rank inside is found by halving.
    near = scores > scores.amax(-1, keepdim=True) - temperature / (alpha - 1.0)
    ranked = scores.topk(max(1, int(near.sum(-1).max())), dim=-1).values if near.numel() else scores
    inside = torch.zeros_like(ranked[..., :1], dtype=torch.long)
    outside = torch.full_like(inside, ranked.shape[-1])
    while bool((outside - inside > 1).any()):
        middle = (inside + outside) // 2
        within = _above(ranked, ranked.gather(-1, middle), alpha) < temperature
        inside, outside = torch.where(within, middle, inside), torch.where(within, outside, middle)
    return scores >= ranked.gather(-1, inside)


def conformal_temperature(scores: Tensor, delta: float) -> float:
    """Return the temperature at which supports hold the next label with probability ``1 - delta``.

        T  just above  the k-th smallest of n scores,     k = ceil((n + 1)(1 - delta))

    The chance of a miss is at most ``delta``, and at least ``delta - 1 / (n + 1)`` where no two scores are equal.

    Args:
        scores: ``[n]`` from `support_temperature`, of held-out examples.
        delta: allowed chance of a miss, strictly between 0 and 1.

    Returns:
        The temperature, in the unit of the logits.

    Raises:
        ValueError: for another ``delta``; if ``n`` is below ``1 / delta - 1``, so that no finite temperature keeps the
            promise; if scores are NaN, or more of them infinite than ``delta`` allows.
    """
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0.0 < delta < 1.0:
        raise ValueError(f"delta={delta!r} is not allowed: it is the chance of a miss, strictly between 0 and 1.")
    count = scores.numel()
    # As the decimal number that was written: in binary, 10 * (1 - 0.1) may come out above 9.
    miss = Fraction(str(float(delta)))
    place = math.ceil((count + 1) * (1 - miss))
    if place > count:
        raise ValueError(
            f"delta={delta} cannot be promised after {count} example(s): it takes at least {math.ceil(1 / miss) - 1}. Give more "
            "held-out data, or allow more misses."
        )
    if bool(scores.isnan().any()):
        raise ValueError("scores hold NaN: nothing can be calibrated with them.")
    quantile = float(scores.flatten().sort().values[place - 1])
    if quantile == math.inf:
        raise ValueError(
            f"delta={delta} cannot be promised: more examples than that have an infinite score: a label with the logit -inf, which "
            "no temperature makes possible, or an answer without a probability, which has one at a lower alpha."
        )
    return max(quantile * (1.0 + SLACK), SLACK)


def check_sparse(alpha: float) -> None:
    """Raise ValueError unless alpha is a finite number above 1."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1.0 < alpha < math.inf:
        raise ValueError(
            f"alpha={alpha!r} is not allowed: sets are supports of entmax, alpha must be a finite number above 1. With alpha=1, "
            "softmax, every label has a probability above 0."
        )


def _check_logits(logits: Tensor) -> None:
    if bool((logits.isnan() | (logits == math.inf)).any()):
        raise ValueError("logits hold NaN or +inf: there is no order of labels to make sets of.")
    if bool((logits == -math.inf).all(-1).any()):
        raise ValueError("a row of logits is -inf throughout: no label is possible there.")
