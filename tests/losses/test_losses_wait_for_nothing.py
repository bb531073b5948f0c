"""On a GPU a loss asks for no value of a tensor once its arguments are checked: found without a GPU, on tensors without values.

Tensors of the device "meta" raise where Python looks at a value (``item``, ``bool``) or a shape depends on one (``nonzero``, boolean
indices), which is where a GPU would have to be waited for. The kernels for rows are not launched.
"""

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it has wheels for Linux only")

from hf_entmax.losses import fenchel_young, linear
from hf_entmax.losses.blocks import row_blocks
from hf_entmax.ops import candidates
from hf_entmax.ops.triton_gpu import row_host

ROWS, CLASSES, WIDTH = 6, 40, 8
launched = []


@pytest.fixture
def rows_on_device(monkeypatch):
    launched.clear()
    monkeypatch.setattr(row_host, "_launch", lambda kernel, *a, **k: launched.append(kernel))
    monkeypatch.setattr(candidates, "row_kernel", lambda scores: row_host)
    # There is no autocast for tensors without a device.
    monkeypatch.setattr(torch, "autocast", lambda *a, **k: contextlib.nullcontext())


def tensors(*shapes):
    return [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def labels():
    return torch.empty(ROWS, device="meta", dtype=torch.int64)


def test_a_look_at_a_value_would_be_seen(rows_on_device):
    (logits,) = tensors((ROWS, CLASSES))
    with pytest.raises(RuntimeError, match="meta"):
        bool(logits.sum() > 0)
    with pytest.raises(RuntimeError, match=r"[Mm]eta"):
        logits.nonzero()
    with pytest.raises(RuntimeError, match=r"[Mm]eta"):
        logits[logits > 0]
    assert len(list(row_blocks(logits))) == 1 and not launched


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("distributions", [False, True])
def test_on_logits(rows_on_device, learned, smoothing, distributions):
    (logits,) = tensors((ROWS, CLASSES))
    alpha = torch.empty((), device="meta", requires_grad=True) if learned else None
    keep = None if distributions else torch.empty(ROWS, device="meta", dtype=torch.bool)
    target = torch.empty(ROWS, CLASSES, device="meta") if distributions else labels()
    losses = fenchel_young.EntmaxLossFunction.apply(logits, target, keep, alpha, 1.5, smoothing)
    total = fenchel_young.reduce_losses(losses, keep, "mean", torch.Size([ROWS]), torch.float32)
    total.backward()
    assert logits.grad.shape == logits.shape and len(launched) == 3
    assert alpha is None or alpha.grad.shape == ()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}, {"smoothing": 0.1}])
def test_on_hidden_states(rows_on_device, learned, reduced, more):
    hidden, weight, bias = tensors((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    alpha = torch.empty((), device="meta", requires_grad=True) if learned else None
    layer = linear._Layer(weight.detach(), bias.detach(), None, 0.0, 1.5)
    layer = dataclasses.replace(layer, **more)
    scale = torch.empty((), device="meta", dtype=torch.float64) if reduced else None
    arguments = (hidden, weight, bias, labels(), alpha, layer, 4, scale)
    linear.LinearEntmaxLossFunction.apply(*arguments).sum().backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape and bias.grad.shape == bias.shape
    assert launched
