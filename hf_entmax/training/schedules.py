"""How alpha moves while a softmax model is made sparse: one function of the share of training, for any loop."""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_entmax.config import check_alpha

SHAPES = ("linear", "cosine")


class AlphaSchedule:
    r"""Alpha on its way from ``start`` to ``end`` over the first part of training.

        alpha(s) = start + (end - start) * shape(min(1, s / over)),     s: share of training done, in [0, 1]

    Args:
        start: alpha at the beginning, >= 1.
        end: alpha from the share ``over`` on, >= 1.
        over: share of training over which alpha moves, in (0, 1].
        shape: ``"linear"``, ``"cosine"`` (``0.5 - 0.5 cos(pi x)``) or a function from [0, 1] to [0, 1].

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self, start: float, end: float, over: float = 0.5, shape: str | Callable[[float], float] = "linear"
    ) -> None:
        if not 0.0 < over <= 1.0:
            raise ValueError(f"over={over!r} is not allowed: give a share of training in (0, 1].")
        if not callable(shape) and shape not in SHAPES:
            raise ValueError(f"shape={shape!r} is not allowed: choose 'linear', 'cosine' or give a function.")
        self.start, self.end = check_alpha(start, "start"), check_alpha(end, "end")
        self.over, self.shape = float(over), shape

    def __call__(self, share: float) -> float:
        """Alpha when ``share`` of training, in [0, 1], is done."""
        done = min(1.0, share / self.over)
        if callable(self.shape):
            done = self.shape(done)
        elif self.shape == "cosine":
            done = 0.5 - 0.5 * math.cos(math.pi * done)
        return self.start + (self.end - self.start) * done

    def arrived(self, share: float) -> bool:
        """Whether alpha moves no more: learned alphas are free from here on."""
        return share >= self.over
