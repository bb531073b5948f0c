"""How sparse may each head be without training a weight? Alphas as high as a budget on the loss allows."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_entmax.batches.prepare import evaluation_mode, prepare_batch
from hf_entmax.integration.config_hook import CALIBRATION_KEY
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.labels import count_labels
from hf_entmax.integration.observe import AttentionCall, observe_attention
from hf_entmax.integration.patching import alphas, softmax_attention
from hf_entmax.training.density import LossBudget
from hf_entmax.training.distillation import Recorded, attention_pairs
from hf_entmax.training.sensitivity import AlphaVector, Loss, Sensitivity, measure_sensitivity

#: How often each of the two searches along a line may measure the loss of all batches.
_TRIALS = 5
#: Where step 2 starts with heads that the choice left at softmax: alpha 1.01 in the usual range.
_START = math.log(0.01 / 0.99)


@dataclasses.dataclass
class Calibration:
    """What `calibrate_alphas` found. ``rich.print(result)`` shows every head.

    Attributes:
        loss_before: mean loss with softmax attention, nats per token.
        loss_after: the same with the alphas found.
        max_loss_increase: the budget, nats per token.
        alphas: site -> float32 ``[layers, heads]``; attention that was left alone shows as 1.
        density: site -> float32 ``[layers, heads]``, share of the possible weights that are not zero, on the same batches.
        tokens: how many labels were predicted in one pass over the batches.
    """

    loss_before: float
    loss_after: float
    max_loss_increase: float
    alphas: dict[str, Tensor]
    density: dict[str, Tensor]
    tokens: int

    @property
    def mean_density(self) -> float:
        """Mean over all heads of the model."""
        return float(torch.cat([values.flatten() for values in self.density.values()]).nanmean())

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: what is saved with the model, as ``model.config.entmax_calibration``."""
        number = lambda x: None if math.isnan(x) else round(x, 4)  # noqa: E731 - JSON knows no NaN
        plain = lambda table: {site: [[number(x) for x in row] for row in v.tolist()] for site, v in table.items()}  # noqa: E731
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"alphas": plain(self.alphas), "density": plain(self.density)}

    def __str__(self) -> str:
        rise = self.loss_after - self.loss_before
        return (
            f"{1 - self.mean_density:.1%} of the attention weights are exactly zero (mean over heads) at {rise:+.4f} nats per "
            f"token ({self.loss_before:.4f} -> {self.loss_after:.4f}, allowed {self.max_loss_increase:+.4f}, {self.tokens} tokens)"
        )

    def __rich__(self) -> Table:
        table = Table(title=str(self), caption="per head: alpha, share of weights that are not zero")
        width = max(values.shape[1] for values in self.alphas.values())
        for name in ("site", "layer", *(f"head {head}" for head in range(width))):
            table.add_column(name, justify="right")
        for site, rows in self.alphas.items():
            for layer, (values, density) in enumerate(zip(rows.tolist(), self.density[site].tolist(), strict=True)):
                cells = [f"{a:.3f} {d:4.0%}" if a == a else "" for a, d in zip(values, density, strict=True)]
                table.add_row(site, str(layer), *cells)
        return table


