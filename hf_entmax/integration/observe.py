"""Looking at the attention weights of a model while it runs, one module at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_entmax.integration import interface
from hf_entmax.integration.discovery import AttentionSite, attention_sites, check_supported
from hf_entmax.integration.interface import CHILD, IMPLEMENTATION, LEFT_ALONE
from hf_entmax.ops.sparse_rows import SparseRows


@contextlib.contextmanager
def observe_attention(
    model: PreTrainedModel, callback: Callable[[AttentionSite, Any], None], *, sparse: bool = False
) -> Iterator[None]:
    """Call ``callback(site, weights)`` at every attention call of a model, patched or plain softmax.

    The weights ``[B, H, T_q, T_k]`` of one module exist only while the callback runs, so that no more than one layer's
    weights are held at a time. A plain model computes its softmax through the same path meanwhile; afterwards it is as
    it was.

    Args:
        model: a ``PreTrainedModel`` whose attention goes through Transformers' attention interface.
        callback: given the ``AttentionSite`` and the weights, after dropout if there is any, still in the autograd graph
            if there is one.
        sparse: the callback reads `hf_entmax.ops.SparseRows` too and gets those where the backend that computes a
            module's attention has them at hand (see ``need_weights="sparse"`` of `hf_entmax.ops.entmax_attention`) and
            nobody else wants its weights; dense weights everywhere else.

    Raises:
        ValueError: if some attention of the model cannot be seen; the message names it.
    """
    check_supported(model)
    sites = {id(site.module): site for site in attention_sites(model)}

    def look(module: nn.Module, weights: Tensor | SparseRows) -> None:
        site = sites.get(id(module))  # another model may run inside the same block
        if site is not None:
            callback(site, weights)

    plain = [s.module for s in sites.values() if CHILD not in s.module._modules and not hasattr(s.module, LEFT_ALONE)]
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    configs |= {id(s.module.config): s.module.config for s in sites.values() if hasattr(s.module, "config")}  # type: ignore[misc]
    previous = [(config, config._attn_implementation) for config in configs.values()]
    observer = interface.Observer(look, sparse)
    interface._observers.append(observer)
    try:
        for module in plain:
            setattr(module, LEFT_ALONE, True)
        for config, _ in previous:
            config._attn_implementation_internal = IMPLEMENTATION
        yield
    finally:
        interface._observers.remove(observer)
        for config, implementation in previous:
            config._attn_implementation_internal = implementation
        for module in plain:
            delattr(module, LEFT_ALONE)
