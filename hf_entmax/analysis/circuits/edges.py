"""Single attention weights as edges: switched off one by one, and how much a result owes to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_entmax.analysis.circuits.tasks import Task
from hf_entmax.batches.prepare import evaluation_mode, only_gradients_of, prepare_batch
from hf_entmax.integration.discovery import AttentionSite
from hf_entmax.integration.observe import AttentionCall, observe_attention

Ablation = Literal["zero", "mean", "corrupted"]
#: Name of an attention module (``NAME#1``, ... for later calls of a module that layers share) -> ``[B, H, T_q, T_k]``.
Gates = dict[str, Tensor]


@dataclass(frozen=True)
class Edge:
    """One attention weight of one prompt, and what the result owes to it.

    Attributes:
        site: ``"encoder_self"``, ``"cross"`` or ``"decoder_self"``.
        layer: from 0.
        head: from 0.
        query: position that reads.
        key: position that is read.
        score: its attribution, in units of the task's metric.
    """

    site: str
    layer: int
    head: int
    query: int
    key: int
    score: float


class Ablated:
    """A model in which edges can be switched off: what takes their place, and what every prompt comes to.

    With a gate ``g_ij`` for every edge, head by head,

        o_i = sum_j [ g_ij p_ij v_j + (1 - g_ij) r_ij ],

    with the weights ``p`` and values ``v`` of the run itself. ``r`` is 0 (``"zero"``), what the edge carries on the prompt's own
    corrupted partner (``"corrupted"``), or the mean of that over all corrupted prompts (``"mean"``; they need one length).

    Args:
        model: any Transformers model whose attention goes through the attention interface, patched or not.
        task: prompts, their corrupted partners and the metric.
        ablation: what takes the place of an edge.

    Attributes:
        present: where there is an edge, bool: the weight is not zero, nor what would take its place. Switching off all
            others changes nothing, to the bit.
        full: the metric with all edges, ``[B]``.
        empty: with none.

    Raises:
        ValueError: for an unknown ``ablation``, or corrupted prompts that are missing or of another shape.
    """

    def __init__(self, model: Any, task: Task, ablation: Ablation = "corrupted") -> None:
        if ablation not in get_args(Ablation):
            raise ValueError(f"ablation={ablation!r} is not known; choose one of {list(get_args(Ablation))}.")
        if ablation != "zero" and task.corrupted is None:
            raise ValueError(
                f"ablation={ablation!r} needs corrupted prompts, and {task.name} has none; 'zero' needs none."
            )
        self.model, self.task, self.ablation = model, task, ablation
        self.sites: dict[str, AttentionSite] = {}
        self._inputs = prepare_batch(model, task.batch).inputs
        self._references: dict[str, tuple[Tensor, Tensor]] = {}
        with evaluation_mode(model), torch.no_grad():
            if ablation != "zero":
                with observe_attention(model, self._keep_reference):
                    model(**prepare_batch(model, task.corrupted or {}).inputs)
            self.present: Gates = {}
            with observe_attention(model, self._keep_present):
                model(**self._inputs)
        self.full = self.measure(self.present)
        self.empty = self.measure({name: torch.zeros_like(mask) for name, mask in self.present.items()})

    @property
    def edges(self) -> float:
        """How many edges a prompt has, mean over prompts."""
        return sum(int(mask.sum()) for mask in self.present.values()) / len(self.full)

    @torch.no_grad()
    def measure(self, gates: Mapping[str, Tensor]) -> Tensor:
        """Return the metric of every prompt, ``[B]``, with these gates, bool or numbers from 0 to 1."""
        with evaluation_mode(self.model):
            return self._run(gates).detach()

    def slopes(self, share: float) -> Gates:
        """Return the derivative of the summed metric in every gate where all are open by this share."""
        gates = {name: (mask * share).requires_grad_() for name, mask in self.present.items()}
        with evaluation_mode(self.model), torch.enable_grad(), only_gradients_of(self.model):
            total = self._run(gates).sum()
            found = torch.autograd.grad(total, list(gates.values()), allow_unused=True)
        slopes = zip(gates.items(), found, strict=True)
        return {name: torch.zeros_like(gate) if slope is None else slope.detach() for (name, gate), slope in slopes}

    def _run(self, gates: Mapping[str, Tensor]) -> Tensor:
        def replace(call: AttentionCall) -> Tensor:
            name = call.name
            gate = gates[name].to(call.weights.dtype)
            out = _mix(gate * call.weights, call.value)
            if name in self._references:
                weights, value = (part.to(call.weights.dtype) for part in self._references[name])
                if self.ablation == "mean":
                    many = torch.stack([_mix((1 - row) * weights, value).mean(0) for row in gate])
                    out = out + many
                else:
                    out = out + _mix((1 - gate) * weights, value)
            return out.transpose(1, 2)

        with observe_attention(self.model, replace=replace):
            return self.task.metric(self.model(**self._inputs))

    def _keep_reference(self, call: AttentionCall) -> None:
        self._references[call.name] = call.weights, call.value

    def _keep_present(self, call: AttentionCall) -> None:
        name, mask = call.name, call.weights > 0
        if name in self._references:
            other = self._references[name][0] > 0
            if other.shape[1:] != mask.shape[1:] or (self.ablation != "mean" and len(other) != len(mask)):
                raise ValueError(
                    f"prompts make weights {tuple(mask.shape)} and corrupted ones {tuple(other.shape)}: give both the same length."
                )
            mask = mask | (other.any(0, keepdim=True) if self.ablation == "mean" else other)
        self.present[name], self.sites[name] = mask, call.site


@dataclass
class EdgeScores:
    """How much the metric owes to every edge of every prompt.

    Attributes:
        ablated: model, task and ablation that the scores are of.
        scores: name of an attention module -> ``[B, H, T_q, T_k]`` float32; 0 where there is no edge.
    """

    ablated: Ablated
    scores: Gates

    @property
    def missed(self) -> float:
        """Largest distance, over prompts, of the summed scores to what they explain: the metric with all edges less that with none.

        It falls with the number of steps.
        """
        summed = torch.stack([score.sum((1, 2, 3)) for score in self.scores.values()]).sum(0)
        return float((summed - (self.ablated.full - self.ablated.empty)).abs().max())

    @property
    def heads(self) -> dict[str, Tensor]:
        """Head edges: the scores of each head summed over queries and keys, mean over prompts, ``[H]`` per module."""
        return {name: score.sum((2, 3)).mean(0) for name, score in self.scores.items()}

    def circuit(self, size: int) -> Gates:
        """Return the edges of each prompt with the ``size`` highest absolute scores, as gates."""
        rows = torch.cat(
            [score.abs().masked_fill(~self.ablated.present[n], -1).flatten(1) for n, score in self.scores.items()], 1
        )
        picked = torch.zeros_like(rows, dtype=torch.bool)
        picked.scatter_(1, rows.topk(min(size, rows.shape[1]), dim=1).indices, True)
        picked &= rows >= 0
        parts = picked.split([score[0].numel() for score in self.scores.values()], 1)
        return {name: part.reshape(score.shape) for (name, score), part in zip(self.scores.items(), parts, strict=True)}

    def head_circuit(self, count: int) -> Gates:
        """Return all edges of the ``count`` heads with the highest absolute scores, the same for all prompts."""
        heads = self.heads
        every = torch.cat([score.abs() for score in heads.values()])
        picked = torch.zeros_like(every, dtype=torch.bool)
        picked[every.topk(min(count, len(every))).indices] = True
        parts = picked.split([len(score) for score in heads.values()])
        return {n: self.ablated.present[n] & part[None, :, None, None] for n, part in zip(heads, parts, strict=True)}

    def edges(self, prompt: int, size: int) -> list[Edge]:
        """List the ``size`` edges of one prompt with the highest absolute scores, strongest first."""
        found = []
        for name, gate in self.circuit(size).items():
            site = self.ablated.sites[name]
            for head, query, key in gate[prompt].nonzero().tolist():
                score = float(self.scores[name][prompt, head, query, key])
                found.append(Edge(site.site, site.layer, head, query, key, score))
        return sorted(found, key=lambda edge: -abs(edge.score))


def attribute(
    model: Any,
    task: Task,
    *,
    ablation: Ablation = "corrupted",
    steps: int = 5,
    progress: Callable[[int], None] | None = None,
) -> EdgeScores:
    r"""Attribute the metric of a task to single attention weights, by integrated gradients on their gates.

        score_e = (1 / S) sum_{s=1..S}  dm / dg_e  at  g = (s - 1/2) / S  on every edge

    All edges are opened together from 0 (ablated) to 1; the scores of a prompt add up to what all edges do together, up to
    the error of the sum (`EdgeScores.missed`). Edges whose weight is zero, and that of what takes their place, have none.

    Args:
        model: any Transformers model whose attention goes through the attention interface, patched or not; it is not changed.
        task: prompts and metric, see `hf_entmax.analysis.circuits.tasks`.
        ablation: what takes the place of an edge that is switched off, see `Ablated`.
        steps: S, at least 1; each is a forward and a backward pass.
        progress: called with the number of steps done.

    Raises:
        ValueError: if an argument is not allowed, or attention of the model cannot be seen.

    Reference:
        Hanna, Pezzelle, Belinkov 2024, Have Faith in Faithfulness (EAP-IG), eq. 3, with the gates of edges as the path;
        Sundararajan, Taly, Yan 2017, Axiomatic Attribution for Deep Networks, eq. 3.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is not allowed: give a whole number of at least 1.")
    ablated = Ablated(model, task, ablation)
    scores = {name: torch.zeros(mask.shape) for name, mask in ablated.present.items()}
    for step in range(steps):
        for name, slope in ablated.slopes((step + 0.5) / steps).items():
            scores[name] += (slope * ablated.present[name]).float().cpu() / steps
        if progress is not None:
            progress(step + 1)
    ablated.present = {name: mask.cpu() for name, mask in ablated.present.items()}
    return EdgeScores(ablated, scores)


def _mix(weights: Tensor, value: Tensor) -> Tensor:
    """Return the output of heads, ``[B, H, T_q, D_v]``; those that share values read the same."""
    return weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
