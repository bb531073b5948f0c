r"""Row solvers: the probabilities of alpha-entmax for a matrix of rows, without any gradient.

With ``u = alpha - 1`` and every row centred at its maximum, the distribution is

.. math:: p_i = [1 + u (y_i - c)]_+^{1/u}, \qquad \textstyle\sum_i p_i = 1,

which is ``exp(y_i - c)`` at ``u = 0``. One number per row has to be found, the threshold ``c``. Two solvers share
that work:

* ``0 <= u <= 1``: ``G(c) = (sum_i p_i)^u`` is the ``1/u``-norm of non-negative, convex, decreasing functions of
  ``c``, so it is convex and decreasing itself. Newton's method on ``(G - 1)/u`` from any ``c`` where ``sum_i p_i >=
  1`` (such as the maximum) climbs to the root and never passes it: no bracket is needed. The step is exact where all
  entries of the support are equal, and for every row at ``u = 0``, where ``(G - 1)/u`` is ``log sum_i p_i``, linear
  in ``c``.
* ``u > 1``: ``p_i`` has an infinite slope where an entry enters the support. The support is found by a binary search
  over the sorted row; the root is then sought in the smallest probability ``x`` of the support:
  ``S(x) = sum_i (x^u + u (y_i - y_min))^{1/u}`` is increasing and convex, so Newton's method from ``x = 1/k``
  descends to the root. All terms are positive; nothing cancels, however steep the edge.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from hf_entmax.config import alpha_error

#: Elements per chunk of rows. The working set of a chunk (about three buffers) then stays in the caches of a CPU.
CPU_CHUNK_ELEMENTS = 1 << 17
#: On accelerators chunks only bound the memory; they are large enough to fill the device.
DEVICE_CHUNK_ELEMENTS = 1 << 25
#: Smallest ``u`` the formulas see: a power of two, so that ``log1p(u * y) / u`` returns ``y`` itself where alpha is 1.
SMALLEST_U = 2.0**-100
#: Where a row's Newton loop may look at its progress it stops by itself; this only ends a loop that cannot.
MAX_STEPS = 100
#: Longest rows an exported graph is made for: its loops are unrolled whatever the length will be.
EXPORT_LENGTH = 1 << 20

_LOG2_E = math.log2(math.e)
#: PyTorch 2.6 does not say whether it exports.
_OLD_COMPILER = not hasattr(torch.compiler, "is_exporting")


@dataclasses.dataclass
class RowSolution:
    """The entmax of ``n`` rows of length ``V``: all probabilities, or the ones that are not zero where these are few.

    Attributes:
        maximum: ``m``, ``[n, 1]``, float32 or float64; 0 for impossible rows.
        shift: ``c``, ``[n, 1]``, in float64 where the device has it: the threshold, in the form that stays finite as
            alpha -> 1.
        scale: what ``[1 + u (z_i - m - c)]_+ ^ (1/u)`` is multiplied by to sum to 1, ``[n, 1]``; 0 for impossible rows.
        conjugate: ``max_p p.(z - m) + H(p)`` with the Tsallis entropy ``H`` of the same alpha, ``[n]``, in float64 where
            the device has it.
        probs: probabilities, ``[entries]`` or, where ``rows`` is None, ``[n, V]``; they sum to 1 in each row, or to 0
            in impossible ones.
        rows: int64 ``[entries]``, ascending: the rows of the probabilities that are not zero, or None.
        columns: int64 ``[entries]``: their positions in the row, or None.
        impossible: bool ``[n]``, True for rows without an entry that may receive mass.
    """

    maximum: Tensor
    shift: Tensor
    scale: Tensor
    conjugate: Tensor
    probs: Tensor
    rows: Tensor | None
    columns: Tensor | None
    impossible: Tensor

    def support_sizes(self) -> Tensor:
        """Count the probabilities above 0 of each row, int64 ``[n]``."""
        if self.rows is None:
            return (self.probs > 0).sum(-1)
        return torch.bincount(self.rows, minlength=self.maximum.shape[0])


def masked_below(dtype: torch.dtype) -> float:
    """Return the value at or below which a score of this dtype counts as masked: half of ``finfo(dtype).min``.

    Masks are written as ``-inf`` or ``finfo.min``, often with a bias added on top; half of the range catches both.
    """
    return torch.finfo(dtype).min / 2


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are solved: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of numbers of which there is one a row: float64 where the device has it."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def traced() -> bool:
    """Tell whether ``torch.jit.trace`` records what is computed."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def exporting() -> bool:
    """Tell whether ``torch.export`` is at work."""
    if _OLD_COMPILER:
        return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    return torch.compiler.is_exporting()


