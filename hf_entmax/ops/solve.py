r"""Row solvers: the probabilities of alpha-entmax for a matrix of rows, without any gradient.

With ``u = alpha - 1`` and every row centred at its maximum, the distribution is

.. math:: p_i = [1 + u (y_i - c)]_+^{1/u}, \qquad \textstyle\sum_i p_i = 1,

which is ``exp(y_i - c)`` at ``u = 0``. One number per row, the threshold ``c``, has to be found. Two solvers share that work:

* ``0 <= u <= 1``: ``G(c) = (sum_i p_i)^u`` is the ``1/u``-norm of non-negative, convex, decreasing functions of ``c`` and so
  is itself convex and decreasing. Newton's method on ``(G - 1)/u`` from ``c = max`` (where ``sum_i p_i >= 1``) therefore climbs
  to the root from the left without ever passing it: no bracket is needed. The step is exact when all entries of the support
  are equal, and exact for every row at ``u = 0``, where ``(G - 1)/u`` is ``log sum_i p_i``, linear in ``c``.
* ``u > 1``: ``p_i`` has an infinite slope where an entry enters the support, and no smooth transformation is convex.
  The support is found by a binary search over the sorted row; the root is then sought in the smallest probability ``x`` of the
  support: ``S(x) = sum_i (x^u + u (y_i - y_min))^{1/u}`` is increasing and convex, so Newton's method from ``x = 1/k``
  descends to the root. All terms are sums of positive numbers; nothing cancels, however steep the edge.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Elements per chunk of rows. The working set of a chunk (about three buffers) then stays in the caches of a CPU.
CPU_CHUNK_ELEMENTS = 1 << 17
#: On accelerators chunks only bound the memory; they are large enough to fill the device.
DEVICE_CHUNK_ELEMENTS = 1 << 25

# A power of two, so that `log1p(u * y) / u` returns `y` exactly where a row's alpha is 1.
_SMALLEST_U = 2.0**-100


def masked_below(dtype: torch.dtype) -> float:
    """Return the value at or below which a score of this dtype counts as masked: half of ``finfo(dtype).min``.

    Masks are written as ``-inf`` or ``finfo.min``, often with a bias added on top; half of the range catches both.
    """
    return torch.finfo(dtype).min / 2


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are solved: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def solve_rows(scores: Tensor, u: float | Tensor) -> Tensor:
    """Map every row of ``scores`` to its entmax probabilities.

    Args:
        scores: ``[R, d]``, any floating dtype, last dimension contiguous. Entries at or below ``finfo.min / 2`` get no mass.
        u: ``alpha - 1 >= 0``, a float or a tensor ``[R, 1]`` in the compute dtype.

    Returns:
        ``[R, d]`` probabilities in the dtype of ``scores``; rows without any unmasked entry are 0, rows that contain NaN or
        ``+inf`` are NaN. Not differentiable.
    """
    rows, length = scores.shape
    if torch.compiler.is_compiling():
        return _solve_chunk(scores, u, traced=True).to(scores.dtype)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    chunk = chunk_rows(rows, length, scores.device)
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        u_chunk = u if isinstance(u, float) else u[start:stop]
        out[start:stop] = _solve_chunk(scores[start:stop], u_chunk, traced=False)
    return out


def chunk_rows(rows: int, length: int, device: torch.device) -> int:
    """Return how many rows of ``length`` entries to work on at a time, so that temporaries stay a fraction of the input."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(1, min(rows, elements // max(1, length)))


def newton_steps(length: int, u_max: float, dtype: torch.dtype) -> int:
    """Return a number of Newton steps that suffices for every row, where the loop cannot look at its own progress.

    Each step either converges quadratically or removes a cluster of entries from the support; the number of clusters that can
    be removed one at a time grows with the logarithm of the row length, and with ``u``.
    """
    final = 4 if dtype == torch.float32 else 5
    if u_max <= 0:
        return 1
    return final + math.ceil(min(1.0, u_max) * math.log2(max(2, length)) * 0.75)


def _solve_chunk(scores: Tensor, u: float | Tensor, *, traced: bool) -> Tensor:
    """Solve one chunk of rows in the compute dtype; ``traced`` forbids control flow that depends on values."""
    dtype = compute_dtype(scores.dtype)
    centred, alive = _centre(scores, dtype)
    if isinstance(u, float):
        probs = _solve_steep(centred, u) if u > 1 else _solve_convex(centred, u, traced=traced)
    elif traced:
        probs = torch.where(
            u > 1, _solve_steep(centred, u.clamp(min=1)), _solve_convex(centred, u.clamp(max=1), traced=True)
        )
    else:
        steep = u.squeeze(-1) > 1
        if not bool(steep.any()):
            probs = _solve_convex(centred, u, traced=False)
        elif bool(steep.all()):
            probs = _solve_steep(centred, u)
        else:
            probs = torch.empty_like(centred)
            probs[steep] = _solve_steep(centred[steep], u[steep])
            probs[~steep] = _solve_convex(centred[~steep], u[~steep], traced=False)
    # A row without support is left at zero; NaN survives the division and spoils its whole row, as it should.
    total = probs.sum(-1, keepdim=True)
    total = torch.where(alive, total, torch.ones_like(total))
    return torch.where(alive, probs, torch.zeros_like(probs)).div_(total) if traced else probs.mul_(alive).div_(total)


