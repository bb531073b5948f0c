"""Shares of proved answers: against the searches themselves, and rows that are not made again."""

import csv

import pytest
import tiny_models as tiny
import torch

import hf_entmax
from hf_entmax.generation import beam_search
from recipes.lab import certified


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny T5 with answers of a few tokens, and texts."""
    place = tmp_path_factory.mktemp("certified")
    torch.manual_seed(0)
    model = hf_entmax.patch_model(tiny.build("t5"), alpha=1.0, output_alpha=1.5)
    tiny.save(model, place / "t5")
    (place / "texts.tsv").write_text("source\ttarget\n" + "".join(f"{text}\tx\n" for text in tiny.texts(6, 5)))
    return place


def rows_of(folder, *words):
    table = folder / "rows.csv"
    certified.main([*map(str, (folder / "t5", folder / "texts.tsv", *words)), "--write", "3", "--out", str(table)])
    with table.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_shares_are_those_of_the_searches(folder):
    rows = rows_of(folder, "--alphas", "1", "2", "--beams", "2", "50", "--budget", "30")
    assert [(row["output_alpha"], row["beams"]) for row in rows] == [
        ("1.0", "2"),
        ("1.0", "50"),
        ("2.0", "2"),
        ("2.0", "50"),
    ]
    model, tokenizer = certified.AutoModelForSeq2SeqLM.from_pretrained(folder / "t5"), tiny.tokenizer()
    for row in rows:
        search = {"num_beams": int(row["beams"]), "max_new_tokens": 3, "output_alpha": float(row["output_alpha"])}
        batches = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in tiny.texts(6, 5)]
        found = [beam_search(model, dict(batch), **search)[0] for batch in batches]
        for name in ("optimal", "exhaustive"):
            assert float(row[name]) == round(100 * sum(getattr(one, name) for one in found) / 6, 1)
        assert float(row["exact"]) >= float(row["optimal"])
    assert float(rows[0]["exhaustive"]) == 0  # of a softmax nothing is impossible


def test_rows_that_are_there_are_kept_and_the_models_own_alpha_is_taken(folder):
    before = rows_of(folder, "--alphas", "1", "2", "--beams", "2", "50", "--budget", "30")
    after = rows_of(folder, "--beams", "2")
    assert after[: len(before)] == before
    (new,) = after[len(before) :]
    assert (new["output_alpha"], new["budget"], new["exact"]) == ("1.5", "0", "")
