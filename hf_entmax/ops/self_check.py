"""A fused kernel on a processor that it was never tried on: is it right?"""

from __future__ import annotations

import math
import platform
from types import ModuleType

import torch
from torch import Tensor

from hf_entmax.ops.options import AttentionOptions

#: Processors, as Python names them, that the CPU kernels were tried on.
TRIED = ("x86_64", "AMD64")
#: Relative to the largest entry: far above what rounding does to rows of 80 keys, far below what a wrong kernel does.
_ALLOWED = 1e-3


def tried_here() -> bool:
    """Whether the CPU kernels were tried on a processor of this kind."""
    return platform.machine() in TRIED


def faults(kernel: ModuleType) -> str | None:
    """Compare output and gradients of a kernel with those found by bisection; return what is wrong, or None.

    Rows of 80 keys at alphas that take each of the solvers, causal and with padding, as a training step has them.
    """
    generator = torch.Generator().manual_seed(0)
    padding = torch.ones(2, 80, dtype=torch.bool)
    padding[1, 60:] = False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for alpha in ([1.01, 1.3, 1.5, 2.0], [1.1, 1.7, 1.9, 3.0]):
                for options in (AttentionOptions(is_causal=True), AttentionOptions(key_padding_mask=padding)):
                    inputs = [2 * torch.randn(2, 4, 80, 16, generator=generator) for _ in range(3)]
                    results = []
                    for attention in (kernel.attention, _by_bisection):
                        own = [t.clone().requires_grad_() for t in (*inputs, torch.tensor(alpha))]
                        query, key, value, per_head = own
                        out, _ = attention(query, key, value, per_head, options)
                        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), own)])
                    for name, found, wanted in zip(("output", "dq", "dk", "dv", "dalpha"), *results, strict=True):
                        error = float((found - wanted).abs().max() / wanted.abs().max())
                        if not error <= _ALLOWED:
                            return f"{name} differs by {error:.2g} from bisection at alphas {alpha}"
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"
    return None


def _by_bisection(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, options: AttentionOptions
) -> tuple[Tensor, None]:
    """Entmax attention in float64, for alpha above 1; nothing of it is shared with what is checked."""
    scores = query.double() @ key.double().mT * options.scale(query.shape[-1])
    scores = scores.masked_fill(~options.visible_pairs(query, key), -1e4)
    u = (alpha.double() - 1)[:, None, None]

    def weights(shift: Tensor) -> Tensor:
        base = 1 + u * (scores - shift)
        return torch.where(base > 0, base.clamp(min=1e-300).log() / u, -math.inf).exp()

    with torch.no_grad():
        low = scores.amax(-1, keepdim=True)
        high = low + math.log(scores.shape[-1])
        for _ in range(50):
            middle = (low + high) / 2
            above = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        slope = (
            weights(low).where(weights(low) > 0, math.inf).pow(1 - u).where(weights(low) > 0, 0).sum(-1, keepdim=True)
        )
    # One step of Newton's method, which autograd sees: its derivative is that of the solution.
    found = weights(low + (weights(low).sum(-1, keepdim=True) - 1) / slope)
    return found @ value.double(), None
