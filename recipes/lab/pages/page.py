"""The pages of results. Their text stands in the Markdown templates beside this file, their numbers come from the rows."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from .. import mapping_views, views
from ..rows import CARDS, RESULTS, ROOT, Rows, column, commands, data, machines, origin
from . import (
    benchmarks,
    claims,
    head_alphas,
    length,
    long_context,
    mappings,
    pretrained,
    pretrained_heads,
    tables,
)

#: Templates, by the page that is made of them.
PAGES = {"RESULTS.md": "results.md.j2", "controllable_mappings.md": "mappings.md.j2"}
OPTIONS = {"trim_blocks": True, "lstrip_blocks": True}
#: What templates may call, by its name.
CALLED = (claims, head_alphas, length, long_context, mappings, pretrained, pretrained_heads, tables)
CALLED += (views, mapping_views)
CALLED += (column, commands, data, machines, origin)


def render(template: str, results: Path = RESULTS, figures: Path = CARDS / "figures") -> str:
    """A page.

    Args:
        template: its file beside this one.
        results: folder of the rows.
        figures: folder of the figures; a page shows those that are there.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, **OPTIONS
    )

    def shown(name: str, text: str) -> str:
        return f"![{text}](figures/{name}.png)\n\n" if (figures / f"{name}.png").exists() else ""

    named = {each.__name__.rpartition(".")[2]: each for each in CALLED}
    page = environment.get_template(template).render(rows=Rows(results), shown=shown, **named)
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"


def write_all(results: Path = RESULTS, cards: Path = CARDS) -> None:
    """Write the pages, and the tables within the pages of the benchmarks where the folder is this repository's."""
    cards.mkdir(parents=True, exist_ok=True)
    for name, template in PAGES.items():
        (cards / name).write_text(render(template, results, cards / "figures"), encoding="utf-8")
        print(f"wrote {cards / name}")
    for page in benchmarks.PAGES if cards == CARDS else ():
        page.write_text(benchmarks.filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
