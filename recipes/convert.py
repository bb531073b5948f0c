"""Make a pretrained softmax model sparse, and report quality against sparsity on the way.

    python recipes/convert.py --config recipes/configs/convert_wikitext2.yaml --model runs/lm-softmax/model --out runs/lm-sparse
    python recipes/convert.py --config ... --model ... --out ... --attention 1.5                     # fixed instead of learned
    python recipes/convert.py --config ... --model ... --out ... --schedule abrupt                   # at once
    python recipes/convert.py --config ... --model ... --out ... --attention softmax                 # the control: train on
    python recipes/convert.py --config recipes/configs/convert_multi30k.yaml --model runs/mt-softmax/model --out runs/mt-sparse \
        --distill_logits 1.0 --distill_attention 1.0 --density_target 0.2
    python recipes/convert.py --config ... --model openai-community/gpt2 --out ... --lora_rank 8     # adapters and alphas only
    python recipes/convert.py --config recipes/configs/convert_smollm2.yaml --model models/smollm2 --out runs/smollm2-sparse \
        --schedule abrupt --release 1.01 --loss_budget 0 --loss_rate 0.2 --alpha_lr 0.05  # within the loss of the softmax model
    accelerate launch recipes/convert.py --config ... --out ...                         # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/convert.py --config ... --out ...             # two CPU processes

The model is a causal language model (data: ``--data``) or an encoder-decoder (data: sentence pairs, ``--train``, ``--dev``,
``--test``), a folder or a Hub id. Alpha starts at ``--start`` (1: still a softmax), moves to its target over the share ``--over``
of training, and is then held (``--attention 1.5``) or let go (``--attention learned``, from ``--release`` on). The loss is

    task_weight * task + distill_logits * logits + distill_attention * attention + lam * D_tau

with the distances to the frozen softmax model and the density pressure as `hf_entmax.training.distillation` and
`hf_entmax.training.density` define them; lam grows while the density of a step is above ``--density_target``. With
``--loss_budget`` it is the other way round: density is the objective, and lam falls while the loss is further above the softmax
model's than the budget. Alphas are then best free from the start (``--schedule abrupt --release 1.01``). Each
evaluation is a row of ``curve.csv`` (and of ``RESULTS_curve.csv`` beside ``--results``): before, after patching without any
training, and on the way. What an encoder-decoder made of the test set before and after is kept in
``hypotheses.before.txt`` and ``hypotheses.after.txt``. The model kept is the last one: a conversion that stopped early would not be one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
)

import hf_entmax
from common.batches import Batches, collated
from common.blocks import check_sizes, collate, prepare, read_splits
from common.conversion import Conversion, base_model
from common.curves import STAGES, curve, shared_curve, write_curve
from common.finish import check_finish, finish
from common.heads import head_statistics
from common.perplexity import text_measures
from common.pretrained import check_causal, check_length
from common.results import END, columns
from common.run import Run, check_model
from common.seq2seq import bleu_and_chrf, encode_pairs, translate
from common.settings import RunSettings, option, parse
from common.training import Training, count_labels, count_shifted_labels
from hf_entmax import EntmaxConfig, alphas, is_patched, patch_model
from hf_entmax.analysis.reading import tables
from hf_entmax.integration.interface import CHILD
from hf_entmax.training import AlphaSchedule, DensityTarget, LossBudget

QUALITY = "bleu chrf perplexity epsilon_perplexity"
HEADS = (
    "density density_encoder_self support_encoder_self js_encoder_self density_cross support_cross js_cross "
    "density_decoder_self support_decoder_self js_decoder_self"
)
FIELDS = columns(
    "attention output_alpha seed model data schedule over distill_logits distill_attention density_target "
    "loss_budget freeze_weights lora_rank lost",
    QUALITY,
    "bleu_before chrf_before perplexity_before epsilon_perplexity_before",
    HEADS,
    END.replace("best_step ", ""),  # the last model is the one that is kept
)
CURVE = columns("command stage step", QUALITY, "alpha_mean alpha_min alpha_max pressure", HEADS)


@dataclasses.dataclass
class Settings(RunSettings):
    """Settings of this recipe, beside those that all share."""

    model: str = option("", "the softmax model: a folder or Hub id, causal or encoder-decoder")
    attention: str = option("learned", "what its attention becomes: learned, a fixed alpha, or softmax (the control)")
    release: float | None = option(None, "learned: the alpha from which they are let go, between 1 and 2 (default 1.5)")
    schedule: str = option("anneal", "anneal: alpha moves to its target; abrupt: it is there at once")
    start: float = option(1.0, "alpha at the beginning of annealing")
    over: float = option(0.5, "share of training over which it moves")
    shape: str = option("linear", "how it moves: linear or cosine")
    task_weight: float = option(1.0, "weight of the task's own loss")
    distill_logits: float = option(0.0, "weight of the distance to the softmax model's output")
    temperature: float = option(1.0, "of that distance")
    distill_attention: float = option(0.0, "weight of the distance to the softmax model's attention, mean over modules")
    attention_loss: str = option("kl", "that distance: kl (student to teacher) or mse")
    density_target: float | None = option(None, "largest share of nonzero attention weights to train towards")
    density_rate: float = option(0.1, "how fast the pressure on the density follows, per step")
    loss_budget: float | None = option(
        None, "nats per token by which the loss may exceed the softmax model's: attention gets as sparse as that allows"
    )
    loss_rate: float = option(0.05, "loss_budget: largest change of the logarithm of the pressure, per step")
    density_floor: float = option(0.0, "density below which no head is pushed further, in [0, 1)")
    freeze_weights: bool = option(False, "train the learned alphas alone")
    tau: float = option(0.01, "attention weight that counts half in the density's stand-in")
    lora_rank: int = option(0, "train adapters of this rank (and learned alphas) only; 0 trains everything")
    evaluate_every: int = option(0, "evaluate after so many optimiser steps too, not only after each epoch")
    data: str = option("lm/wikitext-2/{split}.txt.gz", "causal models: as for language_modeling.py")
    dev_split: str = option("valid", "causal models: what {split} is for dev")
    column: str = option("text", "causal models: which column has the text")
    block: int = option(128, "causal models: tokens in a block")
    train_tokens: int = option(0, "causal models: train on so many tokens; 0 for all")
    dev_tokens: int = option(0, "causal models: tokens of dev; 0 for all")
    test_tokens: int = option(0, "causal models: tokens of test; 0 for all")
    train: str = option("", "encoder-decoders: sentence pairs, as for translation.py")
    dev: str = option("", "encoder-decoders: pairs for each evaluation")
    test: str = option("", "encoder-decoders: pairs for the last one")
    source: str = option("de", "encoder-decoders: source language")
    target: str = option("en", "encoder-decoders: target language")
    max_tokens: int = option(128, "encoder-decoders: longest sentence in tokens")
    dev_sentences: int = option(500, "encoder-decoders: dev pairs translated greedily for each evaluation; 0 for all")
    beams: int = option(5, "encoder-decoders: beam width on the test set")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("model", bool(self.model), "given: the softmax model to convert")
        self.require("schedule", self.schedule in ("anneal", "abrupt"), "anneal or abrupt")
        self.require("attention_loss", self.attention_loss in ("kl", "mse"), "kl or mse")
        self.require("patience", self.patience == 0, "0: a conversion keeps its last model")
        self.require_at_least(task_weight=0, distill_logits=0, distill_attention=0, lora_rank=0, evaluate_every=0)
        self.require_at_least(dev_sentences=0, max_tokens=2, beams=1)
        check_sizes(self)
        weighted = self.task_weight + self.distill_logits + self.distill_attention > 0
        self.require("task_weight", weighted, "above 0 where nothing is distilled")
        for name in ("temperature", "tau"):
            self.require(name, getattr(self, name) > 0, "above 0")
        if self.density_target is not None:
            self.require("attention", self.attention != "softmax", "sparse for a density_target")
            DensityTarget(self.density_target, self.density_rate)
        if self.loss_budget is not None:
            self.require("loss_budget", self.density_target is None, "left out: density_target is the constraint")
            self.require("attention", self.attention != "softmax", "sparse for a loss_budget")
            self.require("output_alpha", self.output_alpha == 1, "1: the loss is compared with the softmax model's")
            LossBudget(self.loss_budget, self.loss_rate)
        self.require("density_floor", 0 <= self.density_floor < 1, "at least 0 and below 1")
        pressed = self.density_target is not None or self.loss_budget is not None
        self.require("density_floor", pressed or not self.density_floor, "left out: nothing pushes the density")
        self.require(
            "freeze_weights", not self.freeze_weights or self.learned, "false: only learned alphas would be left"
        )
        self.require("freeze_weights", not (self.freeze_weights and self.lora_rank), "false: adapters are weights")
        if self.learned:
            self.require(
                "alpha_init", self.alpha_init == "normal", "left out: --release says where learned alphas begin"
            )
            self.release = 1.5 if self.release is None else self.release
            self.require("release", 1 < self.release < 2, "between 1 and 2")
        self.require(
            "release", self.learned or self.release is None, f"left out: attention={self.attention} learns no alpha"
        )
        if self.annealed:
            self.alpha_schedule()

    @property
    def learned(self) -> bool:
        """Whether alphas learn once they are let go."""
        return self.attention == "learned"

    @property
    def annealed(self) -> bool:
        """Whether alpha moves on a schedule."""
        return self.schedule == "anneal" and self.attention != "softmax"

    def alpha_schedule(self) -> AlphaSchedule:
        """Alpha on its way; only an alpha can be annealed."""
        target = self.release if self.learned else self.attention
        try:
            end = float(target)
        except ValueError:
            raise ValueError(f"schedule=anneal needs an alpha; attention={target!r} has none. Use abrupt.") from None
        return AlphaSchedule(self.start, end, self.over, self.shape)


@dataclasses.dataclass
class Task:
    """What differs between the two kinds of models: examples to train on, and measures of dev and test."""

    examples: list[Any]
    collate: Callable[[list[Any]], Any]
    length: Callable[[Any], int]
    count: Callable[[dict[str, Any]], int]
    shift: bool
    probe: list[dict[str, Any]]
    dev: Callable[[Any], dict[str, float]]
    test: Callable[[Any, str], dict[str, float]]


def read_data(settings: Settings, encoder_decoder: bool) -> Any:
    """The raw data, before anything is written."""
    if not encoder_decoder:
        return read_splits(settings)
    for name in ("train", "dev", "test"):
        settings.require(name, bool(getattr(settings, name)), f"given for an encoder-decoder such as {settings.model}")
    wheres = {split: getattr(settings, split) for split in ("train", "dev", "test")}
    pairs = tables.read_splits(wheres, (settings.source, settings.target), tables.read_pairs)
    pairs["dev"] = pairs["dev"][: settings.dev_sentences or None]
    return {split: rows[: 64 if split == "train" else 8] for split, rows in pairs.items()} if settings.smoke else pairs


def causal_task(settings: Settings, lines: dict[str, list[str]], tokenizer: Any, run: Run) -> Task:
    """Blocks of text and perplexities."""
    blocks, words = prepare(settings, lines, tokenizer)
    whole = [block for block in blocks["dev"] if len(block["input_ids"]) == settings.block][:32] or blocks["dev"][:1]

    def measure(model: Any, split: str) -> dict[str, float]:
        found = text_measures(model, blocks[split], words[split], run)
        return {name: found[name] for name in ("perplexity", "epsilon_perplexity")}

    return Task(
        blocks["train"],
        collate,
        lambda block: len(block["input_ids"]),
        count_shifted_labels,
        True,
        [collate(whole[start : start + 8]) for start in range(0, len(whole), 8)],
        lambda model: measure(model, "dev"),
        lambda model, name: measure(model, "test"),
    )


def pairs_task(settings: Settings, pairs: dict[str, Any], tokenizer: Any, run: Run, model: Any) -> Task:
    """Sentence pairs and BLEU."""
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
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
        False,
        collated(examples["dev"][:256], collator, 32, run.accelerator.device),
        lambda model: measure(model, "dev", 1),
        lambda model, name: measure(model, "test", settings.beams, name),
    )


def student_config(settings: Settings) -> EntmaxConfig | None:
    """How the student is patched; learned alphas and fixed ones start where the schedule does."""
    config = settings.entmax()
    if config is not None and settings.learned:
        return config.replace(alpha_init=settings.release)
    if config is not None and settings.annealed:
        return config.replace(alpha=settings.start)
    return config


def add_adapters(model: Any, rank: int) -> Any:
    """LoRA on every linear layer; learned alphas are trained and saved with the adapters."""
    from peft import LoraConfig, TaskType, get_peft_model

    learned = any(f".{CHILD}." in name for name, _ in model.named_parameters())
    kind = TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM
    options = {"modules_to_save": [CHILD]} if learned else {}
    return get_peft_model(
        model, LoraConfig(task_type=kind, r=rank, lora_alpha=2 * rank, target_modules="all-linear", **options)
    )


def measure(model: Any, task: Task) -> dict[str, float]:
    """A point of the curve on dev: quality, density, alphas."""
    found = {**task.dev(model), **head_statistics(model, task.probe)}
    if is_patched(model) and hf_entmax.entmax_config(model).mapping == "entmax":
        values = torch.cat([site.flatten() for site in alphas(model).values()])
        values = values[~values.isnan()]
        found |= {f"alpha_{name}": float(getattr(values, name)()) for name in ("mean", "min", "max")}
    return found


def lost(before: dict[str, float], after: dict[str, float]) -> float:
    """BLEU points, or percent of perplexity (with epsilon: finite for sparse outputs too), against the model given.

    Training on gains something by itself: what sparsity costs is the difference to the control's loss.
    """
    if "bleu" in before:
        return before["bleu"] - after["bleu"]
    return 100 * (after["epsilon_perplexity"] / before["epsilon_perplexity"] - 1)


def model_name(where: str) -> str:
    """The run of a folder ``RUN/model``, any other folder by its own name, else the Hub id."""
    if not Path(where).is_dir():
        return where
    folder = Path(os.path.abspath(where))  # not resolved: a link has the name it was given
    return (folder.parent.name if folder.name == "model" else "") or folder.name


def load(auto: Any, where: str | Path, adapter: Path | None = None) -> Any:
    """A model to train or to measure: in full precision, whatever its checkpoint was stored in."""
    model = auto.from_pretrained(where, dtype=torch.float32)
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


def main(settings: Settings) -> None:
    check_model(settings.model)
    encoder_decoder = bool(AutoConfig.from_pretrained(settings.model).is_encoder_decoder)
    data = read_data(settings, encoder_decoder)
    check_finish(settings, FIELDS)
    if settings.results:
        shared_curve(settings, CURVE)  # says now what is wrong with that file
    auto: Any = AutoModelForSeq2SeqLM if encoder_decoder else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    teacher = load(auto, settings.model).eval().requires_grad_(False)
    if is_patched(teacher):
        raise ValueError(f"model={settings.model!r} is sparse already: give a softmax model.")
    longest = "max_tokens" if encoder_decoder else "block"
    check_length(teacher, getattr(settings, longest), longest)
    if not encoder_decoder:
        check_causal(teacher)
    run = Run(settings, "convert")
    teacher.to(run.accelerator.device)
    set_seed(settings.seed)
    model = load(auto, settings.model).to(run.accelerator.device)
    if (config := student_config(settings)) is not None:
        patch_model(model, config)
    if settings.lora_rank:
        model = add_adapters(model, settings.lora_rank)
    if settings.freeze_weights:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{CHILD}." in name)
    if encoder_decoder:
        task = pairs_task(settings, data, tokenizer, run, teacher)
    else:
        task = causal_task(settings, data, tokenizer, run)
    batches = Batches.for_training(run, task.examples, task.collate, task.length)
    schedule = settings.alpha_schedule() if settings.annealed else None
    conversion = Conversion(run, model, teacher, schedule, shift=not encoder_decoder)

    def evaluate(current: Any) -> dict[str, float]:
        progress = training.progress
        conversion.move(progress.step / training.total)
        pressure = {"pressure": conversion.density.multiplier} if conversion.density is not None else {}
        # The score rises with every evaluation: the last model is the one that is kept.
        plain = base_model(run.accelerator.unwrap_model(current))
        return {"score": float(progress.step), **measure(plain, task), **pressure}

    options = {"loss": conversion.loss, "count": task.count, "before_step": conversion.move}
    training = Training(run, model, tokenizer, batches, evaluate, evaluate_every=settings.evaluate_every, **options)
    if training.progress.step == 0:
        known = {row["stage"] for row in curve(run, CURVE)}  # of an earlier start
        run.accelerator.wait_for_everyone()
        model.eval()
        conversion.arrive()
        for stage, plain in enumerate([teacher] if config is None else [teacher, conversion.student]):
            if STAGES[stage] not in known:
                found = measure(plain, task)
                run.say(f"{STAGES[stage]}: " + "  ".join(f"{name} {value:.4g}" for name, value in found.items()))
                run.log(0, **{f"dev_{name}": value for name, value in found.items()}, stage=stage)
    training.fit()
    finished = run.folder / "model"
    student = load(auto, settings.model, finished) if settings.lora_rank else load(auto, finished)
    student.to(run.accelerator.device).eval()
    before, after = task.test(teacher, "before"), task.test(base_model(student), "after")
    measures: dict[str, Any] = {name: value for name, value in training.summary().items() if name != "best_step"}
    measures |= {f"{name}_before": round(value, 4) for name, value in before.items()}
    measures |= {name: round(value, 4) for name, value in after.items()}
    measures |= {name: value for name in FIELDS if (value := getattr(settings, name, None)) is not None}
    measures |= {"lost": round(lost(before, after), 4), **head_statistics(base_model(student), task.probe)}
    measures |= {"data": settings.train if encoder_decoder else settings.data, "model": model_name(settings.model)}
    task_name, main_measure = ("translation", "bleu") if encoder_decoder else ("text-generation", "epsilon_perplexity")
    write_curve(run, CURVE)
    finish(run, FIELDS, measures, task=task_name, data=str(measures["data"]), main_measures=[main_measure, "density"])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
