"""Make a pretrained softmax model sparse, and report quality against sparsity on the way.

    python recipes/convert.py --config recipes/configs/convert_wikitext2.yaml --model runs/lm-softmax/model --out runs/lm-sparse
    python recipes/convert.py --config ... --model ... --out ... --attention 1.5                     # fixed instead of learned
    python recipes/convert.py --config ... --model ... --out ... --schedule abrupt                   # at once
    python recipes/convert.py --config ... --model ... --out ... --attention softmax                 # the control: train on
    python recipes/convert.py --config recipes/configs/convert_multi30k.yaml --model runs/mt-softmax/model --out runs/mt-sparse \
        --distill_logits 1.0 --distill_attention 1.0 --density_target 0.2
    python recipes/convert.py --config ... --model openai-community/gpt2 --out ... --lora_rank 8     # adapters and alphas only
    python recipes/convert.py --config recipes/configs/convert_smollm2.yaml --model models/smollm2 --out runs/smollm2-sparse \
        --schedule abrupt --release 1.5 --loss_budget 0 --loss_rate 0.1 --alpha_lr 0.01  # within the loss of the softmax model
    python recipes/convert.py --config recipes/configs/convert_minilm.yaml --model models/minilm --out runs/minilm-sparse \
        --loss_budget 0.05                                                              # a sentence encoder
    accelerate launch recipes/convert.py --config ... --out ...                         # as `accelerate config` says
    torchrun --standalone --nproc_per_node 2 recipes/convert.py --config ... --out ...             # two CPU processes

The model is a causal language model (data: ``--data``), an encoder-decoder (data: sentence pairs, ``--train``, ``--dev``,
``--test``) or an encoder of sentences (texts and what means the same, by the same options), a folder or a Hub id. Alpha starts
at ``--start`` (1: still a softmax), moves to its target over the share ``--over`` of training, and is then held
(``--attention 1.5``) or let go (``--attention learned``, from ``--release`` on). The loss is

    task_weight * task + distill_logits * logits + distill_attention * attention + lam * D_tau

with the distances to the frozen softmax model and the density pressure as `hf_entmax.training.distillation` and
`hf_entmax.training.density` define them; lam grows while the density of a step is above ``--density_target``. With
``--loss_budget`` it is the other way round: density is the objective, and lam falls while the loss is further above the softmax
model's than the budget. Alphas are then best free from the start, and where weights are trained best sparse from the start
(``--schedule abrupt --release 1.5 --softened true``): these recover faster than alphas grow. The loss is the task's, or with
``--task_weight 0`` the distance of the outputs (*logits* above).

The embedding of a sentence is the mean over its tokens, of length 1. The task is to find a text's partner among those of its
batch (InfoNCE, cosines times 20), the distance of outputs is 20 (1 - cosine) to the softmax model's embedding. Measured are the
correlation of the similarities of all texts and partners with the softmax model's, and how often a text finds its own.

Each evaluation is a row of ``curve.csv`` (and of ``RESULTS_curve.csv`` beside ``--results``): before, after patching without any
training, and on the way. What an encoder-decoder made of the test set before and after is kept in ``hypotheses.before.txt`` and
``hypotheses.after.txt``. The model kept is the last one: a conversion that stopped early would not be one.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoTokenizer

import hf_entmax
from common.batches import Batches
from common.blocks import TextSettings
from common.conversion import Conversion, base_model
from common.conversion_tasks import CAUSAL, SENTENCES, Kind, Task, kind_of, make_task, read_data
from common.finish import STAGES, check_finish, curve, finish, shared_curve, write_curve
from common.heads import head_statistics
from common.pretrained import check_length
from common.results import END, columns
from common.run import Run, check_model
from common.settings import option, parse
from common.training import Training
from hf_entmax import EntmaxConfig, alphas, is_patched, patch_model
from hf_entmax.integration.interface import CHILD
from hf_entmax.training import AlphaSchedule, DensityTarget, LossBudget

ALPHAS = ("alpha_mean", "alpha_min", "alpha_max")


def fields(kind: Kind) -> tuple[str, ...]:
    """Columns of the results."""
    before = " ".join(f"{name}_before" for name in kind.quality.split())
    return columns(
        "attention output_alpha seed model data schedule over distill_logits distill_attention density_target "
        "loss_budget freeze_weights lora_rank lost",
        kind.quality,
        before,
        kind.heads,
        "keys" if kind is SENTENCES else "",
        END.replace("best_step ", ""),  # the last model is the one that is kept
    )


def curve_fields(kind: Kind) -> tuple[str, ...]:
    """Columns of the evaluations."""
    return columns("command stage step", kind.quality, *ALPHAS, "pressure", kind.heads)


@dataclasses.dataclass
class Settings(TextSettings):
    """Settings of this recipe, beside those that all share."""

    model: str = option("", "the softmax model: a folder or Hub id, causal, encoder-decoder or sentence encoder")
    attention: str = option("learned", "what its attention becomes: learned, a fixed alpha, or softmax (the control)")
    softened: bool = option(False, "a temperature of each head too, at which entmax starts about as sharp as softmax")
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
    dropout: bool | None = option(
        None,
        "train with the model's dropout (default: yes, but not with loss_budget: the softmax model's loss has none)",
    )
    freeze_weights: bool = option(False, "train the learned alphas alone")
    tau: float = option(0.01, "attention weight that counts half in the density's stand-in")
    lora_rank: int = option(0, "train adapters of this rank (and learned alphas) only; 0 trains everything")
    evaluate_every: int = option(0, "evaluate after so many optimiser steps too, not only after each epoch")
    train: str = option("", "pairs: sentence pairs as for translation.py, or texts that mean the same for an encoder")
    dev: str = option("", "pairs: for each evaluation")
    test: str = option("", "pairs: for the last one")
    train_pairs: int = option(0, "pairs: train on the first so many; 0 for all")
    source: str = option("de", "pairs: source language, or column of the texts")
    target: str = option("en", "pairs: target language, or column of their partners")
    max_tokens: int = option(128, "pairs: longest sentence in tokens; for a sentence encoder longer texts are cut")
    dev_sentences: int = option(500, "pairs: of dev for each evaluation (translated greedily); 0 for all")
    beams: int = option(5, "encoder-decoders: beam width on the test set")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("model", bool(self.model), "given: the softmax model to convert")
        self.dropout = self.loss_budget is None if self.dropout is None else self.dropout
        self.require("schedule", self.schedule in ("anneal", "abrupt"), "anneal or abrupt")
        self.require("attention_loss", self.attention_loss in ("kl", "mse"), "kl or mse")
        self.require("patience", self.patience == 0, "0: a conversion keeps its last model")
        self.require_at_least(task_weight=0, distill_logits=0, distill_attention=0, lora_rank=0, evaluate_every=0)
        self.require_at_least(dev_sentences=0, train_pairs=0, max_tokens=2, beams=1)
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
        alone = self.freeze_weights
        self.require("freeze_weights", not alone or self.learned, "false: only learned alphas would be left")
        self.require("freeze_weights", not (alone and self.lora_rank), "false: adapters are weights")
        if self.learned:
            begin = "left out: --release says where learned alphas begin"
            self.require("alpha_init", self.alpha_init == "normal", begin)
            self.require(
                "schedule", self.schedule == "abrupt" or not self.softened, "abrupt: softened starts at --release"
            )
            self.release = 1.5 if self.release is None else self.release
            self.require("release", 1 < self.release < 2, "between 1 and 2")
        released = self.learned or self.release is None
        self.require("release", released, f"left out: attention={self.attention} learns no alpha")
        self.require("softened", self.learned or not self.softened, f"left out: attention={self.attention}")
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


def student_config(settings: Settings) -> EntmaxConfig | None:
    """How the student is patched; learned alphas and fixed ones start where the schedule does."""
    config = settings.entmax()
    if config is not None and settings.learned:
        temperature = {"length_scaling": "constant", "length_scaling_init": "softmax"} if settings.softened else {}
        return config.replace(alpha_init=settings.release, **temperature)
    if config is not None and settings.annealed:
        return config.replace(alpha=settings.start)
    return config


def add_adapters(model: Any, rank: int, kind: Kind) -> Any:
    """LoRA on every linear layer; learned alphas are trained and saved with the adapters."""
    from peft import LoraConfig, get_peft_model

    learned = any(f".{CHILD}." in name for name, _ in model.named_parameters())
    options: dict[str, Any] = {"modules_to_save": [CHILD]} if learned else {}
    options |= {"task_type": kind.adapters, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, **options))


def measure(model: Any, task: Task) -> dict[str, float]:
    """A point of the curve on dev: quality, density, alphas."""
    found = task.dev(model)
    if broken := [name for name, value in found.items() if math.isnan(value)]:
        raise ValueError(f"{', '.join(broken)} of dev: not a number. The model is broken, or its training has failed.")
    found |= head_statistics(model, task.probe)
    if is_patched(model) and hf_entmax.entmax_config(model).mapping == "entmax":
        values = torch.cat([site.flatten() for site in alphas(model).values()])
        values = values[~values.isnan()]
        found |= {name: float(getattr(values, name.removeprefix("alpha_"))()) for name in ALPHAS}
    return found


def lost(before: dict[str, float], after: dict[str, float]) -> float:
    """BLEU points, percent of perplexity (with epsilon: finite for sparse outputs too) or points of partners found.

    It is against the model given.

    Training on gains something by itself: what sparsity costs is the difference to the control's loss.
    """
    if "bleu" in before:
        return before["bleu"] - after["bleu"]
    if "accuracy" in before:
        return 100 * (before["accuracy"] - after["accuracy"])
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
    kind = kind_of(settings, AutoConfig.from_pretrained(settings.model))
    data = read_data(settings, kind)
    check_finish(settings, fields(kind))
    if settings.results:
        shared_curve(settings, curve_fields(kind))  # says now what is wrong with that file
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    teacher = load(kind.auto, settings.model).eval().requires_grad_(False)
    if is_patched(teacher):
        raise ValueError(f"model={settings.model!r} is sparse already: give a softmax model.")
    check_length(teacher, getattr(settings, kind.longest), kind.longest)
    kind.check(teacher)
    run = Run(settings, "convert")
    teacher.to(run.accelerator.device)
    set_seed(settings.seed)
    model = load(kind.auto, settings.model).to(run.accelerator.device)
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)  # made for another task: the embedding is a mean over the tokens
    if (config := student_config(settings)) is not None:
        patch_model(model, config)
    if settings.lora_rank:
        model = add_adapters(model, settings.lora_rank, kind)
    if settings.freeze_weights:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{CHILD}." in name)
    task = make_task(kind, settings, data, tokenizer, run, teacher)
    batches = Batches.for_training(run, task.examples, task.collate, task.length)
    conversion = Conversion(run, model, teacher, settings.alpha_schedule() if settings.annealed else None, kind)

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
        known = {row["stage"] for row in curve(run, curve_fields(kind))}  # of an earlier start
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
    student = load(kind.auto, settings.model, finished) if settings.lora_rank else load(kind.auto, finished)
    student = base_model(student.to(run.accelerator.device).eval())
    before, after = task.test(teacher, "before"), task.test(student, "after")
    measures: dict[str, Any] = {name: value for name, value in training.summary().items() if name != "best_step"}
    measures |= {f"{name}_before": round(value, 4) for name, value in before.items()}
    measures |= {name: round(value, 4) for name, value in after.items()}
    measures |= {name: value for name in fields(kind) if (value := getattr(settings, name, None)) is not None}
    measures |= {"lost": round(lost(before, after), 4), **head_statistics(student, task.probe)}
    if kind is SENTENCES:
        measures["keys"] = head_statistics(teacher, task.probe)["support_encoder_self"]
    measures |= {"data": settings.data if kind is CAUSAL else settings.train}
    measures |= {"model": model_name(settings.model)}
    write_curve(run, curve_fields(kind))
    main_measures = [kind.main, "density"]
    finish(run, fields(kind), measures, task=kind.hub_task, data=str(measures["data"]), main_measures=main_measures)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
