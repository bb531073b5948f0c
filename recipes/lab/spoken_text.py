"""Speech with its words, and where they are known their times: text spoken by programs, recordings with TextGrids or without any.

    apt-get install festival festvox-us-slt-hts flite espeak-ng
    python -m recipes.lab.spoken_text speak mt/multi30k_task1_raw/train.en.gz data/train --clips 200 --seed 1
    python -m recipes.lab.spoken_text speak mt/multi30k_task1_raw/test_2016_flickr.en.gz data/test --clips 40 --seed 2 --voices festival
    python -m recipes.lab.spoken_text textgrids recordings data/real --texts recipes/data/recordings.tsv
    python -m recipes.lab.spoken_text heard models/whisper-tiny.en more_recordings data/heard

``speak`` has each clip spoken by one voice: a few lines of the text, at a speed of its own, half of the clips with white noise; with
``--fillers`` also "um" and "uh", which are not in the text. Festival says when each word begins and ends. ``textgrids`` reads wav or
flac files beside TextGrids with a tier ``words``, or beside a ``.lab`` with the words alone, or with lines in ``--texts`` (columns
``file``, ``start``, ``end``, ``text``: seconds to cut out, what is said in them; ``recordings.tsv`` has those of the guide to
speech). ``heard`` cuts recordings of which nothing is known into pieces that overlap, and has a model write what it hears in them: to
distil that model, nobody else has to have written it. All write audio at 16 kHz and ``manifest.jsonl`` with ``audio`` (a file beside
it), ``text``, ``voice`` and, where they are known, ``words``: lists of a word, its start and its end in seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from hf_entmax.analysis.reading.tables import find, read_lines, read_rows

from .rows import RECIPES

sys.path.insert(0, str(RECIPES))  # recipes are scripts, and find what they share beside them
from common.audio import RATE, load_speech, read_audio

FESTIVAL = """(voice_cmu_us_slt_arctic_hts)
(set! spoken (utt.synth (Utterance Text {text})))
(utt.save.wave spoken {wave} 'riff)
(mapcar
  (lambda (word) (format t "%s\\t%f\\t%f\\n" (item.name word) (item.feat word "word_start") (item.feat word "word_end")))
  (utt.relation.items spoken 'Word))
"""
VOICES = ("festival", "flite:rms", "flite:slt", "flite:awb", "flite:kal16", "espeak-ng:en-us", "espeak-ng:en-gb")
FILLERS = ("um", "uh")  # Whisper does not write them
LONGEST = 28.0  # seconds: Whisper hears 30


def speak(text: str, voice: str, wave: Path) -> list[tuple[str, float, float]]:
    """Have a text spoken into a wav file; returns the words with their times, which festival alone knows."""
    program, _, name = voice.partition(":")
    quoted = json.dumps(text)
    commands = {
        "festival": ["festival", "--pipe"],
        "flite": ["flite", "-voice", name, "-t", text, "-o", str(wave)],
        "espeak-ng": ["espeak-ng", "-v", name, "-w", str(wave), text],
    }
    script = FESTIVAL.format(text=quoted, wave=json.dumps(str(wave)))
    try:
        done = subprocess.run(commands[program], input=script, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SystemExit(
            f"{program} is not installed: apt-get install {program}, or leave it out of --voices."
        ) from error
    words: list[tuple[str, float, float]] = []
    for line in done.stdout.splitlines() if program == "festival" else ():
        word, start, end = line.split("\t")
        if word.startswith("'") and words:  # 's has no time of its own
            words[-1] = (words[-1][0] + word, *words[-1][1:])
        else:
            words.append((word, float(start), float(end)))
    return words


def read_textgrid(path: Path) -> list[tuple[str, float, float]]:
    """Return the intervals with a word of the first tier called ``words``, of a TextGrid in either of Praat's two forms."""
    data = path.read_bytes()
    text = data.decode("utf-16" if data[:2] in (b"\xfe\xff", b"\xff\xfe") else "utf-8")
    text = re.sub(r"\b(\w+ = |\w+ \[\d*\]:?|\w+: size = )", " ", text)  # the long form names what it lists
    tiers = text.split('"IntervalTier"')[1:]
    tier = next((tier for tier in tiers if "words" in tier.split('"')[1]), "")
    found = re.findall(r'([\d.]+)\s+([\d.]+)\s+"([^"]*)"', tier)
    return [(word.strip(), float(start), float(end)) for start, end, word in found if word.strip()]


def with_fillers(text: str, rng: random.Random, share: float) -> str:
    """Put a filler and a pause before so many of the words."""
    return " ".join(
        f"{rng.choice(FILLERS)}, {word}" if place and rng.random() < share else word
        for place, word in enumerate(text.split())
    )


def changed(samples: np.ndarray, rng: random.Random) -> tuple[np.ndarray, float]:
    """Play faster or slower by at most a tenth, and add white noise to half of the clips; returns the factor of the times."""
    size = round(len(samples) * rng.uniform(0.9, 1.1))
    samples = np.interp(np.linspace(0, len(samples) - 1, size), np.arange(len(samples)), samples)
    if rng.random() < 0.5:
        loudness = np.sqrt(np.mean(samples**2)) * 10 ** (-rng.uniform(10, 30) / 20)
        samples = samples + loudness * np.random.default_rng(rng.getrandbits(32)).standard_normal(size)
    return samples / max(1.0, np.abs(samples).max()), size


def spoken_clips(settings: argparse.Namespace) -> Any:
    """Yield the clips of ``speak``, each as samples, text, voice and words."""
    rng = random.Random(settings.seed)
    lines = read_lines(find(settings.text))
    rng.shuffle(lines)
    for number in range(settings.clips):
        voice = settings.voices[number % len(settings.voices)]
        text = " ".join(lines.pop() for _ in range(rng.randint(1, settings.lines)))
        said = with_fillers(text, rng, settings.fillers) if settings.fillers else text
        with tempfile.TemporaryDirectory() as scratch:
            wave = Path(scratch) / "spoken.wav"
            words = [word for word in speak(said, voice, wave) if word[0] not in FILLERS]
            original = read_audio(wave)
        samples, size = changed(original, rng)
        factor = size / len(original)
        if size <= LONGEST * RATE:
            yield samples, text, voice, [(word, start * factor, end * factor) for word, start, end in words]


def recorded_clips(settings: argparse.Namespace) -> Any:
    """Yield the clips of ``textgrids``."""
    rows = read_rows(str(settings.texts), ("file", "start", "end", "text")) if settings.texts else []
    for path in sorted(p for p in settings.folder.iterdir() if p.suffix in (".wav", ".flac")):
        grid, lab = path.with_suffix(".TextGrid"), path.with_suffix(".lab")
        words = read_textgrid(grid) if grid.exists() else []
        parts = [(float(start), float(end), text) for name, start, end, text in rows if name == path.name]
        samples = read_audio(path)
        if not parts and (words or lab.exists()):
            text = lab.read_text(encoding="utf-8").strip() if lab.exists() else " ".join(word for word, *_ in words)
            parts = [(0.0, len(samples) / RATE, text)]
        if not parts:
            print(f"{path}: left out, its words are not known")
        for start, end, text in parts:
            inside = [(word, a - start, b - start) for word, a, b in words if start <= a and b <= end]
            yield samples[round(start * RATE) : round(end * RATE)], text, "recording", inside


@torch.no_grad()
def heard_clips(settings: argparse.Namespace) -> Any:
    """Yield the clips of ``heard``: pieces with any words in them."""
    if not 0 < settings.step <= settings.seconds <= LONGEST:
        raise SystemExit(
            f"--step {settings.step:g} --seconds {settings.seconds:g}: a piece has at most {LONGEST:g} seconds, and a step at most a piece."
        )
    processor, model = load_speech(settings.model, settings.language)
    size, step = (round(seconds * RATE) for seconds in (settings.seconds, settings.step))
    for path in sorted(p for p in settings.folder.rglob("*") if p.suffix in (".wav", ".flac", ".ogg", ".mp3")):
        samples = read_audio(path)
        for start in range(0, max(len(samples) - size, 0) + step, step):
            piece = samples[start : start + size]
            if len(piece) < RATE:  # a second says too little
                continue
            given = processor.feature_extractor(piece, sampling_rate=RATE, return_tensors="pt")
            text = processor.batch_decode(model.generate(**given), skip_special_tokens=True)[0].strip()
            if text:
                yield piece, text, "recording", []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    spoken = commands.add_parser("speak", help="text spoken by programs")
    spoken.add_argument("text", help="file of lines")
    spoken.add_argument("out", type=Path)
    spoken.add_argument("--clips", type=int, default=200)
    spoken.add_argument("--lines", type=int, default=6, help="a clip has one to so many")
    spoken.add_argument("--voices", nargs="+", default=VOICES, choices=VOICES, help="in turns")
    spoken.add_argument("--fillers", type=float, default=0.0, help="share of the words that um or uh is said before")
    spoken.add_argument("--seed", type=int, default=0)
    grids = commands.add_parser("textgrids", help="recordings with TextGrids or transcripts beside them")
    grids.add_argument("folder", type=Path)
    grids.add_argument("out", type=Path)
    grids.add_argument("--texts", type=Path, help="table of parts of recordings and what is said in them")
    heard = commands.add_parser("heard", help="recordings, and what a model hears in them")
    heard.add_argument("model", help="folder or Hub id")
    heard.add_argument("folder", type=Path, help="with sound files, in folders of their own or not")
    heard.add_argument("out", type=Path)
    heard.add_argument("--seconds", type=float, default=15.0, help="of a piece")
    heard.add_argument(
        "--step", type=float, default=10.0, help="seconds from the start of one piece to that of the next"
    )
    heard.add_argument("--language", default="en")
    settings = parser.parse_args(arguments)
    settings.out.mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    with (settings.out / "manifest.jsonl").open("w", encoding="utf-8") as manifest:
        clips = {"speak": spoken_clips, "textgrids": recorded_clips, "heard": heard_clips}[settings.command](settings)
        for number, (samples, text, voice, words) in enumerate(clips):
            path = settings.out / f"{number:04}.flac"
            soundfile.write(path, samples, RATE)
            times = [[word, round(start, 4), round(end, 4)] for word, start, end in words]
            record = {"audio": path.name, "text": text, "voice": voice} | ({"words": times} if times else {})
            manifest.write(json.dumps(record, ensure_ascii=False) + "\n")
            seconds += len(samples) / RATE
    print(f"{settings.out / 'manifest.jsonl'}: {seconds / 60:.1f} minutes of speech")


if __name__ == "__main__":
    main()
