"""The Triton kernels compile for Hopper GPUs, on machines without one, and fit into their multiprocessors."""

import json

import fresh
import pytest

from recipes.lab.gpu.compiled import CASES, SHARED, STACK

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

ATTENTION = {f"_entmax_attention_{name}_kernel" for name in ("fwd", "bwd_query", "bwd_key")} | {"_compact_flags_kernel"}
KERNELS = {
    "learned": ATTENTION | {"_entmax_attention_bwd_bias_kernel"},
    "options": ATTENTION | {"_key_extent_kernel"},
    "float32": ATTENTION | {"_key_extent_kernel"},
    "ones": ATTENTION | {"_entmax_attention_bwd_bias_kernel", "_key_extent_kernel"},
    "sizes": ATTENTION,
    "rows": {"_solve_rows_kernel", "_write_rows_kernel"},
    "exact": {"_score_bounds_kernel", "_candidate_scores_kernel", "_candidate_output_kernel"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KERNELS)
def test_compiles_for_hopper(case, tmp_path):
    assert case in CASES
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    module = "recipes.lab.gpu.compiled"
    start = f"import sys, runpy; sys.argv = ['', {case!r}]; runpy.run_module({module!r}, run_name='__main__')"
    run = fresh.run(start, after="torch", environment=environment)
    assert run.returncode == 0, run.stderr
    reports = dict(map(json.loads, run.stdout.splitlines()))
    assert set(reports) == KERNELS[case]
    for name, found in reports.items():
        # A device function that is not inlined forces its own layout on tiles: ten times the code, all of it spilling.
        assert found["calls"] == 0 and found["lines"] < 20_000, (name, found)
        # The tensor cores' own instruction: without it the tiles were shaped wrongly.
        assert case != "learned" or "attention" not in name or found["products"] == "wgmma", name
        # Batches of many lengths do not compile again and again.
        assert case != "sizes" or found["variants"] == 1, (name, found["variants"])
        assert found["shared"] <= SHARED and found["stack"] <= STACK and found["registers"] <= 255, (name, found)
        # In float32 some versions of Triton write products out one by one, which no instruction tells from others.
        products = ("attention" in name or "bounds" in name) and found["products"] != "none"
        assert not products or found["loops"], (name, "no loop with matrix products was found")