def recorded() -> bool:
    """Tell whether operations are recorded for a graph that must stand alone: ``torch.export``, ONNX, ``torch.jit.trace``."""
    return traced() or exporting()


def values_visible(tensor: Tensor) -> bool:
    """Tell whether Python may look at values of this tensor: not while tracing, nor while a CUDA graph is captured."""
    if torch.compiler.is_compiling() or traced() or tensor.device.type == "meta":
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def transformed() -> bool:
    """Tell whether a transform of ``torch.func`` (vmap, grad, jvp) is at work."""
    return _functorch.peek_interpreter_stack() is not None


def checked(u: Tensor) -> Tensor:
    """Refuse ``u < 0`` and infinity where looking is free; elsewhere turn them into NaN, so that they cannot pass unseen."""
    right = (u >= 0) & (u < math.inf)
    if u.device.type != "cpu" or not values_visible(u):
        return torch.where(right, u, torch.full_like(u, math.nan))
    if not bool(right.all()):
        raise alpha_error(float(u.detach()[~right][0]) + 1)
    return u


def expm1(x: Tensor) -> Tensor:
    """Return ``exp(x) - 1`` without cancellation, also where a compiler would write it as just that."""
    if not torch.compiler.is_compiling():
        return torch.expm1(x)
    # Inductor lowers `torch.expm1` to `exp(x) - 1`. Kahan's quotient: the rounding of exp cancels against its logarithm.
    power = torch.exp(x)
    quotient = (power - 1) * (x / torch.log(power))
    return torch.where(power == 1, x, torch.where(x.abs() < 1, quotient, power - 1))


