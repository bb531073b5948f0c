"""How many score-sized tensors the torch path keeps alive at once."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_entmax.ops import entmax, entmax_attention


class LargestAlive(TorchDispatchMode):
    """Counts the storages of at least ``nbytes`` that operators made and that are alive, after every operator."""

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.alive, self.peak = nbytes, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.nbytes:
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    self.alive[storage._cdata] = StorageWeakRef(storage)
        self.alive = {key: ref for key, ref in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, len(self.alive))
        return result


def test_the_counter_counts():
    with LargestAlive(4000) as counter:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b * 2
        c = c - 1
        a = b.view(10, 100)
        a.add_(1)
    assert counter.peak == 3 and len(counter.alive) == 2, (counter.peak, c)


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 1.7, 2.0, "per head", "steep"])
def test_mapping(alpha):
    scores = torch.randn(2, 4, 256, 512, requires_grad=True)
    if isinstance(alpha, str):
        alpha = torch.linspace(1.1, 3 if alpha == "steep" else 1.9, 4).view(4, 1, 1).requires_grad_()
    cotangent = torch.randn_like(scores)
    with LargestAlive(scores.numel() * 2) as counter:
        probs = entmax(scores, alpha)
        forward = counter.peak
        probs.backward(cotangent)
    # The result alone going forward; the result and the gradient going back.
    assert forward == 1 and counter.peak == 2


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"is_causal": True}, {"position_bias": True}, {"attention_mask": True}], ids=str
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention(options, kv_heads):
    # Long and thin, so that queries, keys and values are not of the size of the scores themselves.
    query, key, value = (torch.randn(1, heads, 512, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    alpha = torch.linspace(1.1, 1.9, 4).requires_grad_()
    scores_bytes = 4 * 512 * 512 * 4
    tensors = {"position_bias": torch.randn(1, 4, 512, 512), "attention_mask": torch.zeros(1, 1, 512, 512)}
    options = {name: tensors.get(name, value) for name, value in options.items()}
    with LargestAlive(scores_bytes // 2) as counter:
        out, _ = entmax_attention(query, key, value, alpha, backend="torch", **options)
        out.sum().backward()
    # The derivative of the cap needs the capped scores a second time.
    assert counter.peak <= (4 if "softcap" in options else 3)
