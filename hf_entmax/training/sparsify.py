"""Zeros by one call: a model, some data, and how sparse or how good it is to be."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from hf_entmax.integration.config_hook import CALIBRATION_KEY, SPARSITY_KEY
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.head_numbers import alphas
from hf_entmax.integration.patching import is_patched, patch_model, unpatch_model
from hf_entmax.integration.softmax_blocks import runs_softmax
from hf_entmax.training.alpha_vector import HIGHEST, AlphaVector
from hf_entmax.training.calibration import evaluated_alone
from hf_entmax.training.density_search import DensitySearch
from hf_entmax.training.search import Search, Task, mean_density
from hf_entmax.training.sensitivity import Loss
from hf_entmax.training.sparse_training import ADAPTERS, TrainingPlan, searched_before, train_sparse

Train = Literal["nothing", "alphas", "adapters", "lora", "weights"]
#: Every so many batches one is kept for the report alone.
_HELD_OUT = 5
#: Of gradient steps, where nothing else is said.
_STEPS = {"nothing": 0, "alphas": 60, "adapters": 200, "lora": 200, "weights": 200}
#: Ends of the range of alpha of a model that sparsify patches, and for densities that the first does not reach.
_RANGE, _WIDE = (1.0, 2.0), (1.0, 4.0)
_LEARNING_RATES = {"alphas": 0.1, "adapters": 1e-3, "lora": 1e-3, "weights": 2e-4}


@dataclasses.dataclass
class SparsityReport:
    """What `sparsify` did. ``rich.print(report)`` shows every layer.

    Attributes:
        loss_before: loss of the original, with softmax attention, on the batches that were kept for this report.
        loss_after: loss of the sparse model on the same batches; with a causal model both are nats per token.
        density: site -> float32 ``[layers, heads]``, share of the possible weights that are not zero, on the same batches.
        alphas: site -> float32 ``[layers, heads]``; attention that was left alone shows as 1.
        tokens: how many labels the batches of the report have.
        goal: ``"max_loss_increase"`` or ``"density"``.
        wanted: its value.
        reached: whether the goal holds on the batches that the search judged by.
        train: what was trained.
        steps: of gradient descent.
        seconds: from beginning to end.
    """

    loss_before: float
    loss_after: float
    density: dict[str, Tensor]
    alphas: dict[str, Tensor]
    tokens: int
    goal: str
    wanted: float
    reached: bool
    train: str
    steps: int
    seconds: float

    @property
    def loss(self) -> float:
        """``loss_after``: what the model has now."""
        return self.loss_after

    @property
    def density_before(self) -> dict[str, Tensor]:
        """Site -> ``[layers, heads]`` of ones: no weight of a softmax is zero."""
        return {site: torch.ones_like(shares) for site, shares in self.density.items()}

    @property
    def mean_density(self) -> float:
        """Mean over all heads of the model."""
        return mean_density(self.density)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: what is saved with the model, as ``model.config.entmax_sparsity``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        number = lambda x: None if math.isnan(x) else round(x, 4)  # noqa: E731 - JSON knows no NaN
        plain = lambda table: {site: [[number(x) for x in row] for row in v.tolist()] for site, v in table.items()}  # noqa: E731
        return fields | {
            "alphas": plain(self.alphas),
            "density": plain(self.density),
            "mean_density": self.mean_density,
        }

    def __str__(self) -> str:
        rise = self.loss_after - self.loss_before
        missed = "" if self.reached else f" The goal ({self.goal} {self.wanted:g}) was not reached: train more steps."
        return (
            f"{1 - self.mean_density:.1%} of the attention weights are exactly zero (mean over heads). Loss on {self.tokens} "
            f"tokens that nothing was chosen by: {self.loss_before:.4f} -> {self.loss_after:.4f} ({rise:+.4f}).{missed}"
        )

    def __rich__(self) -> Table:
        table = Table(title=str(self), caption="per layer: mean and extremes over its heads")
        for name in ("site", "layer", "alpha", "lowest", "highest", "nonzero", "sparsest", "densest"):
            table.add_column(name, justify="right")
        for site, rows in self.alphas.items():
            for layer, (own, density) in enumerate(zip(rows, self.density[site], strict=True)):
                numbers = [own.nanmean(), *_extremes(own)]
                shares = [density.nanmean(), *_extremes(density)]
                cells = [f"{float(x):.3f}" for x in numbers] + [f"{float(x):.1%}" for x in shares]
                table.add_row(site, str(layer), *cells)
        return table


def sparsify(
    model: PreTrainedModel,
    data: Iterable[Any],
    *,
    max_loss_increase: float | None = None,
    density: float | None = None,
    train: Train = "nothing",
    steps: int | None = None,
    learning_rate: float | None = None,
    collator: Callable[[list[Any]], dict[str, Any]] | None = None,
    batch_size: int = 8,
    loss: Loss | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = print,
) -> SparsityReport:
    r"""Make the attention of a model sparse: as sparse as a loss allows, or as good as a density allows.

    A model that is not patched is patched with learned alphas and a temperature for each head
    (``length_scaling="constant"``), in the range from 1 to 2, or up to 4 where 2 would still be denser than ``density``.
    Every fifth batch is set aside for the report. With the others the alphas and temperatures are searched
    (`hf_entmax.calibrate_alphas` says how), and then whatever ``train`` names is trained:

    - ``"nothing"``: minutes; no gradient step at all.
    - ``"alphas"``: gradient steps on alphas and temperatures, so that heads can trade zeros among them.
    - ``"adapters"``, or ``"lora"``: low-rank adapters on every linear layer (needs PEFT), merged into the weights at the end.
    - ``"weights"``: all weights.

    With the last two, ``density`` is reached first and the weights then learn to live with it; with
    ``max_loss_increase`` density is pushed down while the loss is within the budget (`LossBudgetCallback`). The state that
    was best on the batches that judge is kept. If neither goal is given, ``max_loss_increase`` is 0.01.

    Args:
        model: any model that `hf_entmax.patch_model` takes, or one patched with learned alphas. It is changed in place.
        data: batches with labels (dicts of tensors, a ``DataLoader``), at least three, better forty; or with ``collator`` the
            examples that it makes batches of.
        max_loss_increase: at least 0, how far the loss may rise above the original's; nats per token, 0.01 is 1 % of
            perplexity.
        density: in (0, 1), the share of the attention weights that may stay nonzero, mean over heads.
        train: what may be trained.
        steps: how many steps, at least 1; by default 60 for alphas, 200 for adapters and weights.
        learning_rate: above 0; by default 0.1 for alphas, 1e-3 for adapters, 2e-4 for weights.
        collator: makes a batch of a list of examples, e.g. ``DataCollatorForLanguageModeling(tokenizer, mlm=False)``.
        batch_size: examples in a batch, with ``collator``.
        loss: ``loss(model, batch) -> scalar`` in the place of the model's own; not with adapters or weights.
        output_dir: folder for checkpoints of ``"adapters"`` and ``"weights"``. Call again with the same one to go on after an
            interruption.
        trainer_arguments: more of ``TrainingArguments`` for ``"adapters"`` and ``"weights"``, e.g.
            ``{"bf16": True, "gradient_accumulation_steps": 4}``.
        progress: called with a line of text for every measurement; None for silence.

    Returns:
        Losses, densities and alphas, on the batches that were set aside.

    Raises:
        TypeError: if ``model`` is no ``PreTrainedModel`` or a batch is no mapping.
        ValueError: if an argument is out of range or would have no effect, there are too few batches, the model learns no
            alphas, or the goal is out of reach for the search. The model is then as it was before the search.

    Examples:
        >>> report = sparsify(model, batches, max_loss_increase=0.02)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    begin = time.perf_counter()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"sparsify needs a transformers.PreTrainedModel, not {type(model).__name__}. Give it the model inside."
        )
    goal, wanted = _goal(max_loss_increase, density)
    steps, rate = _steps(train, steps), _rate(train, learning_rate)
    _reject_without_effect(train, loss, output_dir, trainer_arguments)
    if any(runs_softmax(site.module) for site in attention_sites(model)):
        raise ValueError("sparsify would only see softmax inside softmax_attention(model): call it outside the block.")
    examples, batches = _batches(data, collator, batch_size)
    kept = list(range(_HELD_OUT - 1, len(batches), _HELD_OUT)) or [len(batches) - 1]
    used = [i for i in range(len(batches)) if i not in kept]
    say = progress or (lambda line: None)
    trains = train in (*ADAPTERS, "weights")
    plan = TrainingPlan(goal, wanted, train, steps, rate, collator, batch_size, output_dir, trainer_arguments or {})
    ours = not is_patched(model)
    if ours:
        earlier = plan.record() or {}
        patch_model(model, length_scaling="constant", alpha_range=tuple(earlier.get("alpha_range", _RANGE)))
    vector = AlphaVector(model)
    start = vector.values()
    settled = False  # once there is a result, or weights that the alphas belong to
    try:
        task = Task(model, [batches[i] for i in used], loss, vector)
        report = Task(model, [batches[i] for i in kept], loss, vector)
        report.judge_by_all()
        known = searched_before(plan, vector)
        if ours and known is None and goal == "density" and _too_dense(task, wanted):
            say(f"alphas of {_RANGE[1]:g} leave more than {wanted:.1%} of the weights: they may rise to {_WIDE[1]:g}")
            unpatch_model(model)
            patch_model(model, length_scaling="constant", alpha_range=_WIDE)
            vector = task.vector = report.vector = AlphaVector(model)
        with evaluated_alone(model, vector):
            before = report.measure_softmax()
            say(f"with softmax attention: {task.measure_softmax():.4f}")
            if known is None:
                known = _search(task, vector, goal, wanted, 0 if trains else steps, rate, say).best
            vector.set_(known)
        reached = True
        if trains:
            size = 1 if collator is None else batch_size  # a ready batch is its own example
            own = [example for i in used for example in examples[i * size : (i + 1) * size]]
            settled = True
            reached = train_sparse(model, task, vector, own, plan, progress)
        with evaluated_alone(model, vector):
            after, table = report.measure(vector.values())
        settled = True
    finally:
        if not settled:
            if ours:
                unpatch_model(model)
            else:
                vector.set_(start)
    seconds = time.perf_counter() - begin
    found = SparsityReport(
        before, after, table, alphas(model), report.tokens, goal, wanted, reached, train, steps, seconds
    )
    if hasattr(model.config, CALIBRATION_KEY):  # of an earlier search: no longer true
        delattr(model.config, CALIBRATION_KEY)
    setattr(model.config, SPARSITY_KEY, found.to_dict())
    return found