def chunk_rows(rows: int, length: int, device: torch.device) -> int:
    """Return how many rows of ``length`` entries to work on at a time, so that temporaries stay small."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(1, min(rows, elements // max(1, length)))


def any_above_two(u: float | Tensor) -> bool:
    """Tell whether alpha is above 2 for some row, so that probabilities rise like a root at the edge of the support."""
    return bool((u > 1).any()) if isinstance(u, Tensor) else u > 1


def _length_bound(length: int) -> int:
    """Return the row length that fixed numbers of steps must suffice for: in a recorded graph it may be unknown."""
    unknown = traced() or torch.compiler.is_dynamo_compiling() or not isinstance(length, int)
    return EXPORT_LENGTH if recorded() and unknown else length


def newton_steps(length: int, u_max: float, dtype: torch.dtype) -> int:
    """Return a number of Newton steps that suffices for every row, where the loop cannot look at its own progress.

    A step either converges quadratically or removes a cluster of entries from the support; how many clusters can be
    removed one at a time grows with the logarithm of the length, and with ``u``.
    """
    final = 5 if dtype == torch.float32 else 7
    return final + math.ceil(0.75 * min(1.0, u_max) * math.log2(max(2, length)))


def solve_chunk(scores: Tensor, u: float | Tensor, *, visible: bool, above_two: bool) -> Tensor:
    """Solve one chunk of rows in the compute dtype; unless ``visible``, no control flow depends on values."""
    centred, alive = _centre(scores)
    probs, total = solve_centred(centred, u, visible=visible, above_two=above_two)
    # A row without support stays at zero; NaN survives and spoils its whole row, as it should.
    return probs.mul_(torch.where(alive, 1 / total, torch.zeros_like(total)))


def solve_centred(
    centred: Tensor, u: float | Tensor, *, visible: bool = True, above_two: bool = True
) -> tuple[Tensor, Tensor]:
    """Solve rows whose largest entry is 0.

    Args:
        centred: ``[R, d]``, float32 or float64; ``-inf`` where an entry is masked. Consumed.
        u: ``alpha - 1 >= 0``, a float or ``[R, 1]`` of the same dtype.
        visible: whether values may steer the computation.
        above_two: whether a tensor ``u`` may be above 1.

    Returns:
        ``[1 + u (z - c)]_+ ^ (1/u)`` ``[R, d]`` for a ``c`` next to the threshold, and its sum ``[R, 1]``, by which it is
        to be divided.
    """
    if not isinstance(u, Tensor):
        return _solve_above_two(centred, u) if u > 1 else _convex(centred, u, visible=visible)
    if not above_two:
        return _convex(centred, u, visible=visible)
    if not visible:
        if recorded() or not torch.compiler.is_compiling():
            return _either(centred, u)  # plain operations: branches are slow to export
        # Only the branch that is needed runs: sorting every row would cost more than all the rest.
        probs, total = torch.cond((u > 1).any(), _either, _convex_branch, (centred, u))
        return probs.clone(), total
    above = (u > 1).squeeze(-1)
    if not bool(above.any()):
        return _convex(centred, u, visible=True)
    probs, total = torch.empty_like(centred), torch.empty_like(u)
    probs[above], total[above] = _solve_above_two(centred[above], u[above])
    if not bool(above.all()):
        probs[~above], total[~above] = _convex(centred[~above], u[~above], visible=True)
    return probs, total


def shift_of(probs: Tensor, centred: Tensor, u: float | Tensor) -> Tensor:
    """Return the ``c`` of rows that `solve_centred` solved, ``[R, 1]``, from one entry of each: ``c = z_i - (p_i^u - 1) / u``.

    Its error is that of ``p_i^u / u``: least for the largest entry, which is 0, where ``u <= 1``, and for the smallest of the
    support where ``u > 1``. In float64 where the device has it.
    """
    exact = exact_dtype(probs)
    largest = probs.amax(-1, keepdim=True).to(exact)
    u = (u.to(exact) if isinstance(u, Tensor) else torch.tensor(u, dtype=exact, device=probs.device)).clamp(
        min=SMALLEST_U
    )
    shift = -torch.expm1(u * largest.log()) / u
    if any_above_two(u):
        smallest, place = torch.where(probs > 0, probs, math.inf).min(-1, keepdim=True)
        edge = centred.gather(-1, place).to(exact)
        shift = torch.where(u > 1, edge - torch.expm1(u * smallest.to(exact).log()) / u, shift)
    return shift


def conjugate_of(shift: Tensor, total: Tensor, expected: Tensor, u: float | Tensor) -> Tensor:
    """Return ``max_p p.z + H(p)`` of centred rows, from weights ``p`` at ``shift`` that sum to ``total`` and not quite to 1.

    It is the objective at ``p / total``, so that an error of the shift enters squared: ``sum p^(1+u) = S (1 - u c) + u sum p z``
    with ``S`` the ``total`` and ``expected`` the last sum; all ``[n, 1]``, float64 where the device has it.
    """
    u = u.to(shift.dtype).clamp(min=SMALLEST_U) if isinstance(u, Tensor) else max(u, SMALLEST_U)
    mean, shrunk = expected / total, torch.expm1(-u * total.log())
    return mean + ((1 + shrunk) * (shift - mean) - shrunk / u) / (1 + u)


def weights_at(centred: Tensor, shift: Tensor, u: float | Tensor) -> Tensor:
    """Return ``[1 + u (z - c)]_+ ^ (1/u)`` for ``c`` ``[R, 1]`` in the dtype of ``centred`` ``[R, d]``, which is consumed."""
    if not isinstance(u, Tensor) and u == 0:
        return centred.sub_(shift).mul_(_LOG2_E).exp2_()
    u = u.clamp(min=SMALLEST_U) if isinstance(u, Tensor) else u
    return _evaluate(centred.mul_(u), shift * u, u)[0]


def _convex_branch(centred: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    # A branch of `torch.cond` must not overwrite its operands.
    return _convex(centred.clone(), u, visible=False)


def _either(centred: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    probs, total = _convex(centred.clone(), u.clamp(max=1), visible=False)
    other_probs, other_total = _solve_above_two(centred, u.clamp(min=1))
    return torch.where(u > 1, other_probs, probs), torch.where(u > 1, other_total, total)


def _centre(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of the rows in the compute dtype with maximum 0, and which have an unmasked entry, ``[R, 1]``."""
    dtype = compute_dtype(scores.dtype)
    maximum = scores.amax(-1, keepdim=True)
    # Written so that a NaN maximum counts as alive and reaches the output.
    alive = ~(maximum <= masked_below(scores.dtype))
    centred = scores.to(dtype) - torch.where(alive, maximum, torch.zeros_like(maximum)).to(dtype)
    if dtype != scores.dtype:
        # finfo.min of a half type is an ordinary number in float32.
        centred.masked_fill_(scores <= masked_below(scores.dtype), -math.inf)
    return centred, alive


def project_centred(centred: Tensor) -> Tensor:
    """Project rows ``[..., d]`` as `solve_centred` takes them onto the simplex, entmax at ``u = 1``; 0 where all is masked."""
    probs, total = _convex(centred, 1.0, visible=values_visible(centred))
    return probs.mul_(torch.where(total == 0, 0.0, 1 / total))


