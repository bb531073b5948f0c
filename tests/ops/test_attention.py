"""The dense path and the CPU kernel pass the tests of every backend (`conformance`); the checks of `entmax_attention`."""

import dataclasses
import itertools
import math

import pytest
import reference
import torch
from conformance import *  # noqa: F403  the tests themselves, and what they need
from conformance import ALPHAS, Subject, test_every_alpha

from hf_entmax.ops import available_backends, dense, entmax_attention
from hf_entmax.ops.attention import attend
from hf_entmax.ops.options import AttentionOptions, append_sink

F64 = torch.float64
B, H, H_KV, T_Q, T_K, D, D_V = 2, 4, 2, 5, 7, 8, 6


def tensors(dtype=F64, *, kv_heads=H_KV, queries=T_Q, keys=T_K):
    shapes = {"query": (B, H, queries, D), "key": (B, kv_heads, keys, D), "value": (B, kv_heads, keys, D_V)}
    return {name: torch.randn(shape, dtype=F64).mul(1.5).to(dtype).requires_grad_() for name, shape in shapes.items()}


SUBJECTS = {
    "torch": Subject(
        "torch", F64, ((1.0, 1.3), (1.5, 3.0)), (1.5,), half=((1.0, 1.0),)
    ),  # in half only softmax has a peer
    "numba": Subject(
        "numba",
        pools=((1.0, 1.05), (1.7, 2.0)),
        sharpness=(0.1, 2.0),
        alphas=(*ALPHAS, 1.0000001, 1.001, 1.05, 1.24, 1.26, 1.3, 1.4, 1.49, 1.51, 1.7, 1.99, 1.999),
        half=((1.2, 1.7), (2.5, 4.0)),
    ),
}


@pytest.fixture(params=SUBJECTS)
def subject(request, two_threads):
    found = SUBJECTS[request.param]
    if not available_backends()[found.backend].startswith("available"):
        pytest.skip(available_backends()[found.backend])
    return found


@pytest.fixture
def kernel(two_threads):
    if not available_backends()["numba"].startswith("available"):
        pytest.skip(available_backends()["numba"])
    return SUBJECTS["numba"]


def test_every_alpha_in_float32():
    test_every_alpha(Subject("torch"))


PADDING = torch.arange(T_K)[None] < torch.tensor([[T_K], [3]])


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float16, torch.bfloat16, F64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_another_dtype(dtype, mask_dtype):
    inputs = {name: tensor.detach() for name, tensor in tensors(dtype).items()}
    mask = torch.zeros(B, 1, T_Q, T_K, dtype=mask_dtype).masked_fill(
        ~PADDING[:, None, None], torch.finfo(mask_dtype).min
    )
    mask[0, 0, 0] = torch.finfo(mask_dtype).min
    for alpha in (1.0, 1.5):
        out, weights = entmax_attention(**inputs, alpha=alpha, attention_mask=mask, need_weights=True, backend="torch")
        assert out.dtype == dtype and (weights[1, ..., 3:] == 0).all() and (out[0, :, 0] == 0).all()
        kept, _ = entmax_attention(**inputs, alpha=alpha, key_padding_mask=PADDING, backend="torch")
        torch.testing.assert_close(out[1], kept[1])


@pytest.mark.slow
def test_gradcheck_through_everything():
    inputs = tensors(queries=3, keys=4)
    alpha = torch.tensor([1.2, 1.5, 1.7, 2.2], dtype=F64, requires_grad=True)
    bias = torch.randn(1, H, 3, 4, dtype=F64, requires_grad=True)

    def function(query, key, value, alpha, bias):
        options = {"position_bias": bias, "is_causal": True, "softcap": 3.0, "backend": "torch"}
        return entmax_attention(query, key, value, alpha, **options)[0]

    assert torch.autograd.gradcheck(function, (*inputs.values(), alpha, bias))


def test_any_normalizer():
    inputs = tensors(torch.float32)
    seen = {}

    def uniform(scores, mask):
        seen["mask"] = mask
        weights = mask.expand_as(scores).to(scores.dtype)
        return weights / weights.sum(-1, keepdim=True)

    out, weights = dense.dense_attention(
        **inputs, normalizer=uniform, options=AttentionOptions(key_padding_mask=PADDING, need_weights=True)
    )
    assert seen["mask"].shape == (B, 1, 1, T_K)
    torch.testing.assert_close(weights[1, 0, 0], torch.tensor([1 / 3] * 3 + [0.0] * 4))
    torch.testing.assert_close(out[1, 3, 0], inputs["value"][1, 1, :3].mean(0))


def test_masked_keys_get_nothing_whatever_the_scores_are():
    # A mask of -10000, and a maximum that starts at -1000, both fail here.
    query, key = torch.full((1, 1, 2, 4), -300.0), torch.full((1, 1, 3, 4), 300.0)
    key[:, :, 2] = 1.0
    value = torch.eye(3)[None, None]
    real = torch.tensor([[True, True, False]])
    for alpha in (1.0, 1.5, 2.0):
        out, weights = entmax_attention(
            query, key, value, alpha, key_padding_mask=real, need_weights=True, backend="torch"
        )
        torch.testing.assert_close(weights[0, 0], torch.tensor([[0.5, 0.5, 0.0]] * 2))
        torch.testing.assert_close(out[0, 0], weights[0, 0])


