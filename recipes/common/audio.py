"""Recordings from files and data sets, and batches of them as speech models take them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import torch
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from hf_entmax.analysis.reading.speech import RATE, read_audio, sounds_of_data_set
from hf_entmax.analysis.reading.tables import HUB, find, read_rows

#: So many recordings that cannot be used are named.
SHOWN = 5


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
        try:
            samples = read_audio(self.source)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}" if isinstance(self.source, bytes) else str(error)) from error
        if longest is not None and len(samples) > longest * RATE:
            raise ValueError(
                f"{self.name} is {len(samples) / RATE:.1f} seconds long, and the model hears {longest:g}: cut it where nobody speaks."
            )
        return samples


def read_clips(where: str, audio: str, text: str) -> list[Clip]:
    """Read the clips of a table, of JSON lines, or of a data set.

    Args:
        where: as `hf_entmax.analysis.reading.tables.read_rows` takes it. Files that a table names are relative to it.
        audio: column of the file, or of a data set's audio.
        text: column of what is said.

    Raises:
        FileNotFoundError: if there is no such table, data set or sound file.
        ValueError: for an empty text or a table that is not as it should be.
    """
    if where.startswith(HUB):
        return [
            Clip(name, sound, said) for name, sound, said, _ in sounds_of_data_set(where, audio, text, streaming=False)
        ]
    folder = find(where).parent
    clips = [Clip(str(folder / name), folder / name, said) for name, said in read_rows(where, (audio, text))]
    if missing := [clip.source for clip in clips if not clip.source.is_file()]:
        raise FileNotFoundError(
            f"{where}: {len(missing)} of {len(clips)} sound files are not there, {missing[0]} among them."
        )
    return clips


def load_speech(name: str, language: str) -> tuple[Any, Any]:
    """Return processor and model, in float32, of a folder or Hub id; one that knows several languages is told which."""
    processor = AutoProcessor.from_pretrained(name)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(name, dtype=torch.float32)
    if getattr(model.generation_config, "is_multilingual", False):
        processor.tokenizer.set_prefix_tokens(language, "transcribe")
        model.generation_config.language, model.generation_config.task = language, "transcribe"
    return processor, model


def check_clips(clips: list[Clip], processor: Any, model: Any) -> None:
    """Say before training what would stop it later, or teach nothing: each recording is opened once.

    Raises:
        ValueError: if recordings cannot be read, are longer than the model hears at once or silent, or texts are longer than it
            writes; the message names the first of them.
    """
    wrong = []
    most = getattr(model.config, "max_target_positions", None)
    for clip in clips:
        try:
            silent = not clip.read(seconds_heard(processor)).any()
        except (FileNotFoundError, ValueError) as error:
            wrong.append(str(error).rstrip("."))
            continue
        if silent:
            wrong.append(f"{clip.name} is silent: all of its samples are zero, and its text is {clip.text[:40]!r}")
        elif most is not None and (size := len(processor.tokenizer(clip.text)["input_ids"])) > most:
            wrong.append(f"{clip.name}: the text has {size} tokens, and the model writes {most}")
    if wrong:
        more = f"; {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(f"{len(wrong)} of {len(clips)} recordings cannot be used: {'; '.join(wrong[:SHOWN])}{more}.")


def seconds_heard(processor: Any) -> float | None:
    """Seconds that a model hears at once: Whisper 30 of whatever it is given, other models as much as there is (None)."""
    return getattr(processor.feature_extractor, "chunk_length", None)


def error_rates(hypotheses: list[str], clips: list[Clip], language: str) -> dict[str, float]:
    """Word and character error rate, %."""
    normalised = EnglishTextNormalizer({}) if language == "en" else BasicTextNormalizer()
    said, heard = ([normalised(text) for text in texts] for texts in ([clip.text for clip in clips], hypotheses))
    return {"wer": 100 * jiwer.wer(said, heard), "cer": 100 * jiwer.cer(said, heard)}


def labelled(clips: list[Clip], processor: Any, model: Any) -> list[dict[str, Any]]:
    """Return examples for `Collator`: clips with the token ids of what is said in them."""
    ids = processor.tokenizer([clip.text for clip in clips])["input_ids"]
    start = model.config.decoder_start_token_id  # the model puts it before the labels itself
    return [{"clip": c, "labels": i[i[0] == start :]} for c, i in zip(clips, ids, strict=True)]


class Collator:
    """Batches of clips: what the encoder is given, or of an encoder that is frozen what it makes of each clip; and labels.

    Args:
        processor: the model's.
        model: a speech model that writes.
        frozen: whether its encoder stays as it is. Where its output has one length, as Whisper's, it is kept in memory for every
            clip (2.3 MB for Whisper tiny).
    """

    def __init__(self, processor: Any, model: Any, frozen: bool) -> None:
        self.extractor, self.pad = processor.feature_extractor, processor.tokenizer.pad
        self.encoder, self.start = model.get_encoder(), model.config.decoder_start_token_id
        self.seconds = seconds_heard(processor)
        self.known: dict[str, torch.Tensor] | None = {} if frozen and self.seconds else None

    def __call__(self, clips: list[dict[str, Any]]) -> dict[str, Any]:
        """Return tensors for `forward` and `generate`."""
        padded = self.pad({"input_ids": [clip["labels"] for clip in clips]}, return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
        before = torch.nn.functional.pad(padded["input_ids"][:, :-1], (1, 0), value=self.start)
        batch = {"labels": labels, "decoder_input_ids": before}
        if self.known is None:
            return self.features([clip["clip"] for clip in clips]) | batch
        for clip in (clip["clip"] for clip in clips):
            if clip.name not in self.known:
                with torch.no_grad():
                    features = {name: t.to(self.encoder.device) for name, t in self.features([clip]).items()}
                    self.known[clip.name] = self.encoder.eval()(**features).last_hidden_state[0].cpu()
        states = torch.stack([self.known[clip["clip"].name] for clip in clips])
        return {"encoder_outputs": BaseModelOutput(states), **batch}

    def features(self, clips: list[Clip]) -> dict[str, Any]:
        """Return what the encoder is given."""
        sounds = [clip.read(self.seconds) for clip in clips]
        padding = "max_length" if self.seconds else True
        return dict(self.extractor(sounds, sampling_rate=RATE, padding=padding, return_tensors="pt"))
