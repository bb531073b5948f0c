"""Length scaling: a learned factor of the scores that depends on how many keys a query may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_entmax.alpha import LearnedNumbers

#: How fast the scores of a head are to shrink as its alpha grows, for rows of about the same sharpness.
SOFTENING = 3.0


class LengthScaling(LearnedNumbers):
    r"""What all kinds have in common: ``factor = 1 + (term - start)`` for some heads, 1 for the others.

    ``start`` is what the term is at the start, where that is to change nothing; it is a constant, not learned.

    Args:
        num_heads: number of query heads, H.
        heads: the heads that are scaled, counted from 0; None for all.
        init: ``"identity"`` starts with a factor of 1 whatever the number of keys; ``"paper"`` as the papers do.
        keep_float32: stay float32 when the model is cast to a lower precision.

    Raises:
        ValueError: if there is no head of some number, one is named twice, or ``init`` is another word.
    """

    #: The constant that is taken away for the start at the identity, and for that of the paper.
    starts: ClassVar[dict[str, float]]
    #: Whether the factor depends on the hidden state.
    needs_hidden: ClassVar[bool] = False

    def __init__(
        self, num_heads: int, heads: Sequence[int] | None = None, init: str = "identity", *, keep_float32: bool = True
    ) -> None:
        super().__init__(num_heads, keep_float32)
        if heads is not None and (beyond := [head for head in heads if not 0 <= head < num_heads]):
            raise ValueError(f"length_scaling_heads names {beyond}, but there are heads 0 to {num_heads - 1}.")
        if heads is not None and len(set(heads)) < len(heads):
            raise ValueError(f"length_scaling_heads={list(heads)} names a head twice: name each once.")
        if init not in self.starts:
            raise ValueError(f"length_scaling_init={init!r} is not allowed: choose one of {list(self.starts)}.")
        self.heads = list(range(num_heads)) if heads is None else sorted(heads)
        self.init = init

    def forward(self, keys: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the factor of the scores, float32.

        Args:
            keys: how many keys each query may see, broadcastable to ``[B, H, T_q]``.
            hidden: the input of the attention module ``[B, T_q, d]``, where ``needs_hidden``.

        Returns:
            ``[B or 1, H, T_q or 1]``. Differentiable in the parameters and in ``hidden``.
        """
        if keys.shape[-2] > 1:
            keys = keys[..., self.heads, :]
        # A query that sees no key has output 0 whatever its factor is.
        change = self.term(keys.clamp(min=1).float(), hidden) - self.starts[self.init]
        if len(self.heads) == self.num_heads:
            return 1 + change
        factor = change.new_ones(change.shape[0], self.num_heads, change.shape[2])
        factor[:, self.heads] += change
        return factor

    def term(self, keys: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the learned term of the factor, for the scaled heads alone."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Show heads and start."""
        scaled = "" if len(self.heads) == self.num_heads else f", heads={self.heads}"
        return f"{self.num_heads}, init={self.init}{scaled}"


class _NumberPerHead(LengthScaling):
    """One learned ``s`` per head; 0 at the identity, 0.43 in the paper on scalable softmax."""

    def __init__(
        self, num_heads: int, heads: Sequence[int] | None = None, init: str = "identity", *, keep_float32: bool = True
    ) -> None:
        super().__init__(num_heads, heads, init, keep_float32=keep_float32)
        self.s = self.new_parameter(len(self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every ``s`` to its start."""
        with torch.no_grad():
            self.s.fill_(0.43 if self.init == "paper" else 0.0)


class ConstantScaling(_NumberPerHead):
    """A temperature of each head: ``factor = 1 + s``, whatever the number of keys.

    It starts with ``s = 0``, or with ``"softmax"`` where `soften` puts it.
    """

    starts: ClassVar = {"identity": 0.0, "softmax": 0.0}

    def soften(self, alpha: Tensor | float) -> None:
        """Start where entmax is about as sharp as the softmax of the same scores: ``factor = 1 / (1 + 3 (alpha - 1))``.

        At the same scores entmax is the sharper the higher alpha is. The 3 was measured on SmolLM2-135M: at alpha 1.5 in all
        heads its perplexity of 26 becomes 110 without a temperature, 38, 33 and 31 with 2, 3 and 4.

        Args:
            alpha: of each head ``[H]``, or of all.
        """
        factor = 1 / (1 + SOFTENING * (torch.as_tensor(alpha, device=self.s.device) - 1))
        with torch.no_grad():
            self.s.copy_(factor.expand(self.num_heads)[self.heads] - 1)

    def term(self, keys: Tensor, hidden: Tensor | None) -> Tensor:
        """Return ``s``."""
        return self.s.float()[None, :, None]


class LogScaling(_NumberPerHead):
    r"""Scalable softmax: ``factor = c + s * log(n)``, one learned ``s`` per head, n the number of keys the query may see.

    The start at the identity has ``c = 1`` and ``s = 0``, that of the paper ``c = 0`` and ``s = 0.43``.

    Reference:
        Nakanishi (2025), Scalable-Softmax Is Superior for Attention, eq. 4.
    """

    starts: ClassVar = {"identity": 0.0, "paper": 1.0}

    def term(self, keys: Tensor, hidden: Tensor | None) -> Tensor:
        """Return ``s * log(n)``."""
        return self.s.float()[:, None] * keys.log()


class AdaptiveScaling(LengthScaling):
    r"""Adaptive-scalable entmax: ``factor = delta + beta * log(n + 1) ** gamma``, for each query and head.

    ``beta = softplus(w_beta . h)`` and ``gamma = 2 * tanh(w_gamma . h)`` depend on the hidden state h that enters the
    attention module; n counts the keys that the query may see, so that ``n + 1`` is the paper's ``pos + 2`` with
    positions from 0. The start at the identity has ``w_beta = w_gamma = 0`` and ``delta = 1 - log(2)``, so that
    ``beta = log(2)`` makes it up to 1 and both weights have a gradient. The start of the paper has ``delta = 1`` and
    weights as ``nn.Linear`` draws them.

    Args:
        hidden_size: d, width of the hidden state.

    Reference:
        Vasylenko et al. (2025), Long-Context Generalization with Sparse Attention, arXiv 2506.16640v3.
    """

    starts: ClassVar = {"identity": math.log(2), "paper": 0.0}
    needs_hidden: ClassVar = True

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        heads: Sequence[int] | None = None,
        init: str = "identity",
        *,
        keep_float32: bool = True,
    ) -> None:
        super().__init__(num_heads, heads, init, keep_float32=keep_float32)
        self.beta_weight = self.new_parameter(len(self.heads), hidden_size)
        self.gamma_weight = self.new_parameter(len(self.heads), hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to their start (or draw them)."""
        for weight in (self.beta_weight, self.gamma_weight):
            if self.init == "identity":
                nn.init.zeros_(weight)
            else:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def term(self, keys: Tensor, hidden: Tensor | None) -> Tensor:
        """Return ``beta * log(n + 1) ** gamma``."""
        if hidden is None or hidden.shape[-1] != self.beta_weight.shape[1]:
            raise ValueError(
                f"Adaptive length scaling needs hidden states [B, T_q, {self.beta_weight.shape[1]}], not "
                f"{None if hidden is None else tuple(hidden.shape)}."
            )
        weights = torch.cat([self.beta_weight, self.gamma_weight]).float()
        with torch.autocast(hidden.device.type, enabled=False):
            beta, gamma = nn.functional.linear(hidden.float(), weights).transpose(-1, -2).chunk(2, -2)
        return nn.functional.softplus(beta) * keys.log1p() ** (2 * gamma.tanh())
