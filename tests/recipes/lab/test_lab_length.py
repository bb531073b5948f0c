"""The recipe of longer inputs: its data, its models, two runs of a few steps."""

import csv
import math
import sys

import pytest
import torch

import hf_entmax
import recipes.lab.length.__main__ as recipe
from recipes.lab.length import retrieval, sequences
from recipes.lab.length import text as long_text
from recipes.lab.pages import length as tables
from recipes.lab.rows import RESULTS, RowFile, Rows, origin


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["length", *map(str, arguments)])
    recipe.main()


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


@pytest.mark.parametrize("name", retrieval.ROWS)
def test_the_fused_call_is_the_equation_and_seeds_do_not_meet(name):
    model = retrieval.Retrieval(retrieval.ROWS[name], [3, 7])
    items, wanted = model.batch(4, 16)
    assert torch.equal(items[..., 1:-1].argmax(-1).gather(-1, items[..., 0].argmax(-1, keepdim=True))[..., 0], wanted)
    encoded = model.encoded(items)
    by_hand = model.answers((model.weights(model.scores(encoded))[..., None, :] @ encoded)[..., 0, :])
    found = model(items)
    torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=1e-4)
    found[0].sum().backward()
    assert all(p.grad is None or not p.grad[1:].any() for p in model.parameters())
    identity = {"none", "log", "adaptive"}
    for length in (1, 16, 4096):
        factor = float(model.factor(length)[0].detach())
        if retrieval.ROWS[name].scaling in identity:
            assert factor == pytest.approx(1.0, abs=1e-6)
        elif name == "SSMax":
            assert factor == pytest.approx(0.43 * math.log(length), abs=1e-6)
        else:
            gamma = int(name[-1])
            assert factor == pytest.approx(1 + math.log(2) * math.log(length + 1) ** gamma, rel=1e-6)


@pytest.mark.parametrize("name", sequences.ROWS)
def test_decoders_start_alike_and_answer_as_they_generate(name):
    torch.manual_seed(0)
    plain = sequences.Decoder(sequences.Row(sequences.ROWS[name].alpha), 16, 4, 2)
    torch.manual_seed(0)
    model = sequences.Decoder(sequences.ROWS[name], 16, 4, 2)
    model.load_state_dict(plain.state_dict(), strict=False)
    ids, _ = sequences.batch("copy", 3, 4, torch.Generator().manual_seed(1))
    if sequences.ROWS[name].init == "identity":
        torch.testing.assert_close(model(ids), plain(ids), atol=1e-5, rtol=1e-4)
    else:
        assert not torch.allclose(model(ids), plain(ids), atol=1e-4)
    changed = ids.clone()
    changed[:, 6:] = 1
    torch.testing.assert_close(model(changed)[:, :6], model(ids)[:, :6], atol=1e-5, rtol=1e-4)
    loss = model(ids).logsumexp(-1).sum()
    loss.backward()
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if ".scaling." in n or ".alpha." in n)


def test_rows_come_once_and_make_a_page(tmp_path, monkeypatch, capsys):
    path = tmp_path / "length.csv"
    common = ("--results", path, "--batch", 4, "--samples", 8, "--seeds", 0, 1)
    run(monkeypatch, "max_retrieval", *common, "--steps", 3, "--only", "softmax", "learned alpha in (1, 2)")
    small = ("--steps", 2, "--width", 8, "--heads", 2, "--layers", 1, "--length", 2)
    run(monkeypatch, "sort", *common, *small, "--only", "softmax", "ASEntmax")
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == (1 + len(retrieval.AT_TEST) + 1) * 2 + 2 * 2
    assert (
        rows[0]["command"].startswith("python -m recipes.lab.length max_retrieval")
        and str(tmp_path) not in rows[0]["command"]
    )
    before = path.read_bytes()
    run(monkeypatch, "sort", *common, *small, "--only", "softmax", "ASEntmax")
    run(monkeypatch, "sort", *small, *common[:-3], "--only", "softmax", "--seeds", 1)  # said otherwise, the same run
    assert path.read_bytes() == before
    # What was cut off is made again, and nothing else: a kill came between a model and its lines at test.
    kept = [line for line in path.read_text().splitlines(True) if "at test,1," not in line.replace('"', "")]
    assert len(kept) == len(rows) + 1 - len(retrieval.AT_TEST)
    path.write_text("".join(kept))
    run(monkeypatch, "max_retrieval", *common, "--steps", 3, "--only", "softmax")
    with path.open() as lines:
        again = list(csv.DictReader(lines))

    def measured(found):
        return sorted((row["task"], row["row"], row["seed"], row["accuracies"]) for row in found)

    assert measured(again) == measured(rows)
    found = Rows(tmp_path)
    table = tables.lengths_table(found, "max_retrieval")
    assert table.count("\n") == 2 + len(retrieval.AT_TEST) + 2 and "| 256x |" in table
    assert tables.figure(found) is not None and tables.figure(Rows(tmp_path / "none")) is None
    with pytest.raises(SystemExit, match="There is no line"):
        run(monkeypatch, "sort", *common, "--only", "hardmax")
    # Other settings are another run, and another line of the page.
    run(monkeypatch, "sort", *common, *small, "--width", 16, "--only", "softmax")
    named = tables.lines(Rows(tmp_path)("length", task="sort"))
    assert [len(own) for own in named.values()] == [2, 2, 2] and "ASEntmax" in named
    assert [name.endswith("--width 16`)") for name in named] == [False, True, False]


