"""What stands in the place of the attention mask while Transformers batches continuously.

Its engine lays the queries of many requests in one row, keeps their keys in blocks of one large cache, and hands every
attention call the mask that parts the requests. That mask holds every query against every key of every request. Here it is
a `PagedMask` instead: it names the step, which knows where the keys of each request lie, and is never written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_entmax.ops.backends import Backend
from hf_entmax.ops.options import AttentionOptions


class PagedCall(NamedTuple):
    """One attention module that asks a step for its output.

    Attributes:
        module: the attention module.
        alpha: of its heads, or None where its mapping is not entmax.
        backend: what it is to be computed by.
        attend: ``attend(query, key, value, options)`` over keys ``[1, H_kv, T_k, D]`` that lie in one piece: the output
            ``[1, H, T_q, D_v]``.
    """

    module: nn.Module
    alpha: float | Tensor | None
    backend: Backend
    attend: Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]


class Step(Protocol):
    """One forward pass of the engine."""

    def visible_keys(self, module: nn.Module) -> Tensor:
        """Count the keys that each query of a module's layer may attend to, int64 ``[1, 1, T_q]``."""
        ...

    def attend(self, call: PagedCall, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store new keys and values, and attend to them and to the past ones of the same request.

        Args:
            call: who asks.
            query: ``[1, H, T_q, D]``, the requests one after the other.
            key: the new keys, ``[1, H_kv, T_q, D]``.
            value: the new values, ``[1, H_kv, T_q, D_v]``.
            options: what applies to every request alike; causality and windows are the step's.

        Returns:
            ``[1, T_q, H, D_v]``.
        """
        ...


class PagedMask(torch.Tensor):
    """A mask ``[1, 1, T_q, T_k]`` of a step, to be passed on as it is; any operation on it is an error."""

    step: Step

    @staticmethod
    def __new__(cls, step: Step, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PagedMask:
        """Name the step."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.step = step
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"This model computes with its attention mask ({func}), but continuous batching of patched models hands over none "
            "that is written out. Use model.generate with a padded batch."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedMask(shape={tuple(self.shape)})"
