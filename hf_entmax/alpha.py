"""Alpha of the heads of one attention module: learned, fixed or tied; or the options of another mapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class LearnedNumbers(nn.Module):
    """Numbers that an attention module learns beside its weights: how they are kept, cast and checked.

    Args:
        num_heads: number of query heads, H.
        keep_float32: stay float32 when the model is cast to a lower precision.
    """

    def __init__(self, num_heads: int, keep_float32: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.keep_float32 = keep_float32

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """Make a parameter to be filled by ``reset_parameters``."""
        # A dtype only where float32 is promised: otherwise the default dtype of the surrounding model counts.
        return nn.Parameter(torch.empty(*shape, dtype=torch.float32 if self.keep_float32 else None))

    def reset_parameters(self) -> None:
        """Set the parameters to their start."""
        raise NotImplementedError

    def check_loaded(self, name: str, values: Tensor) -> None:
        """Refuse raw numbers that are infinite or NaN: they would run as a bound, or as NaN, and never learn.

        ``name`` is their key in the checkpoint, for the message.
        """
        if values.device.type != "meta" and not (finite := values.isfinite()).all():
            held = values if values.numel() < 100 else values[~finite][:4]
            raise ValueError(
                f"The checkpoint holds {held.tolist()} under {name!r}; the raw numbers of learned alphas and of length "
                "scaling must be finite. The checkpoint is damaged, or its training diverged."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, _ in self.named_parameters(recurse=False):
            if isinstance(values := state_dict.get(f"{prefix}{name}"), Tensor):
                self.check_loaded(f"{prefix}{name}", values)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedNumbers:
        # `model.half()`, `model.to(torch.bfloat16)`: follow the device, keep the precision.
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not self.keep_float32:
                return moved
            return tensor.to(moved.device)

        return super()._apply(keep, recurse)


class LearnedAlpha(LearnedNumbers):
    r"""One bounded number per head, ``value = lo + (hi - lo) * sigmoid(a)``.

    For alpha and the range (1, 2) this is ``alpha = 1 + sigmoid(a)``, Correia et al. 2019, eq. 10. The number is
    differentiable in ``a`` and can never leave its interval, whatever the optimiser does.

    Args:
        num_heads: number of query heads, H.
        init: the value at the start, strictly inside ``bounds``, or ``"normal"`` for ``a ~ N(0, 1)``.
        bounds: the open interval ``(lo, hi)``.
        shared: all heads share one number.
        keep_float32: stay float32 when the model is cast to a lower precision.
    """

    def __init__(
        self,
        num_heads: int,
        init: float | str = 1.01,
        bounds: tuple[float, float] = (1.0, 2.0),
        *,
        shared: bool = False,
        keep_float32: bool = True,
    ) -> None:
        super().__init__(num_heads, keep_float32)
        self.init = init
        self.bounds = bounds
        self.a = self.new_parameter(1 if shared else num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set ``a`` so that the value is ``init`` (or draw it)."""
        with torch.no_grad():
            if self.init == "normal":
                self.a.normal_()
            else:
                lo, hi = self.bounds
                share = (float(self.init) - lo) / (hi - lo)
                self.a.fill_(math.log(share) - math.log1p(-share))

    def forward(self) -> Tensor:
        """Return the values, float32 ``[num_heads]``."""
        return self.bounded().expand(self.num_heads)

    def bounded(self) -> Tensor:
        """Return the values in the shape of ``a``, float32."""
        lo, hi = self.bounds
        return lo + (hi - lo) * torch.sigmoid(self.a.float())

    def set_(self, values: Tensor | float) -> None:
        """Set the values in place; those at or beyond a bound are moved just inside it.

        Args:
            values: a number, or ``[num_heads]`` (``[1]`` where the heads share one).
        """
        lo, hi = self.bounds
        tiny = 1e-4
        with torch.no_grad():
            share = (torch.as_tensor(values, dtype=torch.float64, device=self.a.device) - lo) / (hi - lo)
            wanted = torch.logit(share.clamp(tiny, 1 - tiny)).expand(self.a.shape)
            if hasattr(self.a, "device_mesh"):  # FSDP2 has split it
                from torch.distributed.tensor import distribute_tensor

                mesh, placements = self.a.device_mesh, self.a.placements  # type: ignore[attr-defined]
                wanted = distribute_tensor(wanted.to(self.a.dtype).contiguous(), mesh, placements)
            self.a.copy_(wanted)

    def extra_repr(self) -> str:
        """Show heads, bounds and start."""
        shared = ", shared" if self.a.numel() == 1 < self.num_heads else ""
        return f"{self.num_heads}, bounds={self.bounds}, init={self.init}{shared}"


class FixedAlpha(nn.Module):
    """The same number for all heads, not learned; a Python float, so that kernels can choose their exact branch.

    Args:
        num_heads: number of query heads, H.
        value: the number.
    """

    def __init__(self, num_heads: int, value: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.value = float(value)

    def forward(self) -> float:
        """Return the value."""
        return self.value

    def set_(self, value: float) -> None:
        """Change the value (schedules do so)."""
        self.value = float(value)

    def extra_repr(self) -> str:
        """Show heads and value."""
        return f"{self.num_heads}, value={self.value}"


class TiedAlpha(nn.Module):
    """The alpha of another attention module, used by this one too.

    Args:
        num_heads: number of query heads, H.
        owner: the module that holds the one shared number. It is deliberately not registered as a child: the
            parameter has one name in the checkpoint, that of its owner.
    """

    def __init__(self, num_heads: int, owner: LearnedAlpha) -> None:
        super().__init__()
        self.num_heads = num_heads
        object.__setattr__(self, "_owner", (owner,))

    @property
    def owner(self) -> LearnedAlpha:
        """The module that holds the shared number."""
        return self._owner[0]  # type: ignore[index,return-value]

    @property
    def bounds(self) -> tuple[float, float]:
        """The open interval that the shared number stays in."""
        return self.owner.bounds

    def forward(self) -> Tensor:
        """Return the shared value, float32 ``[num_heads]``."""
        return self.owner()[:1].expand(self.num_heads)

    def set_(self, values: Tensor | float) -> None:
        """Set the shared value."""
        self.owner.set_(values)


class MappingOptions(nn.Module):
    """The options of a mapping other than entmax, one per head where they are learned.

    Args:
        num_heads: number of query heads, H.
        mapping: name in ``hf_entmax.ops.controllable.ATTENTION_MAPPINGS``.
        options: option name -> module giving a float or a tensor ``[num_heads]``.
    """

    def __init__(self, num_heads: int, mapping: str, options: dict[str, nn.Module]) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.mapping = mapping
        self.options = nn.ModuleDict(options)

    def forward(self) -> dict[str, Tensor | float]:
        """Return the value of each option, by name."""
        return {name: module() for name, module in self.options.items()}
