"""The search behind ``hf_entmax.sparsify(model, data, density=...)``: alphas of a wanted density at the lowest loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_entmax.training.alpha_vector import HIGHEST, AlphaVector
from hf_entmax.training.search import Task, descend, mean_density

#: Measurements along a line.
_TRIALS = 7
#: Share of the range of alpha at which the search for a common alpha begins.
_FIRST = 0.35
#: How far below the wanted density a line is searched: a tenth of it is close enough.
_CLOSE = 0.9


class DensitySearch:
    """The best values so far: the lowest loss among those measured to be as sparse as wanted.

    Args:
        task: batches and their loss with softmax, already measured.
        vector: the alphas and temperatures.
        goal: largest mean density over heads, in (0, 1).
        say: called with a line for each measurement.

    Raises:
        ValueError: if the highest alphas are still denser.
    """

    def __init__(self, task: Task, vector: AlphaVector, goal: float, say: Callable[[str], None]) -> None:
        self.task, self.vector, self.goal, self.say = task, vector, goal, say
        self.loss, self.best = math.inf, vector.even(HIGHEST)
        self.density: dict[str, Tensor] = {}
        self._even()

    def try_(self, values: Tensor, name: str) -> float:
        """Measure, keep if it is sparse enough and better; returns the density."""
        loss, table = self.task.measure(values)
        density = mean_density(table)
        fits = density <= self.goal
        if fits and (loss < self.loss or not self.density):
            self.loss, self.best, self.density = loss, values, table
        rise = loss - self.task.before
        self.say(
            f"{name}: {density:.1%} nonzero at {rise:+.4f} nats per token{'' if fits else ', not yet sparse enough'}"
        )
        return density

    def line(self, point: Callable[[float], Tensor], name: str, first: float, low: float, high: float) -> None:
        """Find the densest point of a line on which density falls that is sparse enough."""
        share = first
        for _ in range(_TRIALS):
            density = self.try_(point(share), f"{name} {share:.3g}")
            if density <= self.goal:
                high = share
            else:
                low = share
            if _CLOSE * self.goal <= density <= self.goal:
                break
            share = (low + high) / 2

    def _even(self) -> None:
        """Try one alpha for all heads; where the highest is not sparse enough, temperatures are given up for sharper rows."""
        self.line(self.vector.even, "all heads, share of the range of alpha:", _FIRST, 0.0, HIGHEST)
        if self.density:
            return
        highest = self.vector.even(HIGHEST)
        sharpest = torch.cat([highest[: self.vector.count], torch.zeros_like(highest[self.vector.count :])])
        if (lowest := self.try_(sharpest, "the highest alphas")) > self.goal:
            raise ValueError(
                f"density={self.goal} cannot be reached: with all alphas at the highest of alpha_range {lowest:.4f} of the "
                "weights are still nonzero. The model is left as it was. Allow more, or patch with a higher alpha_range."
            )
        self.line(lambda share: self.vector.between(highest, sharpest, share), "sharpened by", 0.5, 0.0, 1.0)

    def choose(self) -> float:
        """Give each head its own alpha, by what it is estimated to cost; return the price of a density of 1, in nats."""
        sensitivity = self.task.sensitivity()
        price = 0.0

        def point(log_cost: float) -> Tensor:
            nonlocal price
            chosen, price = sensitivity.choose(math.exp(log_cost))
            return self.vector.softened(chosen, sensitivity.softening)

        # Estimated costs span many orders of magnitude; their logarithm is what is searched.
        self.line(point, "estimated cost, log nats:", 0.0, -9.0, 9.0)
        return price

    def refine(self, price: float, steps: int, learning_rate: float) -> None:
        """Take gradient steps on loss + pressure * soft density; the pressure goes up while the weights are too dense."""
        if not steps:
            return
        start = self.best

        def judge(values: Tensor, step: int) -> bool:
            return self.try_(values, f"step {step}") <= self.goal

        values = descend(self.task, self.vector, start, max(20 * price, 1.0), steps, learning_rate, judge)
        # Where the steps end is seldom just as dense as is wanted: all alphas are moved up or down together.
        count = self.vector.count

        def point(shift: float) -> Tensor:
            return self.vector.clamp(torch.cat([values[:count] + shift, values[count:]]))

        self.line(point, "all alphas moved by", 0.0, -3.0, 3.0)
