"""The kinds of models that can be converted: what each is trained on, and what says how good it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import send_to_device
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

import hf_entmax
from common.batches import collated
from common.blocks import collate, prepare, probe, read_splits, text_measures
from common.folder import write_lines
from common.pretrained import check_causal, check_encoder
from common.results import END, columns
from common.sentences import (
    add_contrast,
    check_pooling,
    cosine_distance,
    embed,
    pair_batch,
    read_text_pairs,
    retrieval,
    spearman,
)
from common.seq2seq import bleu_and_chrf, encode_pairs, translate
from hf_entmax.analysis.reading import tables
from hf_entmax.integration.interface import HEADS_MODULE

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
        keys: whether the rows say how many keys a query has.
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
    keys: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns of the results."""
        return columns(
            "attention output_alpha seed model data schedule over distill_logits distill_attention density_target "
            "loss_budget freeze_weights lora_rank lost",
            self.quality,
            " ".join(f"{name}_before" for name in self.quality.split()),
            self.heads,
            "keys" if self.keys else "",
            END.replace("best_step ", ""),  # the last model is the one that is kept
        )

    @property
    def curve(self) -> tuple[str, ...]:
        """Columns of the evaluations."""
        return columns("command stage step", self.quality, "alpha_mean alpha_min alpha_max pressure", self.heads)


CAUSAL = Kind(
    "causal", AutoModelForCausalLM, check_causal, "block", "CAUSAL_LM", "text-generation", "epsilon_perplexity"
)
ENCODER_DECODER = Kind(
    "encoder-decoder", AutoModelForSeq2SeqLM, lambda _: None, "max_tokens", "SEQ_2_SEQ_LM", "translation", "bleu"
)
SENTENCES = Kind(
    "encoder of sentences", AutoModel, check_encoder, "max_tokens", "FEATURE_EXTRACTION", "sentence-similarity", "spearman",
    quality="spearman pearson accuracy mrr",
    heads="density density_encoder_self support_encoder_self js_encoder_self", keys=True,
)  # fmt: skip


def kind_of(settings: Any, config: Any) -> Kind:
    """Tell the kind by the model's configuration; an encoder is told from a causal model by the pairs it is given (``--train``)."""
    if config.is_encoder_decoder:
        return ENCODER_DECODER
    return SENTENCES if settings.train else CAUSAL


@dataclasses.dataclass
class Task:
    """What differs between the kinds: examples to train on, and measures of dev and test.

    ``dev`` and ``test`` take a model that is not wrapped, ``test`` also the name of a file for what it answers.
    """

    examples: list[Any]
    collate: Callable[[list[Any]], Any]
    probe: list[dict[str, Any]]
    dev: Callable[[Any], dict[str, float]]
    test: Callable[[Any, str], dict[str, float]]
    distance: Callable[..., torch.Tensor] | None = None


def read_data(settings: Any, kind: Kind) -> Any:
    """Read the raw data, before anything is written.

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


def make_task(kind: Kind, settings: Any, data: Any, tokenizer: Any, teacher: Any) -> Task:
    """Make the task of a model of this kind; ``teacher`` is the frozen softmax model."""
    if kind is CAUSAL:
        return _text_task(settings, data, tokenizer)
    make = _sentence_task if kind is SENTENCES else _translation_task
    return make(settings, data, tokenizer, teacher)


def _text_task(settings: Any, lines: dict[str, list[str]], tokenizer: Any) -> Task:
    blocks, words = prepare(settings, lines, tokenizer)

    def measure(model: Any, split: str) -> dict[str, float]:
        found = text_measures(model, blocks[split], words[split])
        return {name: found[name] for name in ("perplexity", "epsilon_perplexity")}

    return Task(
        blocks["train"],
        collate,
        probe(blocks["dev"], settings.block),
        lambda model: measure(model, "dev"),
        lambda model, name: measure(model, "test"),
    )


def _translation_task(settings: Any, pairs: dict[str, Any], tokenizer: Any, teacher: Any) -> Task:
    collator = DataCollatorForSeq2Seq(tokenizer, model=teacher)
    examples = {split: encode_pairs(rows, tokenizer, settings.max_tokens)[0] for split, rows in pairs.items()}
    for split in ("train", "dev"):
        settings.require("max_tokens", bool(examples[split]), f"larger: every {split} pair is longer")

    def measure(model: Any, split: str, beams: int, name: str = "") -> dict[str, float]:
        hypotheses = translate(model, pairs[split], tokenizer, settings.max_tokens, beams)
        if name:
            write_lines(Path(settings.out) / f"hypotheses.{name}.txt", hypotheses)
        return bleu_and_chrf(hypotheses, pairs[split])

    return Task(
        examples["train"],
        lambda rows: dict(collator(rows)),
        collated(examples["dev"][:256], collator, 32, teacher.device),
        lambda model: measure(model, "dev", 1),
        lambda model, name: measure(model, "test", settings.beams, name),
    )


def _sentence_task(settings: Any, pairs: dict[str, Any], tokenizer: Any, teacher: Any) -> Task:
    """Make the task of pairs of texts: their similarities beside the softmax model's, and how well a text finds its partner among all."""
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
        ids = [text for text, _ in rows] + [partner for _, partner in rows]
        return {**tokenizer.pad({"input_ids": ids}, return_tensors="pt"), "labels": torch.arange(len(rows))}

    tokens = [
        tokenizer(list(side), truncation=True, max_length=settings.max_tokens)["input_ids"]
        for side in zip(*pairs["train"], strict=True)
    ]
    looked_at = pairs["dev"][:64]
    starts = range(0, len(looked_at), 8)
    shown = [pair_batch(looked_at[start : start + 8], tokenizer, settings.max_tokens) for start in starts]
    return Task(
        list(zip(*tokens, strict=True)),
        batch,
        send_to_device(shown, teacher.device),
        lambda model: measure(model, "dev"),
        lambda model, name: measure(model, "test"),
        cosine_distance,
    )


