"""The multilabel losses by name, with the mapping that predicts, and how their options are written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hf_entmax.losses.multilabel import terms
from hf_entmax.ops.controllable import softmax, sparsegen_lin, sparsehourglass
from hf_entmax.ops.controllable.domain import LAM, Interval, Q, holds
from hf_entmax.ops.mapping import entmax, sparsemax

ALPHA = Interval("alpha", 1.0, math.inf, False, True, "1 is softmax, 2 is sparsemax", 1.5)


@dataclasses.dataclass(frozen=True)
class MultilabelSpec:
    """One loss with the mapping that predicts.

    Args:
        loss: ``(z, rows, **options) -> [N]``, see :class:`LabelRows`.
        probs: ``(logits, mask, **options) -> probabilities``.
        options: name -> interval, with the default.
        description: one line.
    """

    loss: Callable[..., Tensor]
    probs: Callable[..., Tensor]
    options: Mapping[str, Interval]
    description: str


MULTILABEL_LOSSES: dict[str, MultilabelSpec] = {
    "softmax": MultilabelSpec(terms.log_loss, lambda z, m: softmax(z, mask=m), {}, "softmax, log loss"),
    "sparsemax": MultilabelSpec(
        lambda z, rows: terms.fenchel_young_loss(z, rows, 2.0),
        lambda z, m: sparsemax(z, mask=m),
        {},
        "sparsemax, Huber loss",
    ),
    "entmax": MultilabelSpec(
        terms.fenchel_young_loss,
        lambda z, m, alpha: entmax(z, alpha, mask=m),
        {"alpha": ALPHA},
        "alpha-entmax, Fenchel-Young loss",
    ),
    "sparsemax_hinge": MultilabelSpec(
        lambda z, rows: terms.hinge(z, rows.target, rows),
        lambda z, m: sparsemax(z, mask=m),
        {},
        "sparsemax, hinge loss",
    ),
    "sparsegen_lin": MultilabelSpec(
        terms.sparsegen_lin_hinge,
        lambda z, m, lam: sparsegen_lin(z, lam, mask=m),
        {"lam": LAM},
        "sparsegen-lin, hinge loss",
    ),
    "sparsehourglass": MultilabelSpec(
        terms.sparsehourglass_hinge,
        lambda z, m, q: sparsehourglass(z, q, mask=m),
        {"q": Q},
        "sparsehourglass, hinge loss",
    ),
}


def parse_mapping(mapping: str) -> tuple[str, dict[str, float]]:
    """Read ``"name"`` or ``"name(option=value)"``; return the name and the options, defaults filled in.

    Raises:
        ValueError: if the name or an option is unknown, or a value is outside its range.
        TypeError: if ``mapping`` is not a string.
    """
    if not isinstance(mapping, str):
        raise TypeError(f"mapping must be a string such as 'sparsehourglass(q=1.0)', not {type(mapping).__name__}.")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", mapping)
    if match is None or match[1] not in MULTILABEL_LOSSES:
        raise ValueError(f"mapping={mapping!r} is unknown: choose from {sorted(MULTILABEL_LOSSES)}.")
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            given[option] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"mapping={mapping!r} cannot be read: options are written as in 'sparsegen_lin(lam=0.5)'.")
    return match[1], {name: float(value) for name, value in _options(match[1], given).items()}


def check_mapping(mapping: str) -> None:
    """Raise unless ``mapping`` names a multilabel loss, with valid options; see :func:`parse_mapping`."""
    parse_mapping(mapping)


def _options(name: str, given: Mapping[str, Any]) -> dict[str, float | Tensor]:
    known = MULTILABEL_LOSSES[name].options
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"mapping={name!r} has no options {unknown}; it has {sorted(known) or 'none'}.")
    options: dict[str, float | Tensor] = {}
    for option, interval in known.items():
        value = given.get(option, interval.default)
        if isinstance(value, Tensor):
            if value.numel() != 1 or not value.is_floating_point():
                raise TypeError(f"{option} must be a number or a floating-point tensor of one element.")
            if not holds(interval.contains(value)):  # type: ignore[arg-type]
                raise interval.error(value.item())
            options[option] = value.reshape(())
        else:
            options[option] = interval.number(value)
    return options


def resolve(mapping: str, given: Mapping[str, Any]) -> tuple[MultilabelSpec, dict[str, float | Tensor]]:
    """Return the loss of that name and its options, wherever they are given."""
    name, options = parse_mapping(mapping)
    if "(" in mapping and given:
        raise ValueError(f"mapping={mapping!r} carries its options already; {sorted(given)} were given a second time.")
    return MULTILABEL_LOSSES[name], _options(name, given) if given else {**options}
