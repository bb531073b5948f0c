"""The one renderer: pages are Markdown, and what stands in them between two marks is made from the rows.

    <!-- tables.morphology inflection_epochs -->
    ...
    <!-- end -->

The first mark names a function of a module of this package and the words that it is given after the rows. In running text the
marks stand on one line: ``after <!-- tables.value inflection_beams steps -->24<!-- end --> steps``. Everything else is left as it is.
"""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

from ..rows import CARDS, RESULTS, ROOT, Rows

PAGES = (
    CARDS / "RESULTS.md", CARDS / "controllable_mappings.md", ROOT / "docs" / "compatibility.md", ROOT / "docs" / "speed.md",
    ROOT / "docs" / "guides" / "long_texts.md", RESULTS / "bench" / "README.md",
)  # fmt: skip
_MARKED = re.compile(r"(<!-- (\w+)\.(\w+)((?: [^\n>]*?)?) -->)(\n?)(.*?)(<!-- end -->)", re.DOTALL)


def filled(text: str, rows: Rows) -> str:
    """Return a page with what its marks name, made from the rows."""

    def made(match: re.Match[str]) -> str:
        mark, module, function, words, block, _, end = match.groups()
        value = str(getattr(importlib.import_module(f"{__package__}.{module}"), function)(rows, *shlex.split(words)))
        return f"{mark}\n\n{value.strip()}\n\n{end}" if block else f"{mark}{value}{end}"

    return _MARKED.sub(made, text)


def write_all(rows: Rows, pages: tuple[Path, ...] = PAGES) -> None:
    """Fill all pages, in place."""
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
        print(f"wrote {page}")