def calibrate_alphas(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    max_loss_increase: float = 0.01,
    *,
    loss: Loss | None = None,
    steps: int = 40,
    learning_rate: float = 0.15,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    r"""Set the learned alphas of a patched model as high as a budget on the loss allows; no weight is trained.

        min_a  mean_h density_h(a)      subject to      loss(a) - loss(softmax) <= max_loss_increase

    1. One forward and backward pass per batch near softmax estimates what each head alone would cost and gain at each of a
       few alphas (`hf_entmax.training.sensitivity`). The alphas with the fewest nonzero weights at a given sum of estimated
       costs are chosen, and that sum is moved until the measured loss just fits.
    2. Gradient steps on all alphas together, the loss of one batch each, let heads trade the budget among them.
    3. What step 2 found is drawn back towards step 1 until the loss is measured to be within the budget.

    At the same scores entmax is sharper than softmax, and that costs more than the zeros themselves. A model that is patched
    with ``length_scaling="constant"`` has a temperature for each head, and step 1 sets it as well: the scores of a head are
    multiplied by ``1 / (1 + r (alpha - 1))`` with the ``r`` that costs it least.

    Alphas fit a small text: on SmolLM2, those fitted to 4,000 tokens raised the loss of other text by 0.12 nats when they were
    judged on the 4,000 tokens themselves. So every fourth batch is left out of steps 1 and 2, and the loss of these batches
    decides; at the end all batches together must be within the budget as well. Give at least eight, better thirty, of the kind
    of text that the model is for. The result is also kept in ``model.config.entmax_calibration`` and saved with the model.

    Args:
        model: patched with learned alphas, the weights of which are those of the softmax model: causal, masked,
            encoder-decoder, or any other whose output has a loss. With ``length_scaling="constant"`` temperatures are set too.
        batches: dicts of tensors as a data collator returns them, with labels; at least two, so that one can be left out
            (a single one serves both ends). They are held in memory; the attention weights of one batch are held for all
            layers at once.
        max_loss_increase: at least 0, nats per token over the same model with softmax attention. 0.01 is 1 % of perplexity.
        loss: ``loss(model, batch) -> scalar`` in the place of the model's own, e.g. for an encoder without a head; its
            mean over the batches, weighted by their rows, is then what the budget is on.
        steps: of 2., at least 0.
        learning_rate: of Adam in 2., above 0; it falls to 0 on a cosine.
        progress: called with a line of text now and then, e.g. ``print``.

    Returns:
        The losses measured, and alpha and density of every head.

    Raises:
        TypeError: if ``model`` is not a ``PreTrainedModel`` or a batch is no mapping.
        ValueError: if an argument is out of range, the model has no learned alphas, there is nothing to predict in the
            batches or a token is not in the vocabulary, the loss is not finite with softmax, or not even the lowest alphas
            meet the budget. The model is then as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"calibrate_alphas needs a transformers.PreTrainedModel, not {type(model).__name__}. Give it the model inside."
        )
    _check_arguments(max_loss_increase, steps, learning_rate)
    vector = AlphaVector(model)
    task = _Task(model, batches, loss, vector)
    say = progress or (lambda line: None)
    start, done = [parameter.detach().clone() for parameter in vector.trained], False
    with _only(model, vector):
        try:
            before = task.measure_softmax()
            say(f"softmax: {before:.4f} nats per token")
            fitted = [(task.batches[i], task.counts[i]) for i in task.fitted]
            sensitivity = measure_sensitivity(model, *map(list, zip(*fitted, strict=True)), task.loss, vector)  # type: ignore[arg-type]
            search = _Search(task, vector, float(max_loss_increase), say)
            price = search.choose(sensitivity)
            search.refine(sensitivity, price, steps, learning_rate)
            search.confirm()
            vector.set_(search.best)
            budget = float(max_loss_increase)
            found = Calibration(before, search.loss, budget, alphas(model), search.density, task.tokens)
            done = True
        finally:
            if not done:
                with torch.no_grad():
                    for parameter, value in zip(vector.trained, start, strict=True):
                        parameter.copy_(value)
    setattr(model.config, CALIBRATION_KEY, found.to_dict())
    return found


def _check_arguments(budget: float, steps: int, learning_rate: float) -> None:
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0.0 <= budget < math.inf:
        raise ValueError(f"max_loss_increase={budget!r} is not allowed: give nats per token, a number of at least 0.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps={steps!r} is not allowed: give a whole number of at least 0.")
    if not 0.0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate={learning_rate!r} is not allowed: give a number above 0.")


@contextlib.contextmanager
def _only(model: PreTrainedModel, vector: AlphaVector) -> Iterator[None]:
    """Evaluation mode, and gradients for the alphas alone; afterwards everything is as it was."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    own = {id(parameter) for parameter in vector.trained}
    with evaluation_mode(model):
        try:
            for parameter, _ in wanted:
                parameter.requires_grad_(id(parameter) in own)
            yield
        finally:
            for parameter, flag in wanted:
                parameter.requires_grad_(flag)


class _Task:
    """The batches, their loss, and how both are measured."""

    def __init__(
        self, model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], loss: Loss | None, vector: AlphaVector
    ) -> None:
        self.model, self.own_loss, self.vector = model, loss, vector
        device = next(model.parameters()).device
        self.batches: list[dict[str, Any]] = []
        self.counts: list[int] = []
        self._pairs: dict[tuple[int, str, torch.Size], Tensor] = {}
        for batch in batches:
            info = prepare_batch(model, batch)  # names what the model cannot read
            count = info.size if loss is not None else self._labels(batch)
            if count:
                self.batches.append({k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()})
                self.counts.append(count)
        self.tokens = sum(self.counts)
        if not self.tokens:
            raise ValueError(
                "batches hold nothing to predict: give at least one batch with labels other than -100 (causal models predict "
                "each token but the first)."
            )
        count = len(self.batches)
        #: Which batches the alphas are fitted to, and which ones judge.
        self.judging = list(range(3, count, 4)) or [count - 1]
        self.fitted = [i for i in range(count) if i not in self.judging] or self.judging

    def _labels(self, batch: Mapping[str, Any]) -> int:
        if not isinstance(batch.get("labels"), Tensor):
            raise ValueError(
                f"a batch has no labels (it has {sorted(map(str, batch))}): add them, e.g. by a data collator, or give "
                "calibrate_alphas loss=, a function of model and batch."
            )
        return count_labels(self.model, batch)

    def loss(self, model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
        """Mean loss of a batch, in the autograd graph of the alphas."""
        if self.own_loss is not None:
            return self.own_loss(model, batch)
        value = model(**batch).loss
        if value is None:
            raise ValueError(f"{type(model).__name__} returns no loss: give loss=, a function of model and batch.")
        return value

    def mean(self, values: list[float], batches: list[int]) -> float:
        """Over all tokens of these batches."""
        counts = [self.counts[i] for i in batches]
        return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)

    @property
    def before(self) -> float:
        """The loss with softmax attention of the batches that judge."""
        return self.mean([self.reference[i] for i in self.judging], self.judging)

    @torch.no_grad()
    def measure_softmax(self) -> float:
        """The loss of all batches to compare with; that of each is kept."""
        with softmax_attention(self.model):
            self.reference = [float(self.loss(self.model, batch)) for batch in self.batches]
        mean = self.mean(self.reference, list(range(len(self.batches))))
        if not math.isfinite(mean):
            raise ValueError(f"the loss with softmax attention is {mean}: there is nothing to compare with.")
        return mean

    @torch.no_grad()
    def measure(self, values: Tensor) -> tuple[float, dict[str, Tensor]]:
        """Loss of the batches that judge and density ``[layers, heads]`` with these values of ``a``."""
        self.vector.set_(values)
        sums: dict[str, Tensor] = {}
        sites = {site.name: site for site in attention_sites(self.model)}
        losses = []
        for index in self.judging:
            batch = self.batches[index]

            def look(call: AttentionCall, index: int = index, batch: dict[str, Any] = batch) -> None:
                site, weights = call.site, call.weights
                key = (index, site.site, weights.shape[-2:])
                if key not in self._pairs:
                    record = Recorded({site.name: weights}, {site.name: site})
                    self._pairs[key] = attention_pairs(self.model, batch, record)[site.name]
                pairs = self._pairs[key]
                kept = ((weights > 0) & pairs[:, None]).sum((0, 2, 3)).double().cpu()
                total = pairs.sum().double().cpu()
                sums[site.name] = sums.get(site.name, 0.0) + torch.stack([kept, total.expand_as(kept)])

            with observe_attention(self.model, look):
                losses.append(float(self.loss(self.model, batch)))
        rows: dict[str, list[Tensor]] = {}
        for name, (kept, total) in sums.items():
            rows.setdefault(sites[name].site, []).append((kept / total).float())
        return self.mean(losses, self.judging), {site: pad_sequence(own, True, math.nan) for site, own in rows.items()}


