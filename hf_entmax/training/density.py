"""Training towards a given density of attention: a differentiable stand-in for it, and how hard to push."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention_density(weights: Tensor, pairs: Tensor) -> Tensor:
    """Measure the share of the possible weights of one module that are not zero, mean over its heads.

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


def soft_density(weights: Tensor, pairs: Tensor, tau: float = 0.01, floor: float = 0.0) -> Tensor:
    r"""Compute a differentiable stand-in for `attention_density`.

        D_tau = mean_h  sum_{b,i,j} p_j / (p_j + tau)  /  #pairs,          D_tau -> density  as  tau -> 0

    A large weight counts as 1, a weight of ``tau`` as a half, a zero as 0. Its slope ``tau / (p + tau)^2`` is steep for small
    weights only: it pushes those to zero that are nearly there and leaves the peaks of a row alone. Through entmax it reaches
    the scores and a learned alpha alike; weights that are zero get no gradient.

    Args:
        weights: as for `attention_density`.
        pairs: as for `attention_density`.
        tau: weight that counts half, above 0.
        floor: heads whose ``D_tau`` is below it count as ``floor``: nothing pushes them further. In [0, 1).

    Returns:
        Scalar between ``floor`` and the density.

    Raises:
        ValueError: for shapes that do not fit, ``tau`` not above 0 or ``floor`` outside [0, 1).
    """
    _check(weights, pairs)
    if not tau > 0:
        raise ValueError(f"tau={tau!r} is not allowed: give a weight above 0.")
    if not 0.0 <= floor < 1.0:
        raise ValueError(f"floor={floor!r} is not allowed: give a density in [0, 1).")
    p = weights.float().masked_fill(~pairs[:, None], 0.0)
    return ((p / (p + tau)).sum((0, 2, 3)) / pairs.sum()).clamp(min=floor).mean()


class _Pressure:
    """The multiplier of `soft_density` in a loss: part of a checkpoint, moved after every step by what was measured."""

    def __init__(self, rate: float, start: float) -> None:
        if not 0.0 < rate < math.inf:
            raise ValueError(f"rate={rate!r} is not allowed: give a number above 0.")
        self.rate, self.multiplier = float(rate), float(start)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"multiplier": self.multiplier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self.multiplier = float(state["multiplier"])


class DensityTarget(_Pressure):
    r"""The multiplier of `soft_density` in a loss, moved until the measured density is at most ``target``.

        loss_t = task_t + lam_t D_tau,          lam_{t+1} = max(0, lam_t + rate (density_t - target))

    Dual ascent for ``min task  s.t.  density <= target``: the pressure grows while the measured density (the hard one) is above
    the target and goes away below it. It is part of a checkpoint: register the object with
    ``Accelerator.register_for_checkpointing``. `LossBudget` is the converse.

    Args:
        target: largest density, in (0, 1].
        rate: how fast the multiplier follows, above 0.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, target: float, rate: float = 0.1) -> None:
        if not 0.0 < target <= 1.0:
            raise ValueError(f"target={target!r} is not allowed: give a density in (0, 1].")
        super().__init__(rate, 0.0)
        self.target = float(target)

    def update(self, density: float) -> float:
        """Move the multiplier after a step with this measured density; returns it."""
        if math.isnan(density):
            raise ValueError("the density of a step is NaN: no attention weight was possible in it.")
        self.multiplier = max(0.0, self.multiplier + self.rate * (density - self.target))
        return self.multiplier


class LossBudget(_Pressure):
    r"""The multiplier of `soft_density` in a loss, moved until the task's loss is just as far above a reference as is allowed.

        loss_t = task_t + lam_t D_tau,      lam_{t+1} = lam_t exp(-rate clip((rise_t - budget) / scale, -1, 1))

    with ``rise_t`` the moving average of ``task - reference``. This is GECO for ``min density  s.t.  task - reference <=
    budget``, its multiplier ``1 / lam`` written on the other term, so that the loss keeps its size: within the budget the
    pressure on the density grows, beyond it the pressure goes, at once and by factors. It is part of a checkpoint: register
    the object with ``Accelerator.register_for_checkpointing``. `DensityTarget` is the converse.

    Args:
        budget: how far the loss may rise above the reference, nats per token, at least 0.
        rate: largest change of ``log lam`` in a step, above 0.
        start: the first multiplier, nats per unit of density, above 0; None takes ``scale``.
        memory: share of the moving average that a step keeps, in [0, 1).

    Attributes:
        multiplier: lam.
        rise: the moving average; NaN before the first step.
        scale: the distance from the budget that moves the multiplier at the full rate: the budget, at least 0.01.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        Rezende and Viola 2018, Taming VAEs, algorithm 1 (GECO).
    """

    #: The multiplier stays in between, so that it can come back.
    _LEAST, _MOST = 1e-6, 1e3

    def __init__(self, budget: float, rate: float = 0.05, *, start: float | None = None, memory: float = 0.9) -> None:
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0.0 <= budget < math.inf:
            raise ValueError(f"budget={budget!r} is not allowed: give nats per token, a number of at least 0.")
        if not 0.0 <= memory < 1.0:
            raise ValueError(f"memory={memory!r} is not allowed: give a share in [0, 1).")
        self.budget, self.memory, self.scale = float(budget), float(memory), max(float(budget), 0.01)
        start = self.scale if start is None else start
        if not 0.0 < start < math.inf:
            raise ValueError(f"start={start!r} is not allowed: give a number above 0.")
        super().__init__(rate, start)
        self.rise = math.nan

    def update(self, rise: float) -> float:
        """Move the multiplier after a step whose loss was so far above the reference; returns it."""
        if not math.isfinite(rise):
            raise ValueError(f"the loss of a step is {rise} above the reference: the training has failed.")
        self.rise = rise if math.isnan(self.rise) else self.memory * self.rise + (1.0 - self.memory) * rise
        step = max(-1.0, min(1.0, (self.rise - self.budget) / self.scale))
        self.multiplier = max(self._LEAST, min(self._MOST, self.multiplier * math.exp(-self.rate * step)))
        return self.multiplier

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {**super().state_dict(), "rise": None if math.isnan(self.rise) else self.rise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        super().load_state_dict(state)
        self.rise = math.nan if state["rise"] is None else float(state["rise"])


def _check(weights: Tensor, pairs: Tensor) -> None:
    if weights.dim() != 4 or pairs.shape != (weights.shape[0], *weights.shape[2:]) or pairs.dtype != torch.bool:
        raise ValueError(
            f"weights {tuple(weights.shape)} and pairs {tuple(pairs.shape)} ({pairs.dtype}) do not fit: [B, H, T_q, T_k] and "
            "bool [B, T_q, T_k] are needed."
        )
