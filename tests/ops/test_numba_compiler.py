"""Compiling the CPU kernels: the cache on disk, the second process, what is said, and which Numba is taken."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

import fresh
import pytest

numba = pytest.importorskip("numba")

from hf_entmax.ops.numba_cpu import compiler, kernels, threshold  # noqa: E402


def test_machine_code_that_cannot_be_kept(tmp_path, monkeypatch, caplog):
    from numba.core.caching import CacheImpl

    def answer(address):
        address[0] = 42

    signature = numba.types.void(numba.types.CPointer(numba.int64))
    obstacle = tmp_path / "a file where the folder should be"
    obstacle.write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(obstacle))
    # Without the folders beside the source and in the home directory, to which Numba would turn next.
    given = [c for c in CacheImpl._locator_classes if c.__name__.lstrip("_").startswith("UserProvided")]
    assert given
    monkeypatch.setattr(CacheImpl, "_locator_classes", given)
    kernel = compiler._compile(answer, signature)
    assert "NUMBA_CACHE_DIR" in caplog.text
    number = ctypes.c_int64(0)
    kernel.call(ctypes.addressof(number))
    assert number.value == 42


@pytest.mark.parametrize("damage", ["index", "code"])
def test_damaged_machine_code_is_compiled_again(damage, tmp_path, monkeypatch, caplog):
    def answer(address):
        address[0] = 43

    signature = numba.types.void(numba.types.CPointer(numba.int64))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiler._compile(answer, signature)
    files = list(tmp_path.rglob("*.nbi" if damage == "index" else "*.nbc"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    kernel = compiler._compile(answer, signature)
    assert "damaged" in caplog.text
    number = ctypes.c_int64(0)
    kernel.call(ctypes.addressof(number))
    assert number.value == 43


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A process that knows no kernel, and an empty cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(compiler, "_state", compiler._State())
    monkeypatch.setattr(compiler, "_said", set())
    return tmp_path


def started(monkeypatch):
    """The lists of names that second processes would be started with."""
    lists = []

    class Helper:
        def __init__(self, names):
            lists.append(list(names))
            self.remaining = list(names)

    monkeypatch.setattr(compiler, "_Helper", Helper)
    monkeypatch.setattr(compiler, "_can_start_helper", lambda: True)
    return lists


def test_the_second_process_takes_all_that_is_missing_but_the_first(empty_cache, monkeypatch, caplog):
    lists = started(monkeypatch)
    compiler.prepare(["forward", "square"], ["backward", "square", "general"])
    assert lists == [["square", "backward", "general"]]
    compiler.prepare(["solve_rows", "linear"])
    assert len(lists) == 1, "one second process at a time"
    assert caplog.text.count("Compiling the CPU kernels") == 1
    compiler.prepare(["exact_rows"], ["exact_bounds_4"])  # a wait that comes later has a word of its own
    assert not lists[1:] and caplog.text.count("Compiling the CPU kernels") == 1, "still busy with the others"


def test_nothing_is_started_for_what_is_there(empty_cache, monkeypatch, caplog):
    lists = started(monkeypatch)
    folder = compiler.cache_folder()
    for name in ("forward", "square", "backward"):
        (folder / f"{name}.done").touch()
    compiler.prepare(["forward", "square"], ["backward"])
    compiler.prepare(["forward", "linear"], ["backward"])  # one kernel: this process compiles it
    assert not lists and not caplog.text


@pytest.mark.parametrize("obstacle", ["other ranks", "no interpreter", "one core", "frozen"])
def test_no_second_process_where_it_would_be_in_the_way(obstacle, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert compiler._can_start_helper()
    if obstacle == "other ranks":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    elif obstacle == "no interpreter":
        monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    elif obstacle == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    else:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not compiler._can_start_helper()


def test_only_the_solvers_of_these_alphas_are_compiled(monkeypatch):
    import numpy as np

    asked = []
    monkeypatch.setattr(compiler, "prepare", lambda now, soon=(): asked.append(list(now)))
    monkeypatch.setattr(kernels, "kernel", lambda name: compiler.Kernel(len(name), lambda _: None))
    cases = {
        (1.5,): ["forward", "square"],
        (1.0, 2.0): ["forward", "softmax", "linear"],
        (1.7, 1.5): ["forward", "square", "general", "short_rows"],
        (1.1,): ["forward", "general", "full_rows"],
        (3.0,): ["forward", "above_two"],
    }
    for alphas, expected in cases.items():
        found = kernels.find_solvers(np.array(alphas) - 1.0, "forward")
        assert asked.pop() == expected
        assert found.single.tolist() == [len(threshold.solver_name(alpha - 1.0)) for alpha in alphas]
        assert bool(found.short_rows) == ("short_rows" in expected)
        assert bool(found.full_rows) == ("full_rows" in expected)


_STEP = """
import sys, torch
from hf_entmax.ops import entmax_attention
from hf_entmax.ops.numba_cpu import compiler
query, key, value = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
out, _ = entmax_attention(query, key, value, 1.5, backend="numba")
out.sum().backward()
helper = compiler._state.helper
print("helped" if helper else "alone")
while helper and helper.remaining:
    helper.wait_for(helper.remaining[0])
"""


def _first_step(cache, package):
    environment = {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(package)}
    run = fresh.run(_STEP, after="torch", environment=environment)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.slow
def test_a_first_step_compiles_once_for_all_environments_of_a_user(tmp_path):
    package = Path(compiler.__file__).parents[3]
    first = _first_step(tmp_path / "cache", package)
    assert first.stderr.count("Compiling the CPU kernels of hf_entmax") == 1
    assert first.stdout.strip() == ("helped" if compiler._can_start_helper() else "alone")
    files = sorted((tmp_path / "cache").rglob("*.nbi"))
    assert len(files) >= 3
    stamps = [file.stat().st_mtime_ns for file in files]
    shutil.copytree(package / "hf_entmax", tmp_path / "other" / "hf_entmax")
    second = _first_step(tmp_path / "cache", tmp_path / "other")
    assert second.stderr == "" and second.stdout.strip() == "alone"
    assert [file.stat().st_mtime_ns for file in files] == stamps
    assert sorted((tmp_path / "cache").rglob("*.nbi")) == files


def test_without_a_writable_folder_numba_chooses_the_place(tmp_path, monkeypatch):
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(obstacle))
    assert compiler.cache_folder() is None

    def kernel(record):
        pass

    placed = compiler._placed(kernel, None)
    assert placed.__code__.co_filename == __file__ and placed.__name__ == f"kernel_{compiler._digest()}"


def test_the_folder_is_the_users_unless_numba_is_told_one(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiler, "_user_cache", lambda: tmp_path)
    folder = compiler.cache_folder()
    assert folder.parent == tmp_path / "hf_entmax"
    assert compiler._digest() in folder.name and numba.__version__ in folder.name
    before = (folder / "kernels.py").stat().st_mtime_ns
    assert compiler.cache_folder() == folder and (folder / "kernels.py").stat().st_mtime_ns == before


def test_functions_of_one_factory_do_not_share_symbols():
    """Machine code is kept under names: with one name for two, what one process cached ran in the place of the other."""
    from hf_entmax.ops.numba_cpu import exact_bounds

    found, waiting = {}, [getattr(exact_bounds, f"_run_{bits}") for bits in (2, 4, 6, 8)]
    while waiting:
        function = waiting.pop().py_func
        found[function] = function.__qualname__
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        waiting += [inner for inner in cells if hasattr(inner, "py_func")]
    assert len(found) == 12 and len(set(found.values())) == 12, sorted(found.values())
