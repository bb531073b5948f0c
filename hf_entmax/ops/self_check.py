"""Is a fused kernel right on this machine?

Small cases, forward and backward, are compared with thresholds found by bisection in float64; nothing of that is shared with what is
checked.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_entmax.ops.options import AttentionOptions

#: Processors, as Python names them, that the CPU kernels were tried on.
TRIED = ("x86_64", "AMD64")
#: Largest difference that a right kernel may show, relative to the largest entry: far above what rounding does to rows of a few
#: hundred keys, far below what a wrong kernel does.
ALLOWED = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_PARTS = ("output", "grad query", "grad key", "grad value", "grad alpha")


class Case(NamedTuple):
    """One call of attention. ``shape``: B, H, H_kv, T_q, T_k, D; ``options`` makes those of the call on a device."""

    name: str
    dtype: torch.dtype
    alpha: float | tuple[float, ...]
    shape: tuple[int, int, int, int, int, int]
    options: Callable[[torch.device], AttentionOptions]


class Finding(NamedTuple):
    """How far a part of a case is from bisection, relative to its largest entry, or what the kernel raised."""

    case: str
    part: str
    error: float
    allowed: float
    raised: str = ""

    @property
    def right(self) -> bool:
        """Tell if the part is within what is allowed; NaN is not."""
        return not self.raised and self.error <= self.allowed

    def __str__(self) -> str:
        """Say it in a sentence."""
        if self.raised:
            return f"in the case {self.case!r} it raises {self.raised}"
        return f"in the case {self.case!r} its {self.part} differs by {self.error:.2g} from bisection ({self.allowed:.0e} is allowed)"


def _padding(device: torch.device) -> Tensor:
    mask = torch.ones(2, 80, dtype=torch.bool, device=device)
    mask[1, 60:] = False
    return mask


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


_FULL, _HALVES = (2, 4, 4, 80, 80, 16), (1, 4, 2, 100, 100, 64)
#: What is looked at before a kernel is used for the first time: alphas that take each of the solvers, causal and with padding, as a
#: training step has them, and each dtype.
FIRST_USE = (
    Case("float32, causal", torch.float32, (1.01, 1.3, 1.5, 2.0), _FULL, lambda d: AttentionOptions(is_causal=True)),
    Case("float32, padding", torch.float32, (1.1, 1.7, 1.9, 3.0), _FULL, lambda d: AttentionOptions(key_padding_mask=_padding(d))),
    Case("bfloat16, causal, shared keys", torch.bfloat16, (1.1, 1.4, 1.6, 2.0), _HALVES, lambda d: AttentionOptions(is_causal=True)),
    Case("float16, alpha 1.5", torch.float16, 1.5, _HALVES, lambda d: AttentionOptions()),
)  # fmt: skip
_MIDDLE = (1.2, 1.4, 1.6, 1.8)
#: What ``hf-entmax doctor --check`` looks at beside them.
MORE = (
    Case("float32, sliding window", torch.float32, _MIDDLE, _FULL, lambda d: AttentionOptions(is_causal=True, sliding_window=17)),
    Case("float32, soft cap", torch.float32, _MIDDLE, _FULL, lambda d: AttentionOptions(is_causal=True, softcap=3.0)),
    Case("float32, bias", torch.float32, _MIDDLE, _FULL, lambda d: AttentionOptions(position_bias=_random(d, 1, 4, 80, 80))),
    Case("float32, boolean mask", torch.float32, _MIDDLE, _FULL, lambda d: AttentionOptions(_random(d, 2, 1, 80, 80) > -1)),
    Case("float32, softmax", torch.float32, 1.0, _FULL, lambda d: AttentionOptions(is_causal=True)),
    Case("float32, sparsemax", torch.float32, 2.0, _FULL, lambda d: AttentionOptions(is_causal=True)),
    Case("float32, head dimension 80", torch.float32, 1.3, (1, 2, 2, 40, 70, 80), lambda d: AttentionOptions()),
    Case("float32, one query", torch.float32, _MIDDLE, (2, 4, 2, 1, 300, 64), lambda d: AttentionOptions(is_causal=True)),
    Case("bfloat16, 700 keys", torch.bfloat16, 1.5, (1, 2, 1, 700, 700, 128), lambda d: AttentionOptions(is_causal=True)),
)  # fmt: skip
#: Keys enough for a GPU to split each row over several programs.
_EXACT = Case(
    "exact decoding", torch.float32, _MIDDLE, (2, 4, 2, 1, 1300, 64), lambda d: AttentionOptions(softcap=20.0)
)


def tried_here() -> bool:
    """Tell if the CPU kernels were tried on a processor of this kind."""
    return platform.machine() in TRIED


def fault(kernel: ModuleType, device: torch.device) -> str | None:
    """Say what a package of kernels does wrong in the cases of `FIRST_USE`, or return None."""
    dtypes = getattr(kernel, "DTYPES", tuple(ALLOWED))
    found = findings(kernel, device, [case for case in FIRST_USE if case.dtype in dtypes])
    return next((str(finding) for finding in found if not finding.right), None)


def findings(kernel: ModuleType, device: torch.device, cases: Any = FIRST_USE + MORE) -> Iterator[Finding]:
    """Compare a package of kernels with bisection, case by case, and then its rows of probabilities and its exact decoding.

    Args:
        kernel: has ``attention(query, key, value, alpha, options)``, perhaps ``row_kernel(scores)`` and ``exact_sparse_attention``.
        device: where it is to be tried.
        cases: which; the tensors are drawn from a fixed seed.
    """
    for case in cases:
        # Whoever compiles, traces or transforms the call that led here has no part in this.
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            yield from _look(case, lambda case=case: _attention(kernel, device, case))
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for alpha in (1.3, 1.5, 2.0):
            rows = Case(
                f"rows of probabilities, alpha {alpha}", torch.float32, alpha, _FULL, lambda d: AttentionOptions()
            )
            yield from _look(rows, lambda alpha=alpha: _rows(kernel, device, alpha))
        yield from _look(_EXACT, lambda: _exact(kernel, device))


def _look(case: Case, compare: Callable[[], Iterator[tuple[str, float]]]) -> Iterator[Finding]:
    allowed = ALLOWED[case.dtype]
    try:
        for part, error in compare():
            yield Finding(case.name, part, error, allowed)
    except Exception as error:
        yield Finding(case.name, "", float("nan"), allowed, f"{type(error).__name__}: {error}")


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def _inputs(case: Case, device: torch.device) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, dim = case.shape
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim))
    return [
        (2 * torch.randn(shape, generator=generator) * (16 / dim) ** 0.25).to(device, case.dtype) for shape in shapes
    ]


def _attention(kernel: ModuleType, device: torch.device, case: Case) -> Iterator[tuple[str, float]]:
    inputs, options, results = _inputs(case, device), case.options(device), []
    for attention, dtype in ((kernel.attention, case.dtype), (_by_bisection, torch.float64)):
        own = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
        alpha = case.alpha
        if not isinstance(alpha, float):
            alpha = torch.tensor(alpha, device=device, requires_grad=True)
        learned = own if isinstance(alpha, float) else [*own, alpha]
        out, _ = attention(own[0], own[1], own[2], alpha, options)
        results.append([out.detach(), *torch.autograd.grad(out.double().square().sum(), learned)])
    for part, found, wanted in zip(_PARTS, *results, strict=False):
        yield part, _difference(found, wanted)


def _rows(kernel: ModuleType, device: torch.device, alpha: float) -> Iterator[tuple[str, float]]:
    scores = 3 * torch.randn((5, 1500), generator=torch.Generator().manual_seed(2)).to(device)
    rows = getattr(kernel, "row_kernel", lambda scores: None)(scores)
    if rows is None:
        return
    out = torch.empty_like(scores)
    rows.solve_rows(scores, alpha - 1.0, out=out)
    yield "probabilities", _difference(out, _bisected(scores.double(), torch.tensor(alpha - 1.0).double()))


def _exact(kernel: ModuleType, device: torch.device) -> Iterator[tuple[str, float]]:
    """Few keys have weight, so that most are left out on the word of the bounds."""
    from hf_entmax.ops.exact.sketch import sketch_keys

    if (attend := getattr(kernel, "exact_sparse_attention", None)) is None:
        return
    query, key, value = _inputs(_EXACT, device)
    alpha, options = torch.tensor(_EXACT.alpha, device=device), _EXACT.options(device)
    out, _ = attend(query, sketch_keys(key), key, value, alpha, options)
    yield "output", _difference(out, _by_bisection(query.double(), key.double(), value.double(), alpha, options)[0])


def _by_bisection(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> tuple[Tensor, None]:
    """Attend with entmax as its definition says it, in the dtype of the query."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * options.scale(query.shape[-1])
    if options.softcap:
        scores = options.softcap * (scores / options.softcap).tanh()
    if options.position_bias is not None:
        scores = scores + options.position_bias
    scores = scores.masked_fill(~options.visible_pairs(query, key), -1e4)
    u = (torch.as_tensor(alpha, device=query.device).double() - 1).clamp(min=1e-9).expand(query.shape[1])
    return _bisected(scores, u[:, None, None]) @ value, None


def _bisected(scores: Tensor, u: Tensor) -> Tensor:
    """Solve ``sum_i [1 + u (z_i - tau)]_+ ** (1/u) = 1`` for ``tau`` in float64, and return the terms."""

    def weights(shift: Tensor) -> Tensor:
        base = u * (scores - shift)
        return torch.where(base > -1, base.clamp(min=-1 + 1e-15).log1p() / u, -math.inf).exp()

    with torch.no_grad():
        low = scores.amax(-1, keepdim=True)
        high = low + math.log(scores.shape[-1])
        for _ in range(60):
            middle = (low + high) / 2
            above = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        p = weights(low)
        slope = p.where(p > 0, math.inf).pow(1 - u).where(p > 0, 0).sum(-1, keepdim=True)
    # One step of Newton's method, which autograd sees: its derivative is that of the solution.
    return weights(low + (weights(low).sum(-1, keepdim=True) - 1) / slope)
