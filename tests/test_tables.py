"""The table of tools is the one that the script wrote, and every row has its test."""

import tables


def test_the_page_shows_what_was_measured():
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.renewed(text) == text, "run `python tests/tables.py`"


def test_every_row_has_its_test():
    rows = tables._rows("works_with.csv")
    assert rows
    for row in rows:
        path, _, name = row["test"].partition("::")
        source = (tables.HERE.parent / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source and row["tool"] in source, row
