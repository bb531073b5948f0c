"""The tour: every cell runs, and says what the text around it promises."""

import os
import re
from pathlib import Path

import nbformat
import pytest
import tiny_models as tiny
from nbclient import NotebookClient

TOUR = Path(__file__).parents[2] / "recipes" / "tour.ipynb"


def _printed(notebook):
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [o for o in outputs if "image/png" in o.get("data", {})]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout"), figures


def _check(notebook):
    printed, figures = _printed(notebook)
    losses = {name: float(line.split()[1]) for line in printed.splitlines() for name in ("softmax:", "patched:") if line.startswith(name)}  # fmt: skip
    assert abs(losses["patched:"] - losses["softmax:"]) <= 0.005 * losses["softmax:"]
    assert "the same tokens without it: True" in printed and "0 violations" in printed
    assert printed.splitlines()[-1] == "True True"
    assert len(figures) == 3
    return printed


def test_the_tour_as_it_stands():
    notebook = nbformat.read(TOUR, 4)
    printed = _check(notebook)
    named = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    (change,) = re.findall(r"not seen: .*, ([+-][\d.]+)", printed)
    assert f"changes by {change}" in named and "changes by" not in named.replace(f"changes by {change}", "")
    assert TOUR.stat().st_size < 400_000


@pytest.mark.slow
def test_the_tour_runs(tmp_path, monkeypatch):
    tiny.save(tiny.build("llama"), tmp_path / "model")
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("\n".join(tiny.texts(30, 20)) + "\n", encoding="utf-8")
    settings = {"MODEL": tmp_path / "model", "TEXT": tmp_path / "{split}.txt", "OUT": tmp_path / "out", "BLOCK": 16}
    for name, value in settings.items():
        monkeypatch.setenv(f"TOUR_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOUR.parents[1]), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(TOUR, 4)
    before = [cell.source for cell in notebook.cells]
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _check(notebook)
    assert before == [cell.source for cell in notebook.cells] and (tmp_path / "out" / "model" / "config.json").exists()
