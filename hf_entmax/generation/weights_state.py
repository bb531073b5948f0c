"""What tells cheaply that the weights of a model have changed while a cache holds what the old ones computed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_entmax.integration.interface import HEADS_MODULE

_ALPHA = f".{HEADS_MODULE}.a"


class WatchedWeights:
    """The weights of a model, as they were when a cache was first filled.

    Noticed are: a parameter written to in place (optimiser steps, ``copy_``, ``load_state_dict``), one whose storage was
    replaced (``parameter.data = other``, a new dtype or device), and adapters of PEFT that were activated, switched off, merged or
    unmerged. Not noticed are: values written through ``parameter.data`` in place, which PyTorch does not count; buffers; and, for
    a cache made of a configuration or for weights that are offloaded, anything but what the attention modules show.

    It costs two numbers per parameter and no look at a value. The model is not kept alive; a copy of the cache watches the same
    model, and one that was pickled watches none.

    Args:
        model: whose weights; None watches nothing.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._state: Any = None

    def forget(self) -> None:
        """Take the next look as the first."""
        self._state = None

    def changed(self) -> bool:
        """Compare with the first look, which this is if there was none."""
        model = None if self._model is None else self._model()
        if model is None:
            return False
        now = _state(model)
        if self._state is None:
            self._state = now
        return now != self._state

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedWeights:
        twin = WatchedWeights()
        twin._model, twin._state = self._model, self._state
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedWeights, ()


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for tensors of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _state(model: nn.Module) -> Any:
    # Alphas have an error of their own.
    parameters = [p for name, p in model.named_parameters() if not name.endswith(_ALPHA)]
    if any(parameter.is_meta for parameter in parameters):
        return ()  # offloaded: weights come and go with every layer
    numbers = [(_address(parameter), version(parameter)) for parameter in parameters]
    modules: Any = model.modules()
    adapters = [
        (tuple(module.active_adapters), module.disable_adapters, tuple(getattr(module, "merged_adapters", ())))
        for module in modules
        if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters") and hasattr(module, "base_layer")
    ]
    return numbers, adapters


def _address(parameter: torch.Tensor) -> int:
    local: Any = getattr(parameter, "to_local", lambda: parameter)()
    return local.data_ptr()
