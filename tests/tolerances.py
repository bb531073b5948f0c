"""How close is close: one place for all tolerances, by dtype.

Forward values are probabilities (or averages weighted by them), so their errors are absolute. Gradients have no scale of
their own; their errors are relative to the largest entry of the reference. Half types are not judged by a constant at all,
but by the error that plain PyTorch makes at the same dtype.
"""

from __future__ import annotations

import torch

FORWARD = {torch.float64: 1e-9, torch.float32: 2e-6}
GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-4}
LOSS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Losses are in nats, of any size: relative."""

measured: list[float] = []
"""Errors as shares of what is allowed, of all assertions so far; whoever reports them empties it."""

HALF_FACTOR = 2.0
"""A half-precision result may have at most this many times the error of plain PyTorch at that dtype."""

ALPHAS = (1.0, 1 + 1e-6, 1.0001, 1.01, 1.1, 1.5, 2.0, 3.0)
"""The values of alpha every implementation is checked at."""


def absolute_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN anywhere gives NaN, which no bound accepts."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
    difference = (actual.detach().double().cpu() - expected.detach().double().cpu()).abs()
    return float(difference.max()) if difference.numel() else 0.0


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference over the largest entry of ``expected``.

    Where exact arithmetic gives zero (one key, ties) there is no such scale; entries below 1e-4 count as 1e-4.
    """
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    return absolute_error(actual, expected) / max(scale, 1e-4)


def rounding_of_sums(model: torch.nn.Module, exact: torch.Tensor) -> float:
    """Return how far float32 outputs of a small model may lie from ``exact``, whatever the order of its sums.

    To first order each term of each sum on the way, one for each input of each linear layer, rounds once, relative to values
    about as large as the output's largest.
    """
    terms = sum(layer.weight.shape[-1] for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    return terms * torch.finfo(torch.float32).eps * float(exact.abs().max())


def assert_forward(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that probabilities or outputs agree within the tolerance of their dtype."""
    error, bound = absolute_error(actual, expected), FORWARD[dtype or actual.dtype]
    measured.append(error / bound)
    assert error <= bound, f"forward error {error:.3g} exceeds {bound:.3g}"


def assert_gradient(actual: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that gradients agree within the relative tolerance of their dtype."""
    assert actual is not None, "there is no gradient"
    error, bound = relative_error(actual, expected), GRADIENT[dtype or actual.dtype]
    measured.append(error / bound)
    assert error <= bound, f"relative gradient error {error:.3g} exceeds {bound:.3g}"


def assert_loss(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that losses of inputs of a dtype agree within its tolerance."""
    error, bound = absolute_error(actual, expected), LOSS[dtype] * abs(float(expected))
    measured.append(error / bound)
    assert error <= bound, f"error of the loss {error:.3g} exceeds {bound:.3g}"


def assert_half(actual: torch.Tensor, plain: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that a half-precision result errs at most `HALF_FACTOR` times as much as plain PyTorch's (plus one ulp)."""
    ulp = torch.finfo(actual.dtype).eps * float(expected.detach().abs().max())
    error, bound = absolute_error(actual, expected), HALF_FACTOR * absolute_error(plain, expected) + ulp
    measured.append(error / max(bound, 1e-30))
    assert error <= bound, f"error {error:.3g} exceeds {bound:.3g}"
