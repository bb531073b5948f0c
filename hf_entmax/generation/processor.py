"""Sparse probabilities for ``generate()``."""

from __future__ import annotations

import math

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessor

from hf_entmax.config import check_alpha
from hf_entmax.ops.candidates import solve_rows


def log_entmax(scores: Tensor, alpha: float) -> Tensor:
    """Compute ``log entmax(scores)`` of rows ``[n, V]``; ``-inf`` where the probability is 0.

    ``-inf`` marks what is forbidden; a row that is ``-inf`` throughout stays so. Not differentiable.
    """
    solution = solve_rows(scores, alpha - 1.0)
    logs = solution.probs.log()
    if solution.rows is not None:
        found = logs
        logs = found.new_full(scores.shape, -math.inf)
        logs[solution.rows, solution.columns] = found
    return logs.to(scores.dtype)


class EntmaxLogitsProcessor(LogitsProcessor):
    r"""Turns the scores of each step into the log-probabilities of alpha-entmax.

        scores <- log entmax(scores / temperature),     log 0 = -inf

    Entmax does not change when all scores of a row shift alike, so that it makes no difference whether it is given
    logits (greedy search, sampling) or log-softmax values (beam search): the result is exact for all of them. It
    belongs after the processors that forbid tokens by ``-inf`` (constrained decoding, minimum length, bad words, ...),
    so that what remains shares the whole mass, and before the ones that act on probabilities (temperature, top-k,
    top-p, ...). In the list given to ``generate(logits_processor=[...])`` it stands exactly there. A model patched with
    ``output_alpha`` has it by itself.

    Args:
        alpha: ``>= 1``; 1 gives log-softmax.
        temperature: above 0. Unlike the ``temperature`` of ``generate()``, which raises probabilities to a power and leaves
            zeros as they are, it acts before entmax: the higher, the more tokens have a probability above 0.

    Raises:
        ValueError: if alpha is below 1 or the temperature not above 0, or if one is not finite.
        TypeError: if one is not a number.

    Reference:
        Peters, Niculae, Martins 2019, sec. 4.1.
    """

    #: It looks at one row of scores at a time, which is all that continuous batching hands over.
    supports_continuous_batching = True

    def __init__(self, alpha: float = 1.5, temperature: float = 1.0) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
            raise TypeError(f"temperature must be a float, not {type(temperature).__name__}.")
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} is not allowed: it must be finite and above 0.")
        self.alpha, self.temperature = check_alpha(alpha), float(temperature)

    @torch.no_grad()
    def __call__(self, input_ids: LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the log-probabilities of ``scores`` ``[batch, V]``, same shape and dtype; ``input_ids`` are not used."""
        # Division by 1 changes nothing.
        return log_entmax(scores / self.temperature, self.alpha)  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"EntmaxLogitsProcessor(alpha={self.alpha}, temperature={self.temperature})"