class _Search:
    """The best values of ``a`` so far: the fewest nonzero weights among those measured to be within the budget."""

    def __init__(self, task: _Task, vector: AlphaVector, budget: float, say: Callable[[str], None]) -> None:
        self.task, self.vector, self.budget, self.say = task, vector, budget, say
        self._start()

    def _start(self) -> None:
        """From the lowest alphas."""
        self.fits = False
        self.best: Tensor = torch.full_like(self.vector.get(), self.vector.bottom)
        rise = self.try_(self.best, "lowest alphas")
        # Not even float32 repeats a loss exactly when its sums are taken in another order.
        if not self.fits and rise <= self.budget + 1e-6 * max(1.0, abs(self.task.before)):
            self.accept(self.best)
        if not self.fits:
            raise ValueError(
                f"max_loss_increase={self.budget} cannot be met: with all alphas at the lowest of alpha_range the loss is already "
                f"{rise:+.4g} above that of softmax ({self.task.before:.4f}). The model is left as it was. Allow more, or patch "
                "with a lower alpha_range."
            )

    def confirm(self) -> None:
        """Judge by all batches: the best so far, drawn back where it overshoots the budget there."""
        everything = list(range(len(self.task.batches)))
        if self.task.judging == everything:
            return
        reached, self.task.judging, self.fits = self.best, everything, False
        if self.try_(reached, "all batches") > self.budget:
            self._start()
            self._draw_back(self.best, reached)

    def accept(self, values: Tensor) -> None:
        """Keep what was measured last."""
        self.best, self.loss, self.density, self.fits = values, self._loss, self._density, True

    @property
    def zeros(self) -> float:
        """Share of zero weights, of the best."""
        return _zeros(self.density)

    def try_(self, values: Tensor, name: str) -> float:
        """Measure, keep if better; returns how much the loss rises."""
        self._loss, self._density = self.task.measure(values)
        rise = self._loss - self.task.before
        fits = rise <= self.budget
        if fits and (not self.fits or _zeros(self._density) > self.zeros):
            self.accept(values)
        verdict = "" if fits else ", too much"
        self.say(f"{name}: {_zeros(self._density):.1%} zeros at {rise:+.4f} nats per token{verdict}")
        return rise if math.isfinite(rise) else math.inf

    def choose(self, sensitivity: Sensitivity) -> float:
        """The sum of estimated costs, moved until the loss fits; returns the price of a density of 1 there, in nats."""
        good, bad, price = 0.0, math.inf, 0.0
        guess = max(self.budget, 1e-3)
        values, price_here = sensitivity.choose(guess)
        for _ in range(_TRIALS):
            rise = self.try_(values, f"estimated cost {guess:.4f}")
            fits = rise <= self.budget
            if fits:
                good, price = guess, price_here
            else:
                bad = guess
            # Nearby sums of estimated costs may come to the same choice: they need no measurement.
            previous = values
            for _ in range(20):
                if fits and bad == math.inf:
                    guess *= min(4.0, max(1.5, self.budget / rise if rise > 0 else 4.0))
                else:
                    guess = math.sqrt(good * bad) if good else guess * max(0.1, min(0.7, self.budget / rise))
                values, price_here = sensitivity.choose(guess)
                if not values.equal(previous):
                    break
                good, bad = (guess, bad) if fits else (good, guess)
            if bad < 1.1 * good or values.equal(previous):
                break
        if not good:  # the estimates were of no use: as far towards the last choice as the loss allows
            self._draw_back(self.best, values)
        return price or price_here

    def refine(self, sensitivity: Sensitivity, price: float, steps: int, learning_rate: float) -> None:
        """Adam on ``a``: loss + price * mean density, the price moved so that the budget is just used."""
        if not steps:
            return
        origin = self.best
        # From the very bottom no step would lead up within this search: the slope of alpha in `a` is almost 0 there.
        values = origin.clamp(min=_START).requires_grad_(True)
        optimizer = torch.optim.Adam([values], lr=learning_rate)
        constraint = LossBudget(self.budget, rate=0.3, start=max(price, 5 * self.budget, 0.05), memory=0.8)
        for step in range(steps):
            index = self.task.fitted[step % len(self.task.fitted)]
            optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
            self.vector.set_(values.detach())
            loss = self.task.loss(self.task.model, self.task.batches[index])
            slope_of_loss = self.vector.slope(loss)
            density = sensitivity.mean_density(values)
            slope = torch.autograd.grad(density, values)[0]
            if not bool(slope_of_loss.isfinite().all()):
                break
            values.grad = slope_of_loss + constraint.multiplier * slope
            optimizer.step()
            with torch.no_grad():
                values.clamp_(self.vector.bottom, self.vector.top)
            rise = float(loss.detach()) - self.task.reference[index]
            constraint.update(rise)
            if step % 10 == 9:
                self.say(f"step {step + 1}: {1 - float(density):.1%} zeros expected at {rise:+.4f} in one batch")
        self._draw_back(origin, values.detach())

    def _draw_back(self, origin: Tensor, reached: Tensor) -> None:
        """As far along the straight line of alphas as the budget allows, also beyond what was reached.

        A line of `a` would fall to softmax at once: its lowest values are far below.
        """
        low, high, share = 0.0, math.inf, 1.0
        for _ in range(_TRIALS):
            between = torch.lerp(origin.sigmoid(), reached.sigmoid(), share).clamp(0, 1).logit()
            values = reached if share == 1 else between.clamp(self.vector.bottom, self.vector.top)
            if self.try_(values, f"{share:.0%} of the way") <= self.budget:
                low = share
            else:
                high = share
            share = 1.5 * low if high == math.inf else (low + high) / 2


def _zeros(density: dict[str, Tensor]) -> float:
    return 1.0 - float(torch.cat([values.flatten() for values in density.values()]).nanmean())
