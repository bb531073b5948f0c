"""The floors of the house: a file imports only from lower floors."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_entmax"


def _floors() -> dict[str, int]:
    """Top-level part of the package -> floor, as CONTRIBUTING.md tells it. Parts on one floor do not know each other."""
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (`[^|]+`) \|", page, flags=re.MULTILINE)
    return {part: int(floor) for floor, parts in rows for part in re.findall(r"`(\w+)`", parts)}


FLOORS = _floors()
assert FLOORS
#: The rooms of `hf_entmax.analysis` -> floor, by the same rule; `__init__` is the public door and imported by no room.
ANALYSIS = {
    "reading": 0,
    "metrics": 0,
    "statistics": 1,
    "plots": 1,
    "collecting": 2,
    "one_head": 3,
    "circuits": 3,
    "report": 3,
    "analyze": 4,
    "command": 5,
    "__init__": 6,
}
#: Imported by everybody on purpose: the package's public names.
FILES = sorted(PACKAGE.rglob("*.py"))
assert FILES


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


#: A string that is the dotted name of one of our modules: what ``importlib.import_module`` and tables of it are given.
MODULE_NAME = re.compile(r"hf_entmax(\.[A-Za-z_]\w*)+")


def _imports(path: Path):
    """(line, dotted module) of every import of hf_entmax, wherever it stands, by statement or by name in a string."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    yield from _imports_of(path.read_text(encoding="utf-8"), package)


def _module(path: Path) -> str:
    return ".".join(("hf_entmax", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def _imports_of(source: str, package: str):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            yield node.lineno, node.value
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            # f"hf_entmax.analysis.{name}": what stands before the first hole says the part.
            start = str(node.values[0].value).rpartition(".")[0]
            if MODULE_NAME.fullmatch(start):
                yield node.lineno, start
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "hf_entmax")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source_of = ".".join([*above, *([node.module] if node.module else [])])
            if source_of.split(".")[0] == "hf_entmax":
                yield from ((node.lineno, f"{source_of}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    own = _part(path)
    assert own in FLOORS, f"{own} has no floor: give it one"
    for line, module in _imports(path):
        parts = module.split(".")
        target = parts[1] if len(parts) > 1 and parts[1] in FLOORS else "__init__"
        if target == own:
            continue
        public = target == "__init__"
        assert (public and FLOORS[own] >= 8) or FLOORS[target] < FLOORS[own], (
            f"{path.name}:{line} on floor {FLOORS[own]} imports {module}"
        )


@pytest.mark.parametrize(
    "path", [p for p in FILES if _part(p) == "analysis"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_rooms_of_the_analysis_go_down(path):
    own = path.relative_to(PACKAGE / "analysis").with_suffix("").parts[0]
    assert own in ANALYSIS, f"{own} has no floor in the analysis: give it one"
    for line, module in _imports(path):
        parts = module.split(".")
        if parts[1] != "analysis":
            continue
        target = parts[2] if len(parts) > 2 and parts[2] in ANALYSIS else "__init__"
        assert target == own or ANALYSIS[target] < ANALYSIS[own], f"{path.name}:{line} in {own} imports {module}"


def test_imports_by_name_are_seen():
    source = """
TABLE = {"transformers.generation.utils": "hf_entmax.generation.generate_hook"}
def load(name):
    return importlib.import_module(f"hf_entmax.analysis.{name}")
"""
    assert [module for _, module in _imports_of(source, "hf_entmax")] == [
        "hf_entmax.generation.generate_hook",
        "hf_entmax.analysis",
    ]
    assert "hf_entmax.ops.numba_cpu" in [module for _, module in _imports(PACKAGE / "ops/backends.py")]


def _find_circle(sources: dict[str, str], packages: set[str]) -> list[str]:
    """Return modules each of which imports the one before it, back to the first; empty where there are none."""
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for _, target in _imports_of(source, module if module in packages else module.rpartition(".")[0]):
            while target not in sources:  # the name of something in a module
                target = target.rpartition(".")[0]
            if target != module:
                graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    sources = {_module(path): path.read_text(encoding="utf-8") for path in FILES}
    packages = {_module(path) for path in FILES if path.name == "__init__.py"}
    assert not (circle := _find_circle(sources, packages)), " <- ".join(circle)


def test_a_circle_is_seen_however_its_files_import():
    sources = {
        "hf_entmax": "",
        "hf_entmax.one": "from hf_entmax.two import name",
        "hf_entmax.two": "def load():\n    from . import three",
        "hf_entmax.three": "if TYPE_CHECKING:\n    from .four import name",
        "hf_entmax.four": 'importlib.import_module("hf_entmax.one")',
    }
    assert set(_find_circle(sources, {"hf_entmax"})) == set(sources) - {"hf_entmax"}
    assert not _find_circle(sources | {"hf_entmax.four": ""}, {"hf_entmax"})


@pytest.mark.parametrize(
    "path", [p for p in FILES if _part(p) in ("ops", "losses", "multilabel", "alpha", "length")], ids=str
)
def test_the_mathematics_does_not_know_transformers(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert not [n for n in names if n.split(".")[0] in ("transformers", "accelerate", "datasets")]


def test_nothing_imports_the_laboratory():
    root = PACKAGE.parent
    lab = (root / "recipes" / "lab", root / "tests" / "recipes" / "lab", root / "tests" / "model_types")
    others = [p for part in ("hf_entmax", "recipes", "tests", "docs") for p in (root / part).rglob("*.py")]
    for path in others:
        if any(room in path.parents for room in lab):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = (getattr(node, "module", None) or "") if isinstance(node, ast.ImportFrom) else ""
            for name in (module, *named, *(f"{module}.{name}" for name in named)):
                assert not re.match(r"(recipes\.)?lab(\.|$)", name), f"{path}:{node.lineno} imports {name}"


def test_no_file_does_too_much():
    long = {
        str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not long
