"""A fused kernel on a processor that it was never tried on: is it right?"""

from __future__ import annotations

import platform
from types import ModuleType

import torch

from hf_entmax.ops import dense
from hf_entmax.ops.options import AttentionOptions

#: Processors, as Python names them, that the CPU kernels were tried on.
TRIED = ("x86_64", "AMD64")
#: Relative to the largest entry: far above what rounding does to rows of 80 keys, far below what a wrong kernel does.
_ALLOWED = 1e-3


def tried_here() -> bool:
    """Whether the CPU kernels were tried on a processor of this kind."""
    return platform.machine() in TRIED


def faults(kernel: ModuleType) -> str | None:
    """Compare output and gradients of a kernel with the dense path; return what is wrong, or None.

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
                    for attention in (kernel.attention, dense.attention):
                        own = [t.clone().requires_grad_() for t in (*inputs, torch.tensor(alpha))]
                        query, key, value, per_head = own
                        out, _ = attention(query, key, value, per_head, options)
                        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), own)])
                    for name, found, wanted in zip(("output", "dq", "dk", "dv", "dalpha"), *results, strict=True):
                        error = float((found - wanted).abs().max() / wanted.abs().max())
                        if not error <= _ALLOWED:
                            return f"{name} differs by {error:.2g} from the dense path at alphas {alpha}"
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"
    return None
