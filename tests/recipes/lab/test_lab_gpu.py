"""The program for a GPU, on a CPU: every part at tiny sizes, and what it does when parts crash, hang or have no time."""

import json
import os
import subprocess
import sys
import time
import types

import fresh
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

from recipes.lab.gpu import __main__ as program
from recipes.lab.gpu import correctness, problems, timings
from recipes.lab.gpu.compiled import loops
from recipes.lab.gpu.rows import Rows, read
from recipes.lab.gpu.setting import Setting


def statuses(out, part):
    return {line["case"]: line["status"] for line in read(out) if line["part"] == part}


class Forked:
    """Stands in for `subprocess.Popen`: the same module with the same arguments, in a fork that has imported torch."""

    pid = 2**30  # no process has this number, as none is left of one that has ended

    def __init__(self, command, cwd, env, stdout, stderr, **_):
        assert command[:2] == [sys.executable, "-m"] and cwd == program.ROOT
        self.done = fresh.run_module(*command[2:], after="torch", environment=env)
        stdout.write((self.done.stdout + self.done.stderr).encode())

    def wait(self, timeout=None):
        return self.done.returncode


@pytest.mark.slow
def test_every_part_at_tiny_sizes(tmp_path, capsys, monkeypatch):
    if hasattr(os, "fork"):
        monkeypatch.setattr(program, "subprocess", types.SimpleNamespace(Popen=Forked))
    program.main(["--out", str(tmp_path), "--tiny", "--minutes", "20", "--parts", *program.PARTS])
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    for part in program.PARTS:
        found = statuses(tmp_path, part)
        assert found.pop("whole part") == "finished", (part, log[-3000:])
        assert found and set(found.values()) <= {"ok", "skipped"}, (part, found, log[-3000:])
        assert "ok" in found.values(), (part, found)
    lines = {(line["part"], line["case"]): line for line in read(tmp_path)}
    assert lines["timings", "n 20, D 16, as random weights"]["goals"]["ours_learned / sdpa_flash"]["ratio"] > 0
    assert lines["models", "llama, L 24"]["tokens_per_second"]["ours"] > 0
    assert lines["compiled", "rows"]["kernels"]["_solve_rows_kernel"]["registers"] > 0
    table = json.loads((tmp_path / "blocks.json").read_text(encoding="utf-8"))
    assert table["blocks"]["half-64"]["rows"] in (64, 128)
    assert "goal 2.5" in capsys.readouterr().out
    # What is done is left alone.
    before = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    program.main(["--out", str(tmp_path), "--tiny", "--minutes", "20", "--parts", *program.PARTS])
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == before


