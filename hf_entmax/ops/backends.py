"""Which implementation of attention runs here, and why the others do not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
from types import ModuleType

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from hf_entmax.config import BACKENDS as BACKENDS
from hf_entmax.config import Backend as Backend
from hf_entmax.ops import self_check
from hf_entmax.ops.options import AttentionOptions
from hf_entmax.ops.solve import recorded, traced, transformed

_KERNELS = {
    "numba": ("hf_entmax.ops.numba_cpu", "numba", "pip install 'hf_entmax[cpu]'"),
    "triton": ("hf_entmax.ops.triton_gpu", "triton", "pip install 'hf_entmax[gpu]'"),
}
#: The first version of a library that works, and the first that was not tried: the kernels use its internals.
_VERSIONS = {"numba": ((0, 60), (0, 69))}
_loaded: dict[str, ModuleType | str] = {}
_refused_on: dict[tuple[str, int], str] = {}
logger = logging.getLogger(__name__)


def available_backends() -> dict[str, str]:
    """Say for every backend whether it can run here and, where not, why and what to do.

    Returns:
        A dict from backend name to a sentence that begins with "available" or "unavailable". Nothing heavy is imported.

    Examples:
        >>> available_backends()["torch"]
        'available: the dense reference path, on every device and dtype'
    """
    report = {"torch": "available: the dense reference path, on every device and dtype"}
    for name, description in (("numba", "CPU tensors"), ("triton", "CUDA tensors")):
        reason = _missing(name)
        report[name] = f"unavailable: {reason}" if reason else f"available: the fused kernel for {description}"
    return report


def _missing(name: str) -> str | None:
    """Return why a kernel package cannot run on this machine, without importing its compiler."""
    package, library, hint = _KERNELS[name]
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed ({hint})"
    reason = _wrong_version(library)
    if reason is not None:
        return reason
    if name == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not part of this installation"
    loaded = _loaded.get(name)
    return loaded if isinstance(loaded, str) else None


def _wrong_version(library: str) -> str | None:
    if library not in _VERSIONS:
        return None
    first, after = _VERSIONS[library]
    try:
        version = importlib.metadata.version(library)
        release = tuple(int(part) for part in version.split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    if first <= release < after:
        return None
    wanted = f"{library}>={'.'.join(map(str, first))},<{'.'.join(map(str, after))}"
    return f"{library} {version} is installed, and this version of hf_entmax works with others: pip install '{wanted}'"


def kernel_package(name: str) -> ModuleType | str:
    """Import a kernel package once; return it, or why it cannot be used."""
    if torch.compiler.is_compiling() or name not in _loaded:
        _load(name)
    return _loaded[name]


def _checked(name: str, module: ModuleType) -> str | None:
    """Check a kernel once on a kind of processor that it was never tried on; return why it is not to be used, or None."""
    if name != "numba" or self_check.tried_here():
        return None
    fault = self_check.fault(module, torch.device("cpu"))
    return None if fault is None else _refused(name, f"on this processor ({platform.machine()})", fault)


def _refused(name: str, where: str, fault: str) -> str:
    reason = f"{where} its kernel is wrong: {fault}"
    hint = "Slower backends take its place. Please report it, with the table of `hf-entmax doctor --check`"
    logger.warning("The %s backend is not used: %s. %s.", name, reason, hint)
    return reason


def _fault_on(name: str, device: torch.device) -> str | None:
    """Say why the kernels are not to be used on a GPU, or return None: its kind is tried before it is used for the first time."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    if (name, index) not in _refused_on:
        from hf_entmax.ops.triton_gpu import first_use

        fault = first_use.fault_of(index)
        if fault is None:
            return None
        _refused_on[name, index] = _refused(name, f"on this GPU ({torch.cuda.get_device_name(index)})", fault)
    return _refused_on[name, index]


# Compilers cannot trace an import: they run this while they trace, before they look at what is loaded.
def _load(name: str) -> bool:
    if name in _loaded:
        return True
    reason = _missing(name)
    if reason is None:
        try:
            module = importlib.import_module(_KERNELS[name][0])
        except ImportError as error:
            reason = f"{_KERNELS[name][0]} cannot be imported: {error}"
        else:
            if hasattr(module, "attention") and hasattr(module, "unsupported"):
                reason = _checked(name, module)
                _loaded[name] = module if reason is None else reason
                return True
            reason = f"{_KERNELS[name][0]} has no attention kernel in this installation"
    if _wrong_version(_KERNELS[name][1]) is not None:
        logger.warning("The %s backend is not used: %s. Slower backends take its place.", name, reason)
    _loaded[name] = reason
    return True


# What `torch.compiler.assume_constant_result` sets; calling it would import Dynamo, and Dynamo Triton.
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
_fault_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel_module(
    name: str, query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, options: AttentionOptions
) -> ModuleType | None:
    """Return the package of fused kernels for a call of `entmax_attention`, or None for the dense path.

    ``name`` is one of `BACKENDS`; for ``"auto"`` device and dtype of the query decide.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; the options are {', '.join(map(repr, BACKENDS))}.")
    # A recorded graph is to run where hf_entmax is not: plain operations only, unless a kernel is asked for by name.
    if name == "torch" or (name == "auto" and recorded()):
        return None
    if name == "auto":
        candidate = {"cpu": "numba", "cuda": "triton"}.get(query.device.type)
        module = "" if candidate is None else kernel_package(candidate)
        if isinstance(module, str) or module.unsupported(query, key, value, alpha, options) is not None:
            return None
        return module if _fault_on(str(candidate), query.device) is None else None
    if traced():
        raise ValueError(f"backend={name!r} cannot be recorded by torch.jit.trace. Use backend='auto' or 'torch'.")
    module = kernel_package(name)
    if isinstance(module, str):
        raise ValueError(f"backend={name!r} cannot run here: {module}. Use backend='auto' or 'torch'.")
    reason = module.unsupported(query, key, value, alpha, options) or _fault_on(name, query.device)
    if reason is not None:
        raise ValueError(
            f"backend={name!r} cannot be used: {reason}. Use backend='auto' or 'torch', or change the argument."
        )
    return module


def plain(tensor: Tensor) -> bool:
    """Tell whether a kernel may read this tensor's memory: it is PyTorch's own, and nothing takes its operations over."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and not _len_torch_dispatch_stack()


def row_kernel(scores: Tensor) -> ModuleType | None:
    """Return the module of fused kernels for independent rows of scores ``[n, V]``, or None where there is none for them.

    There is none on other devices, for float64 and in a graph being traced.

    Returns:
        A module with two functions and a constant: ``solve_rows(scores, u, floor=-inf, out=None)``, a
        `hf_entmax.ops.solve.RowSolution` whose probabilities are all written to ``out`` where that is given;
        ``recompute_rows(scores, maximum, shift, scale, u, out)``, the same probabilities once more; and ``ABOVE_TWO``,
        whether they take ``u = alpha - 1`` above 1.
    """
    if torch.compiler.is_compiling() or recorded() or not scores.numel():
        return None
    if not plain(scores) or transformed():
        return None
    for name in {"cpu": ("numba", "triton"), "cuda": ("triton",)}.get(scores.device.type, ()):
        module = kernel_package(name)
        if not isinstance(module, str) and (kernel := module.row_kernel(scores)) is not None:
            return kernel if _fault_on(name, scores.device) is None else None
    return None
