"""Losses that keep a model close to a frozen teacher: at its output, and in the attention of each layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_entmax.batches import possible_pairs, prepare_batch
from hf_entmax.integration.discovery import AttentionSite
from hf_entmax.integration.observe import AttentionCall, observe_attention
from hf_entmax.losses import entmax_loss

ATTENTION_LOSSES = ("kl", "mse")


def logit_distillation(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    alpha: float = 1.0,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    r"""Measure how far a student's output is from a softmax teacher's: the Fenchel-Young loss with the teacher as target.

        L = T^2 mean_t [ (p_t - q_t).z_t / T + H(p_t) - H(q_t) ],     q_t = softmax(teacher_t / T),  p_t = entmax(z_t / T)

    with the Tsallis entropy ``H`` of ``alpha``. At ``alpha = 1`` it is ``T^2 KL(q || p)``. For sparse outputs that divergence
    is infinite, this loss is not; it is 0 where ``p = q``, and its gradient is ``T (p - q)`` for every alpha.

    Args:
        student: logits ``[..., V]``, floating point.
        teacher: logits ``[..., V]``; no gradient flows into them.
        labels: ``[...]``, integers; only where they are ``ignore_index`` counts.
        alpha: of the student's output, ``>= 1``.
        temperature: ``T > 0``, flattens both.
        ignore_index: positions with this label are left out.

    Returns:
        Scalar, nats at ``alpha = 1``; 0 where no position is left.

    Raises:
        ValueError: for shapes that do not fit, ``temperature`` not above 0 or ``alpha`` below 1.

    Reference:
        Hinton, Vinyals, Dean 2015, sec. 2; Blondel, Martins, Niculae 2020, sec. 3 (Fenchel-Young losses).
    """
    if student.shape != teacher.shape or student.shape[:-1] != labels.shape:
        raise ValueError(
            f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)} and labels {tuple(labels.shape)} do not fit: "
            "logits [..., V] of the same shape and labels [...] are needed (teacher and student share one vocabulary)."
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} is not allowed: give a number above 0.")
    kept = labels != ignore_index
    own, other = student[kept].float() / temperature, teacher.detach()[kept].float() / temperature
    if not len(own):
        return student.sum() * 0.0
    if alpha == 1.0:  # the same value, without solving for thresholds that are known
        target = torch.log_softmax(other, dim=-1)
        loss = F.kl_div(torch.log_softmax(own, dim=-1), target, log_target=True, reduction="batchmean")
    else:
        loss = entmax_loss(own, torch.softmax(other, dim=-1), alpha)
    return loss * temperature**2


def attention_distillation(student: Tensor, teacher: Tensor, pairs: Tensor, kind: str = "kl") -> Tensor:
    r"""Measure how far the attention of one module is from its softmax teacher's, mean over heads and queries.

        kl:   sum_j p_j (log p_j - log q_j)          mse:   sum_j (p_j - q_j)^2

    The divergence runs from student to teacher: ``p_j = 0`` then costs nothing by itself, while ``KL(q || p)`` would be infinite
    as soon as the student drops a key.

    Args:
        student: weights ``p`` ``[B, H, T_q, T_k]``, floating point, rows that sum to 1.
        teacher: softmax weights ``q`` of the same shape; no gradient flows into them.
        pairs: bool ``[B, T_q, T_k]``, True = a real query may see a real key. Queries without a key do not count.
        kind: ``"kl"`` or ``"mse"``.

    Returns:
        Scalar, nats for ``"kl"``; 0 where no query counts.

    Raises:
        ValueError: for an unknown ``kind`` or shapes that do not fit.
    """
    if kind not in ATTENTION_LOSSES:
        raise ValueError(f"kind={kind!r} is not known; choose one of {list(ATTENTION_LOSSES)}.")
    batch, _, queries, keys = student.shape
    if student.shape != teacher.shape or pairs.shape != (batch, queries, keys):
        raise ValueError(
            f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)} and pairs {tuple(pairs.shape)} do not fit: "
            "[B, H, T_q, T_k] twice and [B, T_q, T_k] are needed."
        )
    p, q = (weights.float().masked_fill(~pairs[:, None], 0.0) for weights in (student, teacher.detach()))
    if kind == "mse":
        terms = (p - q).square()
    else:
        # Where p = 0 the term is 0 and has no gradient; the logarithm there must not be formed, or NaN comes back.
        inside = p > 0
        tiny = torch.finfo(torch.float32).tiny
        terms = torch.where(inside, p * (torch.where(inside, p, 1.0).log() - q.clamp(min=tiny).log()), 0.0)
    count = pairs.any(-1).sum() * student.shape[1]
    return terms.sum() / count.clamp(min=1)


def state_distillation(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Measure how far the states of an encoder are from its teacher's: the fraction of their variance that is not explained.

        D = sum_t |s_t - z_t|^2 / sum_t |z_t - mean_t z_t|^2

    Args:
        student: states ``s`` ``[B, T, d]``, floating point.
        teacher: states ``z`` of the same shape; no gradient flows into them.
        mask: ``[B, T]``, nonzero where a state counts; None counts all.

    Returns:
        Scalar: 0 for equal states, 1 where the student is as far off as the mean of the teacher's states is.

    Raises:
        ValueError: for shapes that do not fit.
    """
    if student.shape != teacher.shape or (mask is not None and mask.shape != student.shape[:-1]):
        raise ValueError(
            f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)} and mask "
            f"{None if mask is None else tuple(mask.shape)} do not fit: states [B, T, d] twice and [B, T] are needed."
        )
    kept = torch.ones_like(student[..., 0], dtype=torch.bool) if mask is None else mask != 0
    own, other = student[kept].float(), teacher.detach()[kept].float()
    spread = (other - other.mean(0)).square().sum()
    return (own - other).square().sum() / spread.clamp(min=torch.finfo(torch.float32).tiny)


