"""The mask function that goes with the attention: a description where one suffices, a dense mask where it does not.

Transformers asks for the mask once per forward pass and hands it to every layer. Written out it is ``[B, 1, T_q, T_k]``
numbers that every head of every layer reads. Most masks are only "causal", "window of w" and "these keys are padding";
such a mask is handed over as a `StructuredMask`, which the attention function reads without ever writing it out. To all
other code it is the additive mask of eager attention: any operation on it gets that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from hf_entmax.integration.families import BOOLEAN_MASKS
from hf_entmax.ops.solve import traced


class Limits(NamedTuple):
    """Which keys a query may see: ``j <= i + T_k - T_q`` if causal, ``j > i + T_k - T_q - window``."""

    causal: bool
    window: int | None


class StructuredMask(torch.Tensor):
    """An additive attention mask ``[B, 1, T_q, T_k]`` that knows what it says and is written out only when it must be.

    Attributes:
        limits: the causal limit and the window.
        key_padding_mask: bool ``[B, T_k]``, True = real key; None where no key is padding.
    """

    limits: Limits
    key_padding_mask: Tensor | None
    _build: Callable[[], Tensor]
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        limits: Limits,
        key_padding_mask: Tensor | None,
        build: Callable[[], Tensor],
    ) -> StructuredMask:
        """Describe a mask; ``build`` writes it out."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.limits, mask.key_padding_mask, mask._build, mask._dense = limits, key_padding_mask, build, None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dense(self) -> Tensor:
        """Write the mask out, as eager attention has it."""
        if self._dense is None:
            self._dense = self._build()
        return self._dense

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_written_out, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        padding = "none" if self.key_padding_mask is None else "some keys"
        return f"StructuredMask(shape={tuple(self.shape)}, {self.limits}, padding={padding})"


def entmax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor | None:
    """Build the mask that Transformers asks for, as ``eager_mask`` would or as its description.

    The arguments are those of ``eager_mask``; ``config`` among ``kwargs`` says which model asks.

    Returns:
        A bool mask, True = may attend, for the few models that read it as that (``families.BOOLEAN_MASKS``). Otherwise
        a `StructuredMask` where ``mask_function`` is a causal, bidirectional or sliding-window one and the last query
        stands at the last key; otherwise the dense additive mask, or None where ``eager_mask`` says that none is needed.
    """
    given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if getattr(kwargs.get("config"), "model_type", None) in BOOLEAN_MASKS:
        return sdpa_mask(*given, **{**kwargs, "allow_is_causal_skip": False})  # type: ignore[arg-type]

    def build() -> Tensor | None:
        return eager_mask(*given, dtype, **kwargs)  # type: ignore[arg-type]

    if torch.compiler.is_compiling() or traced() or isinstance(q_offset, Tensor):
        return build()
    limits = limits_of(mask_function)
    aligned = limits is not None and (
        not (limits.causal or limits.window) or q_offset + q_length == kv_offset + kv_length
    )
    if limits is None or not aligned:
        return build()
    padding = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if padding is not None and padding.shape != (batch_size, kv_length):
        return build()
    if padding is not None and padding.device.type == "cpu" and bool(padding.all()):
        padding = None  # elsewhere looking would wait for the device
    if padding is None and limits == Limits(False, None) and kwargs.get("allow_is_bidirectional_skip"):
        return None
    device = torch.device(kwargs.get("device", "cpu") if attention_mask is None else attention_mask.device)
    return StructuredMask((batch_size, 1, q_length, kv_length), dtype, device, limits, padding, build)  # type: ignore[arg-type]


def limits_of(mask_function: Callable[..., Any]) -> Limits | None:
    """Read the limits of a mask function of Transformers, None where `Limits` cannot describe it."""
    if mask_function is causal_mask_function:
        return Limits(True, None)
    if mask_function is bidirectional_mask_function:
        return Limits(False, None)
    name, held = getattr(mask_function, "__qualname__", ""), _closure(mask_function)
    if getattr(mask_function, "__module__", "") != causal_mask_function.__module__:
        return None
    if name == "sliding_window_overlay.<locals>.inner_mask":
        window = held.get("sliding_window")
        return Limits(False, window) if isinstance(window, int) and window > 0 else None
    if name == "and_masks.<locals>.and_mask":
        parts = [limits_of(part) for part in held.get("mask_functions", ())]
        known = [part for part in parts if part is not None]
        if not parts or len(known) < len(parts):
            return None
        windows = [part.window for part in known if part.window is not None]
        return Limits(any(part.causal for part in known), min(windows, default=None))
    return None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return (
        {} if code is None else {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    )


def _written_out(value: Any) -> Any:
    return value.dense() if isinstance(value, StructuredMask) else value
