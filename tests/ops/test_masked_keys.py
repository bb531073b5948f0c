"""A key that a query may not see is not read: whatever it holds reaches neither output nor gradient, on any backend."""

import math

import pytest
import torch

from hf_entmax.ops import available_backends, entmax_attention
from hf_entmax.ops import controllable as C
from hf_entmax.ops.options import AttentionOptions

B, H, H_KV, D = 2, 4, 2, 8


def hidden_keys(length):
    hidden = torch.zeros(B, length, dtype=torch.bool)
    hidden[0, 5], hidden[1, :3], hidden[0, 50:] = True, True, True
    return hidden


def masks(length=24):
    hidden = hidden_keys(length)
    there = hidden[:, None, None]
    zeros = torch.zeros(B, 1, 1, length)
    return {
        "padding": {"key_padding_mask": ~hidden},
        "bool mask": {"attention_mask": ~there},
        "bool mask of queries": {"attention_mask": ~there & torch.ones(length, length, dtype=torch.bool).tril()},
        "additive mask": {"attention_mask": zeros.masked_fill(there, torch.finfo(torch.float32).min)},
        "infinite bias": {"position_bias": zeros.masked_fill(there, -math.inf)},
        "padding causal": {"key_padding_mask": ~hidden, "is_causal": True},
        "padding window": {"key_padding_mask": ~hidden, "is_causal": True, "sliding_window": 4},
    }


def tensors(length=24, sharpness=1.0):
    """``sharpness`` 0 gives rows without a zero weight, 8 rows with few weights."""
    query = torch.randn(B, H, length, D) * sharpness
    return [query, torch.randn(B, H_KV, length, D), torch.randn(B, H_KV, length, D)]


def results(attend, inputs):
    """Output and gradients."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    alpha = torch.tensor([1.0, 1.3, 1.5, 2.0], dtype=inputs[0].dtype, requires_grad=True)
    out = attend(*leaves, alpha)
    grad_out = torch.ones_like(out).cumsum(-1).cumsum(-2) / out.shape[-2]
    return [out.detach(), *torch.autograd.grad(out, [*leaves, alpha], grad_out, allow_unused=True)]


def spoilt(inputs, fill):
    """Keys and values whose hidden entries are ``fill``, here and there or throughout."""
    query, key, value = (t.clone() for t in inputs)
    where = hidden_keys(key.shape[2])[:, None, :].expand(key.shape[:3])
    key[where], value[where] = fill, fill
    key[0, 0, 5, 1:], value[0, 0, 5, 1:] = 1.0, 1.0
    return query, key, value


def check(attend, inputs, fill):
    clean = spoilt(inputs, 0.0)
    for got, want in zip(results(attend, spoilt(inputs, fill)), results(attend, clean), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("fill", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize(("backend", "length"), [("torch", 24), ("numba", 24), ("numba", 100)])
def test_a_masked_key_is_not_read(backend, length, mask, sharpness, fill):
    if not available_backends()[backend].startswith("available"):
        pytest.skip(available_backends()[backend])
    options = masks(length)[mask]
    check(lambda *t: entmax_attention(*t, backend=backend, **options)[0], tensors(length, sharpness), fill)
    with torch.no_grad():
        for dropout in (0.0, 0.5):
            inputs = spoilt(tensors(length, sharpness), fill)
            out = entmax_attention(*inputs, 1.5, backend=backend, dropout=dropout, **options)[0]
            assert out.isfinite().all()


@pytest.mark.parametrize("mask", ["padding", "bool mask of queries", "additive mask", "padding window"])
@pytest.mark.parametrize("name", list(C.ATTENTION_MAPPINGS))
def test_nor_by_a_controllable_mapping(name, mask):
    options = AttentionOptions(**masks()[mask])

    def attend(query, key, value, option):
        return C.mapped_attention(
            name, {next(iter(C.ATTENTION_MAPPINGS[name].options)): option / 3}, query, key, value, options, "torch"
        )[0]

    check(attend, tensors(), math.nan)


def test_nor_in_a_compiled_graph_nor_under_vmap():
    padding = ~hidden_keys(24)

    def attend(*inputs):
        return entmax_attention(*inputs, key_padding_mask=padding, is_causal=True, backend="torch")[0]

    check(torch.compile(attend, fullgraph=True, backend="aot_eager"), tensors(), math.nan)
    inputs = spoilt(tensors(), math.nan)
    alpha = torch.full((H,), 1.5)
    batched = torch.func.vmap(attend, in_dims=(0, None, None, None))(inputs[0][None], *inputs[1:], alpha)
    torch.testing.assert_close(batched[0], attend(*inputs, alpha))


@pytest.mark.parametrize(("backend", "length"), [("torch", 24), ("numba", 24), ("numba", 100)])
def test_what_is_seen_is_not_hidden(backend, length):
    """NaN at a key spoils the queries that see it, and at a value those that give it weight, and no others."""
    if not available_backends()[backend].startswith("available"):
        pytest.skip(available_backends()[backend])
    for place in (1, 2):
        inputs = tensors(length)
        inputs[place][0, 1, 10, 3] = math.nan
        out = entmax_attention(*inputs, 1.0, is_causal=True, backend=backend)[0]
        bad = out.isnan().any(-1)
        assert bad[0, 2:, 10:].all() and not bad[0, 2:, :10].any() and not bad[0, :2].any() and not bad[1].any()
