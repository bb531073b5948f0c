"""Tiny random models of the families that the tests run over: real classes, a few thousand parameters."""

from __future__ import annotations

import torch
import transformers as tf

VOCAB = 37
PAD, BOS, EOS = 0, 1, 2
_IDS = dict(vocab_size=VOCAB, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
_SEQ = dict(
    **_IDS,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=20,
    decoder_ffn_dim=20,
    max_position_embeddings=64,
    decoder_start_token_id=BOS,
    forced_eos_token_id=None,
)
_LLAMA = dict(
    **_IDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=20,
    max_position_embeddings=64,
)
_BERT = dict(
    vocab_size=VOCAB,
    pad_token_id=PAD,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=20,
    max_position_embeddings=64,
)
_T5 = dict(**_IDS, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, decoder_start_token_id=PAD)


def _t5(**extra):
    model = tf.T5ForConditionalGeneration(tf.T5Config(**(_T5 | extra)))
    # T5 starts with tiny embeddings of the position bias; make it matter.
    for module in model.modules():
        if hasattr(module, "relative_attention_bias"):
            torch.nn.init.normal_(module.relative_attention_bias.weight)
    return model


ENCODER_DECODERS = {
    "t5": _t5,
    "bart": lambda **extra: tf.BartForConditionalGeneration(tf.BartConfig(**_SEQ, **extra)),
    "marian": lambda **extra: tf.MarianMTModel(tf.MarianConfig(**{**_SEQ, **extra})),
    "mbart": lambda **extra: tf.MBartForConditionalGeneration(tf.MBartConfig(**_SEQ, **extra)),
}
DECODERS = {
    "gpt2": lambda **extra: tf.GPT2LMHeadModel(
        tf.GPT2Config(**_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, **extra)
    ),
    "llama": lambda **extra: tf.LlamaForCausalLM(tf.LlamaConfig(**_LLAMA, **extra)),
    "gemma2": lambda **extra: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**{**_LLAMA, "head_dim": 8, "sliding_window": 4, **extra})
    ),
    "mistral": lambda **extra: tf.MistralForCausalLM(tf.MistralConfig(**{**_LLAMA, "sliding_window": 3, **extra})),
    "qwen2": lambda **extra: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_LLAMA, **extra)),
    "gpt_neox": lambda **extra: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(
            **_IDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=20,
            max_position_embeddings=64,
            **extra,
        )
    ),
}
ENCODERS = {
    "bert": lambda **extra: tf.BertForMaskedLM(tf.BertConfig(**_BERT, **extra)),
    "roberta": lambda **extra: tf.RobertaForMaskedLM(tf.RobertaConfig(**_BERT, **extra)),
    "distilbert": lambda **extra: tf.DistilBertForMaskedLM(
        tf.DistilBertConfig(
            vocab_size=VOCAB,
            pad_token_id=PAD,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=20,
            max_position_embeddings=64,
            **extra,
        )
    ),
    "modernbert": lambda **extra: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(
            **_BERT | _IDS, global_attn_every_n_layers=2, local_attention=6, cls_token_id=BOS, sep_token_id=EOS, **extra
        )
    ),
    "albert": lambda **extra: tf.AlbertForMaskedLM(tf.AlbertConfig(**_BERT, embedding_size=8, **extra)),
}
FAMILIES = {**ENCODER_DECODERS, **DECODERS, **ENCODERS}
SITES = {
    **dict.fromkeys(ENCODER_DECODERS, ("encoder_self", "decoder_self", "cross")),
    **dict.fromkeys(DECODERS, ("decoder_self",)),
    **dict.fromkeys(ENCODERS, ("encoder_self",)),
}


def build(family: str, seed: int = 0, **extra):
    """A tiny model of a family in eval mode, with eager attention unless said otherwise and weights large enough to matter."""
    torch.manual_seed(seed)
    extra.setdefault("attn_implementation", "eager")
    return enlarged(FAMILIES[family](**extra))


def enlarged(model):
    """The model in eval mode, its weights large enough to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and parameter.requires_grad and "norm" not in name.lower():
                parameter.mul_(0.3 / parameter.std())
    return model.eval()


def sharp(family, seed=0):
    """Random weights with scores that differ, so that alpha matters."""
    model = build(family, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", ".q.", ".k.", "query", "key")):
                parameter.mul_(1.5)
    return model


def bert_pair():
    """An encoder and a decoder of BERT, with cross-attention, as one model."""
    sizes = build("bert").config.to_dict() | {"is_decoder": True, "add_cross_attention": True}
    pair = tf.EncoderDecoderModel(encoder=build("bert").bert, decoder=tf.BertLMHeadModel(tf.BertConfig(**sizes)))
    pair.config.decoder_start_token_id, pair.config.pad_token_id = BOS, PAD
    return pair.eval()


def pair_inputs():
    """Random token ids for both of its parts."""
    return {
        name: inputs("bert", seed=seed)["input_ids"] for seed, name in enumerate(("input_ids", "decoder_input_ids"))
    }


def inputs(family: str, batch: int = 3, length: int = 9, seed: int = 0, labels: bool = False):
    """Random token ids without padding or special tokens, and an attention mask of ones."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(3, VOCAB, shape, generator=generator)  # noqa: E731
    batch_ = {"input_ids": draw(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    if family in ENCODER_DECODERS:
        batch_["decoder_input_ids"] = draw(batch, length - 2)
    if labels:
        batch_["labels"] = draw(batch, length - 2) if family in ENCODER_DECODERS else batch_["input_ids"].clone()
        batch_.pop("decoder_input_ids", None)
    return batch_


WORDS = tuple(f"w{number}" for number in range(VOCAB))


def tokenizer(words=WORDS, **tokens):
    """One id for each word; the first four stand for padding, start, end and unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), words, strict=False)) | tokens
    raw = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=tokens["unk_token"])
    )
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, **tokens)


def texts(count, length):
    """Random words of `tokenizer`, none of them special."""
    chosen = torch.randint(4, VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    return [" ".join(WORDS[number] for number in row) for row in chosen.tolist()]


def save(model, folder, words=WORDS):
    """Write a model beside its tokenizer; returns the folder."""
    model.save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return folder
