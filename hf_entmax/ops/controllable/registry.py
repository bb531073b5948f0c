"""The mappings that may serve as attention: ours, and those that a user registers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_entmax.config import check_new_name
from hf_entmax.ops.controllable.domain import LAM, TEMPERATURE, Interval, Q
from hf_entmax.ops.controllable.functions import HourglassFunction, SparsegenFunction, TemperedSoftmaxFunction
from hf_entmax.ops.simplex import as_rows, compute_dtype, is_allowed

HeadOption = float | Tensor


class OptionSetting(NamedTuple):
    """What a configuration says about one option: its value (or start), and the bounds of a learned one."""

    value: float
    bounds: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class MappingSpec:
    """A mapping that may serve as attention.

    Args:
        name: how configurations name it.
        options: its options by name.
        description: one line.
        weights: ``(scores, mask, **options) -> weights``; scores ``[B, H, T_q, T_k]``, mask None or bool (True = may
            attend) and broadcastable, options numbers or tensors ``[H]``. Looks at no value, so waits for no device:
            the options must have been validated.
    """

    name: str
    options: Mapping[str, Interval]
    description: str
    weights: Callable[..., Tensor]

    def as_scaled_sparsemax(self, options: Mapping[str, HeadOption]) -> HeadOption | None:
        """Return the factor ``c`` (number or ``[H]``) with ``mapping(z) = sparsemax(c z)``, or None if there is none."""
        return 1.0 / (1.0 - options["lam"]) if self.name == "sparsegen_lin" else None

    def settings(self, options: Mapping[str, Any]) -> dict[str, OptionSetting]:
        """Validate options as a configuration gives them; return one setting for each option of the mapping.

        Each option ``name`` is a number or ``"learned"``; when learned, ``name_init`` says where it starts and
        ``name_range`` its open interval. What is not given takes its default.
        """
        known = [key for name in self.options for key in (name, f"{name}_init", f"{name}_range")]
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(f"mapping={self.name!r} has no options {unknown}; it has {known or 'none'}.")
        return {name: _setting(name, option, options) for name, option in self.options.items()}


def _setting(name: str, option: Interval, options: Mapping[str, Any]) -> OptionSetting:
    value = options.get(name, option.default)
    names = (f"{name}_init", f"{name}_range")
    if value == "learned":
        return OptionSetting(*option.learned(options.get(names[0]), options.get(names[1]), names))
    if isinstance(value, str):
        raise ValueError(f'{name}={value!r} is not allowed: give a number in {option}, or "learned".')
    if extras := [key for key in names if key in options]:
        raise ValueError(f'{extras} belong to {name}="learned", but {name}={value} is fixed.')
    return OptionSetting(option.number(value), None)


def per_head(option: HeadOption, scores: Tensor) -> HeadOption:
    """Lay ``[H]`` out beside scores ``[..., H, T_q, T_k]``."""
    if not isinstance(option, Tensor) or option.ndim == 0:
        return option
    if option.ndim == 1:
        return option.view(-1, *(1,) * min(2, scores.ndim - 1))
    return option


def _weights(function: Any, option: Interval, *extra: Any) -> Callable[..., Tensor]:
    def weights(scores: Tensor, mask: Tensor | None = None, **options: HeadOption) -> Tensor:
        value = options.get(option.name, option.default)
        return function.apply(as_rows(scores, -1, mask), per_head(value, scores), *extra)

    return weights


# As attention q = 0 is excluded: a row of scores may well sum to zero, where sum normalization++ is not defined.
_POSITIVE_Q = dataclasses.replace(Q, lower_open=True, upper_open=True)

ATTENTION_MAPPINGS: dict[str, MappingSpec] = {
    name: MappingSpec(name, {option.name: option}, description, _weights(function, option, *extra))
    for name, option, description, function, *extra in (
        ("sparsegen_lin", LAM, "sparsemax(z / (1 - lam))", SparsegenFunction, "lin"),
        ("sparsegen_exp", LAM, "sparsemax(exp(z) / (1 - lam))", SparsegenFunction, "exp"),
        ("sparsegen_sq", LAM, "sparsemax(z^2 / (1 - lam))", SparsegenFunction, "sq"),
        ("sparsehourglass", _POSITIVE_Q, "sparsemax((1 + K q) z / (|sum z| + K q))", HourglassFunction, True),
        ("softmax", TEMPERATURE, "softmax(z / temperature)", TemperedSoftmaxFunction),
    )
}
#: Names that cannot be registered again.
BUILT_IN = frozenset(("entmax", *ATTENTION_MAPPINGS))

REFUSED_AS_ATTENTION: dict[str, str] = {
    "sparsegen_log": "it is defined for scores > 0 only, and attention scores have both signs; use sparsegen_lin",
    "sparsecone": "it is defined for sum(scores) > -K*q only; use sparsehourglass, which extends it to all scores",
    "sum_normalization": "it is defined for scores >= 0 only; use sparsehourglass with a small q",
    "sum_normalization_pp": "it is not defined where scores sum to 0; use sparsehourglass with a small q",
    "spherical_softmax": "it is not defined where all scores are 0, as after a zero initialisation; use sparsegen_sq",
}


def attention_mapping(name: str) -> MappingSpec:
    """Return the mapping of that name as attention.

    Raises:
        ValueError: if no mapping has that name, or it cannot serve as attention; the message says why.
    """
    if name in REFUSED_AS_ATTENTION:
        raise ValueError(f"mapping={name!r} cannot serve as attention: {REFUSED_AS_ATTENTION[name]}.")
    if name not in ATTENTION_MAPPINGS:
        raise ValueError(
            f"mapping={name!r} is unknown: choose from {['entmax', *sorted(ATTENTION_MAPPINGS)]}. A mapping of your own "
            "must be registered with hf_entmax.register_mapping before a model that uses it is patched or loaded."
        )
    return ATTENTION_MAPPINGS[name]


def register_mapping(
    name: str,
    function: Callable[..., Tensor],
    options: Sequence[Interval] = (),
    *,
    description: str = "",
    exist_ok: bool = False,
) -> None:
    """Register a mapping of your own, so that ``patch_model(model, mapping=name)`` uses it as attention.

    The function is called as ``function(scores, mask=mask, **options)`` with scores ``[B, H, T_q, T_k]`` (float32, or
    float64 for float64 models; finite wherever the mask is True), a bool mask of the same shape (True = may receive
    mass, at least one in each row) and each option as a number or a tensor ``[H, 1, 1]``. It returns weights of the same
    shape: not negative, each row summing to 1 over its allowed keys, differentiable in the scores and in every option.
    Masked keys and rows without any key get weight 0 around it, whatever it returns there.

    A model that uses it saves the name, not the function: register it again before loading such a checkpoint.

    Args:
        name: how ``EntmaxConfig(mapping=...)`` will name it, a Python identifier.
        function: built from differentiable torch operations.
        options: the ranges of its options, with a default each; ``learned_range`` lets heads learn one.
        description: one line for tables; by default where the function is defined.
        exist_ok: replace what was registered under this name before. Mappings of this package are never replaced.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if the name is taken or no identifier, an option has no default inside its range, or the function fails
            one of the checks that the mappings of this package pass: shape, no negative weights, rows that sum to 1, no
            overflow, no influence of masked keys or of the order of keys, one value per head, and gradients.

    Examples:
        >>> import torch
        >>> import hf_entmax
        >>> from hf_entmax.ops.controllable import Interval
        >>> def squared_relu(scores, mask, shift=1.0):
        ...     kept = (scores - scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) + shift).relu() ** 2 * mask
        ...     return kept / kept.sum(-1, keepdim=True)
        >>> shift = Interval("shift", lower=0.0, default=1.0, learned_range=(0.1, 5.0))
        >>> hf_entmax.register_mapping("squared_relu", squared_relu, [shift])
    """
    check_new_name(name, "mapping", BUILT_IN | set(REFUSED_AS_ATTENTION), ATTENTION_MAPPINGS, exist_ok)
    if not callable(function):
        raise TypeError(f"function must be callable as function(scores, mask=mask, **options), not {function!r}.")
    if any(not isinstance(option, Interval) for option in options):
        raise TypeError(f"options={options!r} must be a sequence of hf_entmax.ops.controllable.Interval.")
    names = [option.name for option in options]
    if len(set(names)) < len(names):
        raise ValueError(f"options name one twice: {names}.")
    try:
        inspect.signature(function).bind(None, mask=None, **dict.fromkeys(names))
    except (TypeError, ValueError) as error:  # builtins have no signature
        raise TypeError(f"function cannot be called as function(scores, mask=mask, {names}): {error}.") from None
    for option in options:
        if not option.contains(option.default):
            raise ValueError(f"option {option.name!r} needs a default in {option}, not {option.default}.")
        if option.learned_range is not None:
            option.learned(None)
    place = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    spec = MappingSpec(name, dict(zip(names, options, strict=True)), description or place, _guarded(name, function))
    _check(spec)
    ATTENTION_MAPPINGS[name] = spec


def _guarded(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Show a function finite scores and rows with at least one key; give masked keys and empty rows no weight."""

    def weights(scores: Tensor, mask: Tensor | None = None, **options: HeadOption) -> Tensor:
        rows = as_rows(scores, -1, mask)
        allowed = is_allowed(rows)
        shown = torch.where(allowed, rows, 0.0).to(compute_dtype(rows.dtype))
        values = {key: per_head(value, scores) for key, value in options.items()}
        found = function(shown, mask=allowed | ~allowed.any(-1, keepdim=True), **values)
        if not isinstance(found, Tensor) or found.shape != rows.shape:
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"mapping {name!r} returned {given} for scores of shape {tuple(rows.shape)}.")
        return torch.where(allowed, found, 0.0).to(scores.dtype)

    return weights