START = """
import os, sys, time
from pathlib import Path
from recipes.lab.gpu.rows import Rows, Skip
rows = Rows(Path(sys.argv[1]), sys.argv[2])
def wrong(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def skipped(): raise Skip("nothing to see")
rows.run("first", lambda: {"value": 1})
"""
CRASH = START + 'rows.run("second", os.abort)\nrows.run("third", lambda: {"value": 3})'
DEVICE = START + 'rows.run("second", wrong)\nrows.run("third", skipped)'
PLAIN = START + 'rows.run("second", lambda: {"value": 2})'
HANG = START + 'rows.run("second", lambda: time.sleep(0 if os.path.exists(sys.argv[1] + "/go") else 3600) or {})'


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Run parts whose programs are given."""

    def run(programs, minutes=60.0, seconds=3600.0):
        monkeypatch.setattr(program, "PARTS", dict.fromkeys(programs, ("", seconds)))
        monkeypatch.setattr(
            program, "command_of", lambda name, out, *_: [sys.executable, "-c", programs[name], str(out), name]
        )
        program.main(["--out", str(tmp_path), "--minutes", str(minutes), "--parts", *programs])

    return run


def test_a_crash_costs_its_case_and_nothing_else(play, tmp_path, capsys):
    play({"crash": CRASH, "device": DEVICE, "plain": PLAIN})
    assert statuses(tmp_path, "crash") == {
        "first": "ok", "second": "crashed", "third": "ok", "whole part": "finished"
    }  # fmt: skip
    assert statuses(tmp_path, "device") == {
        "first": "ok", "second": "failed", "third": "skipped", "whole part": "finished"
    }  # fmt: skip
    assert statuses(tmp_path, "plain")["whole part"] == "finished"
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"part": "part", "ca')  # a line that a crash cut short is left out
    assert sum(line["case"] == "first" and line["status"] == "ok" for line in read(tmp_path)) == 3
    assert "CRASHED crash: second" in capsys.readouterr().out


@pytest.mark.slow
def test_the_budget_cuts_and_a_further_run_goes_on(play, tmp_path, monkeypatch):
    real = subprocess.Popen.wait

    def wait(process, timeout=None):
        """The time of the part is over once its second case runs, however slow the machine is."""
        while timeout is not None and process.poll() is None:
            if statuses(tmp_path, "hang").get("second") == "started":
                raise subprocess.TimeoutExpired(process.args, timeout)
            time.sleep(0.01)
        return real(process)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        play({"hang": HANG, "plain": PLAIN})
    assert statuses(tmp_path, "hang") == {"first": "ok", "second": "cut", "whole part": "cut"}
    assert statuses(tmp_path, "plain")["whole part"] == "finished"
    play({"hang": HANG}, minutes=0.01)
    (last,) = read(tmp_path)[-1:]
    assert last["status"] == "cut" and "of the budget were left" in last["reason"]
    (tmp_path / "go").touch()
    play({"hang": HANG, "plain": PLAIN})
    assert statuses(tmp_path, "hang") == {"first": "ok", "second": "ok", "whole part": "finished"}
    assert sum(line["case"] == "first" and line["status"] == "ok" for line in read(tmp_path)) == 2


def test_a_case_without_time_is_tried_again(play, tmp_path):
    slow = START + "from recipes.lab.gpu.rows import Cut\ndef slow(): raise Cut('no time')\n"
    play({"slow": slow + 'rows.run("second", slow)'})
    assert statuses(tmp_path, "slow") == {"first": "ok", "second": "cut", "whole part": "cut"}
    play({"slow": PLAIN})
    assert statuses(tmp_path, "slow") == {"first": "ok", "second": "ok", "whole part": "finished"}


def test_a_tool_that_takes_too_long_is_cut(tmp_path, monkeypatch):
    def no_time(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(correctness.shutil, "which", lambda name: name)
    monkeypatch.setattr(correctness.subprocess, "run", no_time)
    correctness.run_sanitizer(Rows(tmp_path, "sanitizer"), Setting(tmp_path, True, 60.0))
    assert set(statuses(tmp_path, "sanitizer").values()) == {"cut"}


@pytest.mark.parametrize("name", ["out", "query", "alpha"])
def test_nothing_is_timed_that_is_off(name, monkeypatch):
    real = timings.entmax_attention
    tensors, alpha = problems.random(2, 2, 70, 16, "cpu"), torch.tensor([1.3, 1.7], requires_grad=True)

    def attention(*inputs, backend, **options):
        if backend == "triton":
            place = ("query", "key", "value", "alpha", "out").index(name)
            inputs = [t * 1.0 for t in inputs]
            if place < 4:
                inputs[place].register_hook(lambda grad: grad * 1.2)
            out = real(*inputs, backend="torch", **options)[0]
            return out + 0.1 * (name == "out"), None
        return real(*inputs, backend=backend, **options)

    monkeypatch.setattr(timings, "entmax_attention", lambda *a, backend, **o: real(*a, backend="torch", **o))
    assert timings.check(tensors, alpha)["alpha"] < 0.05 and "alpha" not in timings.check(tensors, 1.5)
    monkeypatch.setattr(timings, "entmax_attention", attention)
    with pytest.raises(ValueError, match=f"in {name}: nothing was timed"):
        timings.check(tensors, alpha)


def test_the_anchor_is_called_by_its_own_names(monkeypatch):
    """As adasplash 0.2 has them; what it refuses is left out with its words."""
    seen = []

    def adasplash_v1(q, k, v, alpha=1.5, is_causal=False, varlen=None, niter=10):
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        seen.append((alpha, is_causal))
        return v * 1.0

    def adasplash_v2(q, k, v, niter=1, varlen=None):
        raise AssertionError("If varlen is None, N_CTX must be a power of two.")

    module = types.SimpleNamespace(adasplash_v1=adasplash_v1, adasplash_v2=adasplash_v2)
    monkeypatch.setitem(sys.modules, "adasplash", module)
    tensors, alpha = problems.random(1, 2, 70, 16, "cpu"), torch.tensor([1.3, 1.7], requires_grad=True)
    functions = timings.implementations(tensors, alpha, eager=False)
    reasons = timings.drop_failing(functions, [*tensors, alpha], torch.randn_like(tensors[2]))
    assert seen == [(1.5, True)] and "adasplash_v1" in functions and "adasplash_v2" not in functions
    assert "power of two" in reasons["adasplash_v2"]


def test_loops_of_machine_code():
    code = """
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/                   MUFU.EX2 R3, R3 ;
        /*0030*/              @!P0 FSEL R4, R3, RZ, P1 ;
        /*0034*/              @!P1 BRA `(.L_x_3) ;
        /*0038*/                   STL [R1], R4 ;
        /*003c*/                   FFMA R4, R4, R4, R4 ;
        /*003e*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*003f*/                   FADD R4, R4, R4 ;
.L_x_4:
        /*0040*/                   FFMA R5, R4, R3, R5 ;
        /*0050*/               @P2 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   FADD R5, R5, R5 ;
        /*0070*/                   BRA `(.L_x_2) ;
"""
    (loop,) = loops(code)
    assert loop == {
        "instructions": 10, "products": 1, "powers": 1, "spills": 1, "half_rate": 1, "cycles": 10, "least": 8
    }  # fmt: skip
