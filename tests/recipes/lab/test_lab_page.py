"""The pages of results are what the committed rows give."""

import re

import pytest

from recipes.lab import __main__ as program
from recipes.lab.pages import benchmarks
from recipes.lab.pages.page import PAGES, render
from recipes.lab.rows import CARDS, order, spread


@pytest.mark.parametrize(("name", "template"), PAGES.items())
def test_the_committed_pages_are_what_the_rows_give(name, template):
    assert (CARDS / name).read_text(encoding="utf-8") == render(template), "run python -m recipes.lab page"


def test_links_between_headings_lead_somewhere():
    headings = {
        name: {
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
            for line in text.splitlines()
            if line[:1] == "#"
        }
        for name in PAGES
        for text in [(CARDS / name).read_text(encoding="utf-8")]
    }
    links = re.findall(r"\]\(([\w.]*)#([^)]+)\)", (CARDS / "RESULTS.md").read_text(encoding="utf-8"))
    assert len(links) > 15
    assert [link for link in links if link[1] not in headings[link[0] or "RESULTS.md"]] == []


def test_pages_say_nothing_without_rows(tmp_path):
    program.main(["page", "--results", str(tmp_path / "none"), "--cards", str(tmp_path / "cards")])
    assert (tmp_path / "cards" / "RESULTS.md").read_text(encoding="utf-8").count("##") == 0
    card = (tmp_path / "cards" / "controllable_mappings.md").read_text(encoding="utf-8")
    assert "## As attention" in card and "## Synthetic" not in card and "figures/" not in card


def test_spread_and_order():
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 3.0]) == "2.00 ± 1.41"
    keys = [("learned", "1.5"), ("softmax", "1.5"), ("1.5", "1.0"), ("softmax", "1.0")]
    assert sorted(keys, key=order) == [keys[3], keys[2], keys[1], keys[0]]


class TestBenchmarks:
    @pytest.mark.parametrize("page", benchmarks.PAGES, ids=str)
    def test_pages_agree_with_their_files(self, page):
        text = page.read_text(encoding="utf-8")
        assert benchmarks.filled(text) == text, "run python -m recipes.lab page"
        assert "<!-- end -->" in text

    def test_every_table_has_a_place(self):
        text = "".join(page.read_text(encoding="utf-8") for page in benchmarks.PAGES)
        for name in benchmarks.TABLES:
            assert f"<!-- {name} -->" in text

    def test_misses_are_marked(self):
        rows = [row for row in benchmarks.read("targets-cpu") if row["target"]]
        missed = sum(float(row["ratio"]) > float(row["target"]) for row in rows)
        table = benchmarks.attention()
        assert table.count("missed") == missed and table.count("\n") == len(rows) + 2