BAD = [
    (TypeError, "query must be", {"query": torch.ones(B, H, T_Q, D, dtype=torch.long)}),
    (ValueError, "query has shape", {"query": torch.ones(B, T_Q, D)}),
    (ValueError, "batch sizes", {"key": torch.ones(1, H_KV, T_K, D)}),
    (ValueError, "head dimension", {"key": torch.ones(B, H_KV, T_K, D + 1)}),
    (ValueError, "head dimension 0", {"query": torch.ones(B, H, T_Q, 0), "key": torch.ones(B, H_KV, T_K, 0)}),
    (ValueError, "value has head dimension 0", {"value": torch.ones(B, H_KV, T_K, 0)}),
    (ValueError, "H_kv, T_k", {"value": torch.ones(B, H_KV, T_K + 1, D)}),
    (ValueError, "no multiple", {"key": torch.ones(B, 3, T_K, D), "value": torch.ones(B, 3, T_K, D)}),
    (ValueError, "alpha has shape", {"alpha": torch.full((3,), 1.5)}),
    (ValueError, "alpha has shape", {"alpha": torch.full((H, 1, 1), 1.5)}),
    (ValueError, "alpha >= 1", {"alpha": 0.9}),
    (ValueError, "alpha >= 1", {"alpha": torch.tensor([1.5, 1.5, 0.5, 1.5])}),
    (ValueError, "attention_mask has shape", {"attention_mask": torch.ones(B, 1, T_Q, T_K + 1)}),
    (ValueError, "attention_mask has shape", {"attention_mask": torch.ones(1, B, H, T_Q, T_K)}),
    (TypeError, "attention_mask must be bool", {"attention_mask": torch.ones(T_K, dtype=torch.long)}),
    (TypeError, "position_bias must be floating", {"position_bias": torch.ones(T_K, dtype=torch.bool)}),
    (ValueError, "position_bias has shape", {"position_bias": torch.ones(1, H + 1, T_Q, T_K)}),
    (ValueError, "key_padding_mask has shape", {"key_padding_mask": torch.ones(B, T_Q, dtype=torch.bool)}),
    (TypeError, "key_padding_mask must be bool", {"key_padding_mask": torch.ones(B, T_K)}),
    (ValueError, "sliding_window is 0", {"sliding_window": 0}),
    (TypeError, "sliding_window is 2.5", {"sliding_window": 2.5}),
    (ValueError, "softcap is 0", {"softcap": 0.0}),
    (ValueError, "scaling is inf", {"scaling": math.inf}),
    (ValueError, "dropout is 1", {"dropout": 1.0}),
    (ValueError, "dropout is nan", {"dropout": math.nan}),
    (ValueError, "need_weights is 'dense'", {"need_weights": "dense"}),
    (ValueError, "'auto', 'torch', 'numba', 'triton'", {"backend": "cuda"}),
]


@pytest.mark.parametrize("kind,message,change", BAD, ids=[message for _, message, _ in BAD])
def test_wrong_arguments(kind, message, change):
    arguments = {**tensors(torch.float32), "alpha": 1.5, **change}
    with pytest.raises(kind, match=message):
        entmax_attention(**arguments)


def test_one_alpha_for_all_heads():
    inputs = tensors()
    expected = entmax_attention(**inputs, alpha=1.3, backend="torch")[0]
    for alpha in (torch.tensor(1.3, dtype=F64), torch.tensor([1.3], dtype=F64), torch.full((H,), 1.3, dtype=F64)):
        torch.testing.assert_close(entmax_attention(**inputs, alpha=alpha, backend="torch")[0], expected)


def test_window_and_causal_limit_pair_by_pair():
    for queries, keys, causal, window in itertools.product((1, 4), (4, 6), (False, True), (None, 1, 3)):
        options = AttentionOptions(is_causal=causal, sliding_window=window)
        limits = options.visible(queries, keys, torch.device("cpu"))
        expected = reference.allowed_pairs((1, 1, queries, keys), options)[0, 0]
        assert torch.equal(torch.ones(queries, keys, dtype=torch.bool) if limits is None else limits, expected)
        start, stop = options.key_range(queries, keys, torch.device("cpu"))
        ranges = [range(int(a), int(b)) for a, b in zip(start, stop, strict=True)]
        assert expected.tolist() == [[j in seen for j in range(keys)] for seen in ranges]


@pytest.mark.parametrize(
    "limits",
    [
        {"attention_mask": torch.tensor([True, True, False])[None, None, :, None].expand(2, 1, 3, 1)},
        {"position_bias": torch.arange(5.0)},
        {"position_bias": torch.arange(60.0).view(4, 3, 5).sin()},
        {"position_bias": torch.arange(60.0).view(4, 3, 5).sin(), "is_causal": True},
        {"attention_mask": torch.arange(60.0).view(4, 3, 5).cos()},
        {"attention_mask": torch.tensor([True]), "position_bias": torch.tensor([[0.5], [0.0], [1.0]])},
    ],
)
def test_a_sink_beside_limits_of_every_shape_that_broadcasts(limits):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, n, 8, generator=generator) for n in (3, 5, 5))
    sink = torch.tensor([0.0, 0.5, -1.0, 2.0])
    wide = {name: tensor if isinstance(tensor, bool) else tensor.expand(2, 4, 3, 5) for name, tensor in limits.items()}
    outs = []
    for given in (limits, wide):
        new_key, new_value, options = append_sink(query, key, value, AttentionOptions(**given, sink=sink))
        outs.append(attend(query, new_key, new_value, 1.5, dataclasses.replace(options, need_weights=True), "torch"))
    torch.testing.assert_close(outs[0], outs[1])
    assert (outs[0][1][..., 5] > 0).any()


def test_query_and_key_of_two_dtypes_are_named():
    query, key = torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"query is torch\.float64 and key torch\.float32.*cast one"):
        entmax_attention(query, key, key, 1.5, backend="torch")
    with torch.autocast("cpu"):
        entmax_attention(query.float(), key.bfloat16(), key, 1.5, backend="torch")
