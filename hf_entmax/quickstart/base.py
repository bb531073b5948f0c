"""The model that the quickstart starts from: a small BART of characters trained with softmax, or a given checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

#: Longest answer in characters that the small model may give; the longest form of the table has 19.
MAX_NEW_TOKENS = 32


def small_bart(tokenizer: PreTrainedTokenizerFast) -> BartForConditionalGeneration:
    """A randomly initialised BART of 0.24 million parameters: 2 + 2 layers of 4 heads, width 64."""
    pad, end = tokenizer.get_vocab()["<pad>"], tokenizer.get_vocab()["</s>"]
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_position_embeddings=64,
        dropout=0.05,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=end,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
    )
    return with_answer_length(BartForConditionalGeneration(config))


def load_pretrained(name_or_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A pretrained encoder-decoder and its own tokenizer.

    Raises:
        ValueError: if the checkpoint is no encoder-decoder.
    """
    config = AutoConfig.from_pretrained(name_or_path)
    if not config.is_encoder_decoder:
        raise ValueError(
            f"{name_or_path} is a {config.model_type} model; the quickstart needs an encoder-decoder that answers text with "
            "text, such as google/byt5-small or google-t5/t5-small. For other models call hf_entmax.patch_model directly."
        )
    model = AutoModelForSeq2SeqLM.from_pretrained(name_or_path)
    return with_answer_length(model), AutoTokenizer.from_pretrained(name_or_path)


def with_answer_length(model: Any) -> Any:
    """The same model with room for a whole verb form in ``generate()``."""
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = MAX_NEW_TOKENS
    return model
