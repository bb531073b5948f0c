"""Length scaling at an attention call: the query is multiplied by the factor of its head and its number of keys.

The attention function is given queries, keys and values alone. Where the factor depends on the hidden state, a hook that
runs before the attention module keeps the module's input until the attention function takes it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_entmax.integration.parallel import of_all_heads, of_own_heads
from hf_entmax.length import LengthScaling
from hf_entmax.ops.options import AttentionOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Where an attention module keeps its input during a call: a dict, by thread, because several may run one model.
KEPT_INPUT = "_entmax_input"


def length_scaling_of(heads: nn.Module | None) -> LengthScaling | None:
    """Return the length scaling that belongs to the numbers of an attention module, PEFT's trained copy of it where there is one."""
    return getattr(heads, "length_scaling", None)


def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep what an attention module is called with: runs before every call of it."""
    hidden = args[0] if args else kwargs.get(_first_parameter(type(module)))
    getattr(module, KEPT_INPUT)[_thread()] = hidden


def scaled_query(
    module: nn.Module,
    heads: nn.Module | None,
    query: Tensor,
    keys: int,
    options: AttentionOptions,
    mesh: DeviceMesh | None,
    visible: Tensor | None = None,
) -> Tensor:
    """Multiply the query by the factor of its head, its number of visible keys and (if adaptive) its hidden state.

    ``query`` ``[B, H, T_q, D]`` is of this process's own heads of ``module``, ``heads`` the child with the learned numbers;
    the query itself comes back where there is no length scaling. ``visible`` says how many keys each query may see where that
    does not follow from ``keys`` and ``options``.
    """
    hidden = getattr(module, KEPT_INPUT, {}).pop(_thread(), None)
    scaling = length_scaling_of(heads)
    if scaling is None:
        return query
    if not scaling.needs_hidden:
        hidden = None
    else:
        if isinstance(hidden, Tensor) and hidden.dim() == 2:  # vision towers run without a batch
            hidden = hidden[None]
        if not isinstance(hidden, Tensor) or hidden.shape[:-1] != (query.shape[0], query.shape[2]):
            found = tuple(hidden.shape) if isinstance(hidden, Tensor) else hidden
            raise ValueError(
                f"length_scaling='adaptive' needs one hidden state for each query, but {type(module).__name__} has queries "
                f"{tuple(query.shape)} = [B, H, T_q, D] and was called with {found}. Choose length_scaling='log', or leave "
                "this module out with sites, layers or exclude."
            )
    visible = options.visible_keys(query.shape[-2], keys, query.device) if visible is None else visible
    if mesh is not None and visible.shape[1] > 1:
        visible = of_all_heads(visible, mesh, 1)
    factor: Tensor = scaling(visible, hidden if hidden is None else hidden.to(query.device))
    if mesh is not None:
        factor = of_own_heads(factor, mesh, 1)
    return (query * factor[..., None]).to(query.dtype)


def input_width(module: nn.Module) -> int:
    """Return the width of the hidden states that enter an attention module, which is that of its first projection."""
    for child in module.modules():
        width = getattr(child, "in_features", getattr(child, "nx", None))  # nx: Conv1D of GPT-2
        if isinstance(width, int):
            return width
    raise ValueError(
        f"length_scaling='adaptive' reads the hidden states that enter {type(module).__name__}, but it has no linear "
        "projection that tells their width. Choose length_scaling='log', or leave it out with sites, layers or exclude."
    )


@functools.cache
def _first_parameter(cls: type[nn.Module]) -> str:
    return list(inspect.signature(cls.forward).parameters)[1]


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
