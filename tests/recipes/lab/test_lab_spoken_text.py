"""Speech with known words: TextGrids in both of Praat's forms, and text spoken by festival where it is installed."""

import json
import shutil

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE, tiny_processor

from recipes.lab import spoken_text

LONG = """File type = "ooTextFile"
Object class = "TextGrid"

xmin = 0
xmax = 1.5
tiers? <exists>
size = 2
item []:
    item [1]:
        class = "IntervalTier"
        name = "speaker - words"
        xmin = 0
        xmax = 1.5
        intervals: size = 3
        intervals [1]:
            xmin = 0
            xmax = 0.5
            text = ""
        intervals [2]:
            xmin = 0.5
            xmax = 0.75
            text = "to"
        intervals [3]:
            xmin = 0.75
            xmax = 1.5
            text = "be"
    item [2]:
        class = "IntervalTier"
        name = "speaker - phones"
        xmin = 0
        xmax = 1.5
        intervals: size = 1
        intervals [1]:
            xmin = 0
            xmax = 1.5
            text = "T"
"""
SHORT = '"IntervalTier"\n"words"\n0\n1.5\n3\n0\n0.5\n""\n0.5\n0.75\n"to"\n0.75\n1.5\n"be"\n"IntervalTier"\n"phones"\n0\n1.5\n1\n0\n1.5\n"T"\n'


def test_recordings_with_textgrids_and_with_transcripts(tmp_path, capsys):
    for name, text in (("long", LONG), ("short", SHORT)):
        (tmp_path / f"{name}.TextGrid").write_text(text, encoding="utf-16" if name == "long" else "utf-8")
    (tmp_path / "transcript.lab").write_text("or not\n")
    for name in ("long", "short", "transcript", "unknown"):
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(24_000), 16_000)
    spoken_text.main(["textgrids", str(tmp_path), str(tmp_path / "out")])
    rows = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["to be", "to be", "or not"]
    assert rows[0]["words"] == rows[1]["words"] == [["to", 0.5, 0.75], ["be", 0.75, 1.5]] and "words" not in rows[2]
    assert "unknown.wav: left out" in capsys.readouterr().out
    table = tmp_path / "texts.tsv"
    table.write_text(
        "file\tstart\tend\ttext\nlong.wav\t0.4\t1\tto\nunknown.wav\t0\t0.5\tthat\nunknown.wav\t0.5\t1.5\tis\n"
    )
    spoken_text.main(["textgrids", str(tmp_path), str(tmp_path / "cut"), "--texts", str(table)])
    rows = [json.loads(line) for line in (tmp_path / "cut" / "manifest.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["to", "to be", "or not", "that", "is"]
    assert rows[0]["words"] == [["to", 0.1, 0.35]]  # what is cut in two is no word of the part
    sizes = [soundfile.info(tmp_path / "cut" / row["audio"]).frames for row in rows]
    assert sizes == [9600, 24_000, 24_000, 8000, 16_000]


@pytest.mark.skipif(shutil.which("festival") is None, reason="festival is not installed")
def test_festival_says_when_each_word_was_said(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The man's dog isn't here.\n" * 4)
    spoken_text.main(
        [
            "speak",
            str(text),
            str(tmp_path / "out"),
            "--clips",
            "2",
            "--lines",
            "1",
            "--voices",
            "festival",
            "--fillers",
            "0.5",
        ]
    )
    for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines():
        row = json.loads(line)
        seconds = soundfile.info(tmp_path / "out" / row["audio"]).duration
        assert row["text"] == "The man's dog isn't here."  # what fills the pauses is said, and not written
        assert [word for word, *_ in row["words"]] == ["The", "man's", "dog", "isn't", "here"]
        times = [time for _, *pair in row["words"] for time in pair]
        assert times == sorted(times) and times[0] > 0 and times[-1] < seconds


def test_recordings_of_which_nothing_is_known_come_with_what_a_model_hears(tmp_path, monkeypatch):
    processor, heard = tiny_processor(), []

    class Model:
        def generate(self, input_features):
            heard.append(input_features)
            text = "to be" if len(heard) != 2 else ""
            return [processor.tokenizer(text)["input_ids"]]

    monkeypatch.setattr(spoken_text, "load_speech", lambda name, language: (processor, Model()))
    samples = 0.1 * np.random.default_rng(0).standard_normal(round(3.2 * RATE))
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    soundfile.write(tmp_path / "in" / "deeper" / "long.wav", samples, RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "in" / "short.wav", samples[: RATE // 2], RATE)
    places = [str(tmp_path / "in"), str(tmp_path / "out")]
    spoken_text.main(["heard", "tiny", *places, "--seconds", "1.5", "--step", "1"])
    lines = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert len(heard) == 3 and [line["text"] for line in lines] == ["to be", "to be"]  # the second piece says nothing
    for line, (start, end) in zip(lines, ((0, 1.5), (2, 3.2)), strict=True):
        piece, rate = soundfile.read(tmp_path / "out" / line["audio"])
        assert rate == RATE and np.abs(piece - samples[round(start * RATE) : round(end * RATE)]).max() < 1e-3
    for wrong in (("--seconds", "40"), ("--step", "0"), ("--step", "20")):
        with pytest.raises(SystemExit, match=r"at most 28 seconds, and a step at most a piece"):
            spoken_text.main(["heard", "tiny", *places, *wrong])
