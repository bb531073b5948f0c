"""The kinds of models that can be converted: what each is trained on, and what says how good it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from common.batches import collated
from common.blocks import collate, prepare, probe, read_splits, text_measures
from common.pretrained import check_causal, check_encoder
from common.run import Run
from common.sentences import check_pooling, embed, pair_batch, read_text_pairs, retrieval, spearman
from common.seq2seq import bleu_and_chrf, encode_pairs, translate
from common.training import count_labels, count_shifted_labels
from hf_entmax.analysis.reading import tables

_TEXT_QUALITY = "bleu chrf perplexity epsilon_perplexity"
_TEXT_HEADS = (
    "density density_encoder_self support_encoder_self js_encoder_self density_cross support_cross js_cross "
    "density_decoder_self support_decoder_self js_decoder_self"
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        name: as messages call it.
        auto: the class that loads it.
        check: raises ``ValueError`` for a model of another kind.
        longest: the setting that bounds its sequences.
        adapters: what PEFT calls it.
        hub_task: what the Hub calls its task.
        main: the measure that says most.
        quality: all measures of quality.
        heads: what `common.heads.head_statistics` says about it, for the tables.
    """

    name: str
    auto: Any
    check: Callable[[Any], None]
    longest: str
    adapters: str
    hub_task: str
    main: str
    quality: str = _TEXT_QUALITY
    heads: str = _TEXT_HEADS


CAUSAL = Kind(
    "causal", AutoModelForCausalLM, check_causal, "block", "CAUSAL_LM", "text-generation", "epsilon_perplexity"
)
ENCODER_DECODER = Kind(
    "encoder-decoder", AutoModelForSeq2SeqLM, lambda _: None, "max_tokens", "SEQ_2_SEQ_LM", "translation", "bleu"
)
SENTENCES = Kind(
    "encoder of sentences", AutoModel, check_encoder, "max_tokens", "FEATURE_EXTRACTION", "sentence-similarity", "spearman",
    quality="spearman pearson accuracy mrr",
    heads="density density_encoder_self support_encoder_self js_encoder_self",
)  # fmt: skip


def kind_of(settings: Any, config: Any) -> Kind:
    """By the model's configuration; an encoder is told from a causal model by the pairs it is given (``--train``)."""
    if config.is_encoder_decoder:
        return ENCODER_DECODER
    return SENTENCES if settings.train else CAUSAL


@dataclasses.dataclass
class Task:
    """What differs between the kinds: examples to train on, and measures of dev and test.

    ``dev`` and ``test`` take a model that is neither wrapped nor prepared, ``test`` also a name for what it answers.
    """

    examples: list[Any]
    collate: Callable[[list[Any]], Any]
    length: Callable[[Any], int]
    count: Callable[[dict[str, Any]], int]
    probe: list[dict[str, Any]]
    dev: Callable[[Any], dict[str, float]]
    test: Callable[[Any, str], dict[str, float]]


def read_data(settings: Any, kind: Kind) -> Any:
    """The raw data, before anything is written.

    Raises:
        ValueError: if the settings leave out what this kind of model learns from, or say what has no effect on it.
    """
    if kind is CAUSAL:
        return read_splits(settings)
    for name in ("train", "dev", "test"):
        settings.require(name, bool(getattr(settings, name)), f"given for an {kind.name} such as {settings.model}")
    wheres = {split: getattr(settings, split) for split in ("train", "dev", "test")}
    columns = (settings.source, settings.target)
    if kind is SENTENCES:
        check_pooling(settings.model)
        settings.require("output_alpha", settings.output_alpha == 1, "1: an encoder has no output probabilities")
        settings.require("temperature", settings.temperature == 1, "1: the distance of embeddings knows none")
        parts = settings.gradient_accumulation
        alone = bool(settings.task_weight) and settings.batch_size < 2 * parts
        settings.require("batch_size", not alone, f"at least {2 * parts}: a text is told from the others of its batch")
        pairs = tables.read_splits(wheres, columns, lambda where, names: read_text_pairs(where, *names))
    else:
        pairs = tables.read_splits(wheres, columns, tables.read_pairs)
    for split, count in (("train", settings.train_pairs), ("dev", settings.dev_sentences)):
        pairs[split] = pairs[split][: count or None]
    return {split: rows[: 64 if split == "train" else 8] for split, rows in pairs.items()} if settings.smoke else pairs


