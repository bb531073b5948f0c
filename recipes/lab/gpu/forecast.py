"""What should a training step cost on a GPU, before one is measured? From tiles (`visits`) and machine code (`compiled`).

    python -m recipes.lab.gpu.forecast recipes/lab/results/gpu_visits.csv       # a table: our time over FlashAttention's

Counted for one head, in tiles of 64 x 64 scores at D 64, bfloat16. H100 SXM (132 multiprocessors, 1.83 GHz): 989 TFLOP/s on tensor
cores, that is 128 cycles for a product of such a tile; each quarter of a multiprocessor issues one instruction a cycle, half a
comparison, selection or operation on integers, an eighth of a power or logarithm. Passes take more cycles for instructions on scores
than for products or bytes: keys and values of a head (8 MiB at 32k) are read n / rows times from L2; outside it every tensor once. Memory
is a limit only in decoding, where every pass reads all keys that are left: the sketch of `exact_sparse_attention` is for that.

Products may hide behind the instructions of another program on the same multiprocessor, or not: both ends are forecast. FlashAttention,
with 2 products and a power forward, 5 and 1 backward, takes about 500 + 1000 cycles a tile, as measured, so that whatever it does not
hide is in there. What latency, launches and short rows cost us is in neither end.
"""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path

#: Cycles of a quarter of a multiprocessor for a tile of each pass: ``least`` of the loops that ``compiled`` finds for capability 9.0
#: ("bfloat16-64 at 1.5", "bfloat16-64"); backward is the two kernels together.
CYCLES = {
    "1.5": {"maximum": 261, "histogram": 384, "threshold": 401, "output": 410, "backward": 337 + 470},
    "learned": {"maximum": 261, "histogram": 384, "threshold": 568, "output": 706, "backward": 717 + 655},
}
#: Matrix products of a tile in each pass, and cycles of one.
PRODUCTS, PRODUCT = {"maximum": 1, "histogram": 1, "threshold": 1, "output": 3, "backward": 3 + 4}, 128
FLASH = {"forward": 500, "backward": 1000}
#: Share of empty tiles, and AdaSplash-2's time over FlashAttention-2's there: its README, forward + backward at alpha 1.5, causal.
ADASPLASH = ((0.51, 1.06), (0.58, 1.0), (0.64, 0.98), (0.70, 0.89), (0.75, 0.79), (0.85, 0.62))


def ratio(row: dict[str, str], alpha: str, *, backward: bool = True, hidden: bool = True) -> float:
    """Forecast of our time over FlashAttention's for a row of `visits`.

    Args:
        row: shares of the tiles that each pass reads.
        alpha: "1.5" or "learned".
        backward: whether the backward pass is in it.
        hidden: whether our products hide behind other instructions, or add to them.
    """
    shares = {name: float(row[name]) for name in ("maximum", "histogram", "threshold", "output")}
    if backward:
        shares["backward"] = 1 - float(row["empty"])
    cycles = {name: CYCLES[alpha][name] + (0 if hidden else PRODUCT * PRODUCTS[name]) for name in shares}
    return sum(shares[name] * cycles[name] for name in shares) / (FLASH["forward"] + backward * FLASH["backward"])


def adasplash(empty: float) -> float | None:
    """AdaSplash-2's ratio at a share of empty tiles, between those that it publishes; None beyond them."""
    for (low, before), (high, after) in itertools.pairwise(ADASPLASH):
        if low <= empty <= high:
            return before + (after - before) * (empty - low) / (high - low)
    return None


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: tiles that each pass reads, and what that should cost."""
    lines = [
        "| scores | alpha | empty | histogram | threshold | output | forward | forward + backward | nothing hidden | AdaSplash-2 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kind, theirs = "1.5" if row["alpha"] == "1.5" else "learned", adasplash(float(row["empty"]))
        shares = (row["histogram"], row["threshold"], row["output"])
        ours = (ratio(row, kind, backward=False), ratio(row, kind), ratio(row, kind, hidden=False))
        cells = [f"{row['scores']}, {int(row['length']) // 1024}k", row["alpha"], f"{float(row['empty']):.0%}"]
        cells += [*(f"{float(share):.2f}" for share in shares), *(f"{one:.2f}" for one in ours)]
        lines.append(f"| {' | '.join([*cells, f'{theirs:.2f}' if theirs and kind == '1.5' else ''])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with Path(sys.argv[1]).open(newline="", encoding="utf-8") as found:
        print(table(list(csv.DictReader(found))))
