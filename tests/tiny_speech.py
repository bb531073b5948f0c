"""A tiny Whisper that hears two seconds, with random weights, and its processor."""

from __future__ import annotations

import functools

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
RATE = 16_000


@functools.cache
def tiny_processor() -> tf.WhisperProcessor:
    """Single bytes, and the special tokens of an English Whisper."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    ids = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftranscript|> <|notimestamps|> $A <|endoftext|>", special_tokens=ids
    )
    end = {f"{name}_token": SPECIAL[0] for name in ("unk", "bos", "eos", "pad")}
    fast = tf.WhisperTokenizerFast(tokenizer_object=tokenizer, **end)
    return tf.WhisperProcessor(tf.WhisperFeatureExtractor(feature_size=8, chunk_length=2), fast)


def tiny_whisper(seed: int = 0) -> tf.WhisperForConditionalGeneration:
    """Two layers of two heads on either side, 100 frames of 20 ms; large weights, so that heads differ."""
    tokenizer = tiny_processor().tokenizer
    end, start, *_, plain = tokenizer.convert_tokens_to_ids(SPECIAL)
    both = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    torch.manual_seed(seed)
    config = tf.WhisperConfig(
        vocab_size=len(tokenizer), d_model=16, num_mel_bins=8, max_source_positions=100, max_target_positions=64, **both,
        pad_token_id=end, bos_token_id=end, eos_token_id=end, decoder_start_token_id=start, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name and parameter.ndim == 2:
                parameter.normal_(0, 0.5)
    model.generation_config.update(
        no_timestamps_token_id=plain,
        is_multilingual=False,
        return_timestamps=False,
        max_length=40,
        decoder_start_token_id=start,
    )
    return model
