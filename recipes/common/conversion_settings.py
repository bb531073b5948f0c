"""The settings of a conversion from softmax to sparse attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from common.blocks import TextSettings
from common.settings import make_sparse, option
from hf_entmax import EntmaxConfig, length_scalings
from hf_entmax.training import AlphaScheduleCallback, ConversionCallback, DensityTarget, LossBudget


@dataclasses.dataclass
class ConversionSettings(TextSettings):
    """Settings of this recipe, beside those that all share."""

    model: str = option(
        "", "the softmax model, or one made sparse: a folder or Hub id, causal, encoder-decoder or sentence encoder"
    )
    teacher: str = option("", "another softmax model to compare with and to distil from (default: the model itself)")
    attention: str = option("learned", "what its attention becomes: learned, a fixed alpha, or softmax (the control)")
    softened: bool = option(False, "a temperature of each head too, at which entmax starts about as sharp as softmax")
    release: float | None = option(None, "learned: the alpha from which they are let go, above 1 (default 1.5)")
    alpha_max: float = option(
        2.0, "learned: above it no alpha can rise; the higher, the fewer weights for the same loss"
    )
    length_lr: float | None = option(None, "softened: peak learning rate of the temperatures (default: lr)")
    schedule: str = option("anneal", "anneal: alpha moves to its target; abrupt: it is there at once")
    start: float = option(1.0, "alpha at the beginning of annealing")
    over: float = option(0.5, "share of training over which it moves")
    shape: str = option("linear", "how it moves: linear or cosine")
    task_weight: float = option(1.0, "weight of the task's own loss")
    distill_logits: float = option(0.0, "weight of the distance to the softmax model's output")
    temperature: float = option(1.0, "of that distance")
    distill_encoder: float = option(
        0.0, "encoder-decoders: weight of the distance to the softmax model's encoder states"
    )
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
        self.require("patience", self.patience == 0, "0: a conversion keeps its last model")
        self.require_at_least(lora_rank=0, evaluate_every=0, dev_sentences=0, train_pairs=0, max_tokens=2, beams=1)
        self.require("density_floor", 0 <= self.density_floor < 1, "at least 0 and below 1")
        sparse = self.attention != "softmax"
        if self.density_target is not None:
            self.require("attention", sparse, "sparse for a density_target")
        if self.loss_budget is not None:
            self.require("loss_budget", self.density_target is None, "left out: density_target is the constraint")
            self.require("attention", sparse, "sparse for a loss_budget")
            self.require("output_alpha", self.output_alpha == 1, "1: the loss is compared with the softmax model's")
        pressed = self.density_target is not None or self.loss_budget is not None
        self.require("density_floor", pressed or not self.density_floor, "left out: nothing pushes the density")
        alone = self.freeze_weights
        self.require("freeze_weights", not alone or self.learned, "false: only learned alphas would be left")
        self.require("freeze_weights", not (alone and self.lora_rank), "false: adapters are weights")
        if self.learned:
            begin = "left out: --release says where learned alphas begin"
            self.require("alpha_init", self.alpha_init == "normal", begin)
            at_once = self.schedule == "abrupt" or not self.softened
            self.require("schedule", at_once, "abrupt: softened starts at --release")
            self.require("alpha_max", 1 < self.alpha_max < math.inf, "above 1")
            inside = 1 < self.released < self.alpha_max
            self.require("release", inside, f"between 1 and alpha_max={self.alpha_max:g}")
        free = self.learned or self.release is None
        self.require("release", free, f"left out: attention={self.attention} learns no alpha")
        self.require("softened", self.learned or not self.softened, f"left out: attention={self.attention}")
        self.require("alpha_max", self.learned or self.alpha_max == 2, f"left out: attention={self.attention}")
        self.require(
            "length_lr", self.length_lr is None or self.softened, "left out: only softened learns temperatures"
        )
        self.require("length_lr", self.length_lr is None or self.length_lr >= 0, "at least 0")
        self.callback()  # says now what is wrong with its part
        self.alpha_schedule()

    @property
    def learned(self) -> bool:
        """Whether alphas learn once they are let go."""
        return self.attention == "learned"

    @property
    def released(self) -> float:
        """The alpha from which learned ones are let go."""
        return 1.5 if self.release is None else self.release

    @property
    def annealed(self) -> bool:
        """Whether alpha moves on a schedule."""
        return self.schedule == "anneal" and self.attention != "softmax"

    def check_going_on(self, model: Any) -> None:
        """Raise ``ValueError`` where the settings would begin anew with a model that is sparse already."""
        make_sparse(model, self)  # says where attention or output differ
        own = f"left out: {self.model} is sparse already and keeps its own alphas"
        self.require("release", self.release is None, own)
        scaled = bool(length_scalings(model))
        self.require("softened", self.softened == scaled, f"{str(scaled).lower()}, as in {self.model}")
        self.require("alpha_max", self.alpha_max == 2, own)
        self.require("schedule", not self.annealed, f"abrupt: {self.model} is sparse already")

    def alpha_schedule(self) -> AlphaScheduleCallback | None:
        """Return what moves alpha, if anything does; only an alpha can be annealed."""
        if not self.annealed:
            return None
        target = self.released if self.learned else self.attention
        try:
            end = float(target)  # type: ignore[arg-type]
        except ValueError:
            raise ValueError(f"schedule=anneal needs an alpha; attention={target!r} has none. Use abrupt.") from None
        return AlphaScheduleCallback(self.start, end, self.over, self.shape)

    def callback(self, teacher: Any = "softmax", distance: Any = None) -> ConversionCallback:
        """Return the loss of the conversion: the task's, distances to the softmax model, pressure on the density."""
        constraint: DensityTarget | LossBudget | None = None
        if self.density_target is not None:
            constraint = DensityTarget(self.density_target, self.density_rate)
        elif self.loss_budget is not None:
            constraint = LossBudget(self.loss_budget, self.loss_rate)
        return ConversionCallback(
            constraint,
            teacher,
            task_weight=self.task_weight,
            distill_logits=self.distill_logits,
            temperature=self.temperature,
            distill_encoder=self.distill_encoder,
            distill_attention=self.distill_attention,
            attention_loss=self.attention_loss,
            distance=distance,
            tau=self.tau,
            floor=self.density_floor,
            after=self.over if self.annealed else 0.0,  # before, alpha itself is still on its way
            dropout=bool(self.dropout),
        )

    def student(self) -> EntmaxConfig | None:
        """Return how the student is patched; learned alphas and fixed ones start where the schedule does."""
        config = self.entmax()
        if config is not None and self.learned:
            temperature = {"length_scaling": "constant", "length_scaling_init": "softmax"} if self.softened else {}
            return config.replace(alpha_init=self.released, alpha_range=(1.0, self.alpha_max), **temperature)
        if config is not None and self.annealed:
            return config.replace(alpha=self.start)
        return config
