"""Sound from files and data sets, as models hear it."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from scipy.signal import resample_poly

from hf_entmax.analysis.reading.tables import HUB, find, read_rows

#: Samples per second that speech models of Transformers are trained on.
RATE = 16_000


def read_audio(source: str | Path | bytes, rate: int = RATE) -> np.ndarray:
    """Read sound of any rate and number of channels.

    Args:
        source: a file that libsndfile reads (wav, flac, ogg, mp3), or its bytes.
        rate: samples per second wanted.

    Returns:
        float32 ``[samples]``, one channel, the mean of all.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no sound, or an empty one.
    """
    name = "sound" if isinstance(source, bytes) else str(source)
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise FileNotFoundError(f"there is no audio file {name}.")
    opened: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        samples, own = soundfile.read(opened, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{name} is no sound that can be read ({error}); give wav, flac, ogg or mp3.") from error
    if not len(samples):
        raise ValueError(f"{name} holds no sound: it has no samples.")
    mono = samples.mean(1)
    common = math.gcd(own, rate)
    return mono if own == rate else resample_poly(mono, rate // common, own // common).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Clip:
    """A recording and what is said in it.

    Attributes:
        name: what messages call it.
        source: a file, or its bytes.
        text: what is said.
    """

    name: str
    source: Path | bytes = dataclasses.field(repr=False)
    text: str

    def read(self, longest: float | None = None) -> np.ndarray:
        """Return its samples, float32 ``[samples]`` at `RATE`.

        Raises:
            FileNotFoundError, ValueError: as `read_audio`; if it is longer than ``longest`` seconds.
        """
        samples = read_audio(self.source)
        if longest is not None and len(samples) > longest * RATE:
            raise ValueError(
                f"{self.name} is {len(samples) / RATE:.1f} seconds long, and the model hears {longest:g}: cut it where nobody speaks."
            )
        return samples


def read_clips(where: str, audio: str, text: str) -> list[Clip]:
    """The clips of a table, of JSON lines, or of a data set.

    Args:
        where: as `hf_entmax.analysis.reading.tables.read_rows` takes it. Files that a table names are relative to it.
        audio: column of the file, or of a data set's audio.
        text: column of what is said.

    Raises:
        FileNotFoundError: if there is no such table, data set or sound file.
        ValueError: for an empty text or a table that is not as it should be.
    """
    if where.startswith(HUB):
        return list(_of_data_set(where, audio, text))
    folder = find(where).parent
    clips = [Clip(str(folder / name), folder / name, said) for name, said in read_rows(where, (audio, text))]
    if missing := [clip.source for clip in clips if not clip.source.is_file()]:
        raise FileNotFoundError(
            f"{where}: {len(missing)} of {len(clips)} sound files are not there, {missing[0]} among them."
        )
    return clips


def _of_data_set(where: str, audio: str, text: str) -> Iterator[Clip]:
    import datasets

    name, at, split = where.removeprefix(HUB).partition("@")
    name, _, config = name.partition("#")
    if not (at and name and split):
        raise ValueError(f"{where}: name a data set of the Hub as {HUB}OWNER/NAME[#CONFIG]@SPLIT.")
    data = datasets.load_dataset(name, config or None, split=split)
    if missing := {audio, text} - set(data.column_names):
        raise ValueError(f"{where}: no column {', '.join(sorted(missing))}; it has {', '.join(data.column_names)}.")
    # As it is stored: the sound is read here, whatever decoder datasets would ask for.
    for place, row in enumerate(data.cast_column(audio, datasets.Audio(decode=False))):
        label = f"{where}, record {place}"
        if not row[text].strip():
            raise ValueError(f"{label}: {text} is empty.")
        sound = row[audio]["bytes"]
        yield Clip(label, Path(row[audio]["path"]) if sound is None else sound, row[text].strip())
