"""Which tiles of a prompt can be left out: the bounds hold, and are told from what no method can leave out."""

import csv

import pytest
import tiny_models as tiny
import torch

from hf_entmax.ops import entmax
from recipes.lab import prefill_tiles


def test_what_a_bound_leaves_out_has_no_weight():
    generator = torch.Generator().manual_seed(0)
    length, size, page = 128, 8, 16
    # Keys of a page resemble each other, so that bounds say something.
    key = torch.randn(2, length // page, 1, 4, generator=generator).expand(-1, -1, page, -1).reshape(2, length, 4)
    key = key + 0.02 * torch.randn(2, length, 4, generator=generator)
    query = 30 * torch.randn(2, length, 4, generator=generator)
    nonzero, (weight, exact, known) = prefill_tiles.shares(query, key, 1.5, size, page)
    assert 0 < nonzero <= weight <= exact <= known < 1
    # By hand: of the blocks looked at, the tiles in which any weight is.
    rows = torch.cat([torch.arange(size) + size * block for block in range(7, length // size, 8)])
    scores = (query[:, rows] @ key.mT / 2).masked_fill(torch.arange(length) > rows[:, None], -torch.inf)
    tiles = (entmax(scores, 1.5) > 0).unflatten(-1, (-1, page)).any(-1).unflatten(1, (-1, size)).any(2)
    begun = (torch.arange(0, length, page) <= rows[:, None]).unflatten(0, (-1, size)).any(1)
    assert weight == pytest.approx(float(tiles.sum() / (2 * begun.sum())))


@pytest.mark.slow
def test_every_layer_and_share_has_a_row(tmp_path, monkeypatch):
    keys, shares = [], prefill_tiles.shares
    monkeypatch.setattr(
        prefill_tiles, "shares", lambda query, key, *more: keys.append(key) or shares(query, key, *more)
    )
    tiny.build("mistral", sliding_window=None, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    draw = torch.randint(3, tiny.VOCAB, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in draw), encoding="utf-8")
    options = ["--length", "256", "--layers", "0", "1", "--shares", "0.5", "--trials", "1", "--out", str(tmp_path)]
    prefill_tiles.main([str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *options])
    with (tmp_path / "prefill_tiles.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["layer"] for row in rows] == ["0", "1"]
    for row in rows:
        assert float(row["at_least_ms"]) > 0 and 0 < float(row["nonzero"]) < 1
    for one, two, three, four in keys:  # two query heads share the keys of one head
        assert torch.equal(one, two) and torch.equal(three, four) and not torch.equal(two, three)
