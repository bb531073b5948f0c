"""How much a model needs each head: the loss without it, and the gradient of the loss with respect to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_entmax.analysis.collecting.collect import with_progress
from hf_entmax.batches.prepare import BatchInfo, evaluation_mode, prepare_batch
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.labels import count_labels
from hf_entmax.integration.observe import AttentionCall, observe_attention

if TYPE_CHECKING:
    from accelerate import Accelerator

METHODS = ("masking", "gradient")


def head_importance(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: Literal["masking", "gradient"] = "gradient",
    accelerator: Accelerator | None = None,
    progress: bool = False,
    total: int | None = None,
) -> dict[str, Tensor]:
    r"""Measure the importance of every head for the loss.

    "masking" removes one head at a time and reports by how much the loss rises:
    :math:`I_h = (\mathcal{L}(\xi_h = 0) - \mathcal{L}) / N`. It costs one pass over the data per head.

    "gradient" needs one forward and backward pass: :math:`I_h = \frac{1}{N} \sum_x |\partial \mathcal{L}(x) / \partial \xi_h|`
    with a factor :math:`\xi_h = 1` on the output of the head. Both sum the loss :math:`\mathcal{L}` over the N labels.

    Args:
        model: a Transformers model with a loss, patched or plain.
        batches: dicts with ``labels``; the same for every process.
        method: "masking" or "gradient".
        accelerator: shards the batches over its processes and adds up the results.
        progress: show a progress bar on the main process.
        total: number of batches, for the bar.

    Returns:
        ``{site: float64 [layers, heads]}`` in nats per label; "masking" is negative where the model is better off
        without a head. NaN for heads a layer does not have.

    Raises:
        ValueError: an unknown method, batches without labels, a model without a loss, no data.

    Reference:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", sections 3.2 and 4.1.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed are {', '.join(map(repr, METHODS))}.")
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    # By site, module name and call.
    sums = {(s.site, s.name, 0): torch.zeros(s.num_heads, dtype=torch.float64) for s in attention_sites(model)}
    counted = torch.zeros(1, dtype=torch.float64)
    stream = with_progress(batches, progress and rank == 0, total, f"head importance ({method})")
    add = _add_masking if method == "masking" else _add_gradient
    with evaluation_mode(model):
        for number, batch in enumerate(stream):
            if number % world == rank:
                counted += add(model, *_with_labels(model, batch), sums)
    if accelerator is not None and world > 1:
        from accelerate.utils import gather_object

        # A process without a batch has not met the repeated calls of a shared module.
        everyone = gather_object([(sums, counted)])
        keys = sorted({key for part, _ in everyone for key in part})
        sums = {key: torch.stack([part[key] for part, _ in everyone if key in part]).sum(0) for key in keys}
        counted = torch.stack([count for _, count in everyone]).sum(0)
    if not float(counted):
        raise ValueError("head importance needs at least one label that counts; there was none.")
    result: dict[str, Tensor] = {}
    for site in dict.fromkeys(site for site, _, _ in sums):
        rows = [value / counted for (name, _, _), value in sums.items() if name == site]
        result[site] = pad_sequence(rows, batch_first=True, padding_value=float("nan"))
    return result


def _with_labels(model: Any, batch: Mapping[str, Any]) -> tuple[BatchInfo, dict[str, Any], Tensor]:
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
        raise ValueError("head importance needs 'labels' in every batch: without a loss there is nothing to lose.")
    info = prepare_batch(model, batch)
    labels = batch["labels"].to(next(model.parameters()).device)
    inputs = {key: value for key, value in info.inputs.items() if key != "logits_to_keep"} | {"labels": labels}
    return info, inputs, labels


def _total_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    loss = getattr(model(**inputs), "loss", None)
    if loss is None:
        raise ValueError(f"{type(model).__name__} returns no loss: use one with a head (AutoModelForSeq2SeqLM, ...).")
    return loss * count_labels(model, inputs)


def _add_masking(model: Any, info: BatchInfo, inputs: dict[str, Any], labels: Tensor, sums: dict[Any, Tensor]) -> int:
    target: list[tuple[str, int, int] | None] = [None]
    found: dict[tuple[str, str, int], int] = {}

    def gate(call: AttentionCall) -> Tensor | None:
        site = call.site
        found[(site.site, site.name, call.index)] = site.num_heads
        if target[0] is None or target[0][:2] != (site.name, call.index):
            return None
        factor = torch.ones(1, 1, site.num_heads, 1, device=labels.device)
        factor[:, :, target[0][2]] = 0.0
        return factor

    with torch.no_grad(), observe_attention(model, gate=gate):
        intact = float(_total_loss(model, inputs))
        for key, count in list(found.items()):
            sums.setdefault(key, torch.zeros(count, dtype=torch.float64))
            for head in range(count):
                target[0] = (key[1], key[2], head)
                sums[key][head] += float(_total_loss(model, inputs)) - intact
    return count_labels(model, inputs)


def _add_gradient(model: Any, info: BatchInfo, inputs: dict[str, Any], labels: Tensor, sums: dict[Any, Tensor]) -> int:
    factors: dict[tuple[str, str, int], Tensor] = {}

    def gate(call: AttentionCall) -> Tensor:
        # One factor per sentence, so that gradients of opposite sign do not cancel.
        factor = torch.ones(info.size, 1, call.site.num_heads, 1, device=labels.device, requires_grad=True)
        factors[(call.site.site, call.site.name, call.index)] = factor
        return factor

    with torch.enable_grad(), observe_attention(model, gate=gate):
        loss = _total_loss(model, inputs)
        gradients = torch.autograd.grad(loss, list(factors.values()), allow_unused=True)
    for key, gradient in zip(factors, gradients, strict=True):
        if gradient is not None:
            value = gradient.detach().double().abs().sum(dim=(0, 1, 3)).cpu()
            sums[key] = sums.get(key, torch.zeros_like(value)) + value
    return count_labels(model, inputs)