def load(kind: Kind, settings: Any, where: str = "") -> Any:
    """Load the model to convert, or that of another folder: in full precision, whatever its checkpoint was stored in."""
    model = kind.auto.from_pretrained(where or settings.model, dtype=torch.float32)
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)  # made for another task: the embedding is a mean over the tokens
    if kind is SENTENCES:
        add_contrast(model)
    return model


def load_teacher(kind: Kind, settings: Any) -> Any:
    """Load the frozen softmax model: that of ``settings.teacher``, or else the model itself with softmax.

    Raises:
        ValueError: if another one is sparse, or does not predict the same tokens.
    """
    teacher = load(kind, settings, settings.teacher)
    if settings.teacher:
        settings.require("teacher", not hf_entmax.is_patched(teacher), "a softmax model: this one is sparse")
        own, its = (
            AutoConfig.from_pretrained(name).get_text_config().vocab_size for name in (settings.model, settings.teacher)
        )
        settings.require(
            "teacher", own == its, f"a model of the same tokens: it has {its} of them, {settings.model} {own}"
        )
    elif hf_entmax.is_patched(teacher):
        hf_entmax.unpatch_model(teacher)
    return teacher.eval().requires_grad_(False)


def base_model(model: Any) -> Any:
    """Return the Transformers model inside PEFT."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def add_adapters(model: Any, rank: int, kind: Kind) -> Any:
    """Put LoRA on every linear layer; learned alphas are trained and saved with the adapters."""
    from peft import LoraConfig, get_peft_model

    learned = any(f".{HEADS_MODULE}." in name for name, _ in model.named_parameters())
    options: dict[str, Any] = {"modules_to_save": [HEADS_MODULE]} if learned else {}
    options |= {"task_type": kind.adapters, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, **options))


def whole(model: Any) -> Any:
    """Return a model as one process can use it; of one that FSDP2 has split a copy, on all processes at the same time."""
    if not isinstance(model, FSDPModule):
        return model
    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    with torch.random.fork_rng():  # whoever starts a model anew draws random numbers
        copy = kind(model.config)
    copy.load_state_dict(state)
    return copy.to(PartialState().device)


def lost(before: dict[str, float], after: dict[str, float]) -> float:
    """Return what a model has lost: BLEU points, percent of perplexity (with epsilon, which sparse outputs have too) or partners found, %.

    Training on gains something by itself: what sparsity costs is the difference to the control's loss.
    """
    if "bleu" in before:
        return before["bleu"] - after["bleu"]
    if "accuracy" in before:
        return 100 * (before["accuracy"] - after["accuracy"])
    return 100 * (after["epsilon_perplexity"] / before["epsilon_perplexity"] - 1)


def model_name(where: str) -> str:
    """Name the run of a folder ``RUN/model``, any other folder by its own name, else the Hub id."""
    if not Path(where).is_dir():
        return where
    folder = Path(os.path.abspath(where))  # not resolved: a link has the name it was given
    return (folder.parent.name if folder.name == "model" else "") or folder.name
