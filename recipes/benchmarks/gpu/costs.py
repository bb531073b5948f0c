"""What attention has to cost: products, scores and bytes of each pass, against what a GPU can do.

Counted for one head, in tiles of 64 x 64 scores at D 64, bfloat16, alpha learned and above 1.25. H100 SXM (132 multiprocessors, 1.83
GHz): 989 TFLOP/s on tensor cores, that is 128 cycles for a product of such a tile; 3.35 TB/s; each quarter of a multiprocessor issues
one instruction a cycle, half a comparison or selection, an eighth of a power or logarithm. *Issued* is read off the machine code
(the part "compiled"), without the branch for tiles at the edge of what is visible:

    pass                      tiles    products (cycles)            powers   issued   at alpha 1.5
    maximum                   all      Q K^T (128)                       0      320      290
    threshold, 2 to 4 times   fewer    Q K^T (128)                     512      710      550
    output                    listed   Q K^T, P V, S V (384)           512     1020      580
    backward, queries         listed   Q K^T, dO V^T, dS K (384)       512     1090      550
    backward, keys            listed   + P^T dO, dS^T Q (512)          512     1340      920

- **Passes are bound by instructions on scores**, not by products or bytes. So what is saved is passes and instructions: one power
  serves p, s and s/w; the threshold starts from a bound that equal scores attain; NaN is found in a sum; a tile's flag comes from
  row sums; the polynomial beside the logarithm runs below alpha 1.25 only (210 more a pass).
- FlashAttention: 2 products and a power forward, 5 and 1 backward, about 500 + 1000 cycles a tile. Dense rows cost ours (3 steps of the
  threshold) 3500 + 2400, 3.5 to 4 times as much; at alpha 1.5 some 2.7 times. With two thirds of the tiles empty, which only the
  first passes read: 1.1 (alpha 1.5) to 1.6 times. To be faster there the passes over keys have to become fewer, or tiles wider.
- Bytes: keys and values of a head (8 MiB at 32k) are read n / rows times from L2, 50 MiB; outside it every tensor once, and 4 + 1 bytes a
  tile for lists and flags. That is hundreds of operations a byte: memory is no limit, except in decoding (T_q 1), where every
  pass reads all keys that are left: the sketch of `exact_sparse_attention` is for that.
- Launches: forward 1 (2 with padding), backward 4 and a sum. Short rows pay for them and for Python: compare the rows "graph" of the
  timings. Loops over keys hold 30 KiB of code each.
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
