r"""The oracle: slow, in float64, and written to be checked by eye against the papers.

Nothing here shares code with the fast paths (of `AttentionOptions` it reads the fields, and says itself who sees whom)
and nothing uses autograd: probabilities come from long bisection or from sorting, derivatives from their closed forms.
Tests compare every implementation with these functions, and these with finite differences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_entmax.ops.options import AttentionOptions

# Each halves a bracket no longer than log d: far more than float64 can tell apart.
_BISECTIONS = 80


def entmax(scores: Tensor, alpha: float | Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Find alpha-entmax by bisection.

    .. math:: p_i = [1 + u (z_i - c)]_+^{1/u}, \quad u = \alpha - 1, \quad \max z \le c \le \max z + (1 - d^{-u})/u

    Args:
        scores: ``[..., d, ...]``, any floating dtype.
        alpha: ``>= 1``, a float or a tensor broadcastable to ``scores`` with size 1 along ``dim``.
        dim: the dimension to normalise.
        mask: optional bool, broadcastable to ``scores``; True = may receive mass.

    Returns:
        Probabilities in float64; 0 where every entry is masked. Accurate to about 1e-14 for ``alpha <= 2`` and 1e-11
        at 3.

    Reference:
        Peters, Niculae, Martins (2019), algorithm 1 and eq. 13, with ``tau = u c - 1``.
    """
    centred, alive = _centred(scores, dim, mask)
    u = torch.as_tensor(alpha, dtype=torch.float64, device=scores.device) - 1
    low = torch.zeros_like(centred.amax(dim, keepdim=True)) + 0 * u
    length = max(1, centred.shape[dim])
    high = low + torch.where(u > 0, -torch.expm1(-u * math.log(length)) / torch.where(u > 0, u, 1), math.log(length))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = expq(centred - middle, u).sum(dim, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return _normalised(expq(centred - (low + high) / 2, u), alive, dim)


def expq(y: Tensor, u: float | Tensor) -> Tensor:
    """Return ``[1 + u y]_+ ** (1/u)``, which is ``exp(y)`` at ``u = 0``."""
    u = torch.as_tensor(u, dtype=y.dtype, device=y.device)
    safe = torch.where(u > 0, u, 1)
    power = torch.exp(torch.log1p((safe * y).clamp(min=-1)) / safe)
    return torch.where(u > 0, power, torch.exp(y))


def softmax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return softmax in float64; 0 where every entry is masked."""
    centred, alive = _centred(scores, dim, mask)
    return _normalised(torch.exp(centred), alive, dim)


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return sparsemax in float64 by sorting; 0 where every entry is masked.

    Reference:
        Martins, Astudillo (2016), algorithm 1.
    """
    centred, alive = _centred(scores, dim, mask)
    z = centred.movedim(dim, -1).clamp(min=-2)
    ordered = z.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    partial = ordered.cumsum(-1)
    size = (1 + rank * ordered > partial).sum(-1, keepdim=True)
    tau = (partial.gather(-1, (size - 1).clamp(min=0)) - 1) / size
    return _normalised((z - tau).clamp(min=0).movedim(-1, dim), alive, dim)


def entmax15(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return 1.5-entmax in float64 by sorting; 0 where every entry is masked.

    Reference:
        Peters, Niculae, Martins (2019), algorithm 2.
    """
    centred, alive = _centred(scores, dim, mask)
    z = centred.movedim(dim, -1).clamp(min=-4) / 2
    ordered = z.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    mean = ordered.cumsum(-1) / rank
    spread = torch.stack(
        [(ordered[..., : k + 1] - mean[..., k : k + 1]).square().sum(-1) for k in range(z.shape[-1])], dim=-1
    )
    tau = mean - ((1 - spread) / rank).clamp(min=0).sqrt()
    size = ((spread <= 1) & (tau <= ordered)).sum(-1, keepdim=True)
    tau = tau.gather(-1, (size - 1).clamp(min=0))
    return _normalised((z - tau).clamp(min=0).square().movedim(-1, dim), alive, dim)


def jacobian(probs: Tensor, alpha: float) -> Tensor:
    r"""Return the Jacobian of entmax in the scores, ``[..., d, d]``, from the probabilities ``[..., d]``.

    .. math:: \frac{\partial p}{\partial z} = \mathrm{diag}(s) - \frac{s s^\top}{\sum_j s_j},
        \qquad s_i = p_i^{2 - \alpha} \text{ on the support, else } 0

    Reference:
        Peters, Niculae, Martins (2019), proposition 1.
    """
    s = torch.where(probs > 0, torch.where(probs > 0, probs, 1) ** (2 - alpha), 0)
    total = s.sum(-1)[..., None, None]
    outer = s[..., :, None] * s[..., None, :]
    return torch.diag_embed(s) - outer / torch.where(total > 0, total, 1)


def alpha_derivative(probs: Tensor, alpha: float) -> Tensor:
    r"""Return the derivative of entmax in alpha, ``[..., d]``, from the probabilities ``[..., d]`` in float64.

    With ``l = log p``, ``H = -sum_j p_j l_j``, ``e2(x) = exp(x) - 1 - x`` and ``l2(y) = log(1 + y) - y``:

    .. math::

        E_2 = \sum_j p_j e_2(-u l_j), \qquad x_i = -u l_i - \log(1 + u H + E_2)

        \frac{\partial p_i}{\partial \alpha} = -\frac{p_i}{u^2}
        \left[ e_2(x_i) + u H \operatorname{expm1}(x_i) - E_2 - l_2(u H + E_2) \right]

    and ``(h_i l_i - p_i sum_j h_j l_j) / 2`` with ``h_i = -p_i l_i`` at ``alpha = 1``.

    Reference:
        Correia, Niculae, Martins (2019), proposition 1, rearranged so that nothing cancels as alpha -> 1.
    """
    u = alpha - 1
    logs = torch.where(probs > 0, torch.log(torch.where(probs > 0, probs, 1)), 0)
    entropy = -(probs * logs).sum(-1, keepdim=True)
    if u == 0:
        h = -probs * logs
        return (h * logs - probs * (h * logs).sum(-1, keepdim=True)) / 2
    second = (probs * _e2(-u * logs)).sum(-1, keepdim=True)
    inner = u * entropy + second
    x = -u * logs - torch.log1p(inner)
    return -probs / u**2 * (_e2(x) + u * entropy * torch.expm1(x) - second - _l2(inner))


def _e2(x: Tensor) -> Tensor:
    """Return ``exp(x) - 1 - x``, by its series where that is more accurate."""
    series = sum(x**k / math.factorial(k) for k in range(2, 18))
    return torch.where(x.abs() < 0.5, series, torch.expm1(x) - x)


def _l2(y: Tensor) -> Tensor:
    """Return ``log(1 + y) - y``, by its series where that is more accurate."""
    series = sum((-1) ** (k + 1) * y**k / k for k in range(2, 24))
    return torch.where(y.abs() < 0.1, series, torch.log1p(y) - y)


def allowed_pairs(shape: tuple[int, int, int, int], options: AttentionOptions) -> Tensor:
    """Return which query may attend to which key, bool ``[B, H, T_q, T_k]``, pair by pair."""
    batch, _, queries, keys = shape
    allowed = torch.ones(shape, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            here = i + keys - queries
            if options.is_causal and j > here:
                allowed[:, :, i, j] = False
            if options.sliding_window is not None and j <= here - options.sliding_window:
                allowed[:, :, i, j] = False
    if options.key_padding_mask is not None:
        allowed &= options.key_padding_mask.cpu().reshape(batch, 1, 1, keys)
    for addend in (options.attention_mask, options.position_bias):
        if addend is not None:
            addend = addend.detach().cpu()
            allowed &= addend if addend.dtype == torch.bool else addend > torch.finfo(addend.dtype).min / 2
    return allowed


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    grad_out: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Compute entmax attention and, if ``grad_out`` is given, all its gradients, in float64 on the CPU.

    Args:
        query: ``[B, H, T_q, D]``.
        key: ``[B, H_kv, T_k, D]``.
        value: ``[B, H_kv, T_k, D_v]``.
        alpha: a float or a tensor ``[H]``.
        grad_out: cotangent of the output, ``[B, H, T_q, D_v]``.
        **options: the fields of `AttentionOptions`, without dropout and ``need_weights``.

    Returns:
        A dict with ``out``, ``weights`` and, given ``grad_out``, ``query``, ``key``, ``value``, ``alpha`` (``[H]``) and
        ``scores`` (the gradient of the scores after bias and mask, ``[B, H, T_q, T_k]``: a bias's gradient is its sum
        over the dimensions it was broadcast along).
    """
    asked = AttentionOptions(**options)
    if asked.dropout or asked.need_weights:
        raise ValueError("The oracle knows no dropout, and always returns the weights: leave out both arguments.")
    q, k, v = (tensor.detach().cpu().double() for tensor in (query, key, value))
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    k_full, v_full = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    raw = torch.einsum("bhid,bhjd->bhij", q, k_full) * scale
    softcap = asked.softcap
    scores = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    allowed = allowed_pairs((q.shape[0], heads, q.shape[2], k.shape[2]), asked)
    for addend in (asked.position_bias, asked.attention_mask):
        if addend is not None and addend.dtype != torch.bool:
            scores = scores + addend.detach().cpu().double()
    alphas = torch.as_tensor(alpha, dtype=torch.float64, device="cpu").detach().expand(heads)
    weights = entmax(scores, alphas[:, None, None], -1, allowed)
    result = {"out": torch.einsum("bhij,bhjd->bhid", weights, v_full), "weights": weights}
    if grad_out is None:
        return result
    grad_out = grad_out.detach().cpu().double()
    grad_weights = torch.einsum("bhid,bhjd->bhij", grad_out, v_full)
    grad_scores, grad_alpha = torch.zeros_like(scores), torch.zeros_like(alphas)
    for head, head_alpha in enumerate(alphas.tolist()):
        p, g = weights[:, head], grad_weights[:, head]
        grad_scores[:, head] = torch.einsum("bijk,bik->bij", jacobian(p, head_alpha), g)
        grad_alpha[head] = (alpha_derivative(p, head_alpha) * g).sum()
    grad_raw = grad_scores if softcap is None else grad_scores * (1 - torch.tanh(raw / softcap) ** 2)
    grad_key = torch.einsum("bhij,bhid->bhjd", grad_raw, q) * scale
    grad_value = torch.einsum("bhij,bhid->bhjd", weights, grad_out)
    result["query"] = torch.einsum("bhij,bhjd->bhid", grad_raw, k_full) * scale
    result["key"] = grad_key.unflatten(1, (-1, groups)).sum(2)
    result["value"] = grad_value.unflatten(1, (-1, groups)).sum(2)
    result["alpha"], result["scores"] = grad_alpha, grad_scores
    return result


def _centred(scores: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return float64 scores with maximum 0 and ``-inf`` where masked, and whether each row has an unmasked entry."""
    z = scores.detach()
    masked = z <= torch.finfo(z.dtype).min / 2
    if mask is not None:
        masked = masked | ~mask.to(z.device)
    z = z.double().masked_fill(masked, -math.inf)
    alive = (~masked).any(dim, keepdim=True)
    maximum = torch.where(alive, z.amax(dim, keepdim=True), 0)
    return z - maximum, alive


def _normalised(probs: Tensor, alive: Tensor, dim: int) -> Tensor:
    total = probs.sum(dim, keepdim=True)
    return torch.where(alive, probs / torch.where(alive, total, 1), 0)
