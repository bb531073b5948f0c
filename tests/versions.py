"""Run a fixed choice of tests under other versions of Transformers and PyTorch; write versions.csv.

python tests/versions.py                            # all pairs, in throw-away environments
python tests/versions.py --folder /tmp/environments # which are kept and used again
python tests/versions.py --only 5.18.0,2.13.0       # one pair: Transformers, PyTorch
python -m recipes.lab page                          # then: the table in docs/compatibility.md
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import environments  # noqa: E402

TABLE = HERE / "versions.csv"
COLUMNS = ("transformers", "torch", "python", "verdict", "passed", "skipped", "failed")
#: The oldest Transformers that is supported, one between, the newest; the oldest PyTorch beside the one installed here.
TRANSFORMERS, TORCH = ("5.18.0", "5.20.2", "5.23.0"), "2.6.0"
#: Operations; saving and loading, nothing left a softmax; generation; training.
TESTS = [
    "ops/test_attention.py",
    "integration/test_persistence.py",
    "integration/test_never_softmax.py",
    "generation/test_processor.py",
    "training/test_training.py",
]
MINUTES = 60


def pairs() -> list[tuple[str, str]]:
    """Transformers and PyTorch, of each the version."""
    installed = metadata.version("torch").partition("+")[0]
    return [(version, installed) for version in TRANSFORMERS] + [(TRANSFORMERS[-1], TORCH)]


def row_of(transformers: str, torch: str, folder: Path) -> dict[str, str]:
    """What the tests say under one pair of versions."""
    row = {"transformers": transformers, "torch": torch, "python": platform.python_version()}
    installed = metadata.version("torch").partition("+")[0]
    packages = [f"transformers=={transformers}", *([] if torch == installed else [f"torch=={torch}"])]
    try:
        python = environments.make(folder, packages, pinned=() if len(packages) > 1 else ("torch",))
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or [str(error)]
        return {**row, "verdict": f"does not install: {said[-1][:150]}"}
    results = folder / "results.xml"
    try:
        tests = [str(HERE / test) for test in TESTS]
        said = environments.run_tests(python, ["-m", "not slow", *tests], results, MINUTES * 60)
    except subprocess.TimeoutExpired:
        return {**row, "verdict": f"took more than {MINUTES} minutes"}
    print(said[-2000:])
    if not results.exists():
        return {**row, "verdict": "the tests do not start"}
    cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    verdict = "works" if passed and not failed else "fails: " + ", ".join(sorted({c.get("name", "") for c in failed}))
    return {
        **row,
        "verdict": verdict[:300],
        "passed": str(passed),
        "skipped": str(len(skipped)),
        "failed": str(len(failed)),
    }


def read() -> list[dict[str, str]]:
    """The rows of the table."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(row: dict[str, str]) -> None:
    """Put one row into the table, in the place of the one for the same versions."""
    key = row["transformers"], row["torch"]
    rows = [old for old in read() if (old["transformers"], old["torch"]) != key]
    rows = sorted([*rows, row], key=lambda r: [list(map(int, r[n].split("."))) for n in ("torch", "transformers")])
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where environments are kept and used again")
    parser.add_argument("--only", help="one pair, e.g. 5.18.0,2.13.0")
    options = parser.parse_args()
    wanted = [tuple(options.only.split(","))] if options.only else pairs()
    with tempfile.TemporaryDirectory() as temporary:
        for transformers, torch in wanted:
            name = f"transformers-{transformers}-torch-{torch}"
            write(row_of(transformers, torch, (options.folder or Path(temporary)) / name))


if __name__ == "__main__":
    main()
