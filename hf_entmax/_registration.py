"""Hooks Transformers at the moment its modules are loaded, so that ``import hf_entmax`` itself costs next to nothing."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Mapping, Sequence

#: Module of Transformers (or PEFT) -> module of hf_entmax whose ``install()`` must run once the former is loaded. The
#: package's ``__init__`` fills it, so that nothing below it names a higher floor.
_installers: dict[str, str] = {}
#: What patching and loading cannot do without; the hooks of the trainer and of PEFT wait until these are imported.
_NEEDED = ("transformers.configuration_utils", "transformers.modeling_utils", "transformers.generation.utils")
_failures: dict[str, ImportError] = {}


def register(installers: Mapping[str, str]) -> None:
    """Install hooks now for what is loaded already, and on loading for what is not.

    Each module to wait for leads to the one whose ``install()`` then runs.
    """
    _installers.update(installers)
    waiting = []
    for module in _installers:
        if module in sys.modules:
            _install(module)
        else:
            waiting.append(module)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def ensure() -> None:
    """Install the hooks now, for calls that need them."""
    for module in _NEEDED:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f'This part of hf_entmax needs transformers>=5.18,<6 ({error}). Install it with: pip install "transformers>=5.18,<6". '
                "hf_entmax.ops and hf_entmax.losses work without it."
            ) from error
        if module not in _failures:
            _install(module)
        if module in _failures:
            raise _failures[module]


def _install(module: str) -> None:
    try:
        importlib.import_module(_installers[module]).install()
    except ImportError as error:
        # Importing Transformers must not fail because hf_entmax cannot hook it: what needs the hooks raises instead.
        # A patched checkpoint still cannot load silently, its attention implementation stays unknown.
        _failures[module] = error
        if module not in _NEEDED:
            warnings.warn(f"hf_entmax could not hook {module}: {error}", RuntimeWarning, stacklevel=2)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a module and runs the installer after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _installers:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that calls the installer after the module it loads."""

    def __init__(self, loader: importlib.abc.Loader, fullname: str) -> None:
        self._loader = loader
        self._fullname = fullname

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _install(self._fullname)

    def __getattr__(self, name: str) -> object:
        # inspect.getsource and importlib.resources ask the loader for more than the two methods above.
        return getattr(self._loader, name)
