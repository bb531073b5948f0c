"""Small tokenizers of every kind, built on the spot."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "the unhappiness of the unhappy walkers",
    "who walks the dog ? the walker walks the dog .",
    "what is happening ? something is happening",
    "walking happily , the dog barks",
]


def wrap(tokenizer: Tokenizer, **special) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def metaspace(texts=TEXTS, size: int = 60, pre_tokenizer: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece-like unigram model; without a pre-tokenizer as Llama's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    specials = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=size, special_tokens=specials, unk_token="<unk>")
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    if not pre_tokenizer:
        from tokenizers import normalizers

        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrap(tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def wordpiece(vocabulary: list[str] | None = None) -> PreTrainedTokenizerFast:
    """BERT-like."""
    words = vocabulary or [
        "the",
        "un",
        "##happi",
        "##ness",
        "of",
        "walk",
        "##ers",
        "##er",
        "##s",
        "##ing",
        "dog",
        "who",
        "what",
        "is",
        "happen",
        "some",
        "##thing",
        "?",
        ".",
        ",",
        "bark",
        "##ly",
        "happi",
    ]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = Tokenizer(models.WordPiece({name: place for place, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return wrap(
        tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
    )


def byte_level(texts=TEXTS) -> PreTrainedTokenizerFast:
    """GPT-2-like."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    return wrap(tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def end_of_word(texts=TEXTS) -> PreTrainedTokenizerFast:
    """BPE with ``</w>``."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=70, special_tokens=["<pad>", "<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer, pad_token="<pad>", unk_token="<unk>")


def characters() -> PreTrainedTokenizerFast:
    """One token a character, with a tag as its own token."""
    names = ["<pad>", "</s>", "<unk>", "<plural>", " ", *"abcdefghijklmnopqrstuvwxyz?.,"]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<plural>|."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return wrap(tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def whole_words() -> PreTrainedTokenizerFast:
    """One token a word."""
    names = ["<pad>", "<unk>", *sorted({word for text in TEXTS for word in text.split()}), "one", "two", "three"]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(tokenizer, pad_token="<pad>", unk_token="<unk>")
