"""Measure attention and a whole model against softmax and against other entmax implementations.

    python recipes/benchmarks/run_benchmarks.py                       # the table of the README, about four minutes on two cores
    python recipes/benchmarks/run_benchmarks.py --preset grid         # length x sharpness x causal
    python recipes/benchmarks/run_benchmarks.py --preset quick --out bench-results

The comparison needs `pip install 'hf_entmax[benchmark,cpu,figures]'`; what is not installed is left out and named. Run
it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_entmax import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(bench.PRESETS), default="targets")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds per case and mode")
    parser.add_argument("--threads", type=int, help="default: what PyTorch takes")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    bench.run(
        arguments.preset,
        out=arguments.out,
        device=arguments.device,
        dtype=arguments.dtype,
        repeats=arguments.repeats,
        budget=arguments.budget,
    )


if __name__ == "__main__":
    main()
