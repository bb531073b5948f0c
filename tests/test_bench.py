"""The benchmark: it checks before it times, compares what it says, and writes what it measured."""

from __future__ import annotations

import csv

import pytest
import torch

from hf_entmax import bench
from hf_entmax.bench import implementations, runner, timing
from hf_entmax.bench.cases import Case, ModelCase

TINY = Case("tiny", 2, 4, 24, head_dim=16, kv_heads=2, causal=True, against=("eager_softmax", "sdpa", "ours_torch"))


def run_tiny(monkeypatch, *cases, **options):
    monkeypatch.setitem(bench.PRESETS, "tiny", cases)
    lines: list[str] = []
    return bench.run("tiny", repeats=4, device="cpu", report=lines.append, **options), lines


def test_rows_and_files(monkeypatch, tmp_path):
    case = Case(
        "padded",
        3,
        2,
        16,
        head_dim=16,
        padded=True,
        modes=("forward", "forward+backward", "memory"),
        targets=(("sdpa", "forward", 1e9),),
    )
    rows, lines = run_tiny(monkeypatch, TINY, case, out=tmp_path)
    with (tmp_path / "tiny-cpu.csv").open(encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) == 4 * 2 + 3 * 3
    for row in written:
        assert float(row["q20"]) <= float(row["median"]) <= float(row["q80"])
        assert row["torch"] == torch.__version__ and int(row["repeats"]) >= 1 and row["device"]
        assert row["unit"] == ("MiB" if row["mode"] == "memory" else "ms")
    for row in rows:
        base = next(r for r in rows if (r.case, r.mode) == (row.case, row.mode) and r.ratio is None)
        assert base.implementation.startswith("ours")
        if row.ratio is not None:
            assert row.ratio == pytest.approx(base.median / row.median)
    assert any("reached" in line for line in lines)
    assert (tmp_path / "tiny-cpu.png").stat().st_size > 0


@pytest.mark.parametrize("name", [n for n in implementations.IMPLEMENTATIONS if n != "adasplash"])
@pytest.mark.parametrize("case", [TINY, Case("padded", 3, 4, 20, head_dim=16, padded=True)])
def test_every_implementation_passes_its_check(name, case):
    if (name, case) == ("hf_attention_normalizers", TINY):
        case = Case("no shared heads", 2, 4, 24, head_dim=16, causal=True)
    reason = implementations.unavailable(name, "cpu")
    if reason is not None:
        assert name == "ours_triton" or "not installed" in reason
        pytest.skip(reason)
    runner._checked(name, implementations.make_problem(case, "cpu", torch.float32), torch.float32)


def test_a_wrong_implementation_is_not_timed(monkeypatch):
    def wrong(problem):
        return lambda: problem.query * 1.01

    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "sdpa", (wrong, "softmax"))
    monkeypatch.setattr(runner, "interleaved_times", lambda *a: pytest.fail("timed before the check"))
    with pytest.raises(RuntimeError, match="sdpa is wrong"):
        run_tiny(monkeypatch, TINY)


def test_density_counts_allowed_pairs_only():
    softmax = Case("softmax", 3, 2, 16, head_dim=16, alpha=1.0, sharpness=0.1, padded=True, causal=True)
    assert runner._density(implementations.make_problem(softmax, "cpu", torch.float32)) == 1.0
    sharp = Case("sharp", 1, 2, 64, head_dim=16, alpha=2.0, sharpness=50.0)
    assert runner._density(implementations.make_problem(sharp, "cpu", torch.float32)) < 0.05


def test_peak_memory_of_a_known_call():
    def call():
        first = torch.empty(2**20)  # 4 MiB
        del first
        return torch.empty(2**19), torch.empty(2**19)  # 2 + 2 MiB

    assert timing.peak_memory(call, "cpu") == pytest.approx(4.0, abs=0.1)


def test_interleaving():
    order: list[str] = []
    times = timing.interleaved_times({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 5, "cpu", 60)
    assert order == ["a", "b"] * 6 and all(len(t) == 5 for t in times.values())


def test_whole_model(monkeypatch):
    model = ModelCase("model", batch=2, lengths=(4, 9), layers=1, width=32, heads=2, vocabulary=64, target=1.0)
    rows, _ = run_tiny(monkeypatch, model)
    assert [row.implementation for row in rows] == ["sdpa", "ours"]
    assert all(row.unit == "tokens/s" and row.median > 0 for row in rows)
    assert rows[0].ratio == pytest.approx(rows[0].median / rows[1].median)


def test_own_grid_and_wrong_names():
    lines: list[str] = []
    rows = bench.run(lengths=[8], sharpness=[1.0], causal=True, repeats=3, device="cpu", report=lines.append)
    assert {row.case for row in rows} == {"L8, q x 1, causal"}
    with pytest.raises(ValueError, match="preset"):
        bench.run("nothing")
    with pytest.raises(ValueError, match="implementations"):
        bench.run(implementations=["nothing"])
    with pytest.raises(ValueError, match="device"):
        bench.run(device="tpu")


def test_targets_cover_the_table():
    wanted = [(c.name, t) for c in bench.PRESETS["targets"] if isinstance(c, Case) for t in c.targets]
    assert len(wanted) == 10 and isinstance(bench.PRESETS["targets"][-1], ModelCase)