def _centre(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Subtract the maximum of every row; also return ``[R, 1]`` flags of the rows that have any unmasked entry."""
    maximum = scores.amax(-1, keepdim=True)
    # Written so that a NaN maximum counts as alive and reaches the output.
    alive = ~(maximum <= masked_below(scores.dtype))
    maximum = torch.where(alive, maximum, torch.zeros_like(maximum)).to(dtype)
    centred = scores.to(dtype) - maximum
    # finfo.min of a half type is an ordinary number in float32.
    if dtype != scores.dtype:
        centred = centred.masked_fill_(scores <= masked_below(scores.dtype), -math.inf)
    return centred, alive


def _solve_convex(centred: Tensor, u: float | Tensor, *, traced: bool) -> Tensor:
    """Newton's method from the left for ``0 <= u <= 1``; consumes ``centred``."""
    if isinstance(u, float):
        if u == 0:
            return torch.softmax(centred, -1)
        scaled = centred.mul_(u)
        inverse = 1 / u
        u_max = u
    else:
        u = u.clamp(min=_SMALLEST_U)
        scaled = centred.mul_(u)
        inverse = 1 / u
        u_max = 1.0
    tolerance = 2e-6 if centred.dtype == torch.float32 else 1e-13
    limit = newton_steps(centred.shape[-1], u_max, centred.dtype) if traced else 100
    threshold = scaled.new_zeros(scaled.shape[:-1] + (1,))
    for _ in range(limit):
        total, slope = _sums(scaled, threshold, u, inverse)
        if isinstance(u, float) and u == 1:
            step = (total - 1) / slope
        else:
            step = -torch.expm1(-u * torch.log(total)) * total / slope
        defined = slope > 0
        threshold = threshold + torch.where(defined, step, torch.zeros_like(step))
        if not traced and not bool(((total - 1 > tolerance) & defined).any()):
            break
    return _powers(scaled, threshold, u, inverse)


def _powers(scaled: Tensor, threshold: Tensor, u: float | Tensor, inverse: float | Tensor) -> Tensor:
    """Return ``[1 + scaled - threshold]_+ ** inverse``."""
    if isinstance(u, float) and u in (0.5, 1.0):
        base = torch.sub(scaled, threshold - 1).clamp_(min=0)
        return base.square_() if u == 0.5 else base
    return torch.sub(scaled, threshold).clamp_(min=-1).log1p_().mul_(inverse).exp_()


def _sums(scaled: Tensor, threshold: Tensor, u: float | Tensor, inverse: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sum_i p_i`` and ``sum_i p_i ** (1 - u)`` at a threshold."""
    if isinstance(u, float) and u in (0.5, 1.0):
        base = torch.sub(scaled, threshold - 1).clamp_(min=0)
        first = base.sum(-1, keepdim=True)
        if u == 0.5:
            return base.square_().sum(-1, keepdim=True), first
        return first, torch.sign(base).sum(-1, keepdim=True)
    base = torch.sub(scaled, threshold).clamp_(min=-1)
    probs = torch.log1p(base).mul_(inverse).exp_()
    total = probs.sum(-1, keepdim=True)
    tiny = torch.finfo(base.dtype).tiny
    return total, probs.div_(base.add_(1).clamp_(min=tiny)).sum(-1, keepdim=True)


def _solve_steep(centred: Tensor, u: float | Tensor) -> Tensor:
    """Binary search for the support, then Newton's method in its smallest probability, for ``u >= 1``."""
    inverse = 1 / u
    length = centred.shape[-1]
    floor = -2 * inverse
    # Entries below `-1/u` have no mass; a common finite floor for them keeps infinities out of the differences.
    clipped = centred.clamp(min=floor) if isinstance(floor, float) else torch.maximum(centred, floor)
    ordered = clipped.sort(dim=-1, descending=True).values
    low = torch.zeros(ordered.shape[:-1] + (1,), dtype=torch.long, device=centred.device)
    high = torch.full_like(low, length - 1)
    for _ in range(max(1, math.ceil(math.log2(max(1, length)))) + 1):
        middle = (low + high + 1) // 2
        edge = ordered.gather(-1, middle)
        total = _power((ordered - edge).clamp_(min=0).mul_(u), inverse).sum(-1, keepdim=True)
        inside = total < 1
        low = torch.where(inside, middle, low)
        high = torch.where(inside, high, torch.maximum(middle - 1, low))
    edge = ordered.gather(-1, low)
    gaps = (ordered - edge).clamp_(min=0).mul_(u)
    support = ordered >= edge
    smallest = 1 / (low + 1).to(centred.dtype)
    exponent = u - 1
    for _ in range(12 if centred.dtype == torch.float32 else 16):
        probs = _power(gaps + smallest**u, inverse)
        ratio = torch.where(support, smallest / probs, torch.zeros_like(probs))
        slope = torch.where(support, ratio**exponent, torch.zeros_like(probs)).sum(-1, keepdim=True)
        total = torch.where(support, probs, torch.zeros_like(probs)).sum(-1, keepdim=True)
        step = (total - 1) / slope
        smallest = torch.where(step > 0, (smallest - step).clamp_(min=0), smallest)
    probs = _power((clipped - edge).mul_(u).add_(smallest**u), inverse)
    return torch.where(clipped < edge, torch.zeros_like(probs), probs)


def _power(base: Tensor, exponent: float | Tensor) -> Tensor:
    """Return ``base ** exponent`` for ``base >= 0`` (0 at 0)."""
    return torch.pow(base, exponent)
