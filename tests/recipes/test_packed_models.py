"""Weights in the formats of packages become the same models."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from common import packed_models, packed_weights


def ctranslate2(arrays: dict[str, np.ndarray], aliases: dict[str, str]) -> bytes:
    """A model of format 6 as CTranslate2 writes it."""
    numbers = {np.dtype(kind): number for number, kind in packed_weights.CTRANSLATE2_TYPES.items()}

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<I", 3), struct.pack("<I", len(arrays))]
    for name, array in arrays.items():
        parts += [text(name), struct.pack("<B", array.ndim), struct.pack(f"<{array.ndim}I", *array.shape)]
        parts += [struct.pack("<BI", numbers[array.dtype], array.nbytes), array.tobytes()]
    parts += [struct.pack("<I", len(aliases)), *(text(name) + text(of) for name, of in aliases.items())]
    return b"".join(parts)


def packed_whisper(model: tf.WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """A model's weights under CTranslate2's names."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    names = {"layer_norm": {"weight": "gamma", "bias": "beta"}, "": {"weight": "weight", "bias": "bias"}}
    arrays = {"encoder/num_heads": np.array(2, np.int8)}
    for side in ("encoder", "decoder"):
        for layer in range(2):
            for part, modules in packed_models.WHISPER_PARTS.items():
                if side == "encoder" and part.startswith("attention"):
                    continue
                for kind, own in names["layer_norm" if part.endswith("layer_norm") else ""].items():
                    pieces = []
                    for module in modules:
                        like = state[f"model.{side}.layers.{layer}.{module}.weight"]
                        pieces.append(
                            state.get(f"model.{side}.layers.{layer}.{module}.{kind}", np.zeros(len(like), np.float32))
                        )
                    arrays[f"{side}/layer_{layer}/{part}/{own}"] = np.concatenate(pieces)
        arrays |= {
            f"{side}/layer_norm/{own}": state[f"model.{side}.layer_norm.{kind}"]
            for kind, own in names["layer_norm"].items()
        }
        arrays[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        arrays["encoder/" + name.replace(".", "/")] = state[f"model.encoder.{name}"]
    return arrays | {"decoder/embeddings/weight": state["proj_out.weight"]}


def whisper_vocabulary() -> tuple[dict[str, int], list[str]]:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    return {c: i for i, c in enumerate(characters)}, [
        *special,
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]


def test_whisper_from_ctranslate2_in_two_parts(tmp_path):
    vocabulary, special = whisper_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    size = tokenizer.get_vocab_size()
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 10, "max_target_positions": 12}
    torch.manual_seed(0)
    config = tf.WhisperConfig(
        vocab_size=size, d_model=8, num_mel_bins=4, **sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0
    )
    model = tf.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    data = ctranslate2(packed_whisper(model), {"decoder/projection/weight": "decoder/embeddings/weight"})
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        half = len(data) // 2
        (folder / f"model.bin.part{number + 1}").write_bytes(data[:half] if number == 0 else data[half:])
    own = {"suppress_ids": [1, 2], "suppress_ids_begin": [3], "alignment_heads": [[0, 1]]}
    (folders[0] / "config.json").write_text(json.dumps(own))
    tokenizer.save(str(folders[0] / "tokenizer.json"))
    packed_models.write_whisper(*folders, tmp_path / "out")
    other = tf.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "out").eval()
    processor = tf.AutoProcessor.from_pretrained(tmp_path / "out")
    batch = {"input_features": torch.randn(1, 4, 20), "decoder_input_ids": torch.tensor([[size - 9, size - 1, 5, 6]])}
    with torch.no_grad():
        torch.testing.assert_close(other(**batch).logits, model(**batch).logits)
    assert other.config.decoder_start_token_id == processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    assert other.generation_config.alignment_heads == [[0, 1]] and other.generation_config.suppress_tokens == [1, 2]
    assert processor.tokenizer.decode(processor.tokenizer("a cat").input_ids, skip_special_tokens=True) == "a cat"
    with pytest.raises(ValueError, match="is a part missing"):
        packed_weights.read_ctranslate2(data + b"more")


def test_letters_and_phonemes_keep_their_own_tables(tmp_path):
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters, phonemes = "abz", "aæz"
    torch.manual_seed(0)
    shape = {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 1,
        "decoder_attention_heads": 1,
    }
    shape |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16, "decoder_start_token_id": 1}
    model = tf.BartForConditionalGeneration(
        tf.BartConfig(vocab_size=9, **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2, forced_eos_token_id=None)
    ).eval()
    own = {
        "grapheme_chars": "____" + letters,
        "phoneme_chars": "____" + phonemes,
        "d_model": 8,
        "ffn_dim": 16,
        "num_heads": 1,
    }
    own |= {
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    arrays = {n: v.numpy() for n, v in model.state_dict().items() if "embed_tokens" not in n and n.startswith("model.")}
    np.savez(tmp_path / "oov_bart_en_us.npz", meta_json=json.dumps(own), **arrays)
    (tmp_path / "us_gold.json").write_text(
        json.dumps({"ab": "æz", "ba": {"DEFAULT": "za", "VERB": "zæ", "NOUN": None}})
    )
    packed_models.write_g2p(tmp_path, tmp_path / "out")
    other = tf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path / "out")
    number = lambda known, text: [(special + list(known)).index(c) for c in text]  # noqa: E731
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor([[1, *number(letters, "zab"), 2]]),
            decoder_input_ids=torch.tensor([[1, *number(phonemes, "aæ")]]),
        ).logits
        ids = tokenizer("zab", return_tensors="pt").input_ids
        found = other(input_ids=ids, decoder_input_ids=tokenizer("aæ", return_tensors="pt").input_ids[:, :-1]).logits
    vocabulary = tokenizer.get_vocab()
    same = [vocabulary[token] for token in special + list(phonemes)]
    torch.testing.assert_close(found[..., same], expected[..., :7])
    assert found[..., vocabulary["b"]].max() < -1000  # no phoneme
    lines = [line.split("\t") for line in (tmp_path / "out" / "dictionary.tsv").read_text().splitlines()]
    assert [line[1:3] for line in lines[1:]] == [["ab", "æz"], ["ba", "za"], ["ba", "zæ"]]
    assert lines[2][4] == lines[3][4]  # a word is learned or asked for, not both


def test_words_are_split_alike_whatever_their_case():
    splits = [packed_models.split_of(f"word{number}") for number in range(1000)]
    assert splits == [packed_models.split_of(f"WORD{number}") for number in range(1000)]
    assert 25 < splits.count("dev") < 75 and 25 < splits.count("test") < 75


def test_the_tokenizer_of_a_sentencepiece_model():
    pieces = [
        b"<unk>",
        b"<s>",
        b"</s>",
        *(bytes([i]) for i in range(256)),
        *("▁c at ▁cat ▁ c a t ▁ca".encode().split(b" ")),
    ]
    pieces[3] = b""  # the byte 0 stands as an empty token
    tokenizer = packed_models.sentencepiece_tokenizer(pieces)
    # at (260) before ▁ca (266), so that ▁cat is ▁c + at
    assert tokenizer("cat").input_ids == [1, 261, 2]
    assert tokenizer.decode(tokenizer("cat é").input_ids, skip_special_tokens=True) == "cat é"
