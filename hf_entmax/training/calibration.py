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
from transformers import PreTrainedModel

from hf_entmax.batches.prepare import evaluation_mode, only_gradients_of
from hf_entmax.integration.config_hook import CALIBRATION_KEY
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.head_numbers import alphas
from hf_entmax.integration.softmax_blocks import runs_softmax
from hf_entmax.training.alpha_vector import AlphaVector
from hf_entmax.training.search import Search, Task
from hf_entmax.training.sensitivity import Loss


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
        """Return plain types only: what is saved with the model, as ``model.config.entmax_calibration``."""
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
    steps: int = 0,
    learning_rate: float = 0.1,
    progress: Callable[[str], None] | None = print,
) -> Calibration:
    r"""Set the learned alphas of a patched model as high as a budget on the loss allows; no weight is trained.

        min_a  mean_h density_h(a)      subject to      loss(a) - loss(softmax) <= max_loss_increase

    1. One forward and backward pass per batch near softmax estimates what each head alone would cost and gain at each of a
       few alphas (`hf_entmax.training.sensitivity`). The alphas with the fewest nonzero weights at a given sum of estimated
       costs are chosen, and that sum is moved until the measured loss just fits.
    2. The same alpha for all heads, as high as the measured loss allows.
    3. From the sparser of the two, gradient steps on all alphas together let heads trade zeros among them: how far the
       predictions on one batch are from those with softmax, and some pressure on its `soft_density`, each. The pressure goes up
       while the measured loss is within the budget, else down. Where the model's output is no choice among classes (or
       ``loss`` is given), that loss is in the place of the distance.
    4. What step 3 found is drawn back to the best so far, or driven beyond, until the loss is measured to be just within the
       budget.

    At the same scores entmax is sharper than softmax, and that costs more than the zeros themselves. A model that is patched
    with ``length_scaling="constant"`` has a temperature for each head: its scores are multiplied by ``1 / (1 + r (alpha - 1))``
    with the ``r`` that costs a head least in step 1 and 3 in step 2, and step 3 moves the temperatures as well.

    Alphas fit a small text: every fourth batch is left out of steps 1 and 3, and the loss of these batches decides; at the end
    all batches together must be within the budget as well. Give at least eight, better thirty, from all over the kind
    of text that the model is for. The result is also kept in ``model.config.entmax_calibration`` and saved with the model.

    Args:
        model: patched with learned alphas, the weights of which are those of the softmax model: causal, masked,
            encoder-decoder, or any other whose output has a loss. With ``length_scaling="constant"`` temperatures are set too.
        batches: dicts of tensors as a data collator returns them, with labels; at least two, so that one can be left out
            (a single one serves both ends). They are held in memory; the attention weights of one batch are held for all
            layers at once, and their gradients.
        max_loss_increase: at least 0, nats per token over the same model with softmax attention. 0.01 is 1 % of perplexity.
        loss: ``loss(model, batch) -> scalar`` in the place of the model's own, e.g. for an encoder without a head; its
            mean over the batches, weighted by their rows, is then what the budget is on.
        steps: of 3., at least 0; without them mostly one alpha for all heads is found. 60 are many.
        learning_rate: of Adam in 3., above 0; it falls to 0 on a cosine.
        progress: called with a line of text for every measurement; None for silence.

    Returns:
        The losses measured, and alpha and density of every head.

    Raises:
        TypeError: if ``model`` is not a ``PreTrainedModel`` or a batch is no mapping.
        ValueError: if an argument is out of range, the model has no learned alphas, there is nothing to predict in the
            batches or a token is not in the vocabulary, the loss is not finite with softmax, or not even the lowest alphas
            meet the budget. The model is then as it was.
        KeyboardInterrupt: if it is interrupted; the model then has the best alphas found until then, if there are any.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"calibrate_alphas needs a transformers.PreTrainedModel, not {type(model).__name__}. Give it the model inside."
        )
    _check_arguments(max_loss_increase, steps, learning_rate)
    if any(runs_softmax(site.module) for site in attention_sites(model)):
        raise ValueError(
            "calibrate_alphas would only see softmax inside softmax_attention(model): call it outside the block."
        )
    vector = AlphaVector(model)
    task = Task(model, batches, loss, vector)
    say = progress or (lambda line: None)
    start, search = vector.values(), None
    kept = start
    with evaluated_alone(model, vector):
        try:
            before = task.measure_softmax()
            say(f"with softmax attention: {before:.4f} nats per token")
            search = Search(task, vector, float(max_loss_increase), say)
            price = search.choose()
            search.climb()
            search.refine(price, steps, learning_rate)
            search.confirm()
            kept = search.best
            vector.set_(kept)
            budget = float(max_loss_increase)
            found = Calibration(before, search.loss, budget, alphas(model), search.density, task.tokens)
        except KeyboardInterrupt:
            if search is not None and search.fits:
                kept = search.best
                say(f"interrupted: the best so far is kept, {search.zeros:.1%} zeros")
            raise
        finally:
            vector.set_(kept)
    setattr(model.config, CALIBRATION_KEY, found.to_dict())
    return found


def _check_arguments(budget: float, steps: int, learning_rate: float) -> None:
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0.0 <= budget < math.inf:
        raise ValueError(f"max_loss_increase={budget!r} is not allowed: give nats per token, a number of at least 0.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps={steps!r} is not allowed: give a whole number of at least 0.")
    if not isinstance(learning_rate, (int, float)) or not 0.0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate={learning_rate!r} is not allowed: give a number above 0.")


@contextlib.contextmanager
def evaluated_alone(model: PreTrainedModel, vector: AlphaVector) -> Iterator[None]:
    """Switch to evaluation mode and gradients for the alphas alone; afterwards everything is as it was."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("alphas are searched by gradients, which torch.inference_mode() forbids: call it outside.")
    with evaluation_mode(model), torch.enable_grad(), only_gradients_of(model, vector.parameters):
        yield
