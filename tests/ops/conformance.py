"""What every backend of attention must do: the tests that `test_attention.py` runs for torch and numba, `triton_cases.py` for Triton.

Output, weights and every gradient are compared with the float64 oracle, while every uninitialised buffer is full of NaN. A file
that takes these tests in says by a fixture ``subject`` which backend they are about, and by ``kernel`` which fused one. Tensors are made where a test needs them,
since a file for a GPU sets the default device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import reference
import torch
from tolerances import (
    FORWARD,
    GRADIENT,
    absolute_error,
    assert_forward,
    assert_gradient,
    assert_half,
    measured,
    relative_error,
)
from torch.utils.checkpoint import checkpoint

from hf_entmax.ops import entmax_attention
from hf_entmax.ops.options import AttentionOptions

# Two tiles of 32 along either axis of Triton's kernels, the second of each incomplete; several panels of the CPU kernel's.
Q, K = 34, 41
INF = float("inf")
# 1.125 and 1.25 are seams between forms of the derivative, and between solvers.
ALPHAS = (1.0, 1.000001, 1.0001, 1.01, 1.1, 1.1249, 1.1251, 1.5, 1.9, 2.0)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A backend and what it is tried at.

    Args:
        backend: its name.
        dtype: of query, key and value.
        pools: alphas of the heads, again from the first where there are more heads.
        sharpness: factors of the queries: rows nearly all of whose keys have weight, and rows with a few.
        alphas: tried one by one.
        half: alphas of two heads in half precision.
        weights: whether every case looks at the weights too.
    """

    backend: str
    dtype: torch.dtype = torch.float32
    pools: tuple[tuple[float, ...], ...] = ((1.3, 1.75, 1.0, 2.0),)
    sharpness: tuple[float, ...] = (2.0,)
    alphas: tuple[float, ...] = ALPHAS
    half: tuple[tuple[float, float], ...] = ((1.2, 1.7),)
    weights: bool = True

    def attend(self, *tensors, **options):
        return entmax_attention(*tensors, backend=self.backend, **options)

    def draw(self, pool=None, B=1, H=2, H_kv=None, T_q=Q, T_k=K, D=16, D_v=None, sharpness=None, dtype=None):
        """Query, key and value in a dtype, and alphas; values within one, so that errors of the output are those of weights."""
        dtype, H_kv = dtype or self.dtype, H if H_kv is None else H_kv
        pool = self.pools[0] if pool is None else pool
        query = torch.randn(B, H, T_q, D) * (self.sharpness[-1] if sharpness is None else sharpness)
        key, value = torch.randn(B, H_kv, T_k, D), torch.rand(B, H_kv, T_k, D_v or D) * 2 - 1
        alpha = torch.tensor([pool[h % len(pool)] for h in range(H)], dtype=FLOAT_OF[dtype])
        return [*(t.to(dtype) for t in (query, key, value)), alpha]