@dataclass
class Recorded:
    """The attention of one forward pass.

    Attributes:
        calls: name of the attention module -> its call; of a module shared among layers (ALBERT) ``NAME#1``, ... are the later ones.
    """

    calls: dict[str, AttentionCall]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights ``[B, H, T_q, T_k]`` by the same names, in the autograd graph if there is one."""
        return {name: call.weights for name, call in self.calls.items()}

    @property
    def sites(self) -> dict[str, AttentionSite]:
        """Which attention it is, by the same names."""
        return {name: call.site for name, call in self.calls.items()}


@contextlib.contextmanager
def record_attention(model: PreTrainedModel) -> Iterator[Recorded]:
    """Keep the weights of all attention modules that run inside the block; all layers are held at once.

    Raises:
        ValueError: if some attention of the model cannot be seen.
    """
    record = Recorded({})

    def keep(call: AttentionCall) -> None:
        record.calls[call.name] = call

    with observe_attention(model, keep):
        yield record


def attention_pairs(model: PreTrainedModel, batch: Mapping[str, Any], record: Recorded) -> dict[str, Tensor]:
    """Mark which (query, key) pairs of a recorded pass over ``batch`` are possible: padding and the future are not.

    Returns:
        Name of the module -> bool ``[B, T_q, T_k]``. Modules of one site and shape share one tensor.
    """
    info = prepare_batch(model, batch)
    shared: dict[tuple[str, torch.Size], Tensor] = {}
    for call in record.calls.values():
        site, weights = call.site.site, call.weights
        key = (site, weights.shape[-2:])
        if key not in shared:
            info.learn_padding(call)
            masks = [
                torch.ones(weights.shape[0], size, dtype=torch.bool, device=weights.device) if mask is None else mask
                for (_, mask), size in zip(info.sides(site), weights.shape[-2:], strict=True)
            ]
            shared[key] = possible_pairs(weights, masks[1], masks[0], causal=site == "decoder_self")
    return {name: shared[(call.site.site, call.weights.shape[-2:])] for name, call in record.calls.items()}


def with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Give a batch a mask where only its labels say where a text has been filled up."""
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if (
        batch.get("attention_mask") is None
        and isinstance(labels, Tensor)
        and isinstance(ids, Tensor)
        and labels.shape == ids.shape
    ):
        return {**batch, "attention_mask": (labels != -100).long()}
    return batch


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model has computed itself."""
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ValueError(
            "the model has returned no loss of its own, to which something could be added: give batches with labels, and no "
            "compute_loss_func or label_smoothing_factor to the Trainer."
        )
    return loss


def logits_of(output: Any) -> Tensor:
    """Return the logits of a forward pass."""
    logits = output[1] if isinstance(output, tuple) else output.logits
    if not isinstance(logits, Tensor):
        raise ValueError("distill_logits compares logits, and the model has returned none.")
    return logits


def encoder_states_of(output: Any, batch: Mapping[str, Any]) -> Tensor:
    """Return what the encoder of an encoder-decoder has made of a batch."""
    if batch.get("encoder_outputs") is not None:
        raise ValueError("distill_encoder trains the encoder, and the batch brings encoder_outputs: leave them out.")
    states = getattr(output, "encoder_last_hidden_state", None)
    if not isinstance(states, Tensor):
        raise ValueError(
            f"distill_encoder compares encoder_last_hidden_state, which {type(output).__name__} does not have: it is for "
            "encoder-decoder models with return_dict."
        )
    return states
