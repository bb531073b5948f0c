"""The tables of the benchmark pages and of the documentation, from their CSV files.

A table stands between ``<!-- NAME -->`` and ``<!-- end -->`` in pages of `docs/` and in `recipes/lab/results/bench/README.md`;
everything around it is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..rows import RESULTS, ROOT, Rows, distinct, row_table, table
from . import long_context
from .model_types import model_types

FOLDER = RESULTS / "bench"
DOCS = ROOT / "docs"
PAGES = (DOCS / "compatibility.md", DOCS / "speed.md", DOCS / "guides" / "long_texts.md", FOLDER / "README.md")

read = Rows(FOLDER)
_MARKED = re.compile(r"(<!-- (?!end)(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def attention() -> str:
    """Every case of the attention benchmark that has a limit, with what was measured."""
    rows = read("targets-cpu")
    density = {row["case"]: float(row["density"]) for row in rows if row["density"]}
    return row_table([row for row in rows if row["target"]], {
        "case": lambda row: f"{row['case']}, {row['mode']}",
        "density": lambda row: f"{100 * density[row['case']]:.1f} %" if row["case"] in density else "dense",
        "against": lambda row: f"`{row['implementation']}`",
        "at most": lambda row: f"{float(row['target']):g}",
        "measured": lambda row: f"{float(row['ratio']):{'.2g' if float(row['ratio']) < 0.1 else '.2f'}}",
        "": lambda row: "**missed**" if float(row["ratio"]) > float(row["target"]) else "",
    })  # fmt: skip


def _losses(name: str, implementation: str, mode: str) -> str:
    """Ratios by alpha and kind of logits."""
    rows = [row for row in read(name) if row["implementation"].startswith(implementation) and row["mode"] == mode]
    kinds = distinct(rows, "case")
    found = {(float(row["implementation"].partition("=")[2]), row["case"]): row for row in rows}
    alphas = sorted({alpha for alpha, _ in found}, reverse=True)

    def cell(alpha: float, kind: str) -> str:
        row = found.get((alpha, kind))
        if row is None:
            return ""
        missed = row["target"] and float(row["ratio"]) > float(row["target"])
        return f"**{float(row['ratio']):.2f}**" if missed else f"{float(row['ratio']):.2f}"

    return table(("alpha", *kinds), [(f"{alpha:g}", *(cell(alpha, kind) for kind in kinds)) for alpha in alphas])


TABLES: dict[str, Callable[[], str]] = {
    "attention": attention,
    "losses": lambda: _losses("losses-cpu", "entmax_loss", "forward+backward"),
    "linear_time": lambda: _losses("losses-cpu", "linear_entmax_loss", "forward+backward"),
    "linear_memory": lambda: _losses("losses-cpu", "linear_entmax_loss", "memory"),
    "long_context": lambda: long_context.models(Rows(), length=8192),
    "model_types": model_types,
    "small_losses": lambda: _losses("losses-small-cpu", "entmax_loss", "forward+backward"),
}


def filled(text: str) -> str:
    """A page with its tables as the files have them."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return _MARKED.sub(replace, text)
