"""Losses against cross-entropy, forward and backward, on logits and on hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_entmax.bench.cases import LossCase
from hf_entmax.losses import entmax_loss, linear_entmax_loss

#: Alphas of the losses of logits, and of those that make the logits of hidden states themselves.
LOGIT_ALPHAS = (1.5, 2.0, 1.33, 1.2, 1.05, 1.0)
LINEAR_ALPHAS = (1.5, 2.0, 1.0)
_CHECKED_ROWS = 8


class LossProblem(NamedTuple):
    """Logits ``[N, V]`` with labels ``[N]``, or hidden states ``[N, D]`` with the weight ``[V, D]`` that makes them."""

    inputs: Tensor
    weight: Any  # a tensor, or None with logits
    labels: Tensor


Loss = Callable[[LossProblem], Tensor]


def make_loss_problem(case: LossCase, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> LossProblem:
    """Draw the rows of a case; eight classes of every *trained* row lead by 4 to 14, the label mostly among them."""
    with torch.device(device):
        inputs, weight, labels = _draw(case, torch.Generator(device).manual_seed(seed))
    return LossProblem(
        inputs.to(dtype).requires_grad_(), None if weight is None else weight.to(dtype).requires_grad_(), labels
    )


def _draw(case: LossCase, generator: torch.Generator) -> tuple[Tensor, Tensor | None, Tensor]:
    rows, classes = case.rows, case.classes
    labels = torch.randint(classes, (rows,), generator=generator)
    leaders = torch.randint(classes, (rows, 8), generator=generator)
    # Four rows out of five have learned their label.
    learned = torch.rand(rows, generator=generator) < 0.8
    leaders[learned, 0] = labels[learned]
    lead = torch.linspace(14.0, 4.0, 8)
    frequency = -torch.arange(1.0, classes + 1).log()[torch.randperm(classes, generator=generator)]
    if case.dimension is None:
        logits = torch.randn(rows, classes, generator=generator)
        if case.kind == "trained":
            logits.scatter_add_(1, leaders, lead.expand(rows, 8))
        elif case.kind == "frequency":
            logits = logits.mul_(0.5).add_(frequency)
        return logits, None, labels
    weight = torch.randn(classes, case.dimension, generator=generator) / case.dimension**0.5
    hidden = torch.randn(rows, case.dimension, generator=generator)
    if case.kind == "frequency":  # one dimension holds how frequent a class is
        weight[:, 0], hidden[:, 0] = frequency, 1.0
    elif case.kind == "trained":
        hidden += torch.einsum("k,nkd->nd", lead, weight[leaders])
    return hidden, weight, labels


def _losses(case: LossCase, alphas: Sequence[float] | None) -> dict[str, tuple[float, Loss]]:
    """List losses by name, with their alpha; cross-entropy, the baseline, comes first."""
    if case.dimension is None:
        found: dict[str, tuple[float, Loss]] = {"cross_entropy": (1.0, lambda p: F.cross_entropy(p.inputs, p.labels))}
        for alpha in alphas or LOGIT_ALPHAS:
            found[f"entmax_loss alpha={alpha}"] = alpha, lambda p, alpha=alpha: entmax_loss(p.inputs, p.labels, alpha)
        return found
    found = {"linear + cross_entropy": (1.0, lambda p: F.cross_entropy(F.linear(p.inputs, p.weight), p.labels))}
    for alpha in alphas or LINEAR_ALPHAS:
        found[f"linear_entmax_loss alpha={alpha}"] = alpha, lambda p, alpha=alpha: linear_entmax_loss(*p, alpha)
    return found


def _step(loss: Loss, problem: LossProblem) -> tuple[Tensor, ...]:
    """Run forward and backward; return the gradients."""
    leaves = [tensor for tensor in (problem.inputs, problem.weight) if tensor is not None]
    return torch.autograd.grad(loss(problem), leaves)


def loss_steps(
    case: LossCase, device: str, dtype: torch.dtype = torch.float32, alphas: Sequence[float] | None = None
) -> tuple[dict[str, Callable[[], object]], dict[str, list[float]]]:
    """Return forward and backward passes by name, cross-entropy's first, after all were compared with float64; and their errors.

    Cross-entropy itself is compared in float32 alone: PyTorch rounds its value to the dtype.

    Raises:
        RuntimeError: if a loss or a gradient differs by more than the dtype explains.
    """
    problem = make_loss_problem(case, device, dtype)
    losses, errors = _losses(case, alphas), {}
    for place, (name, (alpha, loss)) in enumerate(losses.items()):
        if place or dtype == torch.float32:
            try:
                errors[name] = _check(alpha, loss, problem)
            except AssertionError as error:
                raise RuntimeError(f"{name} is wrong in case {case.name!r}: {error}") from error
    return {name: partial(_step, loss, problem) for name, (_, loss) in losses.items()}, errors


def _check(alpha: float, loss: Loss, problem: LossProblem) -> list[float]:
    """Compare the loss of some rows, and their gradients in the loss of all, with float64.

    Logits of bfloat16 hidden states are rounded in the one and not in the other, by up to 0.016 where they are 4, which moves a
    probability by some percent.
    """
    part = LossProblem(problem.inputs[:_CHECKED_ROWS], problem.weight, problem.labels[:_CHECKED_ROWS])
    logits = part.inputs if part.weight is None else part.inputs.double() @ part.weight.double().t()
    losses, residual = _oracle(logits, part.labels, alpha)
    gradient = residual if part.weight is None else residual @ part.weight.double()
    found = _step(loss, problem)[0][:_CHECKED_ROWS].double() * len(problem.inputs)
    pairs = [(loss(part).double(), losses.mean()), (found, gradient)]
    if part.weight is not None:
        weight_gradient = residual.t() @ part.inputs.double() / len(residual)
        pairs.append((torch.autograd.grad(loss(part), part.weight)[0].double(), weight_gradient))
    errors = []
    for place, (actual, expected) in enumerate(pairs):
        size = float(expected.detach().abs().max()) if place else 1.0
        rtol, atol = (1e-3, 1e-5) if place else (1e-5, 1e-6)
        if problem.inputs.dtype != torch.float32:
            rtol, atol = 0.0, 0.1 * size if place else 0.02
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        errors.append(float((actual - expected).detach().abs().max()) / size)
    return errors


def _oracle(logits: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Compute losses ``[n]`` and their gradients ``[n, V]`` in float64, by bisection from the definition."""
    z = logits.detach().double()
    target = F.one_hot(labels, z.shape[-1]).double()
    if alpha == 1.0:
        return F.cross_entropy(z, labels, reduction="none"), z.softmax(-1) - target
    u = alpha - 1.0
    centred = z - z.amax(-1, keepdim=True)
    low, high = torch.zeros_like(z[:, :1]), torch.full_like(z[:, :1], 20.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = (1 + u * (centred - middle)).clamp(min=0).pow(1 / u).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = (1 + u * (centred - low)).clamp(min=0).pow(1 / u)
    p = p / p.sum(-1, keepdim=True)
    entropy = (p - p.pow(alpha)).sum(-1) / (alpha * u)
    return ((p - target) * z).sum(-1) + entropy, p - target
