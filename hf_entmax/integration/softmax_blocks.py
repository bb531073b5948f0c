"""Which attention modules run as softmax for a while: a state of the calling context, not of the model.

A block opens for the thread (or the asyncio task) that enters it and for what that starts from its own context. Each block has
a number of its own, kept in a context variable and on the modules it is about; a module runs as softmax while the two have a
number in common. Nothing of the model is exchanged, so blocks may be nested and left in any order, and what is saved, copied
or unpatched meanwhile is the sparse model.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "_entmax_softmax_blocks"
_numbers = itertools.count()
_lock = threading.Lock()
#: Number of an open block -> the layers of its model that may be checkpointed, and whether gradients were on when it opened.
_open: dict[int, tuple[Sequence[Any], bool]] = {}
_entered: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(_ATTRIBUTE, default=frozenset())


class _Blocks(frozenset):  # type: ignore[type-arg]
    """Numbers of the open blocks of a module. A copy of the module is in none of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Blocks:
        return _Blocks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Blocks, ()


@contextlib.contextmanager
def softmax_block(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let attention modules of a model run as softmax wherever this context runs them."""
    number, modules = next(_numbers), list(modules)
    layers = [layer for layer in model.modules() if hasattr(layer, "gradient_checkpointing")]
    with _lock:
        _open[number] = layers, torch.is_grad_enabled()
        for module in modules:
            module.__dict__[_ATTRIBUTE] = _Blocks({*module.__dict__.get(_ATTRIBUTE, ()), number})
    _entered.set(_entered.get() | {number})
    try:
        yield
    finally:
        # Not a token's reset: that would take back what later blocks, still open, have added.
        _entered.set(_entered.get() - {number})
        with _lock:
            for module in modules:
                left = _Blocks(module.__dict__.pop(_ATTRIBUTE, frozenset()) - {number})
                if left:
                    module.__dict__[_ATTRIBUTE] = left
            del _open[number]


def runs_softmax(module: nn.Module) -> bool:
    """Tell if a block of this context is open for an attention module."""
    blocks = getattr(module, _ATTRIBUTE, None)
    return bool(blocks) and _is_ours(module, blocks)


@torch.compiler.disable(
    reason="softmax_attention(model) is open, of which a compiled graph cannot know: run the model uncompiled"
)
def _is_ours(module: nn.Module, blocks: _Blocks) -> bool:
    ours = blocks & _entered.get()
    for number in ours:
        layers, with_gradients = _open.get(number, ((), False))
        if not (with_gradients or torch.is_grad_enabled()):
            continue
        if any(layer.gradient_checkpointing and layer.training for layer in layers):
            raise ValueError(
                "Gradients cannot be checkpointed inside softmax_attention: the backward pass would compute layers again, as "
                "entmax where the block is closed by then. Call model.gradient_checkpointing_disable() or model.eval() first, "
                "or open the block inside torch.no_grad()."
            )
    # The replicas of DataParallel run in threads of their own, and are made anew for every call.
    return bool(ours) or getattr(module, "_is_replica", False)
