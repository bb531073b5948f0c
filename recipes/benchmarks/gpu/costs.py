"""What attention has to cost: products, scores and bytes of each pass, against what a GPU can do.

Counted for one head, ``tiles`` of ``rows x cols`` scores that the causal limit leaves, ``listed`` of which carry weight. H100 SXM
(132 multiprocessors, 1.83 GHz): 989 TFLOP/s bfloat16 on tensor cores, 4096 a cycle and multiprocessor; 3.35 TB/s; 16 powers or
logarithms, 64 comparisons or selections, 128 multiply-adds a cycle and multiprocessor.

    pass                      tiles    products     scores computed from them
    maximum                   all      Q K^T        1 maximum, 2 sums
    threshold, 2 to 4 times   fewer    Q K^T        1 logarithm, 1 power, about 20 others; none of both at alpha 1.5
    output                    listed   Q K^T, P V, S V      the same, 2 more sums for the gradient of alpha
    backward, queries         listed   Q K^T, dO V^T, dS K          and about 15 for the gradient of alpha
    backward, keys            listed   Q K^T, dO V^T, P^T dO, dS^T Q

- A tile of 64 x 64 at D 64 is 128 cycles of tensor cores a product. Its 4096 logarithms and 4096 powers are 512 cycles, its 20
  other operations 640 to 900: **with a learned alpha a pass is bound by arithmetic on scores, not by products or bytes**; at alpha 1.5
  a pass has half of that. So passes and operations per score are what to save: one power serves p, s and s/w; the threshold
  starts from a bound (equal scores: no further pass); NaN is found in a sum.
- FlashAttention has 2 products and 1 power per score forward, 5 and 1 backward. On dense tiles ours has 4 + 2 passes with 12 products
  and 12 powers: 2.5 to 3.5 times its time is what to expect, less than 1 once two thirds of the tiles are empty, since only the
  first pass reads all of them (1 product, 3 operations a score).
- Bytes: keys and values of a head (n D 4 bytes: 4 MiB at 32k, D 64) stay in the 50 MiB of L2; all heads at once read them
  n / rows times from there. Outside L2: Q, K, V, O, their gradients once, and 4 + 1 bytes a tile for lists and flags. Intensity is
  hundreds of operations a byte: memory is no limit, except in decoding (T_q 1: 2 D bytes x 2 passes a key).
- Launches: forward 1 (2 with padding), and 2 buffers filled; backward 4 and 1 sum. Short rows pay the launches: compare the rows
  "graph" of the timings.
"""

from __future__ import annotations

from typing import Any

#: Operations and bytes per second of the H100 SXM: what a rate is compared with where the part "environment" measured nothing.
PEAK_TERAFLOPS, PEAK_TERABYTES = 989.0, 3.35
#: Matrix products of each kernel per tile it visits.
PRODUCTS = {"fwd": 3, "bwd_query": 3, "bwd_key": 4}


def least(shape: tuple[int, int, int, int], empty: float) -> dict[str, Any]:
    """Floating-point operations and bytes that the kernels cannot do without, by kernel.

    Args:
        shape: B, H, length (causal, T_q = T_k), D.
        empty: share of the tiles within the causal limit that carry no weight.
    """
    batch, heads, length, head_dim = shape
    product = 2 * batch * heads * head_dim * length * (length + 1) / 2
    tensor = 2 * batch * heads * length * head_dim
    # One product over all tiles finds the maximum; one pass at least the threshold.
    flops = {kernel: count * product * (1 - empty) for kernel, count in PRODUCTS.items()}
    flops["fwd"] += product * (1 + (1 - empty))
    size = {"fwd": 4 * tensor + 2 * tensor, "bwd_query": 6 * tensor, "bwd_key": 6 * tensor}
    return {kernel: {"flops": flops[kernel], "bytes": size[kernel]} for kernel in PRODUCTS}
