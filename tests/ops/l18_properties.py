r"""The properties of the controllable mappings, each with the condition under which it holds or the example that refutes it.

The definitions, for a mapping ``rho`` of ``R^K`` to the simplex:

* idempotence: ``rho(z) = z`` for every ``z`` in the simplex,
* monotonicity: ``z_i >= z_j`` implies ``rho_i(z) >= rho_j(z)``,
* translation invariance: ``rho(z + c 1) = rho(z)``,
* scale invariance: ``rho(c z) = rho(z)`` for ``c > 0``,
* full domain: defined for every ``z``,
* Lipschitz constant: the smallest ``L`` with ``||rho(z) - rho(z')||_2 <= L ||z - z'||_2``.

Reference:
    L18, table 1, whose question this table answers. The Lipschitz constants of softmax and sparsehourglass given here
    are the exact ones (for softmax 1/2 rather than the customary bound 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from torch import Tensor

from hf_entmax.ops.controllable import mappings
from hf_entmax.ops.mapping import sparsemax

PROPERTIES = ("idempotence", "monotonicity", "translation_invariance", "scale_invariance", "full_domain")


@dataclasses.dataclass(frozen=True)
class Claim:
    """Whether a mapping has a property.

    Args:
        holds: True, False, or ``"option"``: it depends on the option.
        options: the options under which it holds (for ``"option"``); ``{}`` otherwise.
        refuted_by: scores that show that it does not hold (with the default options for ``"option"``).
        change: the shift, or the factor, that goes with ``refuted_by`` for the two invariances.
        condition: the condition in words, for the table.
    """

    holds: bool | str
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    refuted_by: tuple[float, ...] | None = None
    change: float = 1.0
    condition: str = ""


@dataclasses.dataclass(frozen=True)
class Lipschitz:
    """The Lipschitz constant of a mapping.

    Args:
        formula: for the table.
        constant: ``(K, options) -> L``; None where there is no finite one.
        steep: for mappings without a finite constant: ``t -> z``, a curve along which the local slope grows beyond all
            bounds as ``t`` grows.
    """

    formula: str
    constant: Callable[[int, Mapping[str, float]], float] | None = None
    steep: Callable[[float], tuple[float, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class Properties:
    """All properties of one mapping.

    Args:
        function: the mapping.
        options: default options of the claims.
        claims: by the names in ``PROPERTIES``.
        lipschitz: its Lipschitz constant.
        domain: scores from the domain are obtained from any scores by: nothing (``"all"``), their magnitude plus a
            little (``"positive"``), a shift to a sum of 1 (``"sum"``).
    """

    function: Callable[..., Tensor]
    options: Mapping[str, float]
    claims: Mapping[str, Claim]
    lipschitz: Lipschitz
    domain: str


def _hourglass_constant(k: int, options: Mapping[str, float]) -> float:
    # Steepest where sum z = 0: a P_S along the scores themselves, and the change of a(z) along the constant vector.
    q = options["q"]
    return math.sqrt((1 + 1 / (k * q)) ** 2 + (k - 1) / (k * q) ** 2)


def _no(*scores: float, change: float = 1.0, condition: str = "") -> Claim:
    return Claim(False, refuted_by=scores, change=change, condition=condition)


def _steep(curve: Callable[[float], tuple[float, ...]]) -> Lipschitz:
    return Lipschitz("∞", steep=curve)


_YES = Claim(True)
_NOT_IDEMPOTENT = _no(0.5, 0.3, 0.2)
_NOT_MONOTONIC = _no(-2.0, 1.0)
_MOVES = _no(1.0, 2.0)
_SCALES = _no(0.2, 0.1, 0.0, change=4.0)
_CONE = (
    _YES,
    _YES,
    Claim("option", {"q": math.inf}, refuted_by=(1.0, 0.5, 0.2), condition="q → ∞"),
    Claim("option", {"q": 0.0}, refuted_by=(1.0, 0.5, 0.2), change=4.0, condition="q = 0"),
)


def _row(
    function: Callable[..., Tensor],
    options: Mapping[str, float],
    claims: tuple[Claim, ...],
    lipschitz: Lipschitz,
    domain: str = "all",
) -> Properties:
    """``claims`` stand in the order of ``PROPERTIES``."""
    return Properties(function, options, dict(zip(PROPERTIES, claims, strict=True)), lipschitz, domain)


_ROWS = (
    _row(
        mappings.sum_normalization,
        {},
        (_YES, _YES, _MOVES, _YES, _no(1.0, -2.0, condition="z ≥ 0, z ≠ 0")),
        _steep(lambda t: (1 / t, 2 / t)),
        "positive",
    ),
    _row(
        mappings.spherical_softmax,
        {},
        (_NOT_IDEMPOTENT, _NOT_MONOTONIC, _MOVES, _YES, _no(0.0, 0.0, condition="z ≠ 0")),
        _steep(lambda t: (1 / t, 2 / t)),
    ),
    _row(
        mappings.softmax,
        {"temperature": 1.0},
        (_NOT_IDEMPOTENT, _YES, _YES, _SCALES, _YES),
        Lipschitz("1/(2T)", lambda k, options: 0.5 / options["temperature"]),
    ),
    _row(sparsemax, {}, (_YES, _YES, _YES, _SCALES, _YES), Lipschitz("1", lambda k, options: 1.0)),
    _row(
        mappings.sparsegen_lin,
        {"lam": 0.5},
        (Claim("option", {"lam": 0.0}, (0.5, 0.3, 0.2), condition="λ = 0"), _YES, _YES, _SCALES, _YES),
        Lipschitz("1/(1−λ)", lambda k, options: 1 / (1 - options["lam"])),
    ),
    _row(
        mappings.sparsegen_exp,
        {"lam": 0.0},
        (_NOT_IDEMPOTENT, _YES, _no(0.1, 0.0), _no(0.1, 0.0, change=3.0), _YES),
        _steep(lambda t: (math.log(t), math.log(t + 0.5))),
    ),
    _row(
        mappings.sparsegen_sq,
        {"lam": 0.0},
        (_NOT_IDEMPOTENT, _NOT_MONOTONIC, _no(0.1, 0.2), _no(0.1, 0.2, change=3.0), _YES),
        _steep(lambda t: (t, math.sqrt(t * t + 0.5))),
    ),
    _row(
        mappings.sparsegen_log,
        {"lam": 0.0},
        (_NOT_IDEMPOTENT, _YES, _MOVES, _YES, _no(1.0, -2.0, condition="z > 0")),
        _steep(lambda t: (1 / t, 1.5 / t)),
        "positive",
    ),
    _row(
        mappings.sparsecone,
        {"q": 1.0},
        (*_CONE, _no(-2.0, -3.0, condition="Σz > −Kq")),
        # Just inside the boundary sum z = -K q the scores are stretched without limit.
        _steep(lambda t: (-1.0 + 1 / t, -1.0 + 1.2 / t)),
        "sum",
    ),
    _row(
        mappings.sum_normalization_pp,
        {},
        (_YES, _YES, _no(1.0, 0.5, 0.2), _YES, _no(1.0, -1.0, condition="Σz ≠ 0")),
        _steep(lambda t: (1 / t, 1.2 / t)),
        "sum",
    ),
    _row(
        mappings.sparsehourglass,
        {"q": 1.0},
        (*_CONE, Claim("option", {"q": 0.5}, condition="q > 0")),
        Lipschitz("√((1+1/(Kq))² + (K−1)/(Kq)²)", _hourglass_constant),
    ),
)
TABLE: dict[str, Properties] = {row.function.__name__: row for row in _ROWS}


def markdown_table() -> str:
    """The property table in Markdown: ✓ holds, ✗ does not, ◐ under the condition named."""
    lines = [
        "| mapping | idempotent | monotonic | translation invariant | scale invariant | full domain | Lipschitz |",
        "|" + "---|" * 7,
    ]
    for name, row in TABLE.items():
        cells = [f"`{name}`"]
        for claim in row.claims.values():
            sign = {True: "✓", False: "✗"}.get(claim.holds, "◐")  # type: ignore[call-overload]
            cells.append(f"{sign} ({claim.condition})" if claim.condition else sign)
        lines.append("| " + " | ".join([*cells, row.lipschitz.formula]) + " |")
    return "\n".join(lines) + "\n"
