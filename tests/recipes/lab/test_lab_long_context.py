"""The recipe for long caches, on a tiny model: rows add up, and what it compares is compared."""

import csv
import functools
import sys
import types

import pytest
import tiny_models as tiny
import torch

import hf_entmax
from recipes.lab import long_context, texts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model of two layers, patched with alphas of its own, and a text of 400 words; little memory is read to time it."""
    monkeypatch.setattr(long_context, "bandwidth", functools.partial(long_context.bandwidth, 1))
    model = hf_entmax.patch_model(tiny.build("mistral", sliding_window=None, max_position_embeddings=256))
    hf_entmax.set_alphas(model, {"decoder_self": torch.tensor([[1.2, 1.4, 1.6, 1.9], [1.9, 1.5, 1.3, 1.7]])})
    tiny.save(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(tiny.texts(40, 10)), encoding="utf-8")
    return tmp_path


def _run(monkeypatch, folder, what, *options):
    path = folder / f"{what}.csv"
    words = [what, str(folder / "model"), "--text", str(folder / "text.txt"), "--results", str(path), *options]
    monkeypatch.setattr(sys, "argv", ["long_context", *words])
    long_context.main()
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_whole_model(folder, monkeypatch, capsys):
    call = ("--alpha", "own", "--bits", "4", "--lengths", "96", "160", "--batches", "1", "2", "--steps", "2")
    rows = _run(monkeypatch, folder, "generate", *call)
    assert [(row["length"], row["batch"]) for row in rows] == [("96", "1"), ("96", "2"), ("160", "1"), ("160", "2")]
    for row in rows:
        ratio = float(row["tokens_per_second"]) / float(row["softmax_tokens_per_second"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=0.02, abs=0.006)  # all three are rounded
        assert 0 < float(row["ratio_25"]) <= float(row["ratio_75"]) and float(row["bandwidth_gib_s"]) > 0
        assert 0 < float(row["nonzero"]) < float(row["read"]) < 1 and row["bits"] == "4"
        # Two layers, two key heads of 8 channels, the token that was decoded last among them.
        cached = int(row["batch"]) * 2 * 2 * 2 * 8 * 4 * (int(row["length"]) + 3)
        assert float(row["cache_mib"]) == round(cached / 2**20, 1)
        assert 0 < float(row["extra_memory"]) < 0.4
    assert str(folder / "generate.csv") not in rows[0]["command"] and "tokens_per_second" in capsys.readouterr().out
    rows = _run(monkeypatch, folder, "generate", *call, "--softmax_cache", "static")
    assert [row["softmax_cache"] for row in rows] == 4 * ["dynamic"] + 4 * ["static"]


@pytest.mark.parametrize("layers", [("--layers", "1"), ()])
def test_operator(folder, monkeypatch, layers):
    call = [
        "--alpha",
        "own",
        "--alphas",
        "2",
        "own",
        "--all_bits",
        "4",
        "8",
        "--lengths",
        "128",
        "256",
        "--prompt",
        "64",
    ]
    rows = _run(monkeypatch, folder, "operator", *call, *layers, "--steps", "2")
    assert [(row["length"], row["alpha"], row["bits"]) for row in rows[:4]] == [
        ("128", "2", "4"), ("128", "2", "8"), ("128", "own", "4"), ("128", "own", "8")
    ]  # fmt: skip
    assert len(rows) == 8
    for coarse, fine in zip(rows[::2], rows[1::2], strict=True):
        assert float(coarse["nonzero"]) == float(fine["nonzero"]) <= float(fine["read"]) <= float(coarse["read"])
        for other in ("softmax", "grouped_softmax", "dense"):
            ratio = float(fine["exact_ms"]) / float(fine[f"{other}_ms"])
            assert float(fine[f"ratio_to_{other}"]) == pytest.approx(ratio, rel=0.02, abs=0.001)
            assert 0 < float(fine[f"ratio_to_{other}_25"]) <= float(fine[f"ratio_to_{other}_75"])
    for row in rows:
        # Keys and values of two heads of 8 channels in float32; four query heads read keys and values one by one.
        length, looked_at = int(row["length"]), 4 * int(row["length"])
        assert float(row["softmax_key_value_mib"]) == pytest.approx(2 * 2 * 8 * 4 * length / 2**20, rel=1e-3)
        rows_read = (float(row["read"]) + float(row["nonzero"])) * looked_at * 8 * 4 / 2**20
        sketch = float(row["extra_memory"]) * float(row["softmax_key_value_mib"])
        assert float(row["key_value_mib"]) == pytest.approx(sketch + rows_read, rel=1e-3)
        assert row["layers"] == ("1" if "--layers" in row["command"] else "2")


@pytest.mark.parametrize("way", long_context.WAYS)
def test_verify(folder, monkeypatch, capsys, way):
    call = ("--alpha", "own", "--bits", "4", "--prompt", "60", "--steps", "20", "--batches", "2", "--way", way)
    (row,) = _run(monkeypatch, folder, "verify", *call)
    assert (row["tokens"], row["same_tokens"], row["layer_steps"], row["violations"]) == ("40", "40", "38", "0")
    sequences = 8 if way == "beams" else 2
    # Two layers and four heads; each of 19 steps looks at one key more.
    assert int(row["pairs"]) == sequences * 2 * 4 * sum(range(61, 80))
    assert 0 < float(row["nonzero"]) < float(row["read"]) < 1 and row["way"] == way
    shown = capsys.readouterr().out
    assert f"2 x 20 tokens, {way}, after prompts of 60: the same" in shown and "38 layer steps compared" in shown
    assert "0 violations" in shown
    # Without a seed of its own sampling would draw other tokens the second time.
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    if way == "sampling":
        with pytest.raises(SystemExit, match="DIFFERENT from token"):
            _run(monkeypatch, folder, "verify", *call)


def test_a_folder_of_a_patched_model_gives_the_softmax_model_too(folder):
    load = functools.partial(
        texts.load_model, types.SimpleNamespace(model=folder / "model", dtype=torch.float32, alpha="own")
    )
    assert not hf_entmax.is_patched(load(sparse=False))
    assert hf_entmax.alphas(load())["decoder_self"].flatten().tolist() == pytest.approx(
        [1.2, 1.4, 1.6, 1.9, 1.9, 1.5, 1.3, 1.7]
    )
    other = types.SimpleNamespace(model=folder / "model", dtype=torch.float32, alpha="1.5")
    assert (hf_entmax.alphas(texts.load_model(other))["decoder_self"] == 1.5).all()


def test_what_cannot_be(folder, monkeypatch):
    plain = tiny.build("mistral", sliding_window=None, max_position_embeddings=256)
    with pytest.raises(SystemExit, match="--alpha own alone"):
        _run(monkeypatch, folder, "operator", "--alphas", "1.5", "own")
    with pytest.raises(SystemExit, match="knows 256 positions, 300"):
        _run(monkeypatch, folder, "generate", "--alpha", "own", "--lengths", "300")
    monkeypatch.setattr(texts, "encode", lambda lines, tokenizer, limit: [3] * 20)
    with pytest.raises(SystemExit, match="20 tokens, 96 are needed"):
        _run(monkeypatch, folder, "generate", "--alpha", "own", "--lengths", "96")
    plain.save_pretrained(folder / "model")
    with pytest.raises(SystemExit, match="not saved from a patched model"):
        _run(monkeypatch, folder, "generate", "--alpha", "own", "--lengths", "96")
