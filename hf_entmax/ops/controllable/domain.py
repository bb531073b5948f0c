"""The domains of the mappings and of their options, and the errors that name them."""

from __future__ import annotations

import dataclasses
import math
import numbers

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Interval:
    """The range of one option.

    Args:
        name: the option's name.
        lower: the lower end.
        upper: the upper end.
        lower_open: exclude the lower end itself.
        upper_open: exclude the upper end itself.
        meaning: what the option does, for messages and tables.
        default: the value when it is not given.
        learned_range: the open interval ``(lo, hi)`` of ``lo + (hi - lo) sigmoid(a)`` when it is learned.
    """

    name: str
    lower: float = -math.inf
    upper: float = math.inf
    lower_open: bool = True
    upper_open: bool = True
    meaning: str = ""
    default: float = math.nan
    learned_range: tuple[float, float] | None = None

    def __str__(self) -> str:
        """Return mathematical notation, such as ``(-inf, 1)``."""
        return f"{'(' if self.lower_open else '['}{self.lower:g}, {self.upper:g}{')' if self.upper_open else ']'}"

    def _in_words(self) -> str:
        return f"{self} ({self.meaning})" if self.meaning else str(self)

    def contains(self, value: float | Tensor) -> bool | Tensor:
        """Tell whether ``value`` lies inside, element by element for a tensor; NaN never does."""
        above = value > self.lower if self.lower_open else value >= self.lower
        below = value < self.upper if self.upper_open else value <= self.upper
        return above & below

    def error(self, value: object) -> ValueError:
        """Return the error for a value outside."""
        return ValueError(f"{self.name}={value} is not allowed: {self.name} must lie in {self._in_words()}.")

    def number(self, value: object) -> float:
        """Return a number inside the interval as a float.

        Raises:
            TypeError: if ``value`` is not a real number.
            ValueError: if it lies outside.
        """
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{self.name}={value!r} must be a real number in {self._in_words()}.")
        value = float(value)
        if not self.contains(value):
            raise self.error(value)
        return value

    def learned(
        self, init: float | None, bounds: object = None, names: tuple[str, str] = ("init", "bounds")
    ) -> tuple[float, tuple[float, float]]:
        """Return where a learned value starts and the open interval in which it stays, ``learned_range`` by default.

        It starts at the interval's default, or in the middle where that lies outside ``bounds``. Messages call the two by
        ``names``.

        Raises:
            TypeError: if ``bounds`` is not two numbers, or ``init`` none.
            ValueError: if ``bounds`` is no finite interval inside this one, or ``init`` is not strictly between them.
        """
        bounds = self.learned_range if bounds is None else bounds
        try:
            lo, hi = (float(end) for end in bounds)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise TypeError(f"{names[1]}={bounds!r} must be two numbers (lo, hi).") from None
        # A sigmoid never reaches the ends of its interval, so an open end of the domain may bound it; an infinite one not.
        if not (math.isfinite(lo) and math.isfinite(hi) and self.lower <= lo < hi <= self.upper):
            raise ValueError(
                f"{names[1]}={bounds!r} is not allowed: give a finite interval (lo, hi) with lo < hi; {self.name} must "
                f"lie in {self._in_words()}."
            )
        if init is None:
            init = self.default if lo < self.default < hi else (lo + hi) / 2
        init = self.number(init)
        if not lo < init < hi:
            raise ValueError(
                f"{names[0]}={init} is not allowed: a learned {self.name} starts strictly between {lo} and {hi}."
            )
        return init, (lo, hi)


# The ends of learned ranges are far enough out to reach (nearly) uniform and (nearly) one-hot attention at scores of unit
# size, and near enough in for gradients not to vanish between them.
LAM = Interval(
    "lam", -math.inf, 1.0, True, True, "towards 1 the output gets sparser, towards -inf uniform", 0.0, (-4.0, 0.95)
)
Q = Interval("q", 0.0, math.inf, False, False, "0 is sum normalization, towards inf sparsemax", 1.0, (0.01, 10.0))
TEMPERATURE = Interval(
    "temperature", 0.0, math.inf, True, True, "towards 0 the output gets more peaked", 1.0, (0.05, 5.0)
)


def holds(condition: Tensor) -> bool:
    """Tell whether ``condition`` is True everywhere, as far as this can be known.

    Under ``torch.compile``, ``torch.func.vmap`` and on the meta device values cannot be looked at; the answer is then
    True, and the mappings return finite numbers outside their domains too.
    """
    if torch.compiler.is_compiling() or condition.device.type == "meta":
        return True
    try:
        return bool(condition.all())
    except RuntimeError:  # vmap forbids control flow on values
        return True


def option(interval: Interval, value: float | Tensor, scores: Tensor, dim: int) -> float | Tensor:
    """Check an option against its domain and lay it out beside rows of scores.

    The option is a number, or a floating-point tensor broadcastable to ``scores`` with size 1 along ``dim``, the dimension to
    normalise (one value for each row, head, ...); its gradient flows. A tensor comes back with ``dim`` moved last, of the
    same rank as ``scores``.
    """
    if not isinstance(value, Tensor):
        return interval.number(value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{interval.name} must be a floating-point tensor or a number, not a tensor of {value.dtype}.")
    inside = interval.contains(value)
    if not holds(inside):  # type: ignore[arg-type]
        raise interval.error(value[~inside][:3].tolist())  # type: ignore[operator,index]
    try:
        fits = torch.broadcast_shapes(value.shape, scores.shape) == scores.shape
    except RuntimeError:
        fits = False
    aligned = value.reshape((1,) * (scores.ndim - value.ndim) + value.shape) if fits else value
    if not fits or aligned.shape[dim] != 1:
        raise ValueError(
            f"{interval.name} of shape {tuple(value.shape)} does not fit scores of shape {tuple(scores.shape)}: it "
            f"must be broadcastable to them with size 1 along dim={dim}, the dimension that is normalised."
        )
    return aligned.movedim(dim, -1)