def make_task(kind: Kind, settings: Any, data: Any, tokenizer: Any, run: Run, teacher: Any) -> Task:
    """The task of a model of this kind; ``teacher`` is the frozen softmax model."""
    if kind is CAUSAL:
        return _text_task(settings, data, tokenizer, run)
    make = _sentence_task if kind is SENTENCES else _translation_task
    return make(settings, data, tokenizer, run, teacher)


def _text_task(settings: Any, lines: dict[str, list[str]], tokenizer: Any, run: Run) -> Task:
    blocks, words = prepare(settings, lines, tokenizer)

    def measure(model: Any, split: str) -> dict[str, float]:
        found = text_measures(model, blocks[split], words[split])
        return {name: found[name] for name in ("perplexity", "epsilon_perplexity")}

    return Task(
        blocks["train"],
        collate,
        lambda block: len(block["input_ids"]),
        count_shifted_labels,
        probe(blocks["dev"], settings.block),
        lambda model: measure(model, "dev"),
        lambda model, name: measure(model, "test"),
    )


def _translation_task(settings: Any, pairs: dict[str, Any], tokenizer: Any, run: Run, teacher: Any) -> Task:
    collator = DataCollatorForSeq2Seq(tokenizer, model=teacher)
    examples = {split: encode_pairs(rows, tokenizer, settings.max_tokens)[0] for split, rows in pairs.items()}
    for split in ("train", "dev"):
        settings.require("max_tokens", bool(examples[split]), f"larger: every {split} pair is longer")

    def measure(model: Any, split: str, beams: int, name: str = "") -> dict[str, float]:
        hypotheses = translate(model, pairs[split], tokenizer, run, settings.max_tokens, beams)
        if name:
            run.write(f"hypotheses.{name}.txt", hypotheses)
        return bleu_and_chrf(hypotheses, pairs[split])

    return Task(
        examples["train"],
        lambda rows: dict(collator(rows)),
        lambda example: len(example["input_ids"]) + len(example["labels"]),
        count_labels,
        collated(examples["dev"][:256], collator, 32, run.accelerator.device),
        lambda model: measure(model, "dev", 1),
        lambda model, name: measure(model, "test", settings.beams, name),
    )


def _sentence_task(settings: Any, pairs: dict[str, Any], tokenizer: Any, run: Run, teacher: Any) -> Task:
    """Pairs of texts: their similarities beside the softmax model's, and how well a text finds its partner among all."""
    for split in ("dev", "test"):
        settings.require(split, len(pairs[split]) > 1, "a file of two pairs or more, to tell them apart")
    before: dict[str, torch.Tensor] = {}

    def similarities(model: Any, split: str) -> torch.Tensor:
        sides = zip(*pairs[split], strict=True)
        texts, partners = (embed(model, side, tokenizer, settings.max_tokens) for side in sides)
        return texts @ partners.T

    def measure(model: Any, split: str) -> dict[str, float]:
        if split not in before:
            before[split] = similarities(teacher, split)
        own = before[split] if model is teacher else similarities(model, split)
        both = torch.stack([before[split].flatten(), own.flatten()])
        return {"spearman": spearman(both), "pearson": float(torch.corrcoef(both.double())[0, 1]), **retrieval(own)}

    def batch(rows: list[Any]) -> dict[str, torch.Tensor]:
        return pair_batch(rows, tokenizer, settings.max_tokens) | {"labels": torch.arange(len(rows))}

    looked_at = pairs["dev"][:64]
    starts = range(0, len(looked_at), 8)
    probe = [pair_batch(looked_at[start : start + 8], tokenizer, settings.max_tokens) for start in starts]
    return Task(
        pairs["train"],
        batch,
        lambda pair: len(pair[0]) + len(pair[1]),
        count_labels,
        send_to_device(probe, run.accelerator.device),
        lambda model: measure(model, "dev"),
        lambda model, name: measure(model, "test"),
    )
