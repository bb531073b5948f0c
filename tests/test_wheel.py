"""What is installed without a checkout: the files of the wheel, as its build back end lists them, and what they need."""

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_entmax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: What Transformers, datasets and torch require, so that it is there; Numba's own part; and two that only a benchmark or an adapter uses.
GIVEN = {"numpy", "tokenizers", "tqdm"} | {"pandas"} | {"networkx"} | {"llvmlite"} | {"adasplash", "peft"}


def _files(builder: str) -> set[str]:
    module = pytest.importorskip(f"hatchling.builders.{builder.lower()}", reason="hatchling is not installed")
    made = getattr(module, f"{builder}Builder")(str(ROOT))
    return {str(Path(file.distribution_path).as_posix()) for file in made.recurse_included_files()}


def _on_disk(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    kept = (p for p in found if "__pycache__" not in p.parts and p.suffix not in (".nbi", ".nbc"))
    return {path.relative_to(ROOT).as_posix() for path in kept}


def test_the_wheel_holds_the_whole_package_and_the_data_of_the_quickstart():
    files = _files("Wheel")
    assert files == _on_disk(PACKAGE) | {"hf_entmax/data/english_verbs.tsv"}
    for needed in ("py.typed", "analysis/report/assets/report.html.j2", "quickstart/workflow.py"):
        assert f"hf_entmax/{needed}" in files


def test_the_source_distribution_builds_that_wheel():
    assert _files("Sdist") >= _on_disk(PACKAGE) | {"recipes/data/english_verbs.tsv", "constraints.txt", "Makefile"}


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"hf_entmax"}


def test_what_the_package_imports_is_declared():
    extras = PROJECT["optional-dependencies"]
    required = [
        *PROJECT["dependencies"],
        *(extras[e] for e in ("figures", "cpu", "gpu", "serving", "speech", "benchmark")),
    ]
    flat = [r for entry in required for r in ([entry] if isinstance(entry, str) else entry)]
    declared = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in flat}
    used = {name: path.name for path in PACKAGE.rglob("*.py") for name in _imported(path)}
    assert {"torch", "matplotlib", "numba"} <= set(used)
    undeclared = {name: file for name, file in used.items() if name not in declared | GIVEN}
    assert not undeclared
