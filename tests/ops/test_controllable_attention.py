"""The controllable mappings as attention: their registry, their options, and their fast path."""

import math

import pytest
import torch
from l18_properties import TABLE

from hf_entmax.ops import controllable as C
from hf_entmax.ops.controllable.attention import as_sparsemax_attention
from hf_entmax.ops.mapping import sparsemax
from hf_entmax.ops.options import AttentionOptions

F64 = torch.float64


class TestAsAttention:
    @pytest.mark.parametrize("name", list(C.ATTENTION_MAPPINGS))
    def test_weights_equal_the_function(self, name):
        spec = C.ATTENTION_MAPPINGS[name]
        (option,) = spec.options
        scores = torch.randn(2, 3, 4, 5, dtype=F64)
        mask = torch.rand(2, 1, 4, 5) > 0.3
        value = spec.options[option].default * 0.7 + 0.1
        expected = getattr(C, name)(scores, **{option: value}, mask=mask)
        assert torch.allclose(spec.weights(scores, mask, **{option: value}), expected, atol=1e-14)
        heads = torch.tensor([value, value / 2, value + 0.2], dtype=F64)
        expected = getattr(C, name)(scores, **{option: heads.view(3, 1, 1)})
        assert torch.allclose(spec.weights(scores, None, **{option: heads}), expected, atol=1e-14)

    @pytest.mark.parametrize("name", list(C.ATTENTION_MAPPINGS))
    def test_settings(self, name):
        spec = C.attention_mapping(name)
        (option,) = spec.options
        default = spec.settings({})[option]
        assert default == (spec.options[option].default, None)
        learned = spec.settings({option: "learned"})[option]
        assert learned.bounds[0] < learned.value < learned.bounds[1]
        given = spec.settings({option: "learned", f"{option}_init": 0.5, f"{option}_range": (0.2, 0.9)})[option]
        assert given == (0.5, (0.2, 0.9))
        assert spec.settings({option: 0.25})[option].value == 0.25

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("sparsegen_lin", {"lam": 1.0}, "lam must lie"),
            ("sparsegen_lin", {"q": 1.0}, "has no options"),
            ("sparsegen_lin", {"lam": "auto"}, '"learned"'),
            ("sparsegen_lin", {"lam_init": 0.2}, "is fixed"),
            ("sparsegen_lin", {"lam": "learned", "lam_init": 0.97}, "strictly between"),
            ("sparsegen_lin", {"lam": "learned", "lam_range": (0.0, 1.5)}, "lam_range"),
            ("sparsegen_lin", {"lam": "learned", "lam_range": (-math.inf, 0.5)}, "finite"),
            ("sparsehourglass", {"q": 0.0}, r"q must lie in \(0, inf\)"),
            ("sparsehourglass", {"q": "learned", "q_range": (2.0, 1.0)}, "lo < hi"),
            ("softmax", {"temperature": 0}, "temperature must lie"),
        ],
    )
    def test_bad_settings(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            C.attention_mapping(name).settings(options)

    def test_types_of_settings(self):
        with pytest.raises(TypeError, match="real number"):
            C.attention_mapping("sparsegen_lin").settings({"lam": None})
        with pytest.raises(TypeError, match="two numbers"):
            C.attention_mapping("sparsegen_lin").settings({"lam": "learned", "lam_range": 3})

    def test_every_mapping_either_serves_or_is_refused_with_a_reason(self):
        names = set(TABLE) - {"sparsemax"}
        assert names == set(C.ATTENTION_MAPPINGS) | set(C.REFUSED_AS_ATTENTION)
        assert not set(C.ATTENTION_MAPPINGS) & set(C.REFUSED_AS_ATTENTION)
        for name in C.REFUSED_AS_ATTENTION:
            with pytest.raises(ValueError, match="defined"):
                C.attention_mapping(name)
        with pytest.raises(ValueError, match="choose from"):
            C.attention_mapping("sparsest")


def attend(weights_of, query, key, value, *, scaling=None, mask=None, bias=None):
    """Attention written out; ``mask`` bool, ``bias`` additive."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if bias is not None:
        scores = scores + bias
    return weights_of(scores, mask) @ value


def visible(n_query, n_key, causal, window, padding):
    i, j = torch.arange(n_query)[:, None] + n_key - n_query, torch.arange(n_key)
    mask = torch.ones(n_query, n_key, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if window is not None:
        mask &= j > i - window
    mask = mask[None, None]
    return mask & padding[:, None, None, :] if padding is not None else mask


FOLDED = [
    "",
    "causal",
    "causal window",
    "window",
    "padding",
    "padding causal",
    "bias",
    "bias causal padding",
    "bool_mask",
    "float_mask",
    "float_mask bias causal",
    "alibi",
    "scaling",
]


class TestFoldedIntoSparsemax:
    @pytest.mark.parametrize(
        "kind", [("sparsegen_lin", "lam", 0.4), ("sparsegen_lin", "lam", -3.0), ("sparsehourglass", "q", 0.3)]
    )
    @pytest.mark.parametrize("case", FOLDED)
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_equals_the_mapping_on_the_scores(self, kind, case, kv_heads):
        name, option, number = kind
        case = case.split()
        limits = {"is_causal": "causal" in case, "sliding_window": 3 if "window" in case else None}
        limits["scaling"] = 1.7 if "scaling" in case else None
        batch, heads, n_query, n_key, width = 2, 4, 5, 7, 3
        tensors = [
            torch.randn(batch, h, n, width, dtype=F64)
            for h, n in ((heads, n_query), (kv_heads, n_key), (kv_heads, n_key))
        ]
        learned = torch.linspace(number, number + 0.3, heads, dtype=F64)
        padding = torch.rand(batch, n_key) > 0.3 if "padding" in case else None
        bias = torch.randn(1, heads, n_query, n_key, dtype=F64) if "bias" in case else None
        mask = visible(n_query, n_key, limits["is_causal"], limits["sliding_window"], padding)
        extra, total_bias = {}, bias
        if "bool_mask" in case:
            extra["attention_mask"] = torch.rand(batch, 1, n_query, n_key) > 0.4
            mask = mask & extra["attention_mask"]
        if "float_mask" in case:
            blocked = torch.rand(batch, 1, n_query, n_key) > 0.6
            blocked[0, 0, 1] = True
            extra["attention_mask"] = torch.zeros(blocked.shape, dtype=F64).masked_fill(blocked, torch.finfo(F64).min)
            mask = mask & ~blocked
        if "alibi" in case:
            extra["attention_mask"] = -0.2 * torch.arange(n_key, dtype=F64).expand(batch, 1, n_query, n_key).clone()
            extra["attention_mask"][0, 0, :, 2] = -math.inf
            total_bias = extra["attention_mask"].nan_to_num(neginf=0.0)
            mask = mask & (extra["attention_mask"] > -math.inf)
        weight = torch.randn(batch, heads, n_query, width, dtype=F64)

        grads = []
        for folded in (False, True):
            leaves = [t.clone().requires_grad_() for t in (*tensors, learned)]
            query, key, value, x = leaves
            if folded:
                asked = AttentionOptions(position_bias=bias, key_padding_mask=padding, **limits, **extra)
                scaled_query, new = as_sparsemax_attention(name, {option: x}, query, key, asked)
                folded_bias = new.position_bias
                added = new.attention_mask
                if added is not None and added.dtype != torch.bool:
                    finite = added.masked_fill(added < -1e100, 0.0)
                    folded_bias = finite if folded_bias is None else finite + folded_bias
                    assert torch.equal(extra["attention_mask"] < -1e100, (added < -1e100)[:, :1])
                out = attend(
                    lambda s, m: sparsemax(s, mask=m),
                    scaled_query,
                    key,
                    value,
                    scaling=limits["scaling"],
                    mask=mask,
                    bias=folded_bias,
                )
            else:
                weights_of = lambda s, m, x=x: C.ATTENTION_MAPPINGS[name].weights(s, m, **{option: x})  # noqa: E731
                out = attend(weights_of, query, key, value, scaling=limits["scaling"], mask=mask, bias=total_bias)
            (out * weight).sum().backward()
            grads.append((out.detach(), *(leaf.grad for leaf in leaves)))
        for one, two in zip(*grads, strict=True):
            assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)

    def test_what_cannot_be_folded(self):
        query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
        assert as_sparsemax_attention("sparsegen_lin", {"lam": 0.0}, query, key, AttentionOptions(softcap=5.0)) is None
        for name in ("sparsegen_exp", "sparsegen_sq", "softmax"):
            options = {option: spec.default for option, spec in C.ATTENTION_MAPPINGS[name].options.items()}
            assert as_sparsemax_attention(name, options, query, key, AttentionOptions()) is None

    def test_the_scale_of_sparsegen_lin(self):
        spec = C.ATTENTION_MAPPINGS["sparsegen_lin"]
        assert spec.as_scaled_sparsemax({"lam": 0.75}) == 4.0
        z = torch.randn(3, 6, dtype=F64)
        assert torch.equal(C.sparsegen_lin(z, 0.75), sparsemax(4 * z))
        assert C.ATTENTION_MAPPINGS["sparsehourglass"].as_scaled_sparsemax({"q": 1.0}) is None
