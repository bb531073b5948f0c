"""Recordings with what is said in them: how sound is read, and batches of it for a speech model that writes."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_entmax.analysis.reading import records
from hf_entmax.analysis.reading.data import TextRecord
from hf_entmax.analysis.reading.encode import Batch, Encoder
from hf_entmax.analysis.reading.tables import HUB, find, read_rows
from hf_entmax.batches.prepare import frame_seconds, is_encoder_decoder

#: Samples per second that speech models of Transformers are trained on.
RATE = 16_000
#: Recordings in a batch at most: an encoder's weights grow with the square of its 1,500 frames.
_MOST = 2


def read_audio(source: str | Path | bytes, rate: int = RATE) -> Any:
    """Read sound of any rate and number of channels.

    Args:
        source: a file that libsndfile reads (wav, flac, ogg, mp3), or its bytes.
        rate: samples per second wanted.

    Returns:
        NumPy float32 ``[samples]``, one channel, the mean of all.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the package soundfile is not installed, or SciPy, which sound of another rate needs.
        ValueError: if it is no sound, an empty one, or one with samples that are not finite.
    """
    try:
        import soundfile
        from scipy.signal import resample_poly
    except ImportError as error:
        raise ImportError(f'reading sound needs {error.name}: pip install "hf_entmax[speech]".') from error

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
    if not math.isfinite(mono.sum(dtype="float64")):
        raise ValueError(f"{name} has samples that are not finite (NaN or infinity).")
    common = math.gcd(own, rate)
    return mono if own == rate else resample_poly(mono, rate // common, own // common).astype("float32")


@dataclass(frozen=True)
class SpeechRecord(TextRecord):
    """A recording: ``source`` and ``target`` are what is said in it.

    Attributes:
        audio: the sound file, or its bytes.
        words: of what is said, each with its start and end in seconds, where they are known.
    """

    audio: Path | bytes = field(default=Path(), kw_only=True, repr=False)
    words: tuple[tuple[str, float, float], ...] = field(default=(), kw_only=True)


def names_sound(data: str | os.PathLike[str]) -> bool:
    """Tell whether the columns or fields of a file or of a data set hold sound: one is called ``audio``."""
    if str(data).startswith(HUB):
        _, first = next(_data_set(str(data), None), ("", {}))
        return isinstance(first.get("audio"), Mapping)
    path = Path(data)
    if not path.is_file():
        return False
    kind = records.kind_of_file(path)
    if kind in ("tsv", "csv"):
        _, first = next(records.table_rows(path), (0, []))
        return "audio" in [name.strip().lower() for name in first]
    if kind == "json":
        _, record = next(records.json_records(path, lenient=True), ("", None))
        return isinstance(record, Mapping) and "audio" in record
    return False


def _data_set(where: str, audio: str | None, streaming: bool = True) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the records of a data set with what to call them; sound stays as it is stored, ``{"bytes": ..., "path": ...}``."""
    import datasets

    name, at, split = where.removeprefix(HUB).partition("@")
    name, _, config = name.partition("#")
    if not (at and name and split):
        raise ValueError(f"{where}: name a data set of the Hub as {HUB}OWNER/NAME[#CONFIG]@SPLIT.")
    try:
        data = datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    except (FileNotFoundError, ConnectionError, OSError) as error:
        raise FileNotFoundError(f"{where}: no data set that can be loaded ({error}).") from error
    known = data.features or {}
    sounds = [column for column, kind in known.items() if isinstance(kind, datasets.Audio)]
    # Sound that is stored as plain bytes is told that it is sound, any other that it must not be decoded: `read_audio` does that.
    for column in {*sounds, *([audio] if audio in known else [])}:
        data = data.cast_column(column, datasets.Audio(decode=False))
    for place, row in enumerate(data):
        yield f"{where}, record {place}", row


