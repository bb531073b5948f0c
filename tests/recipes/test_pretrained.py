"""What is checked of a pretrained model before it is trained on."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BloomConfig,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    MarianConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from common.pretrained import check_causal, check_length, longest

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, **SPECIAL}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "decoder_start_token_id": 0}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
OPT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "vocab_size": 50}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
CAUSAL, PAIRS, CLASSES = AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

LENGTHS = [
    (GPT2Config(**GPT2, n_positions=20), CAUSAL, 20),
    (LlamaConfig(**BERT, max_position_embeddings=20), CAUSAL, 20),  # rotary: more would run
    (OPTConfig(**OPT, word_embed_proj_dim=16, max_position_embeddings=20, **SPECIAL), CAUSAL, 20),
    (BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=50), CAUSAL, None),
    (XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=50), CAUSAL, None),
    (BertConfig(**BERT, max_position_embeddings=20), CLASSES, 20),
    (RobertaConfig(**BERT, max_position_embeddings=22, pad_token_id=1), CLASSES, 20),
    (RobertaConfig(**BERT, max_position_embeddings=22, pad_token_id=3), CLASSES, 18),
    (DebertaV2Config(**BERT, relative_attention=True, position_biased_input=False), CLASSES, None),
    (BartConfig(**BART, max_position_embeddings=20, **SPECIAL), PAIRS, 20),
    (MarianConfig(**BART, max_position_embeddings=20, **SPECIAL), PAIRS, 20),
    (T5Config(**T5, n_positions=20), PAIRS, None),
]


@pytest.mark.parametrize(("config", "auto", "length"), LENGTHS, ids=lambda value: getattr(value, "model_type", ""))
def test_the_longest_sequence_is_just_what_the_model_can_see(config, auto, length):
    model = auto.from_config(config).eval()
    assert longest(model) == length
    check_length(model, 20 if length is None else length, "block")
    pairs = auto is PAIRS

    def see(tokens):
        ids = torch.full((1, tokens), 9)
        with torch.no_grad():
            return model(input_ids=ids, **({"decoder_input_ids": ids} if pairs else {}))

    if length is None:
        see(600)
        return
    see(length)
    with pytest.raises(ValueError, match=rf"max_tokens={length + 1} .*at most {length}, all that the model can see"):
        check_length(model, length + 1, "max_tokens")
    if config.model_type != "llama":
        with pytest.raises((IndexError, RuntimeError)):
            see(length + 1)


def test_parts_of_a_model_are_asked_for_themselves():
    model = PAIRS.from_config(BartConfig(**BART, max_position_embeddings=20, **SPECIAL))
    assert longest(model.get_encoder()) == 20
    assert longest(PAIRS.from_config(T5Config(**T5)).get_encoder()) is None


def test_a_decoder_that_does_not_shift_its_labels_would_copy():
    with pytest.raises(ValueError, match=r"\(BartForCausalLM\) compares logits and labels as they stand"):
        check_causal(CAUSAL.from_config(BartConfig(**BART)))


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (BertConfig(**BERT), False),
        (BertConfig(**BERT, is_decoder=True), True),
        (RobertaConfig(**BERT, max_position_embeddings=22), False),
        (RobertaConfig(**BERT, is_decoder=True), True),
        (GPT2Config(**GPT2), True),
        (GPT2Config(**GPT2, n_positions=2), True),
        (LlamaConfig(**BERT), True),
        (OPTConfig(**OPT, word_embed_proj_dim=16, **SPECIAL), True),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
@pytest.mark.parametrize("training", [True, False])
def test_a_causal_model_sees_no_later_token(config, causal, training):
    model = CAUSAL.from_config(config).train(training)
    torch.manual_seed(3)
    if causal:
        check_causal(model)
    else:
        with pytest.raises(ValueError, match=rf"\({config.model_type}\) sees later tokens.*is_decoder=true"):
            check_causal(model)
    assert model.training == training
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert all(parameter.grad is None for parameter in model.parameters())
