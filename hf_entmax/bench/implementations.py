"""What is compared: attention implementations as functions of the same inputs, and training steps of whole models."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_entmax.bench.cases import Case, ModelCase
from hf_entmax.ops import entmax_attention, exact_sparse_attention, sketch_keys
from hf_entmax.ops.backends import Backend, available_backends

#: Largest allowed difference from the float64 output, relative to the largest entry, before anything is timed.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass
class Problem:
    """The tensors of one case: drawn by `make_problem`, or one's own."""

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor
    real_keys: Tensor | None
    case: Case

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors with gradients."""
        return self.query, self.key, self.value, self.alpha


def make_problem(case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Draw a problem: Gaussian queries (times the sharpness), keys and values, alphas uniform in their range."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, factor: float = 1.0) -> Tensor:
        tensor = factor * torch.randn(case.batch, heads, length, case.head_dim, generator=generator)
        return tensor.to(device, dtype).requires_grad_()

    kv_heads = case.kv_heads or case.heads
    query = draw(case.heads, case.queries or case.length, case.sharpness)
    key, value = draw(kv_heads, case.length), draw(kv_heads, case.length)
    low, high = case.alpha if isinstance(case.alpha, tuple) else (case.alpha, case.alpha)
    alpha = (low + (high - low) * torch.rand(case.heads, generator=generator)).to(device).requires_grad_()
    real_keys = None
    if case.padded:
        lengths = torch.randint(case.length // 4, case.length + 1, (case.batch, 1), generator=generator)
        real_keys = (torch.arange(case.length) < lengths).to(device)
    return Problem(query, key, value, alpha, real_keys, case)


def _additive_mask(problem: Problem) -> Tensor | None:
    if problem.real_keys is None:
        return None
    forbidden = ~problem.real_keys[:, None, None, :]
    dtype = problem.query.dtype
    return torch.zeros_like(forbidden, dtype=dtype).masked_fill(forbidden, torch.finfo(dtype).min)


def _dense(problem: Problem, mapping: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """Compute scores, a mapping of them, output: the way everybody writes it down."""
    case, mask = problem.case, _additive_mask(problem)
    groups = case.heads // (case.kv_heads or case.heads)
    queries = problem.query.shape[2]
    if case.causal:
        least = torch.full((queries, case.length), torch.finfo(problem.query.dtype).min, dtype=problem.query.dtype)
        limit = least.to(problem.query.device).triu(1 + case.length - queries)
        mask = limit if mask is None else mask + limit

    def attend() -> Tensor:
        key = problem.key.repeat_interleave(groups, 1) if groups > 1 else problem.key
        value = problem.value.repeat_interleave(groups, 1) if groups > 1 else problem.value
        scores = problem.query @ key.transpose(-1, -2) / math.sqrt(case.head_dim)
        if mask is not None:
            scores = scores + mask
        return mapping(scores).to(value.dtype) @ value

    return attend


def _sdpa(problem: Problem) -> Callable[[], Tensor]:
    mask, case = _additive_mask(problem), problem.case
    gqa: dict[str, Any] = {"enable_gqa": True} if case.kv_heads not in (None, case.heads) else {}
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        problem.query, problem.key, problem.value, attn_mask=mask, is_causal=case.causal, **gqa
    )


def _entmax_bisect(problem: Problem) -> Callable[[], Tensor]:
    from entmax import entmax_bisect

    shape = (problem.case.batch, problem.case.heads, problem.query.shape[2], 1)
    bisect: Any = entmax_bisect
    return _dense(problem, lambda scores: bisect(scores, problem.alpha.view(1, -1, 1, 1).expand(shape)))


def _entmax15(problem: Problem) -> Callable[[], Tensor]:
    from entmax import entmax15

    return _dense(problem, lambda scores: entmax15(scores, dim=-1))


def _hf_attention_normalizers(problem: Problem) -> Callable[[], Tensor]:
    from hf_attention_normalizers.backends import scaled_dot_product_attention
    from hf_attention_normalizers.vutils.entmax import entmax15

    mask = _additive_mask(problem)
    return lambda: scaled_dot_product_attention(
        problem.query, problem.key, problem.value, entmax15, attn_mask=mask, is_causal=problem.case.causal
    )


def _adasplash(problem: Problem) -> Callable[[], Tensor]:
    from adasplash import adasplash  # pyright: ignore[reportMissingImports]

    return lambda: adasplash(problem.query, problem.key, problem.value, alpha=1.5, is_causal=problem.case.causal)


def _ours(backend: Backend) -> Callable[[Problem], Callable[[], Tensor]]:
    def make(problem: Problem) -> Callable[[], Tensor]:
        options = {"key_padding_mask": problem.real_keys, "is_causal": problem.case.causal, "backend": backend}
        return lambda: entmax_attention(*problem.tensors(), **options)[0]

    return make


def exact_counts(problem: Problem) -> Callable[[], tuple[Tensor, Any]]:
    """Make a call that returns output and counts of exact sparse attention; the keys are sketched once, as in a cache."""
    query, key, value, alpha = (t.detach() for t in problem.tensors())
    sketch = sketch_keys(key, problem.case.bits or 4)
    options = {"key_padding_mask": problem.real_keys, "is_causal": problem.case.causal}
    return lambda: exact_sparse_attention(query, sketch, key, value, alpha, **options)


def _exact(problem: Problem) -> Callable[[], Tensor]:
    attend = exact_counts(problem)
    return lambda: attend()[0]


#: Every implementation by name: how to make it, and whether its mapping is ours, entmax at 1.5 whatever alpha, or softmax.
IMPLEMENTATIONS: dict[str, tuple[Callable[[Problem], Callable[[], Tensor]], str]] = {
    "eager_softmax": (lambda problem: _dense(problem, lambda scores: torch.softmax(scores, -1)), "softmax"),
    "sdpa": (_sdpa, "softmax"),
    "entmax_bisect": (_entmax_bisect, "entmax"),
    "entmax15": (_entmax15, "entmax15"),
    "hf_attention_normalizers": (_hf_attention_normalizers, "entmax15"),
    "adasplash": (_adasplash, "entmax15"),
    "ours_torch": (_ours("torch"), "entmax"),
    "ours_numba": (_ours("numba"), "entmax"),
    "ours_triton": (_ours("triton"), "entmax"),
    "ours_exact": (_exact, "entmax"),
}


def unavailable(name: str, device: str) -> str | None:
    """Say why an implementation cannot run here, or return None."""
    package = {"entmax_bisect": "entmax", "entmax15": "entmax"}.get(name, name)
    if name.startswith("ours_") and name != "ours_exact":
        backend = name.removeprefix("ours_")
        if backend != "torch" and (backend == "triton") != (device == "cuda"):
            return f"the {backend} backend does not run on {device}"
        state = available_backends()[backend]
        return None if state.startswith("available") else state
    if name == "adasplash" and device != "cuda":
        return "adasplash runs on CUDA only"
    if name not in ("eager_softmax", "sdpa", "ours_exact") and importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install 'hf_entmax[benchmark]')"
    return None


def checked(name: str, problem: Problem) -> Callable[[], Tensor]:
    """Return the implementation for a problem, after its output was compared with float64.

    Raises:
        RuntimeError: if the output is wrong.
    """
    make, kind = IMPLEMENTATIONS[name]
    function = make(problem)
    with torch.no_grad():
        out, exact = function().double(), _reference(problem, kind)
    error = ((out - exact).abs().max() / exact.abs().max()).item()
    if not error <= _TOLERANCE[problem.query.dtype]:
        raise RuntimeError(f"{name} is wrong in case {problem.case.name!r}: it is off by {error:.1e} (relative).")
    return function


def forward(function: Callable[[], Tensor], problem: Problem) -> Callable[[], object]:
    """Return a call of the forward pass alone."""
    return torch.no_grad()(function)


def backward(function: Callable[[], Tensor], problem: Problem) -> Callable[[], object]:
    """Return a call of the forward and the backward pass, with gradients of everything that the problem learns."""
    with torch.no_grad():
        cotangent = torch.randn_like(function())

    def call() -> None:
        for tensor in problem.tensors():
            tensor.grad = None
        function().backward(cotangent)

    return call


def _reference(problem: Problem, kind: str) -> Tensor:
    query, key, value = (t.detach().double() for t in (problem.query, problem.key, problem.value))
    alpha = {"softmax": 1.0, "entmax15": 1.5}.get(kind, problem.alpha.detach().double())
    return entmax_attention(
        query, key, value, alpha, key_padding_mask=problem.real_keys, is_causal=problem.case.causal, backend="torch"
    )[0]


def training_steps(case: ModelCase, device: str, seed: int = 0) -> tuple[dict[str, Callable[[], object]], int]:
    """Make one training step of the same model with SDPA softmax and with entmax, by implementation name.

    Beside them stand the real (unpadded) source and target tokens of one step.
    """
    import hf_entmax

    torch.manual_seed(seed)
    plain = _bart(case) if case.kind == "bart" else _llama(case)
    patched = hf_entmax.patch_model(copy.deepcopy(plain))
    low, high = case.lengths
    source, target = torch.randint(low, high + 1, (2, case.batch))
    source[0] = target[0] = high
    tokens = torch.randint(4, case.vocabulary, (2, case.batch, high))
    position = torch.arange(high)
    mask = (position < source[:, None]).long()
    inputs = tokens[0] * mask + plain.config.pad_token_id * (1 - mask)
    if case.kind == "bart":
        labels = tokens[1].masked_fill(position >= target[:, None], -100)
    else:
        labels, target = inputs.masked_fill(mask == 0, -100), 0 * target
    batch = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
    batch = {name: tensor.to(device) for name, tensor in batch.items()}

    def make_step(model: torch.nn.Module) -> Callable[[], object]:
        model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=case.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()

        return step

    steps = {"sdpa": make_step(plain), "ours": make_step(patched)}
    return steps, int(source.sum() + target.sum())


def _bart(case: ModelCase) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    make_config: Any = BartConfig
    sizes = {"layers": case.layers, "attention_heads": case.heads, "ffn_dim": 4 * case.width}
    config = make_config(
        attn_implementation="sdpa",
        vocab_size=case.vocabulary,
        d_model=case.width,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()},
        max_position_embeddings=max(1024, case.lengths[1]),
    )
    return BartForConditionalGeneration(config)


def _llama(case: ModelCase) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    make_config: Any = LlamaConfig
    config = make_config(
        attn_implementation="sdpa",
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=8 * case.width // 3,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads // 3 or 1,
        max_position_embeddings=max(1024, case.lengths[1]),
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
