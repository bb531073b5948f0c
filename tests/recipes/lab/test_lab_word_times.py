"""Errors of word times, on noise that a tiny Whisper hears and on times that are known."""

import csv
import json

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE, tiny_processor, tiny_whisper

from recipes.lab import word_times


def test_words_are_matched_in_their_order():
    said = [("to", 0, 1), ("um", 1, 2), ("be", 2, 3), ("or", 3, 4), ("not", 4, 5), ("to", 5, 6)]
    heard = [("To", 0, 1), ("be,", 2, 3), ("nor", 3, 4), ("not", 4, 5), ("to!", 5, 6)]
    assert word_times.matched(said, heard) == [(0, 0), (2, 1), (4, 3), (5, 4)]


def test_a_row_for_every_way_and_table(tmp_path, monkeypatch):
    model = tiny_whisper()
    settings = model.generation_config
    settings.alignment_heads, settings._from_model_config = [[0, 0], [1, 1]], False
    model.save_pretrained(tmp_path / "tiny")
    tiny_processor().save_pretrained(tmp_path / "tiny")
    soundfile.write(tmp_path / "0.flac", 0.1 * np.random.default_rng(0).standard_normal(RATE), RATE)
    said = [["to", 0.25, 0.5], ["be", 0.5, 0.75]]
    lines = [{"audio": "0.flac", "text": "to be", "words": said}, {"audio": "0.flac", "text": "or not"}]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # What a model of noise writes is noise: every word counts as heard.
    monkeypatch.setattr(word_times, "matched", lambda said, heard: [(0, 0), (1, len(heard) - 1)])
    kept, out, picture = tmp_path / "words.jsonl", tmp_path / "rows.csv", tmp_path / "words.png"
    asked = [str(tmp_path / "tiny"), str(tmp_path / "clips.jsonl"), "--alphas", "1", "1.5", "--out", str(out)]
    word_times.main([*asked, "--words", str(kept), "--draw", "0", str(picture)])
    words = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [word["alpha"] for word in words] == [1, 1, 1.5, 1.5] and [w["said"] for w in words] == 2 * said
    with out.open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(row["attention"], row["clips"], row["said"], row["words"]) for row in rows] == [
        ("1.0", "1", "2", "2"),
        ("1.5", "1", "2", "2"),
    ]
    for row, pair in zip(rows, (words[:2], words[2:]), strict=True):
        errors = [1000 * abs(word["heard"][1] - word["said"][1]) for word in pair]
        assert float(row["start_50"]) == pytest.approx(sum(errors) / 2, abs=0.5)
    assert picture.stat().st_size > 1000 and "--draw" not in rows[0]["command"]