def _convex(centred: Tensor, u: float | Tensor, *, visible: bool) -> tuple[Tensor, Tensor]:
    """Run Newton's method from the left for ``0 <= u <= 1``; consumes ``centred`` ``[..., d]``.

    Returns ``p`` up to its sum, and the sum.
    """
    if not isinstance(u, Tensor) and u == 0:
        # exp2 is several times faster than exp on CPUs, and indifferent to -inf.
        probs = centred.mul_(_LOG2_E).exp2_()
        return probs, probs.sum(-1, keepdim=True)
    if isinstance(u, Tensor):
        u = u.clamp(min=SMALLEST_U)
    length, dtype = centred.shape[-1], centred.dtype
    scaled = centred.mul_(u)
    # The threshold is rounded at its own size, up to log d; asking for a smaller residual would be asking for noise.
    tolerance = 2 * torch.finfo(dtype).eps * (4 + math.log(length)) if visible else 0.0
    steps = MAX_STEPS if visible else newton_steps(_length_bound(length), 1.0 if isinstance(u, Tensor) else u, dtype)
    threshold = torch.zeros_like(scaled[..., :1])
    for step in range(steps + 1):
        probs, base = _evaluate(scaled, threshold, u)
        total = probs.sum(-1, keepdim=True)
        # Fully masked rows have a total of 0, NaN rows of NaN: neither is waited for.
        if step == steps or (visible and not bool((total > 1 + tolerance).any())):
            return probs, total
        slope = _slope(probs, base, u)
        move = -expm1(-u * torch.log(total)) * total / slope
        threshold = threshold + torch.where(slope > 0, move, torch.zeros_like(move))
    raise AssertionError("unreachable: the last step returns")


def _evaluate(scaled: Tensor, threshold: Tensor, u: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return ``p = [1 + scaled - threshold]_+ ** (1/u)`` and what `_slope` needs."""
    if not isinstance(u, Tensor) and u in (0.5, 1.0):
        base = torch.sub(scaled, threshold - 1).clamp_(min=0)
        return (base.square() if u == 0.5 else base), base
    base = torch.sub(scaled, threshold).clamp_(min=-1)
    return torch.log1p(base).mul_(_LOG2_E / u).exp2_(), base


def _slope(probs: Tensor, base: Tensor, u: float | Tensor) -> Tensor:
    """Return ``sum_i p_i ** (1 - u)`` over the support; consumes its arguments."""
    if not isinstance(u, Tensor) and u in (0.5, 1.0):
        return (base if u == 0.5 else base.sign_()).sum(-1, keepdim=True)
    # p / p^u; where p is 0 the clamp makes the quotient 0 as well.
    return probs.div_(base.add_(1).clamp_(min=torch.finfo(base.dtype).tiny)).sum(-1, keepdim=True)


def _solve_above_two(centred: Tensor, u: float | Tensor) -> tuple[Tensor, Tensor]:
    """Find the support by binary search, then its smallest probability by Newton's method, for ``u >= 1``.

    Returns ``p`` up to its sum, and the sum.
    """
    inverse = 1 / u
    length = centred.shape[-1]
    # Entries below `-1/u` have no mass; a common finite floor for them keeps infinities out of the differences.
    floor = torch.as_tensor(-2 * inverse, dtype=centred.dtype, device=centred.device)
    clipped = torch.maximum(centred, floor)
    ordered = clipped.sort(dim=-1, descending=True).values
    low = torch.zeros((*ordered.shape[:-1], 1), dtype=torch.long, device=centred.device)
    high = torch.full_like(low, length - 1)
    for _ in range(max(1, (_length_bound(length) - 1).bit_length())):
        middle = (low + high + 1) // 2
        edge = ordered.gather(-1, middle)
        inside = (ordered - edge).clamp_(min=0).mul_(u).pow_(inverse).sum(-1, keepdim=True) < 1
        low = torch.where(inside, middle, low)
        high = torch.where(inside, high, torch.maximum(middle - 1, low))
    edge = ordered.gather(-1, low)
    # In logarithms: at alpha = 64 the 63rd power of a probability of 1/4,000 is 0 even in float32's smallest numbers.
    log_gaps = (ordered - edge).clamp_(min=0).mul_(u).log_()
    # Rows keep their length, so entries outside the support are weighted by 0 rather than removed.
    support = (ordered >= edge).to(centred.dtype)
    smallest = 1 / (low + 1).to(centred.dtype)
    for _ in range(12 if centred.dtype == torch.float32 else 16):
        log_smallest = smallest.log()
        log_probs = torch.logaddexp(log_gaps, u * log_smallest).mul_(inverse)
        total = (log_probs.exp() * support).sum(-1, keepdim=True)
        slope = ((log_smallest - log_probs).mul_(u - 1).exp_() * support).sum(-1, keepdim=True)
        move = (total - 1) / slope
        smallest = torch.where(move > 0, (smallest - move).clamp_(min=0), smallest)
    log_gaps = (clipped - edge).clamp_(min=0).mul_(u).log_()
    probs = torch.logaddexp(log_gaps, u * smallest.log()).mul_(inverse).exp_()
    # Not `where(clipped >= edge)`, which would turn NaN into 0.
    probs = probs.masked_fill_(clipped < edge, 0)
    return probs, probs.sum(-1, keepdim=True)
