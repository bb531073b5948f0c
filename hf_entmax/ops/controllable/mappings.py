r"""The probability mappings of Laha et al. 2018 as differentiable functions of tensors.

What all of them share:

* ``scores`` may have any shape and any of float16, bfloat16, float32, float64. The computation runs in float32 at
  least, the result has the dtype of ``scores``. A NaN among the scores gives NaN in its row, as everywhere in torch.
* ``mask`` is bool, broadcastable to ``scores``, True = may receive mass. Entries of ``-inf`` or ``finfo.min`` are
  masked as well. Masked entries get exactly 0 and pass no gradient, and count neither in sums nor in ``K``.
* A row masked whole gives 0 and passes no gradient: every left-padded batch has such rows. It is never an error.
* Options (``lam``, ``q``, ``temperature``) are numbers, or tensors broadcastable to ``scores`` with size 1 along
  ``dim`` (one value per head, for instance), in which the result is differentiable too.
* Outside its domain a mapping raises ``ValueError`` naming the domain. Where values cannot be inspected
  (``torch.compile``, ``torch.func.vmap``) nothing can be raised, and the result outside the domain has no meaning.
* No sort and no iterate is kept for the backward pass.

Reference:
    Laha, Chemmengath, Agrawal, Khapra, Sankaranarayanan and Ramaswamy 2018, "On Controllable Sparse Alternatives to
    Softmax" (L18 below).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_entmax.ops.controllable.domain import LAM, TEMPERATURE, Q, holds, option
from hf_entmax.ops.controllable.functions import (
    SPARSEGEN_KINDS,
    HourglassFunction,
    SparsegenFunction,
    TemperedSoftmaxFunction,
    power_share,
)
from hf_entmax.ops.simplex import as_rows, is_allowed
from hf_entmax.ops.solve import compute_dtype


def sparsegen(
    scores: Tensor,
    g: str | Callable[[Tensor], Tensor] = "lin",
    lam: float | Tensor = 0.0,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Sparsegen: projection of transformed scores with a controllable degree of sparsity.

        p = argmin_{p in simplex} ||p - g(z)||^2 - lam ||p||^2 = sparsemax(g(z) / (1 - lam))

    Args:
        scores: any shape.
        g: ``"lin"``, ``"exp"``, ``"sq"``, ``"log"``, or a callable that maps a tensor (float32, or float64 for float64
            scores) to one of the same shape by torch operations; gradients flow through it by autograd. With masked
            entries it must act component by component: it sees an allowed score of the same row in their place.
        lam: below 1. Towards 1 the support shrinks to the argmax, towards ``-inf`` the output becomes uniform; with
            ``g="lin"``, 0 is sparsemax. Number or tensor.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores`` and ``lam``.

    Raises:
        TypeError: if ``scores`` is not floating point, ``g`` is neither a name nor callable, or ``lam`` is no number.
        ValueError: if ``lam >= 1``; if ``g`` is unknown, changes the shape, or is not finite at an allowed score.

    Reference:
        L18, eq. 2 and section 3.1.
    """
    if isinstance(g, str):
        if g not in SPARSEGEN_KINDS:
            raise ValueError(f"g={g!r} is not a transformation: choose from {SPARSEGEN_KINDS}, or give a callable.")
        if g == "log":
            return sparsegen_log(scores, lam, dim, mask)
        return _sparsegen(g, scores, lam, dim, mask)
    if not callable(g):
        raise TypeError(f"g must be one of {SPARSEGEN_KINDS} or a callable, not {type(g).__name__}.")
    allowed = is_allowed(as_rows(scores, dim, mask)).movedim(-1, dim)
    # Masked scores may lie outside the domain of g; an allowed stand-in keeps NaN out of its gradient.
    inside = torch.where(allowed, scores, _any_allowed(scores, allowed, dim))
    transformed = g(inside.to(compute_dtype(scores.dtype)))
    if not isinstance(transformed, Tensor) or transformed.shape != scores.shape:
        given = tuple(transformed.shape) if isinstance(transformed, Tensor) else type(transformed).__name__
        raise ValueError(f"g must return a tensor of shape {tuple(scores.shape)}, as it was given, not {given}.")
    if not holds(transformed.isfinite() | ~allowed | scores.isnan()):
        raise ValueError("g(scores) is not finite at some allowed score: the scores lie outside the domain of g.")
    lam_rows = option(LAM, lam, scores, dim)
    rows = as_rows(transformed, dim, allowed)
    return SparsegenFunction.apply(rows, lam_rows, "lin").movedim(-1, dim).to(scores.dtype)  # type: ignore[union-attr]


def _any_allowed(scores: Tensor, allowed: Tensor, dim: int) -> Tensor:
    """Return one allowed score of each row, 1 in rows without any."""
    picked = scores.detach().gather(dim, allowed.to(torch.uint8).argmax(dim, keepdim=True))
    return torch.where(allowed.any(dim, keepdim=True), picked, 1.0)


