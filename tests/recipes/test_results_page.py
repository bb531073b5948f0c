"""The page of results is what the committed rows give."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import results_page


def test_the_committed_page_is_what_the_rows_give():
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page()


def test_spread_and_order():
    assert results_page.spread([1.0]) == "1.00"
    assert results_page.spread([1.0, 3.0]) == "2.00 ± 1.41"
    keys = [("learned", "1.5"), ("softmax", "1.5"), ("1.5", "1.0"), ("softmax", "1.0")]
    assert sorted(keys, key=results_page.order) == [keys[3], keys[2], keys[1], keys[0]]