def sounds_of_data_set(
    where: str, audio: str = "audio", text: str = "text", *, streaming: bool = True
) -> Iterator[tuple[str, Path | bytes, str, Mapping[str, Any]]]:
    """Yield the recordings of a data set: what to call one, its file or bytes, what is said, and the whole record.

    Args:
        where: ``hub:OWNER/NAME[#CONFIG]@SPLIT``, or a folder that ``datasets`` can load in the place of ``OWNER/NAME``.
        audio: column of the sound.
        text: column of what is said.
        streaming: keep no copy of the data set.

    Raises:
        FileNotFoundError: if it cannot be loaded.
        ValueError: if ``where`` names no split, a column is missing or holds no sound, or a text is empty.
    """
    for label, row in _data_set(where, audio, streaming):
        if missing := {audio, text} - set(row):
            raise ValueError(f"{where}: no column {', '.join(sorted(missing))}; it has {', '.join(row)}.")
        sound, said = row[audio], row[text]
        if not isinstance(sound, Mapping) or (sound.get("bytes") is None and not sound.get("path")):
            raise ValueError(f"{label}: {audio} holds no sound, but {type(sound).__name__}.")
        if not isinstance(said, str) or not said.strip():
            raise ValueError(f"{label}: {text} is empty.")
        yield label, Path(sound["path"]) if sound.get("bytes") is None else sound["bytes"], said.strip(), row


def read_speech(data: str | os.PathLike[str], limit: int | None = None, text: str = "text") -> list[SpeechRecord]:
    """Read recordings with what is said in them, and where they are known the times of the words.

    Args:
        data: a table, or JSON lines, with ``audio`` (a file beside it) and ``text``, JSON also with ``words``; or a data set
            with such columns, as `sounds_of_data_set` takes it. A word is ``[word, start, end]`` or an object with these names.
        limit: largest number of recordings.
        text: column of what is said.

    Raises:
        FileNotFoundError: if a sound file or data set is not there.
        ValueError: as `hf_entmax.analysis.reading.tables.read_rows` and `sounds_of_data_set`; if a word has no times.
    """
    if str(data).startswith(HUB):
        rows_of = itertools.islice(sounds_of_data_set(str(data), text=text), limit)
        return [
            SpeechRecord(said, said, audio=sound, words=_times(row.get("words") or (), label))
            for label, sound, said, row in rows_of
        ]
    path = find(str(data))
    rows = read_rows(str(data), ("audio", text))[:limit]
    timed: list[Any] = [()] * len(rows)
    if records.kind_of_file(path) == "json":
        timed = [record.get("words", ()) for _, record in records.json_records(path)][:limit]
    found = []
    for (name, said), words in zip(rows, timed, strict=True):
        times = _times(words, f"{path}: words of {name}")
        if not (path.parent / name).is_file():
            raise FileNotFoundError(f"{path}: there is no audio file {path.parent / name}.")
        found.append(SpeechRecord(said, said, audio=path.parent / name, words=times))
    return found


def _times(words: Any, label: str) -> tuple[tuple[str, float, float], ...]:
    try:
        rows = [(w["word"], w["start"], w["end"]) if isinstance(w, Mapping) else w for w in words]
        return tuple((str(word), float(start), float(end)) for word, start, end in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{label} must be [word, start, end], with seconds ({error!r}).") from error


def feature_extractor(model: Any) -> Any:
    """Load what prepares the sound that a model hears.

    Raises:
        ValueError: if there is none beside the model, or it does not write.
    """
    import transformers

    name = getattr(model, "name_or_path", "")
    try:
        extractor = transformers.AutoFeatureExtractor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the data name sound files, and {name or type(model).__name__} has no feature extractor: give a speech model, "
            f"or data without a column audio ({error})."
        ) from error
    if not is_encoder_decoder(model):
        raise ValueError(f"{type(model).__name__} hears, but does not write: give an encoder-decoder such as Whisper.")
    return extractor


