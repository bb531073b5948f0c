"""Runs the files of cases once, in a process where Triton interprets its kernels, and reports each of their tests here."""

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import fresh
import pytest

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

CASES = [Path(__file__).with_name(f"triton_{name}cases.py") for name in ("", "exact_")]
ROOT = Path(__file__).parents[2]
NAMES = [
    node.name
    for file in (*CASES, Path(__file__).with_name("conformance.py"))
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
assert NAMES


def _python(*arguments, **environment):
    """Run Python on the checkout in a fresh process; other tests may have imported Triton without the interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """``{test function: [None or why it failed, per parameter]}``."""
    report = tmp_path_factory.mktemp("triton") / "report.xml"
    arguments = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}", *map(str, CASES))
    run = _python("-m", "pytest", *arguments, TRITON_INTERPRET="1")
    assert report.exists(), run.stdout + run.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next(
            (case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
        )
        text = None if problem is None else f"{case.get('name')}: {problem.get('message')}\n{problem.text}"
        found.setdefault(str(case.get("name")).split("[")[0], []).append(text)
    assert set(found) == set(NAMES), run.stdout + run.stderr
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_interpreted(name, outcomes):
    problems = [text for text in outcomes[name] if text is not None]
    assert outcomes[name] and not problems, "\n".join(problems)


def test_asking_what_is_unsupported_does_not_import_triton():
    code = (
        "import sys, torch\n"
        "from hf_entmax.ops.triton_gpu import unsupported\n"
        "q = torch.zeros(1, 1, 2, 16)\n"
        "reason = unsupported(q, q, q, 1.5)\n"
        "assert reason == 'query: it is on cpu, the kernels are for cuda', reason\n"
        "assert 'triton' not in sys.modules\n"
    )
    run = fresh.run(code, after="torch", environment={"TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr
