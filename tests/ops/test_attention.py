"""The dense path of attention against the oracle, argument by argument, and the checks of `entmax_attention`."""

import dataclasses
import itertools
import math

import pytest
import reference
import torch
from tolerances import ALPHAS, assert_forward, assert_gradient, assert_half

from hf_entmax.ops import available_backends, dense, entmax_attention
from hf_entmax.ops.attention import attend
from hf_entmax.ops.options import AttentionOptions, append_sink

F64 = torch.float64
B, H, H_KV, T_Q, T_K, D, D_V = 2, 4, 2, 5, 7, 8, 6


def tensors(dtype=F64, *, kv_heads=H_KV, queries=T_Q, keys=T_K):
    shapes = {"query": (B, H, queries, D), "key": (B, kv_heads, keys, D), "value": (B, kv_heads, keys, D_V)}
    return {name: torch.randn(shape, dtype=F64).mul(1.5).to(dtype).requires_grad_() for name, shape in shapes.items()}


def check(inputs, alpha, dtype=F64, **options):
    """Compare output, weights and every gradient with the oracle; return what was computed."""
    alpha = torch.tensor(alpha, dtype=F64 if dtype == F64 else torch.float32, requires_grad=True)
    out, weights = entmax_attention(**inputs, alpha=alpha, need_weights=True, backend="torch", **options)
    grad_out = torch.randn(out.shape, dtype=dtype)
    out.backward(grad_out)
    expected = reference.attention(**inputs, alpha=alpha, grad_out=grad_out, **options)
    assert_forward(weights, expected["weights"])
    assert_forward(
        out / max(1.0, float(inputs["value"].detach().abs().max())),
        expected["out"] / max(1.0, float(inputs["value"].detach().abs().max())),
    )
    for name, tensor in {**inputs, "alpha": alpha}.items():
        assert_gradient(tensor.grad, expected[name])
    for name in ("position_bias", "attention_mask"):
        bias = options.get(name)
        if bias is not None and bias.requires_grad:
            assert_gradient(bias.grad, expected["scores"].sum_to_size(bias.shape))
    return out, weights


LOW = torch.finfo(F64).min
PADDING = torch.arange(T_K)[None] < torch.tensor([[T_K], [3]])
OPTIONS = {
    "nothing": {},
    "scaling": {"scaling": 0.3},
    "scaling 0": {"scaling": 0.0},
    "softcap": {"softcap": 1.5},
    "causal": {"is_causal": True},
    "window": {"sliding_window": 3},
    "causal window": {"is_causal": True, "sliding_window": 2},
    "window 1": {"is_causal": True, "sliding_window": 1},
    "padding": {"key_padding_mask": PADDING},
    "left padding": {"key_padding_mask": PADDING.flip(-1), "is_causal": True},
    "bool mask": {"attention_mask": torch.rand(B, 1, T_Q, T_K, generator=torch.Generator().manual_seed(3)) > 0.4},
    "bool mask, one row": {"attention_mask": torch.rand(T_K, generator=torch.Generator().manual_seed(4)) > 0.4},
    "float mask": {"attention_mask": torch.zeros(B, 1, 1, T_K, dtype=F64).masked_fill(~PADDING[:, None, None], LOW)},
    "-inf mask": {
        "attention_mask": torch.zeros(B, 1, 1, T_K, dtype=F64).masked_fill(~PADDING[:, None, None], -math.inf)
    },
    "all at once": {
        "key_padding_mask": PADDING,
        "is_causal": True,
        "sliding_window": 4,
        "softcap": 2.0,
        "scaling": 0.5,
    },
}


@pytest.mark.parametrize("alpha", [[1.0, 1.0001, 1.3, 2.0], [1.5, 1.5, 1.5, 3.0]])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_the_oracle(name, alpha):
    check(tensors(), alpha, **OPTIONS[name])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("queries,keys", [(1, 7), (7, 7), (7, 3), (1, 1)])
def test_shapes_against_the_oracle(kv_heads, queries, keys):
    # More queries than keys: the first queries of a causal mask see nothing.
    out, _ = check(tensors(kv_heads=kv_heads, queries=queries, keys=keys), [1.0, 1.2, 1.5, 2.0], is_causal=True)
    if queries > keys:
        assert (out[:, :, : queries - keys] == 0).all()


@pytest.mark.parametrize("shape", [(1, H, T_Q, T_K), (B, H, T_Q, T_K), (1, 1, 1, T_K), (H, T_Q, T_K), (T_Q, 1)])
def test_position_bias_and_its_gradient(shape):
    bias = torch.randn(shape, dtype=F64, requires_grad=True)
    check(tensors(), [1.0, 1.2, 1.5, 2.0], position_bias=bias, is_causal=True)
    mask = torch.randn(shape, dtype=F64, requires_grad=True)
    check(tensors(), [1.0, 1.2, 1.5, 2.0], attention_mask=mask)


def test_position_bias_may_carry_the_mask():
    # T5 adds its mask to the bias; finfo.min plus a number is still a mask, also where nothing else is left.
    bias = torch.randn(B, H, T_Q, T_K, dtype=F64)
    bias[..., 4:] += LOW
    bias[1, :, 2] += LOW
    out, weights = check(tensors(), [1.0, 1.2, 1.5, 2.0], position_bias=bias)
    assert (weights[..., 4:] == 0).all() and (out[1, :, 2] == 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_float32_against_the_oracle(alpha):
    check(tensors(torch.float32), [alpha] * H, torch.float32, is_causal=True, softcap=5.0)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_at_alpha_one_against_plain_softmax(dtype):
    inputs = tensors(dtype, kv_heads=H)
    exact = reference.attention(**inputs, alpha=1.0, grad_out=torch.ones(B, H, T_Q, D_V))
    out, _ = entmax_attention(**inputs, alpha=1.0, backend="torch")
    out.sum().backward()
    plain_inputs = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    scores = plain_inputs["query"] @ plain_inputs["key"].transpose(-1, -2) * D**-0.5
    plain = torch.softmax(scores, -1, dtype=torch.float32).to(dtype) @ plain_inputs["value"]
    plain.sum().backward()
    assert_half(out, plain, exact["out"])
    for name, tensor in inputs.items():
        assert_half(tensor.grad, plain_inputs[name].grad, exact[name])


def test_alpha_one_is_scaled_dot_product_attention():
    inputs = tensors(torch.float32, kv_heads=H)
    expected = torch.nn.functional.scaled_dot_product_attention(**inputs, attn_mask=None, is_causal=False)
    grads = torch.autograd.grad(expected.square().sum(), list(inputs.values()))
    out, _ = entmax_attention(**inputs, alpha=torch.ones(H), backend="torch")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), list(inputs.values())), grads, atol=1e-5, rtol=1e-5
    )


def test_dropout_scales_and_is_reproducible():
    inputs = {name: tensor.detach() for name, tensor in tensors(queries=64, keys=64).items()}
    torch.manual_seed(5)
    out, weights = entmax_attention(**inputs, alpha=1.1, dropout=0.3, need_weights=True, backend="torch")
    torch.manual_seed(5)
    again, _ = entmax_attention(**inputs, alpha=1.1, dropout=0.3, backend="torch")
    assert torch.equal(out, again)
    _, whole = entmax_attention(**inputs, alpha=1.1, need_weights=True, backend="torch")
    dropped = (weights == 0) & (whole > 0)
    assert 0.25 < float(dropped.sum() / (whole > 0).sum()) < 0.35
    torch.testing.assert_close(weights[~dropped], whole[~dropped] / 0.7)
    full_value = inputs["value"].repeat_interleave(H // H_KV, 1)
    torch.testing.assert_close(out, weights @ full_value)


@pytest.mark.slow
def test_gradcheck_through_everything():
    inputs = tensors(queries=3, keys=4)
    alpha = torch.tensor([1.2, 1.5, 1.7, 2.2], dtype=F64, requires_grad=True)
    bias = torch.randn(1, H, 3, 4, dtype=F64, requires_grad=True)

    def function(query, key, value, alpha, bias):
        options = {"position_bias": bias, "is_causal": True, "softcap": 3.0, "backend": "torch"}
        return entmax_attention(query, key, value, alpha, **options)[0]

    assert torch.autograd.gradcheck(function, (*inputs.values(), alpha, bias))


def test_layouts_and_expanded_inputs():
    # Transformers hands over transposed views; caches may be expanded along the batch.
    inputs = tensors()
    transposed = {name: t.detach().transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    expected = entmax_attention(**inputs, alpha=1.4, backend="torch")[0]
    torch.testing.assert_close(entmax_attention(**transposed, alpha=1.4, backend="torch")[0], expected)
    expanded = {name: t.detach()[:1].expand(B, -1, -1, -1) for name, t in inputs.items()}
    out = entmax_attention(**expanded, alpha=1.4, backend="torch")[0]
    torch.testing.assert_close(out[0], out[1])
    torch.testing.assert_close(out[0], expected[0])


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_zero_sizes(empty):
    batch, queries, keys = (0 if empty == name else size for name, size in (("batch", 2), ("queries", 3), ("keys", 4)))
    query, key = torch.randn(batch, 2, queries, 8, requires_grad=True), torch.randn(batch, 2, keys, 8)
    out, weights = entmax_attention(query, key, key, torch.tensor([1.0, 1.5]), need_weights=True, backend="torch")
    assert out.shape == (batch, 2, queries, 8) and weights.shape == (batch, 2, queries, keys)
    assert (out == 0).all()
    out.sum().backward()


def test_inputs_are_left_alone():
    inputs = tensors(torch.float32)
    bias, mask = torch.randn(1, H, T_Q, T_K), torch.zeros(B, 1, T_Q, T_K)
    kept = [t.detach().clone() for t in (*inputs.values(), bias, mask)]
    entmax_attention(**inputs, alpha=1.5, position_bias=bias, attention_mask=mask, is_causal=True, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip((*inputs.values(), bias, mask), kept, strict=True))


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


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_window_beyond_every_length_limits_nothing(backend):
    if not available_backends()[backend].startswith("available"):
        pytest.skip(available_backends()[backend])
    inputs = tensors(torch.float32)
    for causal in (False, True):
        plain = entmax_attention(**inputs, alpha=1.5, is_causal=causal, backend=backend)[0]
        for window in (T_K, 2**31, 2**63, 2**100):
            out = entmax_attention(**inputs, alpha=1.5, is_causal=causal, sliding_window=window, backend=backend)[0]
            assert torch.equal(out, plain)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_dropout_up_to_its_end(backend):
    """Nearly nothing is kept, and nothing turns into NaN; closer to 1 the factor of what is kept has no float32."""
    if not available_backends()[backend].startswith("available"):
        pytest.skip(available_backends()[backend])
    out, weights = entmax_attention(
        *torch.randn(3, 1, 8, 64, 4).unbind(), 1.0, dropout=1 - 2**-24, need_weights=True, backend=backend
    )
    assert out.isfinite().all() and (weights > 0).sum() < 10
    with pytest.raises(ValueError, match=r"dropout is 0.999999999, but must be in \[0, 1\)"):
        entmax_attention(**tensors(torch.float32), alpha=1.5, dropout=1 - 1e-9, backend=backend)


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
