"""What a speech model loses site by site, on noise that a tiny Whisper hears."""

import csv

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE, tiny_processor, tiny_whisper

from recipes.lab import speech_sites


@pytest.fixture
def data(tmp_path):
    tiny_whisper().save_pretrained(tmp_path / "tiny")
    tiny_processor().save_pretrained(tmp_path / "tiny")
    folder = tmp_path / "clips"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(2):
        soundfile.write(folder / f"{number}.flac", 0.1 * rng.standard_normal(RATE), RATE)
    (folder / "manifest.tsv").write_text("audio\ttext\n0.flac\tto be\n1.flac\tor not\n")
    return tmp_path


def rows(path):
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_sites_are_measured_one_by_one_and_once(data):
    asked = [
        "sites",
        str(data / "tiny"),
        str(data / "clips" / "manifest.tsv"),
        "--alphas",
        "1.5",
        "--out",
        str(data / "rows.csv"),
    ]
    for _ in range(2):
        speech_sites.main([*asked, "--sites", "cross", "all"])
    plain, cross, everywhere = rows(data / "rows.csv")
    densities = [[float(row[f"density_{site}"]) for site in speech_sites.SITES] for row in (plain, cross, everywhere)]
    assert densities[0] == [1, 1, 1] and densities[1][0] == densities[1][2] == 1 and densities[1][1] < 1
    assert all(density < 1 for density in densities[2])
    assert float(plain["loss"]) != float(cross["loss"]) and "--sites cross --alphas 1.5" in cross["command"]


def test_exact_decoding_writes_the_same_tokens(data):
    out = data / "decoding.csv"
    speech_sites.main(
        ["decoding", str(data / "tiny"), str(data / "clips" / "manifest.tsv"), "--alphas", "1.5", "--out", str(out)]
    )
    (row,) = rows(out)
    assert row["equal"] == row["tokens"] and 0 < int(row["keys_read"]) <= int(row["keys"])


def test_the_heads_of_the_encoder_are_drawn(data):
    speech_sites.main(
        ["heads", str(data / "tiny"), str(data / "clips" / "manifest.tsv"), "--out", str(data / "heads.png")]
    )
    assert (data / "heads.png").stat().st_size > 1000