def _too_dense(task: Task, wanted: float) -> bool:
    """Say whether more weights than wanted are left with the highest alphas."""
    vector = task.vector
    with evaluated_alone(task.model, vector):
        return mean_density(task.measure(vector.even(HIGHEST))[1]) > wanted


def _search(
    task: Task, vector: AlphaVector, goal: str, wanted: float, steps: int, rate: float, say: Callable[[str], None]
) -> Search | DensitySearch:
    search: Search | DensitySearch
    if goal == "density":
        search = DensitySearch(task, vector, wanted, say)
        search.refine(search.choose(), steps, rate)
        return search
    search = Search(task, vector, wanted, say)
    price = search.choose()
    search.climb()
    search.refine(price, steps, rate)
    search.confirm()
    return search


def _goal(max_loss_increase: float | None, density: float | None) -> tuple[str, float]:
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)  # noqa: E731
    if density is None:
        budget = 0.01 if max_loss_increase is None else max_loss_increase
        if not number(budget) or not 0.0 <= budget < math.inf:
            raise ValueError(
                f"max_loss_increase={budget!r} is not allowed: give nats per token, a number of at least 0."
            )
        return "max_loss_increase", float(budget)
    if max_loss_increase is not None:
        raise ValueError("give max_loss_increase or density, not both: one is the goal, the other what it costs.")
    if not number(density) or not 0.0 < density < 1.0:
        raise ValueError(f"density={density!r} is not allowed: give the share of weights that may stay, in (0, 1).")
    return "density", float(density)


