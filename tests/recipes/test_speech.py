"""The speech recipe, end to end on noise that a tiny Whisper hears, and how sound is read."""

import json

import datasets
import numpy as np
import pytest
import soundfile
import torch
import transformers as tf
from tiny_speech import RATE, tiny_processor, tiny_whisper

import hf_entmax
import speech
from common.audio import Clip, Collator, check_clips, read_audio, read_clips
from common.settings import parse
from hf_entmax.batches.prepare import prepare_batch


@pytest.fixture
def data(tmp_path):
    tiny_whisper().save_pretrained(tmp_path / "tiny")
    tiny_processor().save_pretrained(tmp_path / "tiny")
    rng = np.random.default_rng(0)
    lines = []
    for number, text in enumerate(("to be", "or not", "to be that", "is it", "a question")):
        soundfile.write(tmp_path / f"{number}.flac", 0.1 * rng.standard_normal(RATE), RATE)
        lines.append(f"{number}.flac\t{text}\n")
    (tmp_path / "clips.tsv").write_text("audio\ttext\n" + "".join(lines))
    return tmp_path


def command(data, **changes):
    table = str(data / "clips.tsv")
    given = {
        "model": str(data / "tiny"),
        "train": table,
        "dev": table,
        "test": table,
        "out": str(data / "run"),
        "smoke": "true",
    }
    given |= {"batch_size": 4, "warmup": 1, "lr": "1e-3"} | changes
    return [
        word
        for name, value in given.items()
        for word in (f"--{name}", *([str(value)] if isinstance(value, (str, int)) else value))
    ]


@pytest.mark.slow
def test_a_sparse_run_with_a_frozen_encoder_can_be_taken_up_again(data):
    options = {
        "attention": "learned",
        "alpha_init": "1.5",
        "sites": "cross",
        "freeze_encoder": "true",
        "distill": "1",
        "smoke": "false",
        "epochs": 1,
    }
    speech.main(parse(speech.Settings, "", command(data, **options)))
    result = json.loads((data / "run" / "result.json").read_text())
    assert (
        result["steps"] == 2
        and result["sites"] == "cross"
        and 0 < result["density_cross"] < 1 == result["density_encoder_self"]
    )
    model = tf.AutoModelForSpeechSeq2Seq.from_pretrained(data / "run" / "model")
    assert hf_entmax.entmax_config(model).sites == ("cross",) and tf.AutoProcessor.from_pretrained(
        data / "run" / "model"
    )
    before = tf.AutoModelForSpeechSeq2Seq.from_pretrained(data / "tiny").state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, model.state_dict()[name])}
    assert changed and not any(name.startswith("model.encoder.") for name in changed)
    (heard,) = (data / "run").glob("hypotheses.*.txt")
    first = heard.read_text()
    speech.main(parse(speech.Settings, "", command(data, **options, resume="true")))  # finished: it only tests again
    assert heard.read_text() == first


def test_a_target_for_the_density_is_for_sparse_attention(data):
    with pytest.raises(SystemExit):
        parse(speech.Settings, "", command(data, density_target="0.5"))
    for wrong in ({"density_target": "0"}, {"density_rate": "1"}, {"density_target": "0.5", "density_rate": "0"}):
        with pytest.raises(SystemExit):
            parse(speech.Settings, "", command(data, attention="1.5", **wrong))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_pressure_on_the_density_moves_learned_alphas_up(data, frozen):
    options = {
        "attention": "learned",
        "alpha_init": "1.2",
        "smoke": "false",
        "epochs": 8,
        "lr": "1e-9",
        "alpha_lr": "0.1",
    }
    density = {}
    for target, rate in (("1", "0.1"), ("0.01", "0.1"), ("0.01", "3")):
        place = data / f"run{target}-{rate}"
        out = {"out": str(place), "density_target": target, "density_rate": rate}
        speech.main(parse(speech.Settings, "", command(data, **options, **out)))
        result = json.loads((place / "result.json").read_text())
        density[target, rate] = result["density_cross" if frozen else "density_encoder_self"]
    assert density["0.01", "3"] < density["0.01", "0.1"] < density["1", "0.1"]


@pytest.mark.slow
def test_the_original_alone_can_teach_the_encoder(data, capsys):
    options = {
        "attention": "1.8",
        "sites": "encoder_self",
        "task_weight": "0",
        "distill_encoder": "1",
        "weight_decay": "0",
        "smoke": "false",
    }
    with pytest.raises(SystemExit):
        parse(speech.Settings, "", command(data, **options, freeze_encoder="true"))
    assert "distill_encoder" in capsys.readouterr().err
    speech.main(parse(speech.Settings, "", command(data, **options, epochs=1)))
    model = tf.AutoModelForSpeechSeq2Seq.from_pretrained(data / "run" / "model")
    before, after = tf.AutoModelForSpeechSeq2Seq.from_pretrained(data / "tiny").state_dict(), model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed and all(name.startswith("model.encoder.") for name in changed)
    assert "conversion/encoder" in (data / "run" / "trainer_state.json").read_text()