def _sparsegen(kind: str, scores: Tensor, lam: float | Tensor, dim: int, mask: Tensor | None) -> Tensor:
    rows = as_rows(scores, dim, mask)
    lam = option(LAM, lam, scores, dim)
    return SparsegenFunction.apply(rows, lam, kind).movedim(-1, dim)  # type: ignore[union-attr]


def sparsegen_lin(scores: Tensor, lam: float | Tensor = 0.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sparsegen-lin: sparsemax whose width of the sparse region is set by ``lam``.

        p = argmin_{p in simplex} ||p - z||^2 - lam ||p||^2 = sparsemax(z / (1 - lam))

    Args:
        scores: any shape.
        lam: below 1; 0 is sparsemax, towards 1 the support shrinks, towards ``-inf`` the output becomes uniform.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores`` and ``lam``.

    Raises:
        TypeError: if ``scores`` is not floating point or ``lam`` is no number.
        ValueError: if ``lam >= 1``.

    Reference:
        L18, section 3.1.

    Examples:
        >>> scores = torch.tensor([0.6, 0.4, 0.1])
        >>> sparsegen_lin(scores), sparsegen_lin(scores, lam=0.8)
        (tensor([0.5667, 0.3667, 0.0667]), tensor([1., 0., 0.]))
    """
    return _sparsegen("lin", scores, lam, dim, mask)


def sparsegen_exp(scores: Tensor, lam: float | Tensor = 0.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sparsegen-exp, ``sparsemax(exp(z) / (1 - lam))``; neither translation nor scale invariant.

    Arguments, result and errors are those of `sparsegen_lin`; large scores do not overflow.

    Reference:
        L18, section 3.1. With ``lam = 1 - sum_j exp(z_j)`` it is softmax.
    """
    return _sparsegen("exp", scores, lam, dim, mask)


def sparsegen_sq(scores: Tensor, lam: float | Tensor = 0.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sparsegen-sq, ``sparsemax(z^2 / (1 - lam))``; the sign of a score does not count.

    Arguments, result and errors are those of `sparsegen_lin`.

    Reference:
        L18, section 3.1. With ``lam = 1 - sum_j z_j^2`` it is spherical softmax.
    """
    return _sparsegen("sq", scores, lam, dim, mask)


def sparsegen_log(scores: Tensor, lam: float | Tensor = 0.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sparsegen-log, ``sparsemax(log(z) / (1 - lam))``, for positive scores; invariant to their scale.

    Args:
        scores: any shape, every allowed entry > 0.
        lam: below 1.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores`` and ``lam``.

    Raises:
        TypeError: if ``scores`` is not floating point or ``lam`` is no number.
        ValueError: if ``lam >= 1`` or an allowed score is not positive.

    Reference:
        L18, section 3.1.
    """
    rows = as_rows(scores, dim, mask)
    # Written so that NaN passes the check and shows in the result, like for every other mapping.
    if not holds(~(is_allowed(rows) & (rows <= 0))):
        raise ValueError(
            "sparsegen_log is defined for scores > 0 only, and some allowed score is zero or negative: mask those "
            "entries, make the scores positive first (e.g. softplus), or use sparsegen_lin."
        )
    return _sparsegen("log", scores, lam, dim, mask)


def sparsecone(scores: Tensor, q: float | Tensor = 1.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sparsecone: the scores are pulled towards the point ``(-q, ..., -q)`` onto ``sum z = 1``, then projected.

        p = sparsemax(a(z) z),     a(z) = (1 + K q) / (sum_j z_j + K q)

    Args:
        scores: any shape, every row with ``sum z > -K q``.
        q: at least 0; 0 is sum normalization on non-negative scores, towards inf sparsemax.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass; ``K`` counts the allowed entries of a row.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores`` and ``q``.

    Raises:
        TypeError: if ``scores`` is not floating point or ``q`` is no number.
        ValueError: if ``q < 0`` or a row has ``sum z <= -K q``.

    Reference:
        L18, section 3.2.
    """
    rows = as_rows(scores, dim, mask)
    q_rows = option(Q, q, scores, dim)
    total, count = _row_sum(rows)
    if not holds((count == 0) | ~(total <= -count * q_rows)):
        raise ValueError(
            f"sparsecone is defined for rows with sum(scores) > -K*q only (K allowed entries, q={q}), and some row "
            "lies outside: use a larger q, or sparsehourglass, which extends it to all scores."
        )
    return HourglassFunction.apply(rows, q_rows, False).movedim(-1, dim)  # type: ignore[union-attr]


def sparsehourglass(scores: Tensor, q: float | Tensor = 1.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sparsehourglass: sparsecone mirrored at ``sum z = 0``, and so defined for all scores.

        p = sparsemax(a(z) z),     a(z) = (1 + K q) / (|sum_j z_j| + K q)

    Args:
        scores: any shape; for ``q = 0`` every row with ``sum z != 0``.
        q: at least 0; 0 is sum normalization++ (scale invariant), ``inf`` is sparsemax (translation invariant).
        dim: the dimension to normalise.
        mask: bool, True = may receive mass; ``K`` counts the allowed entries of a row.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores`` and ``q``.

    Raises:
        TypeError: if ``scores`` is not floating point or ``q`` is no number.
        ValueError: if ``q < 0``, or ``q = 0`` and a row sums to 0.

    Reference:
        L18, section 3.3.

    Examples:
        >>> sparsehourglass(torch.tensor([0.6, 0.4, -0.1]), q=1.0)
        tensor([0.6026, 0.3974, 0.0000])
    """
    rows = as_rows(scores, dim, mask)
    q_rows = option(Q, q, scores, dim)
    # For q > 0 every row is inside the domain: nothing to look at, and no wait for a device.
    if isinstance(q_rows, Tensor) or q_rows == 0:
        total, count = _row_sum(rows)
        if not holds((total != 0) | (count == 0) | torch.as_tensor(q_rows > 0)):
            raise ValueError(
                "sparsehourglass with q=0 (sum normalization++) is defined for rows with sum(scores) != 0 only, and "
                "some row sums to zero: use q > 0."
            )
    return HourglassFunction.apply(rows, q_rows, True).movedim(-1, dim)  # type: ignore[union-attr]


def _row_sum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and number of the allowed entries of each row, ``[..., 1]``."""
    allowed = is_allowed(rows)
    total = torch.where(allowed, rows.detach().to(compute_dtype(rows.dtype)), 0.0).sum(-1, keepdim=True)
    return total, allowed.sum(-1, keepdim=True).to(total.dtype)


def sum_normalization(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sum normalization, ``p_i = z_i / sum_j z_j``, for non-negative scores.

    Args:
        scores: any shape; allowed entries >= 0, at least one of a row > 0.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores``.

    Raises:
        TypeError: if ``scores`` is not floating point.
        ValueError: if an allowed score is negative, or all allowed scores of a row are 0.

    Reference:
        L18, section 2.
    """
    rows = as_rows(scores, dim, mask)
    allowed = is_allowed(rows)
    if not holds(~(allowed & (rows < 0))) or not holds(((rows != 0) & allowed).any(-1) | ~allowed.any(-1)):
        raise ValueError(
            "sum_normalization is defined for scores >= 0 with a positive sum only: make the scores non-negative, or "
            "use sum_normalization_pp (negative scores) or sparsehourglass (all scores)."
        )
    return power_share(rows, 1).movedim(-1, dim)


def sum_normalization_pp(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Sum normalization++: sum normalization extended to negative scores, ``sparsemax(z / |sum_j z_j|)``.

    Arguments, result and errors are those of `sum_normalization`, but scores may be negative: no row may sum to 0.

    Reference:
        L18, section 3.3 (sparsehourglass with q = 0).
    """
    return sparsehourglass(scores, q=0.0, dim=dim, mask=mask)


def spherical_softmax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Spherical softmax, ``p_i = z_i^2 / sum_j z_j^2``.

    Args:
        scores: any shape; not all allowed entries of a row 0.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores``.

    Raises:
        TypeError: if ``scores`` is not floating point.
        ValueError: if all allowed scores of a row are 0.

    Reference:
        L18, section 2.
    """
    rows = as_rows(scores, dim, mask)
    allowed = is_allowed(rows)
    if not holds(((rows != 0) & allowed).any(-1) | ~allowed.any(-1)):
        raise ValueError(
            "spherical_softmax is defined for rows with at least one nonzero score only, and some row is zero "
            "throughout: use sparsegen_sq or softmax, which are defined there."
        )
    return power_share(rows, 2).movedim(-1, dim)


def softmax(scores: Tensor, temperature: float | Tensor = 1.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Softmax with a temperature, ``p_i = exp(z_i / T) / sum_j exp(z_j / T)``.

    Args:
        scores: any shape.
        temperature: above 0.
        dim: the dimension to normalise.
        mask: bool, True = may receive mass.

    Returns:
        Probabilities, shape and dtype of ``scores``. Differentiable in ``scores`` and ``temperature``.

    Raises:
        TypeError: if ``scores`` is not floating point or ``temperature`` is no number.
        ValueError: if ``temperature <= 0``.

    Reference:
        L18, section 2.

    Examples:
        >>> softmax(torch.tensor([0.6, 0.4, 0.1]), temperature=0.1)
        tensor([0.8756, 0.1185, 0.0059])
    """
    rows = as_rows(scores, dim, mask)
    temperature = option(TEMPERATURE, temperature, scores, dim)
    return TemperedSoftmaxFunction.apply(rows, temperature).movedim(-1, dim)  # type: ignore[union-attr]
