"""The controllable mappings as modules, with options that may be learned."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_entmax.alpha import LearnedAlpha
from hf_entmax.ops.controllable import mappings
from hf_entmax.ops.controllable.domain import LAM, TEMPERATURE, Q

_INTERVALS = {interval.name: interval for interval in (LAM, Q, TEMPERATURE)}


class BoundedOption(LearnedAlpha):
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
        if not bounds[0] < init < bounds[1]:
            raise ValueError(
                f"init={init} is not allowed: a learned option starts strictly between {bounds[0]} and {bounds[1]}."
            )
        super().__init__(math.prod(shape), init, bounds)
        self.a = nn.Parameter(self.a.detach().reshape(shape))

    def forward(self) -> Tensor:
        """Return the value in the given shape, float32."""
        return self.bounded()


class ControllableMapping(nn.Module):
    """A mapping as a module; its option (``lam``, ``q`` or ``temperature``) is a number or ``"learned"``.

    A subclass names the function; it takes that function's arguments without ``scores`` and ``mask``.

    Args:
        *args: as of the function.
        init: where a learned option starts, by default where the function has it.
        bounds: the open interval of a learned option, by default its ``learned_range``.
        shape: shape of a learned option, see `BoundedOption`.
        **kwargs: as of the function.

    Raises:
        TypeError: if an argument is unknown or of the wrong type.
        ValueError: if a number is outside its range, or ``init``, ``bounds`` or ``shape`` stands with a fixed option.
    """

    function: Callable[..., Tensor]

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None) -> None:
        if function is None:
            return
        cls.function = staticmethod(function)
        taken = [p for p in inspect.signature(function).parameters.values() if p.name not in ("scores", "mask")]
        learning = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        cls.__signature__ = inspect.Signature([*taken, *learning])

    def __init__(
        self,
        *args: Any,
        init: float | None = None,
        bounds: tuple[float, float] | None = None,
        shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__()
        given = inspect.signature(type(self)).bind(*args, **kwargs)
        given.apply_defaults()
        self.arguments = {name: x for name, x in given.arguments.items() if name not in ("init", "bounds", "shape")}
        self.dim = self.arguments.pop("dim")
        self.option_name = next((name for name in self.arguments if name in _INTERVALS), None)
        name = self.option_name
        value = None if name is None else self.arguments.pop(name)
        interval = None if name is None else _INTERVALS[name]
        if value == "learned" and interval is not None:
            self.option = BoundedOption(*interval.learned(init, bounds), shape)
        elif isinstance(value, str):
            raise ValueError(f'{name}={value!r} is not allowed: give a number in {interval}, or "learned".')
        elif init is not None or bounds is not None or shape != ():
            raise ValueError(f'init, bounds and shape belong to {name}="learned", but {name}={value} is fixed.')
        elif interval is not None:
            self.option = interval.number(value)

    def value(self) -> float | Tensor:
        """Return the option as it stands."""
        return self.option() if isinstance(self.option, BoundedOption) else self.option

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return probabilities in the shape and dtype of ``scores``; ``mask`` is bool, True = may receive mass."""
        option = {} if self.option_name is None else {self.option_name: self.value()}
        return self.function(scores, **self.arguments, **option, dim=self.dim, mask=mask)

    def extra_repr(self) -> str:
        """Show the option and dim."""
        fixed = isinstance(getattr(self, "option", None), float)
        return f"{self.option_name}={self.option}, dim={self.dim}" if fixed else f"dim={self.dim}"


def _module(function: Callable[..., Tensor], name: str) -> type[ControllableMapping]:
    body = {"__module__": __name__, "__qualname__": name, "__doc__": f"Module of `{function.__name__}`."}
    return types.new_class(name, (ControllableMapping,), {"function": function}, lambda space: space.update(body))


Sparsegen = _module(mappings.sparsegen, "Sparsegen")
SparsegenLin = _module(mappings.sparsegen_lin, "SparsegenLin")
SparsegenExp = _module(mappings.sparsegen_exp, "SparsegenExp")
SparsegenSq = _module(mappings.sparsegen_sq, "SparsegenSq")
SparsegenLog = _module(mappings.sparsegen_log, "SparsegenLog")
Sparsecone = _module(mappings.sparsecone, "Sparsecone")
Sparsehourglass = _module(mappings.sparsehourglass, "Sparsehourglass")
Softmax = _module(mappings.softmax, "Softmax")
SumNormalization = _module(mappings.sum_normalization, "SumNormalization")
SumNormalizationPP = _module(mappings.sum_normalization_pp, "SumNormalizationPP")
SphericalSoftmax = _module(mappings.spherical_softmax, "SphericalSoftmax")
