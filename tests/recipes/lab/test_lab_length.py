"""Longer inputs: tasks and models are what they say, runs write their rows once."""

import csv
import math
import sys

import pytest
import torch

import hf_entmax
import recipes.lab.length.__main__ as program
from recipes.lab.length import retrieval, sequences
from recipes.lab.length import text as long_text
from recipes.lab.pages.lengths import accuracies
from recipes.lab.rows import Rows


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["length", *map(str, arguments)])
    program.main()


def test_answers():
    draws = torch.Generator().manual_seed(0)
    for task, answer in (("copy", list), ("reverse", lambda v: v[::-1]), ("sort", sorted)):
        ids, wanted = sequences.batch(task, 3, 5, draws)
        for row, labels in zip(ids.tolist(), wanted.tolist(), strict=True):
            assert row[5] == sequences.SEPARATOR and labels[:5] == [sequences.IGNORED] * 5
            assert labels[5:] == answer(row[:5]) and row[6:] == labels[5:-1]
    ids, wanted = sequences.batch("retrieval", 3, 6, draws)
    for row, labels in zip(ids.tolist(), wanted.tolist(), strict=True):
        pairs = dict(zip(row[:12:2], row[1:12:2], strict=True))
        asked = [(row[i], label) for i, label in enumerate(labels) if label != sequences.IGNORED]
        assert len(pairs) == 6 and len(asked) == sequences.QUERIES and all(pairs[key] == v for key, v in asked)


def test_the_fused_call_is_the_equation_and_seeds_do_not_meet():
    for name, row in retrieval.ROWS.items():
        model = retrieval.Retrieval(row, [3, 7])
        items, _ = model.batch(4, 16)
        encoded = model.encoded(items)
        by_hand = model.answers((model.weights(model.scores(encoded))[..., None, :] @ encoded)[..., 0, :])
        found = model(items)
        torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=1e-4, msg=name)
        found[0].sum().backward()
        assert all(p.grad is None or not p.grad[1:].any() for p in model.parameters()), name


def test_decoders_from_the_identity_are_the_plain_ones_and_causal():
    for name, row in sequences.ROWS.items():
        torch.manual_seed(0)
        plain, model = sequences.Decoder(sequences.Row(row.alpha), 16, 4, 2), sequences.Decoder(row, 16, 4, 2)
        model.load_state_dict(plain.state_dict(), strict=False)
        ids, _ = sequences.batch("copy", 3, 4, torch.Generator().manual_seed(1))
        same = torch.allclose(model(ids), plain(ids), atol=1e-5, rtol=1e-4)
        assert same == (row.init == "identity"), name
        changed = ids.clone()
        changed[:, 6:] = 1
        torch.testing.assert_close(model(changed)[:, :6], model(ids)[:, :6], atol=1e-5, rtol=1e-4)


def test_rows_come_once(tmp_path, monkeypatch):
    path = tmp_path / "length.csv"
    common = ("--results", path, "--batch", 4, "--samples", 8, "--seeds", 0, 1)
    small = ("--steps", 2, "--width", 8, "--heads", 2, "--layers", 1, "--length", 2)
    run(monkeypatch, "max_retrieval", *common, "--steps", 3, "--only", "softmax", "learned alpha in (1, 2)")
    run(monkeypatch, "sort", *common, *small, "--only", "softmax", "ASEntmax")
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == (1 + len(retrieval.AT_TEST) + 1) * 2 + 2 * 2
    assert rows[0]["command"].startswith("python -m recipes.lab.length max_retrieval") and str(path) not in str(rows)
    before = path.read_bytes()
    run(monkeypatch, "sort", *common[:-1], *small, "--only", "ASEntmax")  # fewer lines of the same run
    assert path.read_bytes() == before
    # What was cut off is made again, and nothing else: a kill came between a model and its lines at test.
    path.write_text(
        "".join(line for line in path.read_text().splitlines(True) if "at test,1," not in line.replace('"', ""))
    )
    run(monkeypatch, "max_retrieval", *common, "--steps", 3, "--only", "softmax")
    with path.open() as lines:
        again = list(csv.DictReader(lines))
    key = lambda row: (row["task"], row["row"], row["seed"], row["accuracies"])  # noqa: E731
    assert sorted(map(key, again)) == sorted(map(key, rows))
    run(monkeypatch, "sort", *common, *small, "--width", 16, "--only", "softmax")  # another run
    assert len(Rows(tmp_path)("length", task="sort")) == 6
    with pytest.raises(SystemExit, match="There is no line"):
        run(monkeypatch, "sort", *common, "--only", "hardmax")
    with pytest.raises(SystemExit, match="--length 2 to 16"):
        run(monkeypatch, "retrieval", "--length", 32, "--results", path)


def test_committed_rows_are_recognised_by_their_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["length", "max_retrieval", "--steps", "10000", "--seeds", "3"])
    held = program.Lines(program.parser().parse_args(sys.argv[1:]))
    assert held.has("softmax", 3) and held.has("entmax 1.5", 4)


def test_perplexity_by_position(tmp_path, monkeypatch):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("ab " * 400)
    data = tmp_path / "{split}.txt"
    small = ("--width", 16, "--heads", 2, "--layers", 1, "--length", 8, "--samples", 4, "--batch", 2, "--data", data)
    names = ("softmax", "learned alpha, adaptive scaling")
    run(monkeypatch, "text", "--results", tmp_path / "length.csv", *small, "--steps", 4, "--seeds", 0, "--only", *names)
    rows = Rows(tmp_path)("length", task="text")
    assert [row["row"] for row in rows] == [f"bytes: {name}" for name in names]
    assert all(list(accuracies(row)) == [8 * k for k in range(1, 9)] for row in rows)
    model, ids = long_text.build(sequences.Row(), "", 16, 2, 1), long_text.read(str(data), "test", "")
    found = long_text.perplexity_by_position(model, ids, 16, 8, 1)
    losses = torch.nn.functional.cross_entropy(model(input_ids=ids[None, :16]).logits[0], ids[1:17], reduction="none")
    assert found == {
        8: pytest.approx(losses[:8].mean().exp().item()),
        16: pytest.approx(losses[8:].mean().exp().item()),
    }
    # A pretrained model keeps its weights: only alphas and scaling learn, and seeds that draw nothing are one.
    folder = tmp_path / "pretrained"
    hf_entmax.unpatch_model(model).save_pretrained(folder)
    monkeypatch.setattr(long_text, "read", lambda data, split, pretrained, real=long_text.read: real(data, split, ""))
    more = ("--model", folder, "--seeds", 0, 1, "--results", tmp_path / "more.csv", "--length", 8, "--data", data)
    run(monkeypatch, "text", *more, "--steps", 0, "--samples", 2, "--only", "entmax 1.5", "ASEntmax")
    drawn = [(row["row"].partition(": ")[2], row["seed"], row["train_seconds"]) for row in Rows(tmp_path)("more")]
    assert drawn == [("entmax 1.5", "0", ""), ("ASEntmax", "0", ""), ("ASEntmax", "1", "")]
    again = long_text.build(sequences.ROWS["learned alpha, log scaling"], str(folder), 0, 0, 0)
    before = {name: p.clone() for name, p in again.named_parameters()}
    assert math.isfinite(long_text.train(again, ids, 8, 2, 3, 1e-2, 0, numbers_only=True))
    changed = {name for name, p in again.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(".entmax_norm." in name for name in changed)
