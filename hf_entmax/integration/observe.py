"""Looking at the attention of a model while it runs, one module at a time, and switching heads off or down."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from hf_entmax.integration.config_hook import IMPLEMENTATION
from hf_entmax.integration.discovery import AttentionSite, attention_sites, check_supported
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.sparse_rows import SparseRows

#: Name under which an attention module keeps its observers, a tuple, while it has some.
_OBSERVERS = "_entmax_observers"
_GATED = (
    "Heads cannot be gated while gradients are checkpointed: the backward pass would compute layers again without the gate. "
    "Call model.gradient_checkpointing_disable() or model.eval() first."
)
_lock = threading.Lock()
#: Identity of a configuration -> itself, its own attention implementation, and how many open blocks have replaced that.
_borrowed: dict[int, tuple[Any, str | None, int]] = {}


class AttentionCall(NamedTuple):
    """One call of one attention module.

    Attributes:
        site: the module, its name, its site and its heads.
        index: how often the module ran before in this forward pass; above 0 only in a module that layers share (ALBERT).
        weights: ``[B, H, T_q, T_k]``, after dropout if there is any, still in the autograd graph if there is one; None where
            nobody asked for weights.
        value: what the weights are of, ``[B, H_kv, T_k, D_v]``; as many heads as there are for keys.
        options: what else the attention was given: masks and limits.
    """

    site: AttentionSite
    index: int
    weights: Any
    value: Any = None
    options: AttentionOptions | None = None

    @property
    def keys(self) -> Tensor | None:
        """Which keys some query may look at: bool ``[B, T_k]``, False for padding; None where no mask is given."""
        if self.options is None or self.weights is None:
            return None
        batch, _, queries, keys = self.weights.shape
        allowed = self.options.visible(queries, keys, self.value.device)
        return None if allowed is None else allowed.any(2).any(1).expand(batch, keys)

    @property
    def name(self) -> str:
        """Name of the module; ``NAME#1``, ... for later calls of a module that layers share."""
        return f"{self.site.name}#{self.index}" if self.index else self.site.name