@pytest.mark.slow
def test_a_data_set_with_audio_and_a_softmax(data):
    sounds = [{"bytes": (data / f"{n}.flac").read_bytes(), "path": None} for n in range(3)]
    (data / "set").mkdir()
    features = datasets.Features(
        {
            "sound": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
            "said": datasets.Value("string"),
        }
    )
    table = datasets.Dataset.from_dict({"sound": sounds, "said": ["to be", "or", "not"]}, features=features)
    table.to_parquet(data / "set" / "train.parquet")
    where = f"hub:{data / 'set'}@train"
    options = {"train": where, "dev": where, "test": [where], "audio": "sound", "text": "said"}
    speech.main(parse(speech.Settings, "", command(data, **options)))
    assert json.loads((data / "run" / "result.json").read_text())["density_cross"] == 1
    with pytest.raises(ValueError, match="no column text; it has sound, said"):
        read_clips(where, "sound", "text")


def test_what_a_frozen_encoder_makes_of_a_clip_is_its_own(data):
    model, processor = tiny_whisper(), tiny_processor()
    clips = read_clips(str(data / "clips.tsv"), "audio", "text")
    examples = [{"clip": clip, "labels": [5, 6, 7][: 2 + place % 2]} for place, clip in enumerate(clips)]
    once, plain = Collator(processor, model, frozen=True), Collator(processor, model, frozen=False)
    for batch in (examples[:2], examples[1:4], examples[:3]):
        kept, features = once(batch), plain(batch)
        with torch.no_grad():
            torch.testing.assert_close(model(**kept).logits, model(**features).logits)
            both = [model(**prepare_batch(model, dict(batch)).inputs).logits for batch in (kept, features)]
            torch.testing.assert_close(*both)
        assert features["labels"].tolist() == [e["labels"] + [-100] * (3 - len(e["labels"])) for e in batch]
        assert (features["decoder_input_ids"][:, 0] == model.config.decoder_start_token_id).all()
    with pytest.raises(TypeError, match="what the encoder returns"):
        prepare_batch(model, {**once(examples[:2]), "encoder_outputs": torch.zeros(2, 100, 16)})


def test_sound_of_any_rate_and_number_of_channels(tmp_path):
    times = np.arange(44_100) / 44_100
    tone = 0.5 * np.sin(2 * np.pi * 440 * times)
    soundfile.write(tmp_path / "tone.wav", np.stack([tone, 0 * tone], 1), 44_100)
    samples = read_audio(tmp_path / "tone.wav")
    assert samples.shape == (RATE,) and samples.dtype == np.float32
    expected = 0.25 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert np.abs(samples - expected)[200:-200].max() < 0.003  # the filter rings at the ends
    assert np.array_equal(read_audio((tmp_path / "tone.wav").read_bytes()), samples)


def test_sound_that_cannot_be_used_is_named(tmp_path):
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "long.wav", np.zeros(3 * RATE), RATE)
    for name, error, says in (
        ("empty.wav", ValueError, "has no samples"),
        ("text.wav", ValueError, "no sound that can be read"),
        ("none.wav", FileNotFoundError, "no audio file"),
    ):
        with pytest.raises(error, match=says):
            read_audio(tmp_path / name)
    soundfile.write(tmp_path / "broken.wav", np.array([0.1, np.nan]), RATE, subtype="FLOAT")
    with pytest.raises(ValueError, match="not finite"):
        read_audio(tmp_path / "broken.wav")
    (tmp_path / "clips.tsv").write_text("audio\ttext\nlong.wav\tto be\n")
    (clip,) = read_clips(str(tmp_path / "clips.tsv"), "audio", "text")
    with pytest.raises(ValueError, match=r"long\.wav is 3\.0 seconds long, and the model hears 2"):
        clip.read(2)
    (tmp_path / "clips.tsv").write_text("audio\ttext\nnone.wav\tto be\n")
    with pytest.raises(FileNotFoundError, match="1 of 1 sound files are not there"):
        read_clips(str(tmp_path / "clips.tsv"), "audio", "text")
    (tmp_path / "clips.tsv").write_text("audio\ttext\nlong.wav\t\n")
    with pytest.raises(ValueError, match="text is empty"):
        read_clips(str(tmp_path / "clips.tsv"), "audio", "text")


def test_what_cannot_be_used_is_said_before_the_run_begins(data):
    lines = ["audio\ttext"]
    for name, samples, text in (
        ("good", np.full(RATE, 0.1), "to be"),
        ("long", np.full(3 * RATE, 0.1), "to be"),
        ("silent", np.zeros(RATE), "to be"),
        ("wordy", np.full(RATE, 0.1), "to be or not " * 40),
    ):
        soundfile.write(data / f"{name}.wav", samples, RATE)
        lines.append(f"{name}.wav\t{text}")
    (data / "text.wav").write_text("no sound")
    (data / "bad.tsv").write_text("\n".join([*lines, "text.wav\tto be\n"]))
    with pytest.raises(ValueError, match="4 of 15 recordings cannot be used") as found:
        speech.main(parse(speech.Settings, "", command(data, dev=str(data / "bad.tsv"), smoke="false")))
    for part in ("long.wav is 3.0 seconds", "silent.wav is silent", "wordy.wav: the text has", "text.wav is no sound"):
        assert part in str(found.value)
    assert "good.wav" not in str(found.value) and not (data / "run").exists()
    with pytest.raises(ValueError, match="record 7: sound is no sound"):
        check_clips([Clip("record 7", b"RIFF", "to be")], tiny_processor(), tiny_whisper())
