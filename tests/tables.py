"""The tables of tools and versions in docs/compatibility.md, from works_with.csv and versions.csv: ``python tests/tables.py`` writes them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "compatibility.md"


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def works_with() -> str:
    """What was tried with which tool; the last column names the test."""
    rows = [
        [
            f"{row['tool']} {row['version']}".strip(),
            row["use"],
            row["verdict"],
            f"`{row['test'].partition('::')[0]}`",
        ]
        for row in _rows("works_with.csv")
    ]
    return _table(["tool", "use", "", "test"], rows)


def versions() -> str:
    """Under which versions the tests of `versions.py` pass."""
    rows = [
        [row["transformers"], row["torch"], row["verdict"], f"{row['passed']} passed, {row['skipped']} skipped"]
        for row in _rows("versions.csv")
    ]
    return _table(["Transformers", "PyTorch", "", "tests"], rows)


def renewed(text: str) -> str:
    """The page with its tables as the files say."""
    for name, table in (("works with", works_with()), ("tested versions", versions())):
        marked = re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
        assert len(marked.findall(text)) == 1, f"docs/compatibility.md has no place, or several, for the table {name!r}"
        text = marked.sub(lambda _, table=table: table, text)
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