class SpeechEncoder(Encoder):
    """Batches of recordings for one speech model; the query conventions are those of `Encoder`.

    Attributes:
        seconds: of a frame, one position of the encoder.
        longest: seconds that the model hears at once, None where nothing bounds them. Longer recordings are left out.
    """

    def __init__(
        self, model: Any, tokenizer: Any, extractor: Any, batch_size: int = 16, max_length: int | None = None
    ) -> None:
        super().__init__(model, tokenizer, min(batch_size, _MOST), max_length)
        self.extractor = extractor
        self.seconds = frame_seconds(model, extractor)
        self.longest = getattr(extractor, "chunk_length", None)

    def texts(self, records: Sequence[Any], labels: bool = False) -> Iterator[Batch]:
        """Batches of recordings; where all of a batch have word times, with gold alignments of frames and words."""
        for start in range(0, len(records), self.batch_size):
            chunk = [(record, read_audio(record.audio, RATE)) for record in records[start : start + self.batch_size]]
            heard = [(r, s) for r, s in chunk if self.longest is None or len(s) <= self.longest * RATE]
            self.skipped += len(chunk) - len(heard)
            if heard:
                yield self._speech([record for record, _ in heard], [samples for _, samples in heard])

    def _speech(self, kept: list[SpeechRecord], sounds: list[Any]) -> Batch:
        padding = "max_length" if self.longest else True
        batch: Batch = dict(self.extractor(sounds, sampling_rate=RATE, padding=padding, return_tensors="pt"))
        start = self.model.config.decoder_start_token_id  # the model puts it before the labels itself
        ids = [row[row[:1] == [start] :] for row in self._tokenize([r.source for r in kept], target=True)["input_ids"]]
        self.tokens += sum(map(len, ids))
        width = max(map(len, ids))
        batch["labels"] = torch.tensor([row + [-100] * (width - len(row)) for row in ids])
        inputs = torch.tensor([[start, *row[:-1], *[self._pad] * (width - len(row))] for row in ids])
        batch |= {"decoder_input_ids": inputs, "decoder_attention_mask": (batch["labels"] != -100).long()}
        frames = getattr(self.model.config, "max_source_positions", None)
        words = [self._gold_words(r.source, spans, target=True) if (spans := spans_of(r)) else None for r in kept]
        if frames and all(words):
            cut = [found[len(found) - len(row) :] for found, row in zip(words, ids, strict=True) if found]
            batch["target_words"] = self._place_words(cut, batch["labels"] != -100)
            batch["source_words"] = torch.stack([words_of_frames(r.words, frames, self.seconds) for r in kept])
            most = max(len(r.words) for r in kept)
            batch["sure_links"] = torch.eye(most, dtype=torch.bool).repeat(len(kept), 1, 1)
            for row, record in enumerate(kept):
                batch["sure_links"][row, len(record.words) :] = False
        return batch

    def heard(self, record: SpeechRecord) -> int:
        """Count the frames of a recording, without what fills up the time that a model hears."""
        return math.ceil(len(read_audio(record.audio, RATE)) / RATE / self.seconds)

    def remarks(self, what: str = "data") -> list[str]:
        """Say how many recordings were left out."""
        if not self.skipped:
            return []
        return [f"{self.skipped} recording(s) of the {what} were left out: longer than {self.longest} s."]


def words_of_frames(words: Sequence[tuple[str, float, float]], frames: int, seconds: float) -> Tensor:
    """Find the word that is said in the middle of each frame, by number, -1 where none is: long ``[frames]``."""
    middles = (torch.arange(frames, dtype=torch.float64) + 0.5) * seconds
    found = torch.full((frames,), -1)
    for number, (_, start, end) in enumerate(words):
        found[(middles >= start) & (middles < end)] = number
    return found


def spans_of(record: SpeechRecord) -> list[tuple[int, int]] | None:
    """Find where the words that have times stand in the text, as characters; None where one does not."""
    spans: list[tuple[int, int]] = []
    text, place = record.source.lower(), 0
    for word, _, _ in record.words:
        start = text.find(word.lower(), place)
        if start < 0:
            return None
        place = start + len(word)
        spans.append((start, place))
    return spans or None
