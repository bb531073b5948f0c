"""Training towards a given density of attention: a differentiable stand-in for it, and how hard to push."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention_density(weights: Tensor, pairs: Tensor) -> Tensor:
    """Share of the possible weights of one module that are not zero, mean over its heads.

    Args:
        weights: ``[B, H, T_q, T_k]``, non-negative.
        pairs: bool ``[B, T_q, T_k]``, True where a weight is possible.

    Returns:
        Scalar in [0, 1]; NaN where no pair is possible. Not differentiable. See `hf_entmax.analysis.density`.

    Raises:
        ValueError: for shapes that do not fit.
    """
    _check(weights, pairs)
    return ((weights > 0) & pairs[:, None]).sum() / (pairs.sum() * weights.shape[1])


def soft_density(weights: Tensor, pairs: Tensor, tau: float = 0.01) -> Tensor:
    r"""A differentiable stand-in for `attention_density`.

        D_tau = mean_h  sum_{b,i,j} p_j / (p_j + tau)  /  #pairs,          D_tau -> density  as  tau -> 0

    A large weight counts as 1, a weight of ``tau`` as a half, a zero as 0. Its slope ``tau / (p + tau)^2`` is steep for small
    weights only: it pushes those to zero that are nearly there and leaves the peaks of a row alone. Through entmax it reaches
    the scores and a learned alpha alike; weights that are zero get no gradient.

    Args:
        weights: as for `attention_density`.
        pairs: as for `attention_density`.
        tau: weight that counts half, above 0.

    Returns:
        Scalar between 0 and the density.

    Raises:
        ValueError: for shapes that do not fit or ``tau`` not above 0.
    """
    _check(weights, pairs)
    if not tau > 0:
        raise ValueError(f"tau={tau!r} is not allowed: give a weight above 0.")
    p = weights.float().masked_fill(~pairs[:, None], 0.0)
    return (p / (p + tau)).sum() / (pairs.sum() * weights.shape[1])


class DensityTarget:
    r"""The multiplier of `soft_density` in a loss, moved until the measured density is at most ``target``.

        loss_t = task_t + lam_t D_tau,          lam_{t+1} = max(0, lam_t + rate (density_t - target))

    Dual ascent for ``min task  s.t.  density <= target``: the pressure grows while the measured density (the hard one) is above
    the target and goes away below it. It is part of a checkpoint: register the object with
    ``Accelerator.register_for_checkpointing``.

    Args:
        target: largest density, in (0, 1].
        rate: how fast the multiplier follows, above 0.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, target: float, rate: float = 0.1) -> None:
        if not 0.0 < target <= 1.0:
            raise ValueError(f"target={target!r} is not allowed: give a density in (0, 1].")
        if not 0.0 < rate < math.inf:
            raise ValueError(f"rate={rate!r} is not allowed: give a number above 0.")
        self.target, self.rate = float(target), float(rate)
        self.multiplier = 0.0

    def update(self, density: float) -> float:
        """Move the multiplier after a step with this measured density; returns it."""
        if math.isnan(density):
            raise ValueError("the density of a step is NaN: no attention weight was possible in it.")
        self.multiplier = max(0.0, self.multiplier + self.rate * (density - self.target))
        return self.multiplier

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"multiplier": self.multiplier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.multiplier = float(state["multiplier"])


def _check(weights: Tensor, pairs: Tensor) -> None:
    if weights.dim() != 4 or pairs.shape != (weights.shape[0], *weights.shape[2:]) or pairs.dtype != torch.bool:
        raise ValueError(
            f"weights {tuple(weights.shape)} and pairs {tuple(pairs.shape)} ({pairs.dtype}) do not fit: [B, H, T_q, T_k] and "
            "bool [B, T_q, T_k] are needed."
        )
