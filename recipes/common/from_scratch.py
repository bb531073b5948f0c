"""The model of a recipe and its tokenizer: small ones from scratch, or pretrained ones from text to text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    BertForSequenceClassification,
    MarianConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from common.folder import check_model
from common.pretrained import check_length
from common.settings import RunSettings, attention_and_output, make_sparse, option


@dataclasses.dataclass
class ShapeSettings(RunSettings):
    """The shape of a model from scratch."""

    width: int = option(128, "from scratch: of the model")
    layers: int = option(2, "from scratch: of encoder and of decoder")
    heads: int = option(4, "from scratch: per layer")
    dropout: float = option(0.1, "from scratch: everywhere but on attention weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(width=1, layers=1, heads=1)
        self.require("width", self.width % self.heads == 0, f"a multiple of heads={self.heads}")
        self.require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")


@dataclasses.dataclass
class Seq2SeqSettings(ShapeSettings):
    """The data and the model, pretrained or from scratch, of a recipe from text to text."""

    train: str = option("", "examples to train on")
    dev: str = option("", "examples that choose the best epoch")
    model: str = option("", "pretrained encoder-decoder, Hub id or folder; default: train one from scratch")
    architecture: str = option("bart", "from scratch: bart, marian or t5")
    vocabulary: int = option(4000, "from scratch: size of the BPE")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("architecture", self.architecture in ("bart", "marian", "t5"), "bart, marian or t5")
        for name in ("train", "dev", "test"):
            self.require(name, bool(getattr(self, name)), "given: a file, or hub:OWNER/NAME@SPLIT")
        self.require_at_least(vocabulary=4)


def load_or_build(settings: Seq2SeqSettings, texts: Iterable[str], *bounds: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model, patched, that a recipe from text to text trains.

    Args:
        settings: say which model, or the shape of one from scratch, and how it is patched.
        texts: of the training data, for a BPE from scratch.
        bounds: settings that say how long a sequence may be; the last one bounds what is written.

    Raises:
        ValueError: if a pretrained model cannot see that many tokens.
    """
    longest = {name: getattr(settings, name) for name in bounds}
    if settings.model:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(settings.model, dtype=torch.float32)
        for name, tokens in longest.items():
            check_length(model, tokens, name)
    else:
        tokenizer = train_bpe(texts, settings.vocabulary)
        model = build_seq2seq(settings, len(tokenizer), max(longest.values()), settings.architecture)
    return tokenizer, make_sparse(write_at_most(model, longest[bounds[-1]]), settings)


def load_ensemble(folders: list[str]) -> tuple[Any, list[Any], dict[str, Any]]:
    """Load tokenizer and models, and say what kind they are; kinds that differ are joined by ``+``.

    Raises:
        ValueError: if a folder is not there, or the models do not know the same symbols.
    """
    for folder in folders:
        check_model(folder)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    for folder, other in zip(folders, tokenizers, strict=True):
        if other.get_vocab() != tokenizers[0].get_vocab():
            raise ValueError(
                f"ensemble: {folder} does not have the symbols of {folders[0]}; average models that were trained on the same data."
            )
    members = [AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders]
    kinds = [attention_and_output(member) for member in members]
    return tokenizers[0], members, {key: "+".join(dict.fromkeys(str(kind[key]) for kind in kinds)) for key in kinds[0]}


def train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train a BPE of all texts; ``▁`` marks the beginnings of words, as SentencePiece does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    pieces = [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator(texts, trainer)
    return seq2seq_tokenizer(tokenizer)


def seq2seq_tokenizer(tokenizer: Tokenizer, special: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer for Transformers, with ``<pad>``, ``</s>``, ``<unk>`` as tokens 0, 1, 2; every text ends in ``</s>``."""
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": special} if special else {}),
    )


def build_seq2seq(
    settings: ShapeSettings, vocabulary: int, longest: int, architecture: str = "bart", **config: Any
) -> Any:
    """Build an encoder-decoder in the shape of a known family.

    Args:
        settings: width, layers, heads, dropout.
        vocabulary: number of tokens.
        longest: tokens that it reads or writes at most.
        architecture: bart, marian or t5.
        config: what is to be different.
    """
    width, layers, heads = settings.width, settings.layers, settings.heads
    shared = {"vocab_size": vocabulary, "d_model": width, "pad_token_id": 0, "eos_token_id": 1}
    shared["decoder_start_token_id"] = 0
    if architecture == "t5":
        shape: Any = T5Config(
            d_ff=4 * width,
            d_kv=width // heads,
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=heads,
            dropout_rate=settings.dropout,
            **{**shared, **config},
        )
    else:
        shared |= {f"{side}_layers": layers for side in ("encoder", "decoder")}
        shared |= {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
        shared |= {f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")}
        shared |= {"max_position_embeddings": longest + 8, "bos_token_id": 1, "forced_eos_token_id": None}
        kind = BartConfig if architecture == "bart" else MarianConfig
        shape = kind(dropout=settings.dropout, scale_embedding=True, **{**shared, **config})
    return write_at_most(AutoModelForSeq2SeqLM.from_config(shape), longest)


def build_bert(vocabulary: int, width: int, layers: int, heads: int, longest: int, **config: Any) -> Any:
    """Build a BERT that tells classes of sequences of at most ``longest`` tokens; ``config`` says what is to be different."""
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 4 * width, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": longest}
    return BertForSequenceClassification(BertConfig(**{**sizes, **config}))


def write_at_most(model: Any, tokens: int) -> Any:
    """Let a model generate so many tokens where nobody says otherwise; pretrained ones would stop after 20."""
    model.generation_config.max_length, model.generation_config.max_new_tokens = None, tokens
    return model