def _check(spec: MappingSpec) -> None:
    """Try what attention needs of a mapping on small random scores."""
    random = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(2, 3, 5, 6, generator=random, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 6, generator=random) > 0.3
    mask[0, :, 0], mask[0, :, 1], mask[1, :, 0] = False, False, True
    mask[0, :, 1, 2] = True
    try:
        fault = next((says for holds, says in _checks(spec, scores, mask) if not holds), None)
    except Exception as error:  # whatever a user's function may raise
        fault = f"trying it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if fault is not None:
        raise ValueError(f"mapping {spec.name!r} cannot be registered: {fault.rstrip('.')}.")


def _checks(spec: MappingSpec, scores: Tensor, mask: Tensor) -> Iterator[tuple[bool, str]]:
    """Yield for each property of the weights whether it holds, and what to say if it does not."""
    heads = {name: _values_of_heads(option, scores.shape[1]) for name, option in spec.options.items()}
    defaults = {name: option.default for name, option in spec.options.items()}
    possible = mask.any(-1, keepdim=True).expand(*scores.shape[:-1], 1).double()
    for values, dtype, size in itertools.product((defaults, heads), (torch.float32, torch.float64), (1.0, 50.0)):
        found = spec.weights((size * scores).to(dtype), mask, **values).double()
        where = f"for {dtype} scores of about {2 * size:g}"
        yield bool(found.isfinite().all()), f"{where} some weights are not finite"
        yield bool((found >= 0).all()), f"{where} some weights are negative"
        off = float((found.sum(-1, keepdim=True) - possible).abs().max())
        # Six weights, each with the error of a few operations.
        yield off <= 64 * torch.finfo(dtype).eps, f"{where} a row sums to 1 over its allowed keys only within {off:.2g}"
    found = spec.weights(scores, mask, **heads)
    # Wide enough for an option that the function turned into a float32 tensor.
    same = functools.partial(torch.allclose, found, rtol=0, atol=1e-6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = torch.empty_like(found)
    moved[..., order] = spec.weights(scores[..., order], mask[..., order], **heads)
    yield same(moved), "the weights depend on the order of the keys"
    pad = torch.nn.functional.pad
    padded = spec.weights(pad(scores, (0, 3), value=7.0), pad(mask, (0, 3)), **heads)[..., :6]
    yield same(padded), "masked keys change the weights of the others: whatever counts or sums keys must use the mask"
    alone = [
        spec.weights(scores[:, [head]], mask, **{name: float(values[head]) for name, values in heads.items()})
        for head in range(scores.shape[1])
    ]
    yield same(torch.cat(alone, dim=1)), "options [H, 1, 1] give other weights than the number of each head does"
    leaves = [tensor.clone().requires_grad_() for tensor in (scores, *heads.values())]
    function = lambda z, *values: spec.weights(z, mask, **dict(zip(heads, values, strict=True)))  # noqa: E731
    yield function(*leaves).requires_grad, "the weights have no gradient in the scores"
    yield torch.autograd.gradcheck(function, leaves), "the gradient is wrong"


def _values_of_heads(option: Interval, heads: int) -> Tensor:
    """Return one value for each head inside the range of an option, ``[heads]``; all alike if it cannot be learned."""
    lo, hi = option.learned_range or (option.default, option.default)
    return lo + (hi - lo) * torch.linspace(0.3, 0.6, heads, dtype=torch.float64)
