"""Compiling functions once per user and machine, two at a time, and keeping their machine code on disk.

Numba compiles one function at a time in a process, so a second process compiles what else will be needed into the same
cache. It imports `kernels`, where the functions are, without PyTorch. Here they are only names.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import pathlib
import pickle
import platform
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hf_entmax._version import __version__

logger = logging.getLogger(__name__)

# The files that no kernel is made of.
_HOST_FILES = {
    "__init__.py", "compiler.py", "exact_host.py", "function.py", "host.py", "row_host.py", "runtime.py", "support.py",
}  # fmt: skip
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Imports the kernels without what the packages around them import.
_HELPER = """
import sys, types
for name, path in zip(sys.argv[1:4], sys.argv[4:7]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
import importlib
importlib.import_module(sys.argv[3] + ".kernels").compile_and_say(sys.argv[7:])
"""


class Kernel(NamedTuple):
    """A compiled kernel: a C function of the address of one argument record."""

    address: int
    call: Callable[[int], None]


class _Helper:
    """A process that compiles kernels into the cache, in the order given."""

    def __init__(self, names: Sequence[str]) -> None:
        here = pathlib.Path(__file__).parent
        package = __package__ or ""
        packages = [package.rsplit(".", 2)[0], package.rsplit(".", 1)[0], package]
        paths = [str(here.parents[1]), str(here.parent), str(here)]
        environment = dict(os.environ)
        if folder := _numba_cache():
            environment["NUMBA_CACHE_DIR"] = folder
        self.remaining = list(names)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HELPER, *packages, *paths, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def wait_for(self, name: str) -> None:
        """Wait until a kernel is in the cache, or the process has ended."""
        while name in self.remaining:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            done = line.strip()
            if done in self.remaining:
                self.remaining.remove(done)
            if not line or not self.remaining:
                self.remaining.clear()
                self._process.wait()


class _State:
    """What a forked child must not share with its parent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.helper: _Helper | None = None


_state = _State()
_kernels: dict[str, Kernel] = {}
_said: set[str] = set()


def _after_fork() -> None:
    global _state
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache(maxsize=1)
def _digest() -> str:
    """Return a digest of everything that the machine code depends on.

    Numba's cache watches the file of the compiled function alone, while a kernel is made of functions from several files.
    """
    import llvmlite
    import numba

    from .intrinsics import target_features

    digest = hashlib.sha256()
    folder = pathlib.Path(__file__).parent
    for path in (*sorted(folder.glob("*.py")), folder.parent / "sketch_format.py"):
        if path.name not in _HOST_FILES:
            digest.update(path.read_bytes())
    versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, platform.machine(), sys.platform)
    digest.update(repr((*versions, target_features())).encode())
    return digest.hexdigest()[:12]


def _numba_cache() -> str:
    """Return the folder that the user has named in NUMBA_CACHE_DIR, or nothing."""
    from numba.core import config

    return str(getattr(config, "CACHE_DIR", ""))


def _user_cache() -> pathlib.Path:
    """Return the folder in which programs of this user keep what can be made again."""
    home = pathlib.Path.home()
    if sys.platform == "win32":
        return pathlib.Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")


def cache_folder() -> pathlib.Path | None:
    """Return the folder of these kernels: in NUMBA_CACHE_DIR if that is set, else one for all environments of this user.

    Returns:
        None where it cannot be written to; Numba then looks for a place by itself.
    """
    import numba

    try:
        base = pathlib.Path(_numba_cache() or _user_cache() / "hf_entmax")
        folder = base / f"kernels-{__version__}-numba{numba.__version__}-{_digest()}"
        folder.mkdir(parents=True, exist_ok=True)
        # Numba keeps machine code beside the file of a function, and holds it for outdated when that file's date changes.
        anchor = folder / "kernels.py"
        if not anchor.exists():
            mine = folder / f"kernels.{os.getpid()}.tmp"
            mine.write_text('"""Stands for the source of the kernels that are cached here."""\n', encoding="utf-8")
            os.utime(mine, (1, 1))
            os.replace(mine, anchor)
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _placed(function: Callable[..., Any], folder: pathlib.Path | None) -> Callable[..., Any]:
    """Return the function as if it stood in the cache folder, under a name that changes with what it depends on."""
    code = function.__code__
    if folder is not None:
        code = code.replace(co_filename=str(folder / "kernels.py"))
    placed = types.FunctionType(code, function.__globals__, f"{function.__name__}_{_digest()}")
    placed.__qualname__ = placed.__name__
    return placed


def _compile(function: Callable[..., Any], signature: Any) -> Kernel:
    """Load a C function from the cache, or compile and keep it."""
    import numba

    cfunc: Any = numba.cfunc
    options = {"error_model": "numpy"}
    try:
        compiled = cfunc(signature, cache=True, **options)(function)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
        logger.warning(
            "The machine code of the numba backend cannot be kept on disk or read from it (%s: %s), so every process "
            "compiles it anew. Set NUMBA_CACHE_DIR to a writable directory, an empty one if the files are damaged.",
            type(error).__name__,
            error,
        )
        compiled = cfunc(signature, **options)(function)
    return Kernel(compiled.address, _CALLBACK(compiled.address))


def _on_disk(name: str, folder: pathlib.Path | None) -> bool:
    return folder is not None and (folder / f"{name}.done").exists()


def _say_once(folder: pathlib.Path | None, name: str) -> None:
    """Say what the first wait is for; attention and exact decoding have one each."""
    purpose = "exact decoding" if name.startswith("exact_") else "attention"
    if purpose not in _said:
        place = "" if folder is None else f" and kept in {folder}"
        logger.warning(
            "Compiling the CPU kernels of hf_entmax for %s: ten to thirty seconds, once for this machine%s.",
            purpose,
            place,
        )
    _said.add(purpose)


def known(name: str) -> Kernel | None:
    """Return a kernel that this process has compiled or loaded already."""
    return _kernels.get(name)


def load(name: str, signature: Any, function: Callable[..., Any]) -> Kernel:
    """Compile a kernel or load it from disk, unless another thread did so meanwhile."""
    with _state.lock:
        if name not in _kernels:
            folder = cache_folder()
            if not _on_disk(name, folder):
                _say_once(folder, name)
            if _state.helper is not None:
                _state.helper.wait_for(name)
            compiled = _compile(_placed(function, folder), signature)
            if folder is not None:
                with contextlib.suppress(OSError):
                    (folder / f"{name}.done").touch()
            _kernels[name] = compiled
        return _kernels[name]


def prepare(now: Sequence[str], soon: Iterable[str] = ()) -> None:
    """Have a second process compile what is not in the cache, except the first and largest of ``now``, which the caller compiles."""
    if all(name in _kernels for name in now):
        return
    with _state.lock:
        folder = cache_folder()
        missing = [n for n in dict.fromkeys((*now, *soon)) if n not in _kernels and not _on_disk(n, folder)]
        busy = _state.helper is not None and _state.helper.remaining
        if folder is None or len(missing) < 2 or busy or not _can_start_helper():
            return
        _say_once(folder, missing[0])
        with contextlib.suppress(OSError):
            _state.helper = _Helper([name for name in missing if name != now[0]])


def _can_start_helper() -> bool:
    """Tell whether this is an ordinary interpreter with a second core that no other training process uses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ordinary = "python" in pathlib.Path(sys.executable or "").name.lower() and not getattr(sys, "frozen", False)
    return ordinary and cores > 1 and os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"


def be_quiet() -> None:
    """Log errors only: the second process works for the first, which has said the rest."""
    logger.setLevel(logging.ERROR)
