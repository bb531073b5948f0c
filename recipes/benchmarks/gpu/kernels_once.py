"""Every kernel once, small, checked: what compute-sanitizer and Nsight Compute look at.

Started as ``python -m recipes.benchmarks.gpu.kernels_once half cuda [length]``.
"""

from __future__ import annotations

import sys

import torch

from hf_entmax.ops import entmax, entmax_attention


def attend(dtype: torch.dtype, head_dim: int, device: str, length: int, **options: object) -> None:
    """Forward and backward pass against float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, head_dim) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    alpha = torch.tensor([1.0, 1.2, 1.5, 2.0], device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (*tensors, alpha)]
    results = []
    for backend, inputs in (("triton", (*tensors, alpha)), ("torch", exact)):
        out = entmax_attention(*inputs, backend=backend, is_causal=True, **options)[0]  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    limit = 1e-3 if dtype == torch.float32 else 0.06
    for actual, expected in zip(*results, strict=True):
        error = float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        if not error < limit:
            raise SystemExit(f"off by {error:.3g}, allowed {limit}")


def main(case: str, device: str, length: int = 0) -> None:
    length = length or (20 if device == "cpu" else 150)
    if case == "half":
        attend(torch.bfloat16, 64, device, length)
    elif case == "float32":
        attend(torch.float32, 80, device, length)
    elif case == "options":
        mask = torch.rand(1, 1, length, length, device=device) > 0.2
        padding = torch.arange(length, device=device)[None] < length - 3
        options = {"attention_mask": mask, "key_padding_mask": padding, "softcap": 20.0, "sliding_window": length // 2}
        attend(torch.float16, 128, device, length, **options)
    elif case == "rows":
        for shape in ((33, 40), (2, 1500 if device == "cpu" else 5000)):
            scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
            error = (entmax(scores, 1.4).double() - entmax(scores.double(), 1.4)).abs().max()
            if not float(error) < 1e-5:
                raise SystemExit(f"rows are off by {float(error):.3g}")
    else:
        raise SystemExit(f"{case!r} is no case")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