FLOAT_OF = {
    torch.float64: torch.float64,
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float32),
}
_torch = functools.partial(entmax_attention, backend="torch")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill every uninitialised tensor with NaN (or a wild index), so that an element nobody wrote is noticed."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if type(tensor) is not torch.Tensor or tensor.device.type == "meta":
                return tensor
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(1 if tensor.dtype == torch.bool else min(torch.iinfo(tensor.dtype).max, 2**29))

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def doubles(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def rounding_of_scores(query, key, value, scaling=None):
    """Return by how much an output moves when each score is rounded once, relative to the terms of the largest sum.

    The rows of the Jacobian, diag(s) - s s' / sum(s) with s = p ** (2 - alpha) <= 1, have an absolute sum of at most 2.
    """
    query, key = (
        query.detach().double().abs(),
        key.detach().double().abs().repeat_interleave(query.shape[1] // key.shape[1], 1),
    )
    largest = float((query @ key.mT).max()) * abs(scaling or query.shape[-1] ** -0.5)
    return 2 * torch.finfo(torch.float32).eps * largest * max(1.0, float(value.abs().max()))


def rounding_of_alpha(value, alpha, grad_out, weights):
    """Return by how much the gradient in alpha moves, head by head, when each weight is wrong by what a logarithm costs it.

    The terms ``p (g - delta) / u**2`` of its sum cancel; below u = 1/8 they come in a form without the division. ``g`` is dL/dp
    and ``delta`` its mean by ``s = p ** (2 - alpha)``.
    """
    wide = value.detach().double().repeat_interleave(weights.shape[1] // value.shape[1], 1)
    g = grad_out.double() @ wide.mT
    u = alpha.detach().double().view(-1, 1, 1) - 1
    slope = torch.where(weights > 0, weights, 0.0) ** (1 - u) * (weights > 0)
    delta = (slope * g).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp(min=1e-300)
    terms = weights * (g - delta).abs() / u.clamp(min=0.125) ** 2
    return 8e-7 * terms.sum((0, 2, 3))


def compare(subject, tensors, **options):
    """Compare output, weights and all gradients with the oracle; return the output.

    Each may be wrong by its tolerance, or by twice what the torch path is wrong by: sharp scores alone cost digits in float32.
    Outputs may be wrong by what one rounding of the largest score changes, too: processors without a fused multiply-add round more.
    A gradient in alpha may be wrong by what rounding of the weights does to terms that cancel.
    """
    alone = {name: t.detach().clone() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    inputs, own = leaves(*tensors), dict(alone)
    for name in ("position_bias", "attention_mask"):
        if own.get(name) is not None and own[name].dtype in FORWARD:
            own[name] = own[name].clone().requires_grad_()
            inputs.append(own[name])
    grad_out = None

    def run(attend):
        out, none = attend(*inputs[:4], **own)
        assert none is None
        results = {"out": out, "gradients": torch.autograd.grad(out, inputs, grad_out.to(out.device))}
        if subject.weights:
            with torch.no_grad():
                results["weights"] = attend(*inputs[:4], **own, need_weights=True)[1]
        return results

    shape = (*tensors[0].shape[:3], tensors[2].shape[-1])
    grad_out = torch.randn(shape).to(tensors[2].dtype)
    found, oracle = run(subject.attend), reference.attention(*tensors, grad_out=grad_out, **alone)
    plain = functools.cache(lambda: run(_torch))
    for name in ("out", "weights") if subject.weights else ("out",):
        if absolute_error(found[name], oracle[name]) > FORWARD[found[name].dtype] and subject.backend != "torch":
            allowed = max(
                2 * absolute_error(plain()[name], oracle[name]),
                rounding_of_scores(*tensors[:3], options.get("scaling")),
            )
            measured.append(absolute_error(found[name], oracle[name]) / allowed)
            assert measured[-1] <= 1
        else:
            assert_forward(found[name], oracle[name])
    visible = reference.allowed_pairs((*shape[:3], tensors[1].shape[2]), AttentionOptions(**alone)).to(grad_out.device)
    assert (found["out"][~visible.any(-1)] == 0).all()
    assert not subject.weights or (found["weights"][~visible] == 0).all()
    exact = [oracle[name] for name in ("query", "key", "value", "alpha")]
    exact += [oracle["scores"].sum_to_size(term.shape) for term in inputs[4:]]
    for place, (gradient, wanted) in enumerate(zip(found["gradients"], exact, strict=True)):
        if wanted.abs().max() < 1e-9:  # 0 in exact arithmetic: it has no scale of its own
            # A term of the scores sums their gradients up; each of them rounds.
            rounding = torch.finfo(torch.float32).eps * float(oracle["scores"].abs().sum()) if place > 3 else 0.0
            assert gradient.abs().max() <= max(1e-5, rounding)
        elif relative_error(gradient, wanted) > GRADIENT[gradient.dtype] and subject.backend != "torch":
            allowed = 2 * absolute_error(plain()["gradients"][place], wanted)
            if place == 3:
                allowed = max(allowed, float(rounding_of_alpha(*tensors[2:], grad_out, oracle["weights"]).max()))
            measured.append(absolute_error(gradient, wanted) / allowed)
            assert measured[-1] <= 1
        else:
            assert_gradient(gradient, wanted)
    return found["out"].detach()


def keys(*lengths, total=K, left=False):
    position = torch.arange(total)
    return torch.stack([position >= total - n if left else position < n for n in lengths])


def holes():
    mask = torch.rand(2, K) > 0.4
    mask[1, 10:35] = False
    return mask


def additive(*shape, dtype=torch.float32):
    mask = torch.randn(shape)
    mask[..., 3:20] = torch.finfo(dtype).min
    mask[..., 25:40:2] = -INF
    return mask.to(dtype)


def empty_row(mask):
    mask[0, 0, 3] = False
    return mask


#: Name -> shape, and options made by a function.
CASES = {
    "plain": ({}, lambda: {}),
    "causal": ({"T_q": K}, lambda: {"is_causal": True}),
    "causal, a prefix of the keys is cached": ({}, lambda: {"is_causal": True}),
    "causal, more queries than keys": ({"T_q": K, "T_k": 20}, lambda: {"is_causal": True}),
    "causal window": ({"T_q": K}, lambda: {"is_causal": True, "sliding_window": 9}),
    "causal window, few queries": ({"T_q": 2, "T_k": 131}, lambda: {"is_causal": True, "sliding_window": 9}),
    "window without causality": ({"T_q": K}, lambda: {"sliding_window": 20}),
    "window of one": ({"T_k": Q}, lambda: {"is_causal": True, "sliding_window": 1}),
    "window, more queries than keys": ({"T_q": K, "T_k": 20}, lambda: {"sliding_window": 7}),
    "softcap": ({"sharpness": 6.0}, lambda: {"softcap": 3.0, "is_causal": True}),
    "large softcap": ({}, lambda: {"softcap": 50.0}),
    "softcap, few queries": ({"T_q": 2, "T_k": 131}, lambda: {"softcap": 1.5, "scaling": 0.7}),
    "scaling": ({}, lambda: {"scaling": 0.7}),
    "scaling 0": ({}, lambda: {"scaling": 0.0}),
    "right padding": ({"B": 3}, lambda: {"key_padding_mask": keys(K, 33, 5)}),
    "left padding": ({"B": 3}, lambda: {"key_padding_mask": keys(K, 33, 5, left=True), "is_causal": True}),
    "padding with holes": ({"B": 2}, lambda: {"key_padding_mask": holes()}),
    "a sequence of padding": ({"B": 2}, lambda: {"key_padding_mask": keys(K, 0), "is_causal": True}),
    "bool mask": ({"B": 2}, lambda: {"attention_mask": empty_row(torch.rand(2, 1, Q, K) > 0.5)}),
    "bool mask per key": ({}, lambda: {"attention_mask": torch.rand(K) > 0.5}),
    "bool mask per query": ({}, lambda: {"attention_mask": torch.rand(Q, 1) > 0.5}),
    "additive mask": ({"B": 2}, lambda: {"attention_mask": additive(2, 1, Q, K)}),
    "additive mask per head": ({}, lambda: {"attention_mask": additive(2, 1, K), "is_causal": True}),
    "half-precision mask": ({}, lambda: {"attention_mask": additive(Q, K, dtype=torch.float16)}),
    "bfloat16 mask, padding": (
        {"B": 2},
        lambda: {"attention_mask": additive(2, 1, Q, K, dtype=torch.bfloat16), "key_padding_mask": keys(K, 33)},
    ),
    "holes, padding, causal": (
        {"B": 2},
        lambda: {
            "attention_mask": empty_row(torch.rand(2, 1, Q, K) > 0.3),
            "key_padding_mask": holes(),
            "is_causal": True,
        },
    ),
    "additive mask, holes": ({"B": 2}, lambda: {"attention_mask": additive(2, 1, Q, K), "key_padding_mask": holes()}),
    "T5": ({"B": 2, "sharpness": 0.5}, lambda: {"position_bias": torch.randn(1, 2, Q, K), "scaling": 1.0}),
    "T5, masked bias": ({"B": 2}, lambda: {"position_bias": torch.randn(1, 2, Q, 1) + additive(2, 1, Q, K)}),
    "bias of every head": ({"B": 2}, lambda: {"position_bias": torch.randn(2, 2, Q, K)}),
    "bias shared by heads": ({"B": 2}, lambda: {"position_bias": torch.randn(2, 1, Q, K), "is_causal": True}),
    "bias of three dimensions": ({"B": 2}, lambda: {"position_bias": torch.randn(2, 1, K)}),
    "bias per key": ({"B": 2}, lambda: {"position_bias": torch.randn(K), "key_padding_mask": keys(K, 33)}),
    "bias per query": ({}, lambda: {"position_bias": torch.randn(1, 2, Q, 1)}),
    "bias of one number": ({}, lambda: {"position_bias": torch.randn(1, 1, 1, 1)}),
    "bias, mask, softcap": (
        {"B": 2, "H": 2, "H_kv": 1},
        lambda: {
            "position_bias": torch.randn(2, Q, K),
            "attention_mask": additive(2, 1, 1, K),
            "softcap": 4.0,
        },
    ),
    "all at once": (
        {"B": 2},
        lambda: {
            "key_padding_mask": keys(K, 33),
            "is_causal": True,
            "sliding_window": 12,
            "softcap": 2.0,
            "scaling": 0.5,
        },
    ),
    "grouped queries": ({"B": 2, "H": 4, "H_kv": 2}, lambda: {"is_causal": True}),
    "one head for all": ({"H": 3, "H_kv": 1}, lambda: {"is_causal": True}),
    "decoding": ({"B": 2, "T_q": 1, "H": 4, "H_kv": 1}, lambda: {"is_causal": True}),
    "few queries, many keys": ({"T_q": 2, "T_k": 131, "H": 4, "H_kv": 2}, lambda: {}),
    "one key": ({"T_q": 3, "T_k": 1}, lambda: {}),
    "one query and one key": ({"T_q": 1, "T_k": 1}, lambda: {"is_causal": True}),
    "head dimension 80": ({"D": 80, "sharpness": 1.0}, lambda: {}),
    "head dimension 1": ({"D": 1}, lambda: {"is_causal": True}),
    "head dimension 256": ({"T_q": 18, "T_k": 20, "D": 256, "sharpness": 1.0}, lambda: {}),
    "wider keys than values": ({"D": 96, "D_v": 24, "H": 1}, lambda: {"is_causal": True}),
    "wider values than keys": ({"D": 20, "D_v": 144, "H": 1}, lambda: {}),
}


@pytest.mark.parametrize("name", CASES)
def test_cases_against_the_oracle(name, subject):
    shape, options = CASES[name]
    given = options()
    for pool, sharpness in itertools.product(subject.pools, subject.sharpness):
        compare(subject, subject.draw(pool, **{"sharpness": sharpness, **shape}), **given)


def test_every_alpha(subject):
    """Flat rows and sharp ones."""
    for alpha in subject.alphas:
        tensors = subject.draw((alpha,), H=1, T_q=24, sharpness=4.0)
        tensors[0][:, :, :8] *= 0.02
        tensors[0][:, :, 8:16] *= 0.25
        compare(subject, tensors)


@pytest.mark.parametrize("alpha", [2.5, 4.0])
def test_alpha_above_two_is_as_good_as_its_thresholds(alpha, subject):
    """The mapping has an infinite slope at its threshold there: a weight moves by ``s = p ** (2 - alpha)`` times what its score does.

    Scores and threshold are numbers about 1 that are rounded a few times; eight times half a unit in the last place, by the sum
    of ``s`` over a row, is what its weights and its output may be off by.
    """
    tensors = subject.draw((alpha,), H=2, T_q=20, sharpness=1.0)
    grad_out = torch.randn(1, 2, 20, 16).to(subject.dtype)
    oracle = reference.attention(*tensors, grad_out=grad_out)
    weights = oracle["weights"]
    slope = torch.where(weights > 0, weights, torch.inf).pow(2 - alpha).sum(-1, keepdim=True)
    bound = torch.finfo(subject.dtype).eps * 4 * slope + (1e-9 if subject.dtype == torch.float64 else 0.0)
    errors = []
    for attend in (subject.attend, _torch):
        inputs = leaves(*tensors)
        for found, name in zip(attend(*inputs, need_weights=True), ("out", "weights"), strict=True):
            assert ((found.double() - oracle[name].to(found.device)).abs() <= bound.to(found.device)).all(), name
        out = attend(*inputs)[0]
        errors.append([])
        for gradient, name in zip(
            torch.autograd.grad(out, inputs, grad_out), ("query", "key", "value", "alpha"), strict=True
        ):
            wanted = oracle[name].to(gradient.device)
            errors[-1].append(float((gradient - wanted).norm() / wanted.norm()))
    slack = 1e-9 if subject.dtype == torch.float64 else 2e-3
    assert all(ours <= 4 * plain + slack for ours, plain in zip(*errors, strict=True)), errors


def test_float_alpha_is_the_tensor_alpha(subject):
    tensors = subject.draw()[:3]
    for alpha in (1.0, 1.37, 1.5, 2.0):
        out = subject.attend(*tensors, alpha, is_causal=True)[0]
        same = torch.full((2,), alpha, dtype=FLOAT_OF[subject.dtype])
        assert_forward(subject.attend(*tensors, same, is_causal=True)[0], out)
        assert_forward(out, reference.attention(*tensors, alpha, is_causal=True)["out"], out.dtype)


def test_alpha_one_is_softmax(subject):
    *tensors, _ = leaves(*subject.draw(T_q=K))
    out = subject.attend(*tensors, torch.ones(2), is_causal=True)[0]
    wide = doubles(*tensors)
    plain = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    assert_forward(out, plain, out.dtype)
    grad_out = torch.randn_like(plain)
    ours = torch.autograd.grad(out, tensors, grad_out.to(out.dtype))
    for found, wanted in zip(ours, torch.autograd.grad(plain, wide, grad_out), strict=True):
        assert_gradient(found, wanted)


def test_weights_and_their_gradient(subject):
    for alpha in ((1.0, 1.4), (1.6, 1.05)):
        tensors = leaves(*subject.draw(alpha, T_q=20))
        out, weights = subject.attend(*tensors, is_causal=True, need_weights=True)
        targets = torch.randn_like(out), torch.randn_like(weights)
        ours = torch.autograd.grad((out, weights), tensors, targets)
        wide = doubles(*tensors)
        theirs = torch.autograd.grad(
            _torch(*wide, is_causal=True, need_weights=True), wide, [t.double() for t in targets]
        )
        for found, wanted in zip(ours, theirs, strict=True):
            assert_gradient(found, wanted)
        # The weights alone: no gradient reaches the output.
        weights, exact = (
            attend(*t, is_causal=True, need_weights=True)[1]
            for attend, t in ((subject.attend, tensors), (_torch, wide))
        )
        (only,) = torch.autograd.grad(weights, tensors[0], targets[1])
        assert_gradient(only, torch.autograd.grad(exact, wide[0], targets[1].double())[0])


def test_dropout_is_the_same_in_the_backward_pass(subject):
    for sharpness in subject.sharpness:
        _check_dropout(subject, sharpness)


def _check_dropout(subject, sharpness):
    inputs = leaves(*subject.draw(B=2, H_kv=1, sharpness=sharpness), torch.randn(1, 2, Q, K).to(subject.dtype))

    def attend(tensors, seed=3, function=subject.attend, dropout=0.3, need_weights=False):
        torch.manual_seed(seed)
        return function(*tensors[:4], position_bias=tensors[4], dropout=dropout, need_weights=need_weights)

    out, weights = attend(inputs, need_weights=True)
    again = attend(inputs)[0]
    assert torch.equal(out, again) and not torch.equal(out, attend(inputs, seed=4)[0])
    # What is dropped depends on place and seed alone: softmax, which is nowhere 0, shows it.
    kept = attend([*inputs[:3], torch.ones(2), inputs[4]], need_weights=True)[1] > 0
    assert 0.67 < kept.double().mean() < 0.73
    wide = doubles(*inputs)
    dropped = attend(wide, function=_torch, dropout=0.0, need_weights=True)[1] * kept / 0.7
    exact = dropped @ wide[2].repeat_interleave(2, 1)
    assert_forward(weights, dropped)
    assert_forward(out, exact)
    grad_out = torch.randn_like(exact)
    ours = torch.autograd.grad(again, inputs, grad_out.to(out.dtype))
    for found, wanted in zip(ours, torch.autograd.grad(exact, wide, grad_out), strict=True):
        assert_gradient(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_at_most_twice_as_wrong_as_torch(dtype, subject):
    for alphas in subject.half:
        _check_half(subject, subject.draw(alphas, T_q=K, T_k=130, D=32, dtype=dtype), dtype)


def _check_half(subject, tensors, dtype):
    results, grad_out = [], torch.randn(1, 2, K, 32).to(dtype)
    for attend in (subject.attend, _softmax if subject.backend == "torch" else _torch):
        inputs = leaves(*tensors)
        out, _ = attend(*inputs, is_causal=True)
        results.append([out, *torch.autograd.grad(out, inputs, grad_out, allow_unused=True)])
    oracle = reference.attention(*tensors, is_causal=True, grad_out=grad_out)
    assert [t.dtype for t in results[0]] == [dtype] * 4 + [torch.float32]
    for found, plain, name in zip(*results, ("out", "query", "key", "value", "alpha"), strict=True):
        if plain is not None:
            assert_half(found.to(dtype), plain.to(dtype), oracle[name])


def _softmax(query, key, value, alpha, is_causal):
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    hidden = ~AttentionOptions(is_causal=is_causal).visible(query.shape[2], key.shape[2], query.device)
    return torch.softmax(scores.masked_fill(hidden, -INF), -1, dtype=torch.float32).to(value.dtype) @ value, None


def test_layouts(subject):
    """Transposed, sliced, expanded and overlapping inputs give what their contiguous copies give."""
    wide = torch.full((2, Q, 2, 48), torch.nan, dtype=subject.dtype)
    wide[..., ::3] = torch.randn(2, Q, 2, 16)
    query = wide[..., ::3].transpose(1, 2)
    key = torch.randn(1, 2, 16, K).to(subject.dtype).transpose(2, 3).expand(2, -1, -1, -1)
    value = (torch.rand(2, K, 1, 16).to(subject.dtype) - 0.5).transpose(1, 2).expand(-1, 2, -1, -1)
    alpha = torch.tensor(1.4, dtype=FLOAT_OF[subject.dtype]).expand(2)
    bias = torch.randn(K, Q).t()[None, None].to(subject.dtype)
    mask = (torch.rand(2, K, Q) > 0.3).transpose(1, 2)[:, None]
    assert not any(t.is_contiguous() for t in (query, key, value, bias, mask))
    expected = compare(subject, [t.contiguous() for t in (query, key, value, alpha)])
    assert_forward(subject.attend(query, key, value, alpha)[0], expected)
    inputs = [t.requires_grad_() for t in (wide, key, value, bias)]
    options = {"position_bias": bias, "attention_mask": mask}
    out = subject.attend(wide[..., ::3].transpose(1, 2), key, value, alpha, **options)[0]
    # The gradient of a sum is one number expanded.
    found = torch.autograd.grad(out.sum(), inputs)
    oracle = reference.attention(query, key, value, alpha, **options, grad_out=torch.ones_like(out))
    exact = [oracle[name] for name in ("query", "key", "value")] + [oracle["scores"].sum((0, 1), keepdim=True)]
    for gradient, wanted in zip((found[0][..., ::3].transpose(1, 2), *found[1:]), exact, strict=True):
        assert_gradient(gradient, wanted)


@pytest.mark.parametrize("empty", ["B", "T_q", "T_k"])
def test_nothing_to_do(empty, subject):
    sizes = {"B": 2, "T_q": 5, "T_k": 6, empty: 0}
    inputs = leaves(*subject.draw(**sizes), torch.randn(1, 2, sizes["T_q"], sizes["T_k"]).to(subject.dtype))
    out, weights = subject.attend(*inputs[:4], position_bias=inputs[4], need_weights=True)
    assert out.shape == (sizes["B"], 2, sizes["T_q"], 16) and (out == 0).all() and (weights == 0).all()
    for leaf, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.shape == leaf.shape and (gradient == 0).all()


def test_nan_is_seen_and_stays_in_its_row(subject):
    inputs = leaves(*subject.draw(B=2))
    clean = subject.attend(*inputs)[0].detach()
    with torch.no_grad():
        inputs[0][0, 1, 7, 3] = torch.nan
    out = subject.attend(*inputs)[0]
    (gradient,) = torch.autograd.grad(out.sum(), inputs[0])
    assert out[0, 1, 7].isnan().all() and out.isnan().sum() == 16
    assert_forward(out[out.isfinite()], clean[out.isfinite()])
    if subject.backend != "torch":  # where plain operations put NaN aside
        assert gradient[0, 1, 7].isnan().all()
        gradient[0, 1, 7] = 0.0
    assert gradient.isfinite().all()
    # A masked key may hold anything; a visible one shows.
    query, key, value, alpha = subject.draw(B=2)
    mask = keys(K, 33)
    clean = subject.attend(query, key, value, alpha, key_padding_mask=mask)[0]
    key[1, :, 36] = torch.nan
    assert torch.equal(subject.attend(query, key, value, alpha, key_padding_mask=mask)[0], clean)
    key[1, :, 20] = torch.nan
    assert subject.attend(query, key, value, alpha, key_padding_mask=mask)[0][1].isnan().all()


@pytest.mark.parametrize("limit", ["padding", "bool mask", "causal bias", "softcap window"])
def test_a_masked_key_is_not_read(limit, subject):
    """NaN in keys and values that a query may not see reaches neither its output nor a gradient."""
    tensors = subject.draw(B=2, H_kv=1, T_q=20, T_k=20)
    hidden = torch.zeros(2, 20, dtype=torch.bool)
    hidden[0, 4], hidden[1, 17:] = True, True
    lowest = torch.zeros(2, 1, 1, 20).masked_fill(hidden[:, None, None], -INF)
    options = {
        "padding": {"key_padding_mask": ~hidden},
        "bool mask": {"attention_mask": ~hidden[:, None, None]},
        "causal bias": {"position_bias": lowest.requires_grad_(), "is_causal": True},
        "softcap window": {"attention_mask": lowest.detach(), "softcap": 3.0, "sliding_window": 9, "is_causal": True},
    }[limit]
    results = []
    for fill in (0.0, torch.nan):
        inputs = leaves(*tensors)
        with torch.no_grad():
            for tensor in inputs[1:3]:
                tensor[hidden[:, None].expand(tensor.shape[:3])] = fill
        inputs += [lowest] if "position_bias" in options else []
        out = subject.attend(*inputs[:4], **options)[0]
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out).cumsum(-1))])
    for clean, spoilt in zip(*results, strict=True):
        torch.testing.assert_close(spoilt, clean, atol=1e-6, rtol=1e-5)


def test_values_are_read_by_those_who_give_them_weight(subject):
    tensors = subject.draw(T_q=20, T_k=20)
    weights = subject.attend(*tensors, is_causal=True, need_weights=True)[1]
    tensors[2][0, :, 7, 1] = float("nan")
    out = subject.attend(*tensors, is_causal=True)[0]
    assert torch.equal(out.isnan().any(-1), weights[..., 7] > 0) and (weights[..., 7] > 0).any()


def test_offsets_of_a_row_do_not_matter(subject):
    tensors = subject.draw()
    bias = torch.randint(-3, 4, (1, 2, Q, K)).to(subject.dtype)
    clean, shifted = (subject.attend(*tensors, position_bias=b, scaling=0.0)[0] for b in (bias, bias + 2.0**20))
    assert torch.equal(clean, shifted)


def test_inputs_are_left_alone(subject):
    tensors = [*subject.draw(), torch.randn(1, 2, Q, K).to(subject.dtype), torch.zeros(1, 1, Q, K).to(subject.dtype)]
    kept = [t.clone() for t in tensors]
    subject.attend(*tensors[:4], position_bias=tensors[4], attention_mask=tensors[5], is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_checkpointing_and_retained_graphs(kernel):
    inputs = leaves(*kernel.draw(), torch.randn(1, 2, Q, K))

    def attend(*tensors):
        return kernel.attend(*tensors[:4], position_bias=tensors[4], dropout=0.1)[0]

    torch.manual_seed(0)
    want = torch.autograd.grad(attend(*inputs).sum(), inputs)
    torch.manual_seed(0)
    out = checkpoint(attend, *inputs, use_reentrant=False)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    for a, b, c in zip(want, first, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)


def test_a_window_beyond_every_length_limits_nothing(subject):
    tensors = subject.draw(T_q=7, T_k=7)
    for causal in (False, True):
        plain = subject.attend(*tensors, is_causal=causal)[0]
        for window in (7, 2**31, 2**63, 2**100):
            assert torch.equal(subject.attend(*tensors, is_causal=causal, sliding_window=window)[0], plain)


def test_dropout_up_to_its_end(subject):
    """Nearly nothing is kept, and nothing turns into NaN; closer to 1 the factor of what is kept has no float32."""
    tensors = subject.draw(T_q=64, T_k=64, D=4)[:3]
    out, weights = subject.attend(*tensors, 1.0, dropout=1 - 2**-24, need_weights=True)
    assert out.isfinite().all() and (weights > 0).sum() < 10
    with pytest.raises(ValueError, match=r"dropout is 0.999999999, but must be in \[0, 1\)"):
        subject.attend(*tensors, 1.5, dropout=1 - 1e-9)


def test_compiled_whole(kernel):
    torch._dynamo.reset()

    def step(query, key, value, alpha, bias):
        options = {"position_bias": bias, "is_causal": True, "need_weights": True}
        out, weights = kernel.attend(query, key, value, alpha, **options)
        return out * 2 + weights.sum(-1, keepdim=True)

    inputs = leaves(*kernel.draw(B=2, H_kv=1), torch.randn(1, 2, Q, K))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected, found = step(*inputs), compiled(*inputs)
    grad_out = torch.randn_like(expected)
    assert_forward(found / 2, expected / 2)
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, grad_out) for out in (found, expected)), strict=True):
        assert_gradient(ours, theirs)
    with torch.no_grad():
        assert_forward(compiled(*inputs) / 2, expected / 2)
