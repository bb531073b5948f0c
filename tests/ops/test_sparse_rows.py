"""Sparse rows of an attention call: the dense weights, without the zeros, from the rows that the CPU kernel works on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from hf_entmax.ops import SparseRows, entmax_attention
from hf_entmax.ops.numba_cpu import host

ALPHAS = torch.tensor([1.0, 1.2, 1.5, 2.0])


def make_inputs(B=2, H=4, H_kv=2, T_q=21, T_k=37, D=16, sharpness=4.0, dtype=torch.float32):
    query = torch.randn(B, H, T_q, D) * sharpness
    return tuple(t.to(dtype) for t in (query, torch.randn(B, H_kv, T_k, D), torch.randn(B, H_kv, T_k, D)))


def padding(B=2, T_k=37, holes=False):
    real = torch.arange(T_k) < torch.tensor([T_k, T_k // 2])[:B, None]
    if holes:
        real = real & (torch.rand(B, T_k) < 0.6)
    return real


@pytest.fixture
def always_rows(monkeypatch):
    monkeypatch.setattr(host, "_SPARSE_UP_TO", 1.0)


@pytest.fixture
def supports(monkeypatch):
    """What the forward passes of a test kept."""
    seen, weights_of = [], host.Call.weights_of

    def spy(call, support):
        assert not call.options.need_weights, "dense weights were written on the way to the rows"
        seen.append(support)
        return weights_of(call, support)

    monkeypatch.setattr(host.Call, "weights_of", spy)
    return seen


def check(tensors, alpha=ALPHAS, **options) -> SparseRows:
    out, rows = entmax_attention(*tensors, alpha, need_weights="sparse", backend="numba", **options)
    expected, weights = entmax_attention(*tensors, alpha, need_weights=True, backend="numba", **options)
    assert isinstance(rows, SparseRows) and isinstance(weights, torch.Tensor)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rows.dense(), weights, rtol=0, atol=0, equal_nan=True)
    assert rows.shape == weights.shape and rows.weights.dtype == weights.dtype
    assert rows.columns.dtype == torch.int32 and rows.offsets.dtype == torch.int64
    assert rows.offsets[0] == 0 and rows.offsets[-1] == len(rows.columns) == len(rows.weights)
    place = rows.rows() * rows.shape[3] + rows.columns
    assert (place.diff() > 0).all(), "rows follow each other and columns rise within a row"
    if weights.element_size() == 4:
        assert len(rows.columns) == (weights != 0).sum()
    return rows


CASES = {
    "plain": (dict(), dict()),
    "one head per key head": (dict(H_kv=4), dict()),
    "one key head": (dict(H_kv=1), dict()),
    "single query": (dict(T_q=1), dict(is_causal=True)),
    "few queries": (dict(T_q=3), dict(key_padding_mask=padding())),
    "more queries than keys": (dict(T_q=50), dict()),
    "padding": (dict(), dict(key_padding_mask=padding())),
    "padding with holes": (dict(), dict(key_padding_mask=padding(holes=True))),
    "causal": (dict(T_q=37), dict(is_causal=True)),
    "causal, shorter queries": (dict(), dict(is_causal=True)),
    "window": (dict(T_q=37), dict(is_causal=True, sliding_window=5)),
    "mask": (dict(), dict(attention_mask=torch.rand(2, 1, 21, 37) < 0.4)),
    "nothing allowed": (dict(), dict(attention_mask=torch.zeros(2, 1, 21, 37, dtype=torch.bool))),
    "bias": (dict(), dict(position_bias=torch.randn(1, 4, 21, 37) * 3)),
    "softcap": (dict(), dict(softcap=5.0)),
    "long": (dict(T_q=150, T_k=150), dict(is_causal=True, key_padding_mask=padding(T_k=150))),
}


@pytest.mark.parametrize("sharpness", [0.1, 4.0, 30.0])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_dense_weights(case, sharpness, always_rows, supports):
    sizes, options = CASES[case]
    rows = check(make_inputs(**sizes, sharpness=sharpness), **options)
    densely = (supports[0].row_size < 0).sum()
    if case in ("plain", "padding", "causal", "long") and sharpness == 0.1:
        assert densely > 0, "this case is here for blocks that the kernel keeps densely"
    if case == "nothing allowed":
        assert len(rows.columns) == 0
    assert len(supports) == 1


def test_two_threads_and_several_slabs(always_rows, supports, monkeypatch):
    monkeypatch.setattr(host, "_SMALL_STORAGE", 0)
    monkeypatch.setattr(host, "_FIRST_SHARE", 0.001)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(make_inputs(T_q=600, T_k=600, sharpness=0.5))
    finally:
        torch.set_num_threads(threads)
    assert len(supports[0].slabs) > 1, "this case is here for storage that had to grow"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, always_rows):
    rows = check(make_inputs(dtype=dtype))
    assert rows.weights.dtype == dtype


def test_nan_scores_give_nan_rows(always_rows):
    query, key, value = make_inputs()
    query[1, 2, 5] = float("nan")
    rows = check((query, key, value), key_padding_mask=padding())
    assert rows.dense().isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[1, 2, 5]]


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_zero_sizes(empty):
    sizes = {"batch": dict(B=0), "queries": dict(T_q=0), "keys": dict(T_k=0)}[empty]
    rows = check(make_inputs(**sizes))
    assert len(rows.offsets) == rows.shape[0] * rows.shape[1] * rows.shape[2] + 1


def test_where_rows_are_not_the_better_form_weights_are_dense(supports):
    flat = make_inputs(sharpness=0.1)
    _, weights = entmax_attention(*flat, 1.5, need_weights="sparse")
    assert isinstance(weights, torch.Tensor) and len(supports) == 1
    torch.testing.assert_close(weights, entmax_attention(*flat, 1.5, need_weights=True)[1], rtol=0, atol=0)
    sharp = entmax_attention(*make_inputs(sharpness=20.0), 2.0, need_weights="sparse")[1]
    assert isinstance(sharp, SparseRows)
    assert 0 < len(sharp.columns) <= host._SPARSE_UP_TO * sharp.dense().numel()


def test_a_mixed_call_written_densely(supports, monkeypatch):
    # Sparse heads beside dense ones, and key padding: every way in which a row may be kept.
    tensors = make_inputs(H_kv=4, sharpness=0.2)
    tensors[0][:, 2:] *= 100
    options = dict(key_padding_mask=padding())
    monkeypatch.setattr(host, "_SPARSE_UP_TO", 0.0)
    _, weights = entmax_attention(*tensors, ALPHAS, need_weights="sparse", **options)
    assert (supports[0].row_size < 0).any() and (supports[0].row_size > 0).any()
    expected = entmax_attention(*tensors, ALPHAS, need_weights=True, **options)[1]
    assert isinstance(weights, torch.Tensor) and isinstance(expected, torch.Tensor)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_weights_that_rows_cannot_stand_for_are_dense(always_rows, supports):
    tensors = make_inputs()
    learned = (tensors[0].requires_grad_(), *tensors[1:])
    _, weights = entmax_attention(*learned, 1.5, need_weights="sparse")
    assert isinstance(weights, torch.Tensor) and weights.requires_grad
    with torch.no_grad():
        assert isinstance(entmax_attention(*learned, 1.5, need_weights="sparse")[1], SparseRows)
        _, dropped = entmax_attention(*learned, 1.5, need_weights="sparse", dropout=0.5)
        assert isinstance(dropped, torch.Tensor) and not torch.equal(dropped, weights)
        for options in ({"backend": "torch"}, {}):
            kind = torch.float32 if options else torch.float64  # in float64 the automatic choice is torch
            doubled = [t.detach().to(kind) for t in learned]
            _, plain = entmax_attention(*doubled, 1.5, need_weights="sparse", **options)
            assert isinstance(plain, torch.Tensor)
            torch.testing.assert_close(plain, weights.to(kind), rtol=0, atol=1e-5)
    assert len(supports) == 1


def test_other_values_of_need_weights_are_refused():
    with pytest.raises(ValueError, match="need_weights is 'dense', but must be True, False or 'sparse'"):
        entmax_attention(*make_inputs(), 1.5, need_weights="dense")


def test_first_keys():
    weights = torch.rand(2, 3, 4, 6) * (torch.rand(2, 3, 4, 6) < 0.4)
    place = weights.flatten().nonzero()[:, 0]
    offsets = torch.nn.functional.pad((weights != 0).sum(-1).flatten().cumsum(0), (1, 0))
    rows = SparseRows(offsets, (place % 6).int(), weights.flatten()[place], (2, 3, 4, 6))
    torch.testing.assert_close(rows.dense(), weights, rtol=0, atol=0)
    for length in (6, 5, 1, 0):
        assert rows.first_keys(length).shape == (2, 3, 4, length)
        torch.testing.assert_close(rows.first_keys(length).dense(), weights[..., :length], rtol=0, atol=0)
    assert rows.first_keys(9).shape == rows.shape


def test_no_kernel_writes_dense_weights(always_rows, monkeypatch):
    written, launch = [], host.Call._launch

    def spy(call, name, *rest):
        written.append((name, int(call.record.weights)))
        return launch(call, name, *rest)

    monkeypatch.setattr(host.Call, "_launch", spy)
    entmax_attention(*make_inputs(), ALPHAS, need_weights="sparse")
    assert {name for name, _ in written} == {"forward", "support_rows"} and not any(place for _, place in written)
    written.clear()
    entmax_attention(*make_inputs(), ALPHAS, need_weights=True)
    assert [name for name, place in written if place] == ["forward"]


def test_dense_path_ignores_the_wish():
    tensors = [t.double() for t in make_inputs()]
    _, weights = entmax_attention(*tensors, 1.5, need_weights="sparse", backend="torch")
    assert isinstance(weights, torch.Tensor)
