"""The controllable mappings as modules, with options that may be learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_entmax.ops.controllable import mappings
from hf_entmax.ops.controllable.domain import LAM, TEMPERATURE, Interval, Q

# Where learned options live. The ends are far enough out to reach (nearly) uniform and (nearly) one-hot attention at
# scores of unit size, and near enough in for gradients not to vanish between them.
LEARNED_RANGES: dict[str, tuple[float, float]] = {"lam": (-4.0, 0.95), "q": (0.01, 10.0), "temperature": (0.05, 5.0)}


class BoundedOption(nn.Module):
    r"""A learnable option that cannot leave its interval, ``value = lo + (hi - lo) sigmoid(a)``.

    Args:
        init: the value at the start, strictly inside ``bounds``.
        bounds: the open interval ``(lo, hi)``.
        shape: shape of the learned tensor, broadcastable to the scores with size 1 along the normalised dimension:
            ``()`` for one number, ``(H, 1, 1)`` for one per head of scores ``[B, H, T_q, T_k]``.

    Raises:
        ValueError: if ``init`` is not strictly inside ``bounds``.
    """

    def __init__(self, init: float, bounds: tuple[float, float], shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        lo, hi = bounds
        if not lo < init < hi:
            raise ValueError(f"init={init} is not allowed: a learned option starts strictly between {lo} and {hi}.")
        self.bounds = bounds
        share = (init - lo) / (hi - lo)
        self.a = nn.Parameter(torch.full(shape, math.log(share) - math.log1p(-share), dtype=torch.float32))

    def forward(self) -> Tensor:
        """The value, of the given shape, float32."""
        lo, hi = self.bounds
        return lo + (hi - lo) * torch.sigmoid(self.a.float())

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"shape={tuple(self.a.shape)}, bounds={self.bounds}"


class _OptionMapping(nn.Module):
    """A mapping with one option, fixed or learned."""

    interval: Interval
    default: float

    def __init__(
        self,
        value: float | str,
        dim: int,
        init: float | None,
        bounds: tuple[float, float] | None,
        shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.dim = dim
        name = self.interval.name
        if value == "learned":
            bounds = LEARNED_RANGES[name] if bounds is None else bounds
            for end in bounds:
                # An open end of the domain may bound a sigmoid, which never reaches it.
                if end not in (self.interval.lower, self.interval.upper):
                    self.interval.number(end)
            if not all(map(math.isfinite, bounds)):
                raise ValueError(f"bounds={bounds} are not allowed: a learned {name} needs a finite interval.")
            self.option = BoundedOption(self.default if init is None else init, bounds, shape)
        elif isinstance(value, str):
            raise ValueError(f'{name}={value!r} is not allowed: give a number in {self.interval}, or "learned".')
        elif init is not None or bounds is not None or shape != ():
            raise ValueError(f'init, bounds and shape belong to {name}="learned", but {name}={value} is fixed.')
        else:
            self.option = self.interval.number(value)

    def value(self) -> float | Tensor:
        """The option as it stands."""
        return self.option() if isinstance(self.option, BoundedOption) else self.option

    def extra_repr(self) -> str:
        fixed = "" if isinstance(self.option, BoundedOption) else f"{self.interval.name}={self.option}, "
        return f"{fixed}dim={self.dim}"


class Sparsegen(_OptionMapping):
    """Module of :func:`sparsegen`; ``lam`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``).

    Args:
        g: the transformation, a name or a callable.
        lam: below 1, or ``"learned"``.
        dim: the dimension to normalise.
        init: where a learned value starts.
        bounds: the open interval of a learned value, by default that of ``LEARNED_RANGES``.
        shape: shape of a learned value, see :class:`BoundedOption`.
    """

    interval, default = LAM, 0.0

    def __init__(
        self,
        g: str | Callable[[Tensor], Tensor] = "lin",
        lam: float | str = 0.0,
        dim: int = -1,
        *,
        init: float | None = None,
        bounds: tuple[float, float] | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__(lam, dim, init, bounds, shape)
        self.g = g

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.sparsegen(scores, g=self.g, lam=self.value(), dim=self.dim, mask=mask)


class SparsegenLin(Sparsegen):
    """Module of :func:`sparsegen_lin`; ``lam`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    def __init__(self, lam: float | str = 0.0, dim: int = -1, **learning: Any) -> None:
        super().__init__("lin", lam, dim, **learning)


class SparsegenExp(Sparsegen):
    """Module of :func:`sparsegen_exp`; ``lam`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    def __init__(self, lam: float | str = 0.0, dim: int = -1, **learning: Any) -> None:
        super().__init__("exp", lam, dim, **learning)


class SparsegenSq(Sparsegen):
    """Module of :func:`sparsegen_sq`; ``lam`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    def __init__(self, lam: float | str = 0.0, dim: int = -1, **learning: Any) -> None:
        super().__init__("sq", lam, dim, **learning)


class SparsegenLog(Sparsegen):
    """Module of :func:`sparsegen_log`; ``lam`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    def __init__(self, lam: float | str = 0.0, dim: int = -1, **learning: Any) -> None:
        super().__init__("log", lam, dim, **learning)


class _QMapping(_OptionMapping):
    interval, default = Q, 1.0

    def __init__(
        self,
        q: float | str = 1.0,
        dim: int = -1,
        *,
        init: float | None = None,
        bounds: tuple[float, float] | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__(q, dim, init, bounds, shape)


class Sparsecone(_QMapping):
    """Module of :func:`sparsecone`; ``q`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.sparsecone(scores, q=self.value(), dim=self.dim, mask=mask)


class Sparsehourglass(_QMapping):
    """Module of :func:`sparsehourglass`; ``q`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.sparsehourglass(scores, q=self.value(), dim=self.dim, mask=mask)


class Softmax(_OptionMapping):
    """Module of :func:`softmax`; ``temperature`` a number or ``"learned"`` (with ``init``, ``bounds``, ``shape``)."""

    interval, default = TEMPERATURE, 1.0

    def __init__(
        self,
        temperature: float | str = 1.0,
        dim: int = -1,
        *,
        init: float | None = None,
        bounds: tuple[float, float] | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__(temperature, dim, init, bounds, shape)

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.softmax(scores, temperature=self.value(), dim=self.dim, mask=mask)


class _PlainMapping(nn.Module):
    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"dim={self.dim}"


class SumNormalization(_PlainMapping):
    """Module of :func:`sum_normalization`."""

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.sum_normalization(scores, dim=self.dim, mask=mask)


class SumNormalizationPP(_PlainMapping):
    """Module of :func:`sum_normalization_pp`."""

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.sum_normalization_pp(scores, dim=self.dim, mask=mask)


class SphericalSoftmax(_PlainMapping):
    """Module of :func:`spherical_softmax`."""

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Probabilities, shape and dtype of ``scores``; ``mask`` bool, True = may receive mass."""
        return mappings.spherical_softmax(scores, dim=self.dim, mask=mask)