def _steps(train: str, steps: int | None) -> int:
    if train not in get_args(Train):
        raise ValueError(f"train={train!r} is not allowed: choose one of {list(get_args(Train))}.")
    if steps is None:
        return _STEPS[train]
    if train == "nothing":
        raise ValueError(
            f"steps={steps!r} would have no effect with train='nothing': leave it out, or train something."
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is not allowed: give a whole number of at least 1.")
    return steps


def _rate(train: str, rate: float | None) -> float:
    if rate is None:
        return _LEARNING_RATES.get(train, 0.0)
    if train == "nothing":
        raise ValueError(f"learning_rate={rate!r} would have no effect with train='nothing': leave it out.")
    if not 0.0 < rate < math.inf:
        raise ValueError(f"learning_rate={rate!r} is not allowed: give a number above 0.")
    return float(rate)


def _reject_without_effect(train: str, loss: Any, output_dir: Any, arguments: Any) -> None:
    trains = train in (*ADAPTERS, "weights")
    for name, value in {"output_dir": output_dir, "trainer_arguments": arguments}.items():
        if value is not None and not trains:
            raise ValueError(f"{name} would have no effect with train={train!r}: it is for 'adapters' and 'weights'.")
    if trains and loss is not None:
        raise ValueError(f"loss= cannot be used with train={train!r}: the Trainer takes the model's own loss.")
    if output_dir is not None and Path(output_dir).is_file():
        raise ValueError(f"output_dir={str(output_dir)!r} is a file: give a folder.")


def _batches(
    data: Iterable[Any], collator: Callable[[list[Any]], dict[str, Any]] | None, size: int
) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """Return the examples, and the batches they make."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"batch_size={size!r} is not allowed: give a whole number of at least 1.")
    if isinstance(data, Mapping):
        raise TypeError("data is one batch: give a list of batches, or examples and collator=.")
    examples = list(data)
    batches: list[Mapping[str, Any]] = examples
    if collator is not None:
        batches = [collator(examples[i : i + size]) for i in range(0, len(examples), size)]
    elif not all(
        isinstance(batch, Mapping) and any(isinstance(v, Tensor) for v in batch.values()) for batch in batches
    ):
        raise TypeError(
            "data must hold batches, dicts of tensors; examples need collator=, which makes batches of them."
        )
    if len(batches) < 3:
        raise ValueError(
            f"data makes {len(batches)} batches; at least 3 are needed: to fit, to judge, and to report on."
        )
    return examples, batches


def _extremes(values: Tensor) -> list[Tensor]:
    known = values[~values.isnan()]
    return [known.min(), known.max()] if len(known) else [torch.tensor(math.nan)] * 2
