"""The benchmark: it checks before it times, compares what it says, and writes what it measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from hf_entmax import bench
from hf_entmax.bench import implementations, losses, runner, timing
from hf_entmax.bench.cases import Case, ModelCase

RESULTS = Path(__file__).parents[1] / "recipes" / "lab" / "results" / "bench"
TINY = Case("tiny", 2, 4, 24, head_dim=16, kv_heads=2, causal=True, against=("eager_softmax", "sdpa", "ours_torch"))


def run_tiny(monkeypatch, *cases, **options):
    monkeypatch.setitem(bench.PRESETS, "tiny", cases)
    lines: list[str] = []
    return bench.run("tiny", repeats=4, device="cpu", report=lines.append, **options), lines


@pytest.mark.slow
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


def test_ctrl_c_leaves_what_was_measured(monkeypatch, tmp_path):
    real = runner._measure_case

    def measure(case, *rest):
        if case.name == "padded":
            raise KeyboardInterrupt
        return real(case, *rest)

    monkeypatch.setattr(runner, "_measure_case", measure)
    monkeypatch.setitem(bench.PRESETS, "tiny", (TINY, Case("padded", 3, 2, 16, head_dim=16, padded=True)))
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        bench.run("tiny", repeats=3, device="cpu", report=lines.append, out=tmp_path)
    with (tmp_path / "tiny-cpu.csv").open(encoding="utf-8") as file:
        assert {row["case"] for row in csv.DictReader(file)} == {"tiny"}
    assert "1 of 2: tiny" in lines and "interrupted: 1 of 2 cases were measured" in lines


@pytest.mark.parametrize("name", [n for n in implementations.IMPLEMENTATIONS if n != "adasplash"])
@pytest.mark.parametrize("case", [TINY, Case("padded", 3, 4, 20, head_dim=16, padded=True)])
def test_every_implementation_passes_its_check(name, case):
    if (name, case) == ("hf_attention_normalizers", TINY):
        case = Case("no shared heads", 2, 4, 24, head_dim=16, causal=True)
    reason = implementations.unavailable(name, "cpu")
    if reason is not None:
        assert name == "ours_triton" or "not installed" in reason
        pytest.skip(reason)
    implementations.checked(name, implementations.make_problem(case, "cpu", torch.float32))


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


def test_decoding_says_what_is_read(monkeypatch):
    case = Case(
        "decoding", 1, 4, 200, head_dim=16, kv_heads=2, queries=1, modes=("forward",), against=("sdpa",), bits=4
    )
    rows, lines = run_tiny(monkeypatch, case)
    assert [row.implementation for row in rows] == ["ours_exact", "sdpa"] and rows[1].ratio is not None
    assert any("% of the keys are read, from 4 bits of each" in line for line in lines)


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
    order.clear()
    ticks = iter(range(100))
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = timing.interleaved_times(calls, 4, warm=3, turn=2, clock=lambda: float(next(ticks)))
    assert order == ["a", "a", "b", "b"] * 3 + ["a", "b"] and times == {"a": [1e3] * 4, "b": [1e3] * 4}


def test_spreads_and_ratios():
    assert timing.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, pytest.approx(1.8), pytest.approx(4.2), 5)
    assert timing.spread([1.0, 2.0, 3.0], 0.25) == (2.0, 1.5, 2.5, 3)
    assert timing.ratios([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]).median == 3.0


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


class TestLosses:
    def test_losses_of_ones_own_are_compared_with_cross_entropy(self, tmp_path):
        lines: list[str] = []
        options = {"repeats": 3, "device": "cpu", "report": lines.append, "only": ["flat"]}
        found = bench.run(classes=[40], rows=12, out=tmp_path, **options)
        assert {row.case for row in found} == {"V 40, N 12, flat", "V 40, N 12, D 256, flat"}
        assert [row.mode for row in found if "linear" in row.implementation].count("memory") == 4
        for row in found:
            base = next(r for r in found if (r.case, r.mode) == (row.case, row.mode))
            assert base.implementation.endswith("cross_entropy") and base.ratio is base.target is None
            if row is not base:
                limit = {"memory": 0.25, "forward+backward": 1.3 if "linear" in row.implementation else 1.2}
                assert row.ratio == pytest.approx(row.median / base.median) and row.target == limit[row.mode]
        assert any("ours / cross-entropy" in line for line in lines)
        with pytest.raises(ValueError, match="No case has a name with 'steep' in it"):
            bench.run("losses", only=["steep"])

    @pytest.mark.parametrize("dimension", [None, 8])
    @pytest.mark.parametrize("kind", ["flat", "frequency", "trained"])
    def test_every_loss_passes_its_check_and_a_wrong_one_is_not_timed(self, kind, dimension, monkeypatch):
        case = bench.LossCase(kind, 60, 24, dimension)
        assert len(losses.loss_steps(case, "cpu")[0]) == (7 if dimension is None else 4)
        name = "entmax_loss" if dimension is None else "linear_entmax_loss"
        right = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda *given: 1.001 * right(*given))
        with pytest.raises(RuntimeError, match=f"{name} alpha=1.5 is wrong in case 'V 60, N 24"):
            losses.loss_steps(case, "cpu")

    @pytest.mark.parametrize("dimension", [None, 8])
    def test_no_loss_in_bfloat16_is_timed_that_is_off(self, dimension, monkeypatch):
        case = bench.LossCase("flat", 300, 9, dimension)
        steps, errors = losses.loss_steps(case, "cpu", torch.bfloat16, (1.5,))
        name = "entmax_loss" if dimension is None else "linear_entmax_loss"
        assert len(steps) == 2 and list(errors) == [f"{name} alpha=1.5"]
        assert len(errors[f"{name} alpha=1.5"]) == (2 if dimension is None else 3)
        assert max(errors[f"{name} alpha=1.5"]) < (0.02 if dimension is None else 0.1)
        right = getattr(losses, name)

        def off(*given):
            loss = right(*given)
            return loss.detach() + 1.2 * (loss - loss.detach())

        monkeypatch.setattr(losses, name, off)
        with pytest.raises(RuntimeError, match=f"{name} alpha=1.5 is wrong"):
            losses.loss_steps(case, "cpu", torch.bfloat16, (1.5,))

    def test_the_committed_rows_are_of_cases_of_the_presets(self):
        for preset in ("losses", "losses-small"):
            path = RESULTS / f"{preset}-cpu.csv"
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            assert rows, path
            assert {row["case"] for row in rows} <= {case.name for case in bench.PRESETS[preset]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"preset": "losses-small", "dtype": "bfloat16"}, "dtype"),
        ({"classes": [10], "implementations": ["sdpa"]}, "implementations"),
        ({"classes": [10], "causal": True, "alpha": 1.5}, "causal, alpha"),
        ({"preset": "quick", "causal": True}, "causal"),
        ({"lengths": [8], "rows": 4}, "rows"),
    ],
)
def test_what_no_case_heeds_is_refused_before_anything_is_timed(monkeypatch, options, named):
    for name in ("_measure_case", "_measure_losses", "_measure_model"):
        monkeypatch.setattr(runner, name, lambda *arguments: pytest.fail("timed"))
    with pytest.raises(ValueError, match=f"Without effect here: {named}\\."):
        bench.run(device="cpu", **options)


def test_no_threads_are_refused():
    from hf_entmax import cli

    with pytest.raises(ValueError, match="--threads 0"):
        cli.bench(threads=0)
