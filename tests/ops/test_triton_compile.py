"""The Triton kernels compile for Hopper GPUs, on machines without one."""

from pathlib import Path

import fresh
import pytest

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

ATTENTION = {f"_entmax_attention_{name}_kernel" for name in ("fwd", "bwd_query", "bwd_key")} | {"_compact_flags_kernel"}
KERNELS = {
    "learned": ATTENTION | {"_entmax_attention_bwd_bias_kernel"},
    "options": ATTENTION | {"_key_extent_kernel"},
    "float32": ATTENTION | {"_key_extent_kernel"},
    "rows": {"_solve_rows_kernel", "_write_rows_kernel"},
}


@pytest.mark.parametrize(
    "case", ["learned", "rows", *(pytest.param(c, marks=pytest.mark.slow) for c in ("options", "float32"))]
)
def test_compiles_for_hopper(case, tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("triton_compile_cases.py")
    # Tensors stay on the CPU: the package is told so as it would be by the interpreter, which is not used.
    start = (
        "import sys, runpy; from hf_entmax.ops import triton_gpu; triton_gpu._INTERPRETED = True; "
        f"sys.argv = ['', {case!r}]; runpy.run_path({str(script)!r})"
    )
    run = fresh.run(start, after="torch", environment=environment)
    assert run.returncode == 0, run.stderr
    reports = {name: values for name, *values in map(str.split, run.stdout.splitlines())}
    assert set(reports) == KERNELS[case]
    for name, (instruction, calls, lines) in reports.items():
        # A device function that is not inlined forces its own layout on tiles: ten times the code, all of it spilling.
        assert int(calls) == 0 and int(lines) < 20_000, (name, calls, lines)
        # The tensor cores' own instruction: without it the tiles were shaped wrongly.
        assert case != "learned" or "attention" not in name or instruction == "wgmma", name
