"""The analysis of a speech model: recordings in, frames and word times as gold, a time axis in the viewer."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import RATE, tiny_processor, tiny_whisper
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import hf_entmax
from hf_entmax.analysis import collect
from hf_entmax.analysis.analyze import analyze
from hf_entmax.analysis.collecting.examples import in_seconds, run_sentence
from hf_entmax.analysis.reading.speech import SpeechEncoder, names_sound, read_speech
from hf_entmax.batches.prepare import prepare_batch
from hf_entmax.training import attention_pairs, record_attention

WORDS = [["to", 0.1, 0.3], ["be", 0.3, 0.52]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny sparse Whisper, and two recordings, the second too long for it."""
    place = tmp_path_factory.mktemp("speech")
    model = hf_entmax.patch_model(tiny_whisper(), alpha=1.5, sites=("cross",))
    model.save_pretrained(place / "model")
    tiny_processor().save_pretrained(place / "model")
    rng = np.random.default_rng(0)
    lines = []
    for number, (text, words, seconds) in enumerate(
        (("To be,", WORDS, 1), ("Or not", [["or", 0, 1], ["not", 1, 2]], 3))
    ):
        soundfile.write(place / f"{number}.flac", 0.1 * rng.standard_normal(seconds * RATE), RATE)
        lines.append({"audio": f"{number}.flac", "text": text, "words": words})
    (place / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (place / "clips.tsv").write_text("audio\ttext\n0.flac\tTo be,\n")
    return place


@pytest.fixture(scope="module")
def encoder(folder):
    processor = tiny_processor()
    model = hf_entmax.patch_model(tiny_whisper(), alpha=1.5, sites=("cross",))
    return SpeechEncoder(model, processor.tokenizer, processor.feature_extractor)


def test_frames_and_tokens_carry_their_words(folder, encoder):
    (batch,) = encoder.texts(read_speech(folder / "clips.jsonl"))
    assert encoder.skipped == 1 and "longer than 2 s" in encoder.remarks()[0]
    expected = [-1] * 5 + [0] * 10 + [1] * 11 + [-1] * 74  # frames of 20 ms
    assert batch["source_words"][0].tolist() == expected
    letters = tiny_processor().tokenizer.convert_ids_to_tokens(batch["labels"][0].tolist())
    of_word = [
        "".join(c for c, w in zip(letters, batch["target_words"][0].tolist(), strict=True) if w == n) for n in (0, 1)
    ]
    assert [text.strip("Ġ") for text in of_word] == ["To", "be"]
    assert batch["decoder_input_ids"][0].tolist()[1:] == batch["labels"][0].tolist()[:-1]


def test_frames_of_the_viewer_are_tenths_of_a_second_and_hold_all_weight(folder, encoder):
    record = read_speech(folder / "clips.jsonl")[0]
    (example,) = in_seconds(encoder.model, encoder, [record], encoder.tokenizer)
    (batch,) = encoder.texts([record])
    frames = run_sentence(encoder.model, batch, encoder.tokenizer, None).sites
    cross = example.sites["cross"]
    assert [token.text for token in cross.keys][:3] == ["0.0", "0.1", "0.2"] and len(cross.keys) == 10
    torch.testing.assert_close(cross.weights[..., 3], frames["cross"].weights[..., 15:20].sum(-1))
    own = example.sites["encoder_self"]
    assert own.queries == own.keys
    inside = frames["encoder_self"].weights[..., 10:15, 20:25].sum(-1).mean(-1)
    torch.testing.assert_close(own.weights[..., 2, 4], inside)


def test_a_report_of_recordings(folder, tmp_path):
    done = analyze(
        str(folder / "model"), folder / "clips.jsonl", out=tmp_path, figures=False, device="cpu", num_examples=1
    )
    (statistics,) = done.statistics
    assert not done.problems and set(statistics.sites) == {"encoder_self", "cross", "decoder_self"}
    assert bool(statistics.sites["cross"].alignment_error_rate("support", "output").isfinite().any())
    assert statistics.importance["gradient"]["cross"].isfinite().all()
    page = Path(done.report).read_text(encoding="utf-8")
    assert "frames of 20 ms" in page and "words and the time they were said" in page


def test_a_data_set_with_audio(folder, tmp_path):
    rows = list(map(json.loads, (folder / "clips.jsonl").read_text().splitlines()))
    table = datasets.Dataset.from_list(
        [
            {
                "audio": {"bytes": (folder / row["audio"]).read_bytes(), "path": None},
                "text": row["text"],
                "words": [dict(zip(("word", "start", "end"), word, strict=True)) for word in row["words"]],
            }
            for row in rows
        ]
    )
    (tmp_path / "set").mkdir()
    table.cast_column("audio", datasets.Audio()).to_parquet(tmp_path / "set" / "test.parquet")
    where = f"hub:{tmp_path / 'set'}@test"
    assert names_sound(where)
    found, known = read_speech(where), read_speech(folder / "clips.jsonl")
    for one, other in zip(found, known, strict=True):
        assert (one.source, one.words) == (other.source, other.words)
        assert one.audio == other.audio.read_bytes()
    assert len(read_speech(where, limit=1)) == 1
    done = analyze(str(folder / "model"), where, out=tmp_path / "o", figures=False, device="cpu", num_examples=1)
    same = analyze(str(folder / "model"), folder / "clips.jsonl", out=tmp_path / "p", figures=False, device="cpu")
    assert not done.problems
    for site, statistics in done.statistics[0].sites.items():
        assert torch.equal(statistics.density(), same.statistics[0].sites[site].density())
    with pytest.raises(ValueError, match="no column said; it has audio, text, words"):
        read_speech(where, text="said")
    with pytest.raises(FileNotFoundError, match="no data set that can be loaded"):
        names_sound(f"hub:{tmp_path / 'none'}@test")
    with pytest.raises(ValueError, match="OWNER/NAME"):
        names_sound("hub:set")


def test_what_cannot_be_heard_is_said(folder, tmp_path):
    assert names_sound(folder / "clips.jsonl") and names_sound(folder / "clips.tsv")
    table = tmp_path / "clips.tsv"
    table.write_text("text\tlabel\nTo be,\t1\n")
    assert not names_sound(table)
    table.write_text("audio\ttext\nnone.flac\tTo be\n")
    with pytest.raises(FileNotFoundError, match=r"none\.flac"):
        read_speech(table)
    (tmp_path / "clips.jsonl").write_text(
        json.dumps({"audio": "0.flac", "text": "to be", "words": ["to", "be"]}) + "\n"
    )
    with pytest.raises(ValueError, match="start, end"):
        read_speech(tmp_path / "clips.jsonl")
    with pytest.raises(ValueError, match="target_column"):
        analyze(str(folder / "model"), folder / "clips.tsv", target_column="text", device="cpu", out=tmp_path / "o")


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def moonshine():
    config = MoonshineConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2, decoder_num_attention_heads=2, encoder_num_key_value_heads=2,
        decoder_num_key_value_heads=2, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return MoonshineForConditionalGeneration(config)


def speech_to_text():
    config = Speech2TextConfig(
        vocab_size=30, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, input_feat_per_channel=8, conv_channels=16, max_source_positions=400,
    )  # fmt: skip
    return Speech2TextForConditionalGeneration(config)


def wav2vec2():
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (8, 4), "num_conv_pos_embeddings": 2}
    return Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=30, num_conv_pos_embedding_groups=2, **SMALL, **convolutions))


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(
    ("build", "main", "lengths", "shape", "frames"),
    [
        # Frames of the second recording, as Transformers counts them: every 384th sample, every 4th feature, those of the convolutions.
        (moonshine, "input_values", (9_000, 5_000), (), 14),
        (speech_to_text, "input_features", (120, 60), (8,), 15),
        (wav2vec2, "input_values", (900, 450), (), 14),
    ],
)
def test_what_is_behind_the_end_of_a_recording_does_not_count(build, main, lengths, shape, frames, patched):
    """The batch's mask is of samples or features: only the attention is told which states are padding."""
    torch.manual_seed(5)
    model = build().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 20  # scores that differ: entmax has zeros
    if patched:
        hf_entmax.patch_model(model, alpha=1.5)
    batch = {
        main: pad_sequence([torch.randn(length, *shape) for length in lengths], batch_first=True),
        "attention_mask": torch.stack([torch.arange(lengths[0]) < length for length in lengths]).long(),
    }
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(2, 30, (2, 5))
    first, second = ({name: tensor[row : row + 1] for name, tensor in batch.items()} for row in (0, 1))
    both, whole, padded = (collect(model, [given]) for given in (batch, first, second))
    with torch.no_grad(), record_attention(model) as record:
        model(**prepare_batch(model, batch).inputs)
    pairs, example = (
        attention_pairs(model, batch, record),
        run_sentence(model, second, tiny_processor().tokenizer, None),
    )
    for site in [site for site in ("encoder_self", "cross") if site in both.sites]:
        if site == "encoder_self":
            assert padded.num_tokens[site] == frames < whole.num_tokens[site]
            assert both.num_tokens[site] == frames + whole.num_tokens[site]
        assert example.sites[site].weights.shape[-1] == frames
        called = {name: call.weights for name, call in record.calls.items() if call.site.site == site}
        assert all(pairs[name][1].any(0).sum() == frames for name in called)
        kept = torch.stack([(weights > 0).sum((0, 2, 3)) for weights in called.values()])
        counts = torch.tensor([int(pairs[name].sum()) for name in called])
        if site == "cross":  # queries of padding also look
            assert torch.equal(both.density[site], kept / counts[:, None].double())
        if not patched:
            assert bool((both.density[site] == 1).all())
        else:
            assert bool((both.density[site] < 1).any())
