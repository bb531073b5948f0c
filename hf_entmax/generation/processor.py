"""Entmax probabilities for ``generate()``, as a logits processor."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_entmax.ops import entmax
from hf_entmax.ops.mapping import check_alpha


class EntmaxLogitsProcessor(LogitsProcessor):
    r"""Turn scores into log-probabilities of alpha-entmax.

    ``log entmax(z)`` is what ``generate()`` needs in the place of logits: sampling takes the softmax of it, which gives
    the entmax probabilities back, and beam search adds it up. Entmax does not change when a constant is added to the
    scores, so logits and log-softmax (which beam search passes) give the same. A model patched with ``output_alpha``
    uses this by itself.

    Args:
        alpha: >= 1; 1 is softmax.

    Returns (when called): float ``[B, V]`` log-probabilities, in nats, -inf where the probability is 0. A token that is
    forbidden (-inf) stays so; a row in which everything is forbidden stays -inf.

    Reference: Peters et al. 2019, sec. 4.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = check_alpha(alpha)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities of ``scores [B, V]``; ``input_ids`` are not looked at."""
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return entmax(wide, self.alpha).log().to(scores.dtype)
