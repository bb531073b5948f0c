"""The search behind `hf_entmax.calibrate_alphas`: how batches are measured, and how values of alpha are tried and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_entmax.batches.prepare import prepare_batch
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.labels import count_labels
from hf_entmax.integration.observe import AttentionCall, observe_attention
from hf_entmax.integration.patching import entmax_config, softmax_attention
from hf_entmax.training.alpha_vector import HIGHEST, LOWEST, AlphaVector
from hf_entmax.training.density import soft_density
from hf_entmax.training.distillation import Recorded, attention_pairs, logit_distillation, record_attention
from hf_entmax.training.sensitivity import Loss, Sensitivity, in_the_graph, measure_sensitivity

#: How often a search along a line may measure the loss of the batches that judge.
_TRIALS = 5
#: On how many batches costs are estimated.
_ESTIMATED = 8
#: Shares of the range of alpha: where the search for a common one begins, and where step 3 begins at least.
_FIRST, _LEAST = 0.15, 0.01
#: Steps after which the batches that judge are asked, and by how much the pressure on the density then goes up or down.
_JUDGED, _PUSH = 5, 2.0


class Task:
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
        """Return the mean loss of a batch, in the autograd graph of the alphas."""
        if self.own_loss is not None:
            return _checked(self.own_loss(model, batch))
        value = model(**batch).loss
        if value is None:
            raise ValueError(f"{type(model).__name__} returns no loss: give loss=, a function of model and batch.")
        return value

    def mean(self, values: list[float], batches: list[int]) -> float:
        """Average over all tokens of these batches."""
        counts = [self.counts[i] for i in batches]
        return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)

    def judge_by_all(self) -> None:
        """Let every batch judge: nothing is fitted to them."""
        self.judging = list(range(len(self.batches)))

    @property
    def before(self) -> float:
        """The loss with softmax attention of the batches that judge."""
        return self.mean([self.reference[i] for i in self.judging], self.judging)

    @torch.no_grad()
    def measure_softmax(self) -> float:
        """Measure the loss of all batches to compare with; that of each is kept."""
        with softmax_attention(self.model):
            self.reference = [float(self.loss(self.model, batch)) for batch in self.batches]
        mean = self.mean(self.reference, list(range(len(self.batches))))
        if not math.isfinite(mean):
            raise ValueError(f"the loss with softmax attention is {mean}: there is nothing to compare with.")
        return mean

    @torch.no_grad()
    def measure(self, values: Tensor) -> tuple[float, dict[str, Tensor]]:
        """Measure loss of the batches that judge and density ``[layers, heads]`` with these values of ``a``."""
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
                    record = Recorded({site.name: call})
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

    def sensitivity(self) -> Sensitivity:
        """Estimate what each alpha would cost and gain, on some of the batches that alphas are fitted to."""
        batches, counts = ([values[i] for i in self.fitted[:_ESTIMATED]] for values in (self.batches, self.counts))
        return measure_sensitivity(self.model, batches, counts, self.loss, self.vector)  # type: ignore[arg-type]

    def cost_and_density(self, index: int) -> tuple[Tensor, Tensor]:
        """Return what a batch costs and its soft density, mean over heads, both in the graph of the values.

        The cost is how far the predictions are from those with softmax, in nats. Alphas have little to learn from a text by
        that, and much less noise: on SmolLM2 they hold on other text, where those that follow the loss of a few thousand
        tokens do not. Where there are no such predictions it is the loss.
        """
        batch, sites = self.batches[index], self.vector.places
        known = self._softmax_predictions(batch)
        with in_the_graph(self.model), record_attention(self.model) as seen:
            if known is None:
                cost = self.loss(self.model, batch)
            else:
                cost = logit_distillation(self.model(**batch).logits, *known)
        pairs = attention_pairs(self.model, batch, seen)
        calls = {name: call for name, call in seen.calls.items() if call.site.name in sites}
        each = [soft_density(call.weights, pairs[name]) * call.site.num_heads for name, call in calls.items()]
        return cost, torch.stack(each).sum() / sum(call.site.num_heads for call in calls.values())

    @torch.no_grad()
    def _softmax_predictions(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Return logits with softmax attention, and labels that say which of them are of real tokens; None where none are a choice."""
        config = entmax_config(self.model)
        several = getattr(self.model.config, "problem_type", None) == "multi_label_classification"
        if self.own_loss is not None or config.output_alpha or config.output_mapping or several:
            return None
        with softmax_attention(self.model):
            logits = getattr(self.model(**batch), "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() not in (2, 3) or logits.shape[-1] < 2:
            return None
        info = prepare_batch(self.model, batch)
        real = info.mask if info.decoder_ids is None else info.decoder_mask
        if real is None or real.shape != logits.shape[:-1]:
            real = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        return logits, torch.where(real, 0, -100)


class Search:
    """The best values of ``a`` so far: the fewest nonzero weights among those measured to be within the budget."""

    def __init__(self, task: Task, vector: AlphaVector, budget: float, say: Callable[[str], None]) -> None:
        self.task, self.vector, self.budget, self.say = task, vector, budget, say
        self._start()

    def _start(self) -> None:
        """Begin from the lowest alphas."""
        self.fits = False
        self.best: Tensor = self.vector.even(LOWEST)
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
            self._draw_back(self.best, reached, high=1.0)

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

    def choose(self) -> float:
        """Move the sum of estimated costs until the loss fits; return the price of a density of 1 there, in nats."""
        sensitivity = self.task.sensitivity()

        def choice(cost: float) -> tuple[Tensor, float]:
            chosen, price = sensitivity.choose(cost)
            return self.vector.softened(chosen, sensitivity.softening), price

        good, bad, price = 0.0, math.inf, 0.0
        guess = max(self.budget, 1e-3)
        values, price_here = choice(guess)
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
                values, price_here = choice(guess)
                if not values.equal(previous):
                    break
                good, bad = (guess, bad) if fits else (good, guess)
            if bad < 1.1 * good or values.equal(previous):
                break
        if not good:  # the estimates were of no use: as far towards the last choice as the loss allows
            self._draw_back(self.best, values)
        return price or price_here

    def climb(self) -> None:
        """Try one alpha for all, raised while the loss fits."""
        low, high, share = 0.0, math.inf, _FIRST
        for _ in range(_TRIALS):
            if self.try_(self.vector.even(share), f"all at {share:.1%} of the range of alpha") <= self.budget:
                low = share
            else:
                high = share
            if low == HIGHEST:
                break
            share = min(HIGHEST, 2 * low) if high == math.inf else (low + high) / 2 if low else high / 3

    def refine(self, price: float, steps: int, learning_rate: float) -> None:
        """Take gradient steps on cost + pressure * soft density; the pressure goes up while the loss is within the budget."""
        if not steps:
            return

        def judge(values: Tensor, step: int) -> bool:
            return self.try_(values, f"step {step}") > self.budget

        # The soft density falls less than the density itself: below some 20 times that price nothing moved on SmolLM2.
        pressure = max(20 * price, 100 * self.budget)
        values = descend(self.task, self.vector, self.best, pressure, steps, learning_rate, judge)
        self._draw_back(self.best, values)

    def _draw_back(self, origin: Tensor, reached: Tensor, high: float = math.inf) -> None:
        """Go as far along the line as the budget allows, also beyond what was reached; ``high`` is known to be too far."""
        low, share = 0.0, min(1.0, high / 2)
        for _ in range(_TRIALS):
            values = reached if share == 1 else self.vector.between(origin, reached, share)
            if self.try_(values, f"{share:.0%} of the way") <= self.budget:
                low = share
            else:
                high = share
            share = 1.5 * low if high == math.inf else (low + high) / 2


def _checked(value: Any) -> Tensor:
    """Return what the user's own loss returned, if it can be used."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"
        raise ValueError(f"loss= returned {shown}: a scalar tensor is needed, made of what the model returns.")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            "loss= returned a tensor without a gradient: make it of the model's outputs, without detach(), item() or no_grad()."
        )
    return value.reshape(())


def descend(
    task: Task,
    vector: AlphaVector,
    start: Tensor,
    pressure: float,
    steps: int,
    learning_rate: float,
    judge: Callable[[Tensor, int], bool],
) -> Tensor:
    """Run Adam on the values: cost + pressure * soft density, the pressure moved by what the batches that judge say.

    The loss of one batch is much noisier than a budget is large: nothing could be told from it.

    Args:
        task: the batches.
        vector: whose values are moved.
        start: the first values.
        pressure: the first pressure, nats per unit of density.
        steps: how many, one batch each.
        learning_rate: falls to 0 on a cosine.
        judge: called with values and step every few steps; True where the pressure is to go down.

    Returns:
        The last values, not measured.
    """
    # From the very bottom no step would lead up within this search: the slope of alpha in `a` is almost 0 there.
    values = vector.clamp(start, least=_LEAST)
    optimizer = torch.optim.Adam([values], lr=learning_rate)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
        vector.set_(values)
        cost, density = task.cost_and_density(task.fitted[step % len(task.fitted)])
        slope = vector.slope(cost + pressure * density)
        if not bool(slope.isfinite().all()):
            break
        values.grad = slope
        optimizer.step()
        values.copy_(vector.clamp(values))
        if step % _JUDGED == 0 and step < steps:
            pressure *= 1 / _PUSH if judge(values.clone(), step) else _PUSH
    return values


def mean_density(density: Mapping[str, Tensor]) -> float:
    """Average over all heads of a table of densities by site."""
    return float(torch.cat([values.flatten() for values in density.values()]).nanmean())


def _zeros(density: dict[str, Tensor]) -> float:
    return 1.0 - mean_density(density)
