"""Check the Triton kernels on your GPU, then time them on long sequences, and write the times as CSV.

    python recipes/benchmarks/gpu_check.py                                  # about five minutes on one GPU
    python recipes/benchmarks/gpu_check.py --lengths 4096 --block-sparsity 0 0.6
    python recipes/benchmarks/gpu_check.py --skip-tests                     # the short check before each timing stays

First `tests/ops/test_triton_cuda.py` has to pass. Then, for each length and share of key blocks off the support, the forward
and the forward + backward pass of entmax attention with one learned alpha per head take turns with softmax attention (SDPA, which
picks FlashAttention here) and, if `adasplash` is installed, with AdaSplash at its one alpha of 1.5. Medians and 20/80 % quantiles.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_entmax.bench.timing import interleaved_times, quantile
from hf_entmax.ops import entmax_attention

ROOT = Path(__file__).parents[2]
FIELDS = ("implementation", "mode", "length", "causal", "alpha", "block_sparsity", "median", "q20", "q80", "unit", "repeats",
          "batch", "heads", "head_dim", "dtype", "device", "torch", "triton")  # fmt: skip


def make(batch: int, heads: int, length: int, head_dim: int, sharpness: float) -> list[Tensor]:
    """Queries, keys and values whose scores vary slowly along the sequence, so that whole blocks fall off the support."""
    generator = torch.Generator("cuda").manual_seed(0)
    position = torch.arange(length, device="cuda")[:, None] / 512
    features = torch.empty(2, batch, heads, length, head_dim, device="cuda")
    frequency = torch.randn(batch, heads, 1, head_dim, generator=generator, device="cuda")
    phase = torch.rand(batch, heads, 1, head_dim, generator=generator, device="cuda") * 6.2832
    wave = 1.4142 * torch.cos(frequency * position + phase)
    for side in features:
        side.copy_(wave + 0.5 * torch.randn(wave.shape, generator=generator, device="cuda"))
    value = torch.randn(wave.shape, generator=generator, device="cuda")
    return [t.to(torch.bfloat16).requires_grad_() for t in (features[0] * sharpness, features[1], value)]


def block_sparsity(tensors: list[Tensor], alpha: Tensor, causal: bool) -> float:
    """Share of the tiles that the causal limit leaves which carry no weight."""
    from hf_entmax.ops.triton_gpu.blocks import Arguments, attention_blocks
    from hf_entmax.ops.triton_gpu.launch import attention_forward

    query = tensors[0]
    scale = query.shape[-1] ** -0.5
    arguments = Arguments(*tensors, alpha, None, None, None, None, 0.0, causal, 0, 0.0, scale, 0.0)
    with torch.no_grad():
        flags = attention_forward(arguments, False, True, False)[4]
    blocks = attention_blocks(query.shape[2], query.shape[3], query.shape[3], query.dtype)
    first_row, first_col = (torch.arange(n, device="cuda") for n in flags.shape[2:])
    reachable = torch.ones(flags.shape[2:], dtype=torch.bool, device="cuda")
    if causal:
        reachable = first_col[None] * blocks.cols <= first_row[:, None] * blocks.rows + blocks.rows - 1
    return 1 - float(flags.sum() / (reachable.sum() * flags.shape[0] * flags.shape[1]))


def sharpness_for(wanted: float, shape: tuple[int, int, int, int], alpha: Tensor, causal: bool) -> float:
    """The factor of the queries that comes closest to a block sparsity, by bisection."""
    low, high = 0.0, 64.0
    for _ in range(10):
        middle = (low + high) / 2
        if block_sparsity(make(*shape, middle), alpha, causal) < wanted:
            low = middle
        else:
            high = middle
    return high if wanted > 0 else 0.1


def check(tensors: list[Tensor], alpha: Tensor, causal: bool) -> None:
    """Compare the last 256 queries of one head with float64; raise if they are off."""
    with torch.no_grad():
        out = entmax_attention(*tensors, alpha, is_causal=causal, backend="triton")[0][:1, -1:, -256:].double()
        last = [tensors[0][:1, -1:, -256:].double(), *(t[:1, -1:].double() for t in tensors[1:])]
        expected = entmax_attention(*last, alpha[-1:].double(), is_causal=causal, backend="torch")[0]
    error = float((out - expected).abs().max())
    if not error < 0.03:
        raise SystemExit(f"The kernel is wrong by {error:.3g} at length {tensors[0].shape[2]}; nothing was timed.")


def implementations(tensors: list[Tensor], alpha: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name."""
    query, key, value = tensors
    found: dict[str, Callable[[], Tensor]] = {
        "ours_learned_alpha": lambda: entmax_attention(query, key, value, alpha, is_causal=causal, backend="triton")[0],
        "ours_alpha_1.5": lambda: entmax_attention(query, key, value, 1.5, is_causal=causal, backend="triton")[0],
        "sdpa_softmax": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal),
    }
    try:
        from adasplash import adasplash
    except ImportError as error:
        print(f"adasplash is left out: {error}")
    else:
        found["adasplash_alpha_1.5"] = lambda: adasplash(query, key, value, alpha=1.5, is_causal=causal)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768])
    parser.add_argument("--block-sparsity", type=float, nargs="+", default=[0.0, 0.6, 0.7])
    parser.add_argument("--tokens", type=int, default=32768, help="batch size times length")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--not-causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.csv")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device: nothing was checked and nothing was timed.")
    if not arguments.skip_tests:
        tests = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests/ops/test_triton_cuda.py")]
        if subprocess.run(tests, cwd=ROOT).returncode:
            raise SystemExit("The tests failed: nothing was timed.")
    import triton

    causal = not arguments.not_causal
    alpha = torch.linspace(1.3, 1.9, arguments.heads, device="cuda").requires_grad_()
    rows = []
    for length in arguments.lengths:
        shape = (max(1, arguments.tokens // length), arguments.heads, length, arguments.head_dim)
        for wanted in arguments.block_sparsity:
            tensors = make(*shape, sharpness_for(wanted, shape, alpha, causal))
            reached = block_sparsity(tensors, alpha, causal)
            check(tensors, alpha, causal)
            found = implementations(tensors, alpha, causal)
            grad_out = torch.randn_like(tensors[2])

            def both(function: Callable[[], Tensor], grad_out: Tensor = grad_out) -> Callable[[], object]:
                return lambda: function().backward(grad_out)

            def alone(function: Callable[[], Tensor]) -> Callable[[], object]:
                return torch.no_grad()(function)

            for mode, wrap in (("forward", alone), ("forward+backward", both)):
                timed = {name: wrap(function) for name, function in found.items()}
                for name, times in interleaved_times(timed, arguments.repeats, "cuda", budget=20.0).items():
                    quantiles = [f"{quantile(times, share):.4g}" for share in (0.5, 0.2, 0.8)]
                    kind = {"ours_learned_alpha": "1.3-1.9 per head", "sdpa_softmax": "1"}.get(name, "1.5")
                    rows.append(
                        (name, mode, length, causal, kind, f"{reached:.3f}", *quantiles, "ms", len(times), *shape[:2],
                         shape[3], "bfloat16", torch.cuda.get_device_name(), torch.__version__, triton.__version__)
                    )  # fmt: skip
                    print(f"{length:6d} sparsity {reached:.2f} {mode:17s} {name:22s} {quantiles[0]} ms")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(rows)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
