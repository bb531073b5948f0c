"""The floors of the house: a file imports only from lower floors."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

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


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import of hf_entmax, wherever it stands, by statement or by name in a string."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    return list(_imports_of(_nodes(path), package))


def _module(path: Path) -> str:
    return ".".join(("hf_entmax", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def _imports_of(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[int, str]]:
    for node in nodes:
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


def test_imports_go_down():
    assert {_part(path) for path in FILES} <= set(FLOORS), "a part has no floor: give it one"
    for path in FILES:
        own = _part(path)
        for line, module in _imports(path):
            parts = module.split(".")
            target = parts[1] if len(parts) > 1 and parts[1] in FLOORS else "__init__"
            if target == own:
                continue
            public = target == "__init__"
            assert (public and FLOORS[own] >= 8) or FLOORS[target] < FLOORS[own], (
                f"{path}:{line} on floor {FLOORS[own]} imports {module}"
            )


def test_rooms_of_the_analysis_go_down():
    for path in FILES:
        if _part(path) != "analysis":
            continue
        own = path.relative_to(PACKAGE / "analysis").with_suffix("").parts[0]
        assert own in ANALYSIS, f"{own} has no floor in the analysis: give it one"
        for line, module in _imports(path):
            parts = module.split(".")
            if parts[1] != "analysis":
                continue
            target = parts[2] if len(parts) > 2 and parts[2] in ANALYSIS else "__init__"
            assert target == own or ANALYSIS[target] < ANALYSIS[own], f"{path}:{line} in {own} imports {module}"


def test_imports_by_name_are_seen():
    source = """
TABLE = {"transformers.generation.utils": "hf_entmax.generation.generate_hook"}
def load(name):
    return importlib.import_module(f"hf_entmax.analysis.{name}")
"""
    assert [module for _, module in _imports_of(ast.walk(ast.parse(source)), "hf_entmax")] == [
        "hf_entmax.generation.generate_hook",
        "hf_entmax.analysis",
    ]
    assert "hf_entmax.ops.numba_cpu" in [module for _, module in _imports(PACKAGE / "ops/backends.py")]


def _find_circle(imports: dict[str, list[str]]) -> list[str]:
    """Return modules each of which imports the one before it, back to the first; empty where there are none."""
    graph: dict[str, set[str]] = {module: set() for module in imports}
    for module, targets in imports.items():
        for target in targets:
            while target not in imports:  # the name of something in a module
                target = target.rpartition(".")[0]
            if target != module:
                graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    circle = _find_circle({_module(path): [module for _, module in _imports(path)] for path in FILES})
    assert not circle, " <- ".join(circle)


def test_a_circle_is_seen_however_its_files_import():
    sources = {
        "hf_entmax": "",
        "hf_entmax.one": "from hf_entmax.two import name",
        "hf_entmax.two": "def load():\n    from . import three",
        "hf_entmax.three": "if TYPE_CHECKING:\n    from .four import name",
        "hf_entmax.four": 'importlib.import_module("hf_entmax.one")',
    }
    imports = {
        module: [name for _, name in _imports_of(ast.walk(ast.parse(source)), "hf_entmax")]
        for module, source in sources.items()
    }
    assert set(_find_circle(imports)) == set(sources) - {"hf_entmax"}
    assert not _find_circle(imports | {"hf_entmax.four": []})


def test_the_mathematics_does_not_know_transformers():
    for path in FILES:
        if _part(path) not in ("ops", "losses", "multilabel", "alpha", "length"):
            continue
        for node in _nodes(path):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            known = {name.split(".")[0] for name in named} & {"transformers", "accelerate", "datasets"}
            assert not known, f"{path}:{node.lineno} imports {known}"


def test_nothing_imports_the_laboratory():
    root = PACKAGE.parent
    lab = (root / "recipes" / "lab", root / "tests" / "recipes" / "lab", root / "tests" / "model_types")
    others = [p for part in ("hf_entmax", "recipes", "tests", "docs") for p in (root / part).rglob("*.py")]
    for path in others:
        if any(room in path.parents for room in lab):
            continue
        if not re.search(r"\blab\b", path.read_text(encoding="utf-8")):
            continue
        for node in _nodes(path):
            named = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = (getattr(node, "module", None) or "") if isinstance(node, ast.ImportFrom) else ""
            for name in (module, *named, *(f"{module}.{name}" for name in named)):
                assert not re.match(r"(recipes\.)?lab(\.|$)", name), f"{path}:{node.lineno} imports {name}"


def test_no_file_does_too_much():
    long = {
        str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not long
