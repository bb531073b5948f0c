"""What the CPU kernel keeps for the backward pass, when checkpointing makes it anew in other memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("numba")

from hf_entmax.ops import entmax_attention
from hf_entmax.ops.numba_cpu import host
from hf_entmax.ops.numba_cpu.function import Inputs, Options, run_backward, run_forward


def make_inputs(T=37, H=4, sharpness=1.0, alphas=(1.0, 1.05, 1.5, 2.0)):
    query = (torch.randn(1, H, T, 16) * sharpness).requires_grad_()
    key, value = (torch.randn(1, 2, T, 16, requires_grad=True) for _ in range(2))
    return query, key, value, torch.tensor(alphas[:H]).requires_grad_()


def kept(tensors, bias=None):
    options = Options(is_causal=True, window=0, softcap=0.0, scaling=0.25, dropout=0.0, need_weights=False)
    inputs = Inputs(*(t.detach() for t in tensors), None, bias, None)
    out, _, support = run_forward(inputs, 0, options, keep=True)

    def backward(held):
        gradients = run_backward(inputs, held, torch.ones_like(out), None, 0, options, (True,) * 6)
        return [gradient for gradient in gradients if gradient is not None]

    return support, backward


@pytest.mark.parametrize("shift", [64, 4096])
def test_rows_made_anew_in_memory_that_overlaps_the_old(shift):
    # What checkpointing does: the rows are those of its second pass, and its memory may be part of the first one's.
    support, backward = kept(make_inputs(sharpness=2.0))
    want = backward(support)
    support = support.in_one_piece()
    slab = support.slabs[0]
    arena = torch.empty(slab.numel() + shift, dtype=torch.uint8)

    def placed(begin):
        arena[begin : begin + slab.numel()] = slab
        address = support.row_address - slab.data_ptr() + arena.data_ptr() + begin
        piece = arena[begin : begin + slab.numel()]
        return dataclasses.replace(support, slabs=[piece], bases=torch.tensor([piece.data_ptr()]), row_address=address)

    first = placed(0).without_tensors()
    second = first.restore(placed(shift).tensors())
    for got, plain in zip(backward(second), want, strict=True):
        assert torch.equal(got, plain)


def test_slabs_that_change_places(two_threads, monkeypatch):
    # Hooks that hand back memory at their will: each slab where another one was.
    monkeypatch.setattr(host, "_SMALL_STORAGE", 0)
    monkeypatch.setattr(host, "_FIRST_SHARE", 0.0)
    support, backward = kept(make_inputs(T=900, H=2, sharpness=0.2, alphas=(1.05, 1.05)))
    want, count = backward(support), len(support.slabs)
    assert count > 1
    contents = [slab.clone() for slab in support.slabs]
    arena = torch.empty(count, max(map(torch.numel, contents)), dtype=torch.uint8)
    for shift in range(count):
        slabs = [arena[(i + shift) % count, : content.numel()] for i, content in enumerate(contents)]
        for slab, content in zip(slabs, contents, strict=True):
            slab.copy_(content)
        support = support.restore([*support.tensors()[:4], *slabs])
        for got, plain in zip(backward(support), want, strict=True):
            assert torch.equal(got, plain)


@pytest.mark.parametrize(("sharpness", "alpha"), [(0.2, 1.05), (0.2, 2.0), (3.0, 1.3), (3.0, 2.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_one_piece_holds_all_rows_and_its_size_does_not_depend_on_the_threads(sharpness, alpha, biased, two_threads):
    # Large enough for several slabs; with a dense start, the rows are stored densely and sparsely. For a bias, the gradients
    # of the scores are stored in the rows as well.
    tensors = make_inputs(T=420, sharpness=sharpness, alphas=(alpha,) * 4)
    bias = torch.zeros(1, 4, 420, 420, requires_grad=True) if biased else None
    sizes = set()
    for _ in range(3):
        support, backward = kept(tensors, bias)
        want, piece = backward(support), support.in_one_piece()
        sizes.add(piece.slabs[0].numel())
        assert piece.slabs[0].numel() <= sum(slab.numel() for slab in support.slabs)
        for got, plain in zip(backward(piece), want, strict=True):
            assert torch.equal(got, plain)
    assert len(sizes) == 1


def test_checkpointing_of_several_layers_in_reused_memory(two_threads):
    def layers(query, *others):
        for _ in range(3):
            query = entmax_attention(query, *others, is_causal=True, backend="numba")[0]
        return query

    others = []
    for seed, length in enumerate((5, 33, 60, 7, 290, 9, 45)):
        tensors = make_inputs(T=length, H=2, alphas=(1.2, 1.5))
        want = torch.autograd.grad(layers(*tensors).square().sum(), tensors)
        out = checkpoint(layers, *tensors, use_reentrant=False)
        # Memory that the first pass has given back is taken in pieces by others.
        others = [*others[-3:], torch.empty(1000 * (seed + 1), dtype=torch.uint8)]
        for got, plain in zip(torch.autograd.grad(out.square().sum(), tensors), want, strict=True):
            assert torch.equal(got, plain)
