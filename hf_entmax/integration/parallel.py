"""Attention whose heads (tensor parallelism) or tokens (context parallelism) are spread over processes.

Tensor parallelism gives each process some of the heads of an attention module. The learned numbers stay whole on every
process, they are few, so that reading, setting, scheduling and saving them needs nothing special; each call of the
attention takes those of its own heads, and the gradients of all heads are gathered again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Numbers = TypeVar("Numbers", float, Tensor, dict)


def heads_mesh(module: nn.Module, own: int, total: int) -> DeviceMesh | None:
    """Return the processes among which the heads of an attention module are split, or None where they are not.

    ``own`` are the query heads that this process was given of ``total``; the mesh is that of the sharded projections.
    """
    if own == total:
        return None
    for parameter in module.parameters() if _distributed() else ():
        from torch.distributed.tensor import DTensor

        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            mesh = mesh if mesh.ndim == 1 else mesh["tp"]
            if mesh.size() * own == total:
                return mesh
    raise ValueError(
        f"{type(module).__name__} has {total} heads, but its attention was given {own} of them. Heads may be split "
        "among processes by tensor parallelism with DTensors (from_pretrained with a tp_plan), in equal parts: choose "
        "a number of processes that divides the number of heads."
    )


def of_own_heads(numbers: Numbers, mesh: DeviceMesh, dim: int = 0) -> Numbers:
    """Select the part of this process's heads; the backward pass gathers the gradients of all heads.

    ``numbers`` are one for all heads, a tensor with the heads along ``dim``, or a dict of such.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if isinstance(numbers, dict):
        return {name: of_own_heads(value, mesh, dim) for name, value in numbers.items()}
    if not isinstance(numbers, Tensor):
        return numbers
    whole = DTensor.from_local(numbers.contiguous(), mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(dim)]).to_local()


def of_all_heads(own: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Gather what each process has for its heads, along ``dim``."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(own.contiguous(), mesh, [Shard(dim)], run_check=False).full_tensor()


def same_everywhere(heads: nn.Module, beside: Tensor) -> None:
    """Let new numbers drawn at random be those of the first process; ``beside`` is a parameter of their attention module."""
    mesh = getattr(beside, "device_mesh", None)
    if mesh is None or beside.device.type == "meta":
        return
    for parameter in heads.parameters():
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            torch.distributed.broadcast(parameter.data, torch.distributed.get_global_rank(group, 0), group)


def refuse_context_parallel() -> None:
    """Raise inside torch's ``context_parallel``."""
    if not _distributed():
        return
    # While tokens are split, torch replaces this function by one of its own; other calls see a part of the keys.
    current = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    if current.startswith("torch.distributed"):
        raise NotImplementedError(
            "Entmax attention does not work under context parallelism: each process holds some of the keys, while the "
            "threshold of an entmax depends on all of them. Use tensor parallelism or FSDP, or shorter sequences."
        )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
