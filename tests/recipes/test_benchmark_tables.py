"""The benchmark pages say what their CSV files say."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "benchmarks"))

import tables


@pytest.mark.parametrize("page", tables.PAGES, ids=str)
def test_pages_agree_with_their_files(page):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run python recipes/benchmarks/tables.py"
    assert "<!-- attention -->" in text


def test_every_table_has_a_place():
    text = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for name in tables.TABLES:
        assert f"<!-- {name} -->" in text


def test_misses_are_marked():
    rows = [row for row in tables.read("targets-cpu.csv") if row["target"]]
    missed = sum(float(row["ratio"]) > float(row["target"]) for row in rows)
    assert tables.attention().count("missed") == missed and tables.attention().count("\n") == len(rows) + 2