class Observer:
    """Someone who looks at the attention calls of a model; made by `observe_attention`."""

    def __init__(
        self,
        sites: list[AttentionSite],
        callback: Callable[[AttentionCall], Any] | None,
        gate: Callable[[AttentionCall], Tensor | None] | None,
        replace: Callable[[AttentionCall], Tensor | None] | None,
        sparse: bool,
        models: Sequence[nn.Module],
        configs: list[Any],
    ) -> None:
        self.callback, self.gate, self.replace, self.sparse = callback, gate, replace, sparse
        self._models, self._configs = {id(model) for model in models}, configs
        self.thread = threading.get_ident()
        self._sites = {id(site.module): site for site in sites}
        self._calls: Counter[int] = Counter()
        self._running = 0  # models within models that are in their forward now
        self._busy = False
        self._checkpointed = False  # whether the running forward leaves layers to be computed again

    @property
    def intervenes(self) -> bool:
        """Whether it changes what the model computes."""
        return self.gate is not None or self.replace is not None

    @property
    def reads_weights(self) -> bool:
        """Whether weights must be formed for it."""
        return self.callback is not None or self.replace is not None

    def begins(self, module: nn.Module, *_: Any) -> None:
        """Note the start of a model's forward; the outermost one restarts the count of calls."""
        if id(module) not in self._models:
            self._leave(module)
            return
        if threading.get_ident() == self.thread and not self._busy:
            if not self._running:
                self._calls.clear()
                self._checkpointed = torch.is_grad_enabled() and _checkpoints(module)
                if self._checkpointed and self.intervenes:
                    raise ValueError(_GATED)
            self._running += 1

    def ends(self, module: nn.Module, *_: Any) -> None:
        """Note the end of a model's forward, with or without an exception."""
        if id(module) in self._models and threading.get_ident() == self.thread and not self._busy:
            self._running = max(0, self._running - 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        """Copy nothing: a copy of the model made inside the block is not observed and keeps its attention."""
        for config in self._configs:
            copy.deepcopy(config, memo)._attn_implementation_internal = _borrowed[id(config)][1]
        return self

    def _leave(self, module: nn.Module) -> None:
        """Take the hooks off a copy of the model."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]

    def sees(
        self,
        module: nn.Module,
        weights: Tensor | SparseRows | None,
        value: Tensor,
        out: Tensor,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """Show a call to the observers and return the module's output ``[B, T_q, H, D]``, replaced or gated."""
        site = self._sites.get(id(module))  # a copy of the model made inside the block is another model
        if site is None or self._busy:  # and what a callback runs is its own affair
            return out
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            # Checkpointing computes a layer again in the backward pass: whoever looks has seen it.
            if self.intervenes:
                raise ValueError(_GATED)
            return out
        if self._checkpointed and not torch.is_grad_enabled():
            raise ValueError(
                "Attention weights of layers checkpointed with use_reentrant=True are outside the autograd graph: a loss on "
                "them would have no gradient. Call model.gradient_checkpointing_enable({'use_reentrant': False})."
            )
        call = AttentionCall(site, self._calls[id(module)], weights, value, options)
        self._calls[id(module)] += 1
        self._busy = True
        try:
            if self.callback is not None:
                self.callback(call)
            replaced = self.replace(call) if self.replace is not None else None
            factor = self.gate(call) if self.gate is not None else None
        finally:
            self._busy = False
        out = out if replaced is None else replaced.to(out.dtype)
        return out if factor is None else out * factor.to(out.dtype)


class _Observers(tuple[Observer, ...]):
    """The observers of a module; a copy of the module has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Observers:
        for observer in self:
            copy.deepcopy(observer, memo)
        return _Observers()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Observers, ()


def observers_of(module: nn.Module) -> tuple[Observer, ...]:
    """Return the observers of a module in this thread."""
    observers: tuple[Observer, ...] = getattr(module, _OBSERVERS, ())
    if observers and not torch.compiler.is_compiling():
        here = threading.get_ident()
        observers = tuple(observer for observer in observers if observer.thread == here)
    return observers


def is_observed(module: nn.Module) -> bool:
    """Check whether a module is observed, in any thread."""
    return bool(getattr(module, _OBSERVERS, ()))


@contextlib.contextmanager
def observe_attention(
    model: transformers.PreTrainedModel,
    callback: Callable[[AttentionCall], Any] | None = None,
    *,
    gate: Callable[[AttentionCall], Tensor | None] | None = None,
    replace: Callable[[AttentionCall], Tensor | None] | None = None,
    sparse: bool = False,
) -> Iterator[None]:
    """Call ``callback(call)`` at every attention call of a model, patched or plain softmax, and optionally gate its heads.

    The weights of one module exist only while the callback runs, so that no more than one layer's weights are held at a
    time. A plain model computes its softmax through the same path meanwhile; afterwards it is as it was.

    Blocks may be nested, and left in any order. A block sees what its own thread runs and nothing else; a model that a
    callback runs itself is not shown to that callback. Several threads may look at one model. A plain model that another
    thread runs *without* looking must not be running while the first block opens or the last one closes.

    Args:
        model: a ``PreTrainedModel`` whose attention goes through Transformers' attention interface.
        callback: given an `AttentionCall` with its weights. Without a callback no weights are formed.
        gate: given the same record; returns a factor of the heads' outputs, broadcastable to ``[B, T_q, H, D]``, or None. The
            gates of nested blocks multiply.
        replace: given the same record; returns the heads' outputs ``[B, T_q, H, D_v]`` to go on with, or None. Gates come after it.
        sparse: the callback reads `hf_entmax.ops.SparseRows` too and gets those where the backend that computes a
            module's attention has them at hand (see ``need_weights="sparse"`` of `hf_entmax.ops.entmax_attention`) and
            nobody else wants its weights; dense weights everywhere else.

    Raises:
        ValueError: if some attention of the model cannot be seen; the message names it. When the model runs with gradients
            and checkpoints its layers: if there is a gate, or the weights have no gradient (``use_reentrant=True``).
    """
    check_supported(model)
    sites = attention_sites(model)
    models = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    configs: dict[int, Any] = {id(part.config): part.config for part in models}
    configs |= {id(s.module.config): s.module.config for s in sites if hasattr(s.module, "config")}  # type: ignore[misc]
    observer = Observer(sites, callback, gate, replace, sparse, models, list(configs.values()))
    with contextlib.ExitStack() as stack:
        for part in models:
            stack.callback(part.register_forward_pre_hook(observer.begins).remove)
            stack.callback(part.register_forward_hook(observer.ends, always_call=True).remove)
        for site in sites:
            _add(site.module, observer)
            stack.callback(_remove, site.module, observer)
        for config in configs.values():
            _borrow(config)
            stack.callback(_give_back, config)
        yield


def _checkpoints(model: nn.Module) -> bool:
    """Check whether a model recomputes layers in its backward pass (gradient checkpointing)."""
    return any(getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules())


def _add(module: nn.Module, observer: Observer) -> None:
    with _lock:
        module.__dict__[_OBSERVERS] = _Observers((*module.__dict__.get(_OBSERVERS, ()), observer))


def _remove(module: nn.Module, observer: Observer) -> None:
    with _lock:
        others = _Observers(other for other in module.__dict__.pop(_OBSERVERS) if other is not observer)
        if others:
            module.__dict__[_OBSERVERS] = others


def _borrow(config: Any) -> None:
    with _lock:
        _, previous, blocks = _borrowed.get(id(config), (config, config._attn_implementation, 0))
        _borrowed[id(config)] = (config, previous, blocks + 1)
        config._attn_implementation_internal = IMPLEMENTATION


def _give_back(config: Any) -> None:
    with _lock:
        _, previous, blocks = _borrowed.pop(id(config))
        if blocks > 1:
            _borrowed[id(config)] = (config, previous, blocks - 1)
        else:
            config._attn_implementation_internal = previous