def test_what_the_papers_say_is_judged_over_the_seeds(tmp_path):
    results = RowFile(tmp_path / "length.csv", recipe.FIELDS)
    measured = {
        ("sort", "softmax"): ((1, 0), (2, 0), (0, 0)),
        ("sort", "entmax 1.5"): ((30, 10), (34, 11), (29, 12)),
        ("sort", "ASEntmax"): ((28, 1), (33, 2), (31, 0)),
        ("copy", "softmax"): ((50, 0), (52, 0), (51, 0)),
        ("copy", "entmax 1.5"): ((51, 0), (51, 0), (50, 0)),
    }
    for (task, row), seeds in measured.items():
        lengths = (32, 16 * {"sort": 4, "copy": 64}[task])
        for seed, found in enumerate(seeds):
            values = recipe.in_words(dict(zip(lengths, map(float, found), strict=True)))
            results.add(task=task, row=row, seed=seed, steps=9, train_length=16, accuracies=values, command="x")
    # Fewer steps: not looked at.
    results.add(task="sort", row="softmax", seed=0, steps=3, train_length=16, accuracies="32=99.0 64=99.0", command="y")
    lines = [line.split(" | ") for line in tables.beside_the_papers(Rows(tmp_path)).splitlines()[2:]]
    said = {line[0].strip("| "): [cell.strip(" |") for cell in line[1:]] for line in lines}
    assert said["sort, 2x: entmax 1.5 above softmax"][-1] == "found"
    assert said["sort, 4x: entmax 1.5 above softmax"][:2] == ["57.8 / 0", "53 / 4"]
    assert said["sort, 4x: ASEntmax above entmax 1.5"][-1] == "opposite"
    assert said["sort, 2x: ASEntmax above entmax 1.5"][-1] == "not found"
    assert said["copy, 64x: softmax above entmax 1.5"][-1] == "not found: nobody solves it"
    assert len(said) == 6


def test_committed_rows_are_recognised_by_the_command_they_carry(monkeypatch):
    path = RESULTS / "length.csv"
    monkeypatch.setattr(sys, "argv", ["length", "max_retrieval", "--steps", "10000", "--seeds", "3"])
    held = recipe.Lines(recipe.parser().parse_args(sys.argv[1:]))
    assert held.args.results == path and held.has("softmax", 3) and held.has("entmax 1.5", 4)
    sys.argv.extend(["--lr", "1e-4"])
    assert not recipe.Lines(recipe.parser().parse_args(sys.argv[1:])).there


def test_what_cannot_be_tested_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "train", None)
    with pytest.raises(SystemExit, match="--length 2 to 16"):
        run(monkeypatch, "retrieval", "--length", 32, "--results", tmp_path / "length.csv")
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("ab " * 40)
    monkeypatch.setattr(long_text, "build", None)
    with pytest.raises(SystemExit, match="tested at up to 128 tokens; the test text has 120"):
        run(monkeypatch, "text", "--data", tmp_path / "{split}.txt", "--results", tmp_path / "length.csv")


def test_perplexity_by_position(tmp_path, monkeypatch):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("ab " * 400)
    path, data = tmp_path / "length.csv", tmp_path / "{split}.txt"
    small = ("--width", 16, "--heads", 2, "--layers", 1, "--length", 8, "--samples", 4, "--batch", 2, "--data", data)
    names = ("softmax", "SSMax", "learned alpha, adaptive scaling")
    run(monkeypatch, "text", "--results", path, *small, "--steps", 4, "--seeds", 0, "--only", *names)
    rows = Rows(tmp_path)("length", task="text")
    assert [row["row"] for row in rows] == [f"bytes: {name}" for name in names]
    assert all(list(tables.accuracies(row)) == [8 * k for k in range(1, 9)] for row in rows)
    model = long_text.build(sequences.Row(), "", 16, 2, 1)
    ids = long_text.read(str(data), "test", "")
    found = long_text.perplexity_by_position(model, ids, 16, 8, 1)
    logits = model(input_ids=ids[None, :16]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, ids[1:17], reduction="none")
    assert found == {
        8: pytest.approx(losses[:8].mean().exp().item()),
        16: pytest.approx(losses[8:].mean().exp().item()),
    }
    folder = tmp_path / "pretrained"
    hf_entmax.unpatch_model(model).save_pretrained(folder)
    more = ("--model", folder, "--seeds", 0, 1, "--results", tmp_path / "more.csv", "--length", 8, "--data", data)
    monkeypatch.setattr(long_text, "read", lambda data, split, pretrained, real=long_text.read: real(data, split, ""))
    run(monkeypatch, "text", *more, "--steps", 0, "--samples", 2, "--only", "entmax 1.5", "ASEntmax", "learned alpha")
    drawn = Rows(tmp_path)("more")
    assert [(row["row"].partition(": ")[2], row["seed"]) for row in drawn] == [
        *(("entmax 1.5", "0"), ("ASEntmax", "0"), ("learned alpha", "0")),
        ("ASEntmax", "1"),  # the only one whose start is drawn
    ]
    assert origin(drawn).count("No run") == 1 and origin(rows).count("3 runs") == 1
    again = long_text.build(sequences.ROWS["learned alpha, log scaling"], str(folder), 0, 0, 0)
    before = {name: p.clone() for name, p in again.named_parameters()}
    assert long_text.train(again, ids, 8, 2, 3, 1e-2, 0, numbers_only=True) > 0
    changed = {name for name, p in again.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(".entmax_norm." in name for name in changed)
    same = long_text.build(sequences.Row("learned", "adaptive"), str(folder), 0, 0, 0)
    assert math.isnan(long_text.train(same, ids, 8, 2, 0, 1e-2, 0, numbers_only=True))
