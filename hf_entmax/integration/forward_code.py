"""What the code of a module's ``forward`` does: whether it calls the attention interface, or a softmax of its own."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterator

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Names of functions that give softmax weights. ``softmax_scale`` is a number, and ``softmax_scaling`` a module.
_SOFTMAX = re.compile(
    r"(\w+_)?softmax|\w*Softmax|logsumexp|scaled_dot_product_attention|multi_head_attention_forward|flex_attention"
    r"|_?(sdpa|flash)_attention_forward"
)
#: A router weighs experts, not tokens: its code speaks of experts, or it is called a router or a gate.
_ROUTER_CLASS = re.compile(r"Router|Gating|Gate$|MoE$")
_ROUTER_CODE = re.compile(r"expert|router", re.IGNORECASE)


@functools.cache
def _calls_interface(forward: object) -> bool:
    codes = list(_codes(inspect.unwrap(forward)))  # type: ignore[arg-type]
    if not any(_INTERFACE in code.co_names for code in codes):
        return False
    # getattr(ALL_ATTENTION_FUNCTIONS, name, eager) finds no function whatever the name: Kosmos-2.5's images stay softmax.
    loads = [[step.argval for step in dis.get_instructions(c) if step.opname.startswith("LOAD")] for c in codes]
    return not any(pair == ("getattr", _INTERFACE) for code in loads for pair in itertools.pairwise(code))


def uses_interface(module: nn.Module) -> bool:
    """Check whether a module's own ``forward`` gets its function from Transformers' attention interface."""
    return _calls_interface(type(module).forward)


def reads_mask_as_boolean(module: nn.Module) -> bool:
    """Check whether an attention module inverts its mask by ``logical_not``, which is wrong for an additive mask."""
    return "logical_not" in _names(type(module).forward)


def has_own_softmax(module: nn.Module) -> bool:
    """Check whether a module's ``forward``, or anything it calls, computes a softmax outside the interface.

    Not counted: modules that call the interface (the eager function beside it is for other implementations), routers of
    mixtures of experts, and ``nn.Softmax`` itself, which counts for the module that holds it.
    """
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) or uses_interface(module):
        return False
    if not _computes_softmax(type(module)) and not any(isinstance(child, nn.Softmax) for child in module.children()):
        return False
    return not _is_router(type(module))


@functools.cache
def _computes_softmax(cls: type[nn.Module]) -> bool:
    # What a name stands for may be called otherwise: from torch import softmax as normalize.
    meant = ((name, function.__globals__.get(name)) for function in _called(cls) for name in _names(function))
    return any(_SOFTMAX.fullmatch(word) for name, used in meant for word in (name, str(getattr(used, "__name__", ""))))


@functools.cache
def _is_router(cls: type[nn.Module]) -> bool:
    if _ROUTER_CLASS.search(cls.__name__):
        return True
    codes = [code for function in _called(cls) for code in _codes(function)]
    return any(_ROUTER_CODE.search(name) for code in codes for name in (*code.co_names, *code.co_varnames))


def _called(cls: type[nn.Module]) -> list[types.FunctionType]:
    """List ``forward`` and, from there on, the class's methods and its package's functions that are named in what is called."""
    waiting, found = [cls.forward], []
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, types.FunctionType) or function in found:
            continue
        found.append(function)
        package = function.__module__.rpartition(".")[0]
        for name in _names(function):
            helper = function.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and helper.__module__.rpartition(".")[0] == package:
                waiting.append(helper)
            waiting.extend(_methods(cls, name, every="super" in _names(function)))
    return found


def _methods(cls: type[nn.Module], name: str, *, every: bool) -> list[types.FunctionType]:
    """Return the method of that name that an instance has; with ``every`` those it overrides as well."""
    found = [getattr(vars(base)[name], "__func__", vars(base)[name]) for base in cls.__mro__ if name in vars(base)]
    methods = [method for method in found if isinstance(method, types.FunctionType)]
    # What torch and Transformers give to every module is none of its attention.
    common = ("torch.nn.modules.module", "transformers.modeling_utils", "transformers.generation")
    return [m for m in (methods if every else methods[:1]) if not m.__module__.startswith(common)]


def _names(function: object) -> set[str]:
    """Return all names that a function's code uses, including those of the functions inside it."""
    return {name for code in _codes(inspect.unwrap(function)) for name in code.co_names}  # type: ignore[arg-type]


def _codes(holder: object) -> Iterator[types.CodeType]:
    """Yield the code of a function (or the given code) and of the functions inside it."""
    code = getattr(holder, "__code__", holder)
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            yield from _codes(constant)
