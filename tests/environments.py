"""What this machine can do, and throw-away environments: other versions and tools beside the packages installed here."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def inductor_works() -> bool:
    """Tell if torch.compile's own compiler makes a sum here: it fails without a C++ compiler or under ATEN_CPU_CAPABILITY=default."""
    import torch

    try:
        torch.compile(lambda x: (x.double() * 2).sum(-1), fullgraph=True)(torch.ones(3, 40))
    except Exception:
        return False
    return True


def make(folder: Path, packages: list[str], *, pinned: tuple[str, ...] = ()) -> Path:
    """Make a virtual environment that sees the packages installed here, with others over them; return its Python.

    Args:
        folder: where; one that is there is used again.
        packages: requirements for pip, installed with what they need and is not there.
        pinned: packages installed here whose versions must not change.

    Raises:
        subprocess.CalledProcessError: if pip cannot install them; what it says is in ``stderr``.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
    here = sysconfig.get_paths()["purelib"]
    (inside,) = (folder / "lib").glob("python*/site-packages")
    (inside / "installed_here.pth").write_text(here + "\n", encoding="utf-8")
    constraints = folder / "constraints.txt"
    # Without what follows a +, which names a build, not a version.
    versions = [f"{name}=={metadata.version(name).partition('+')[0]}\n" for name in pinned]
    constraints.write_text("".join(versions), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(constraints), *packages], check=True, capture_output=True, text=True)
    return python


def run_tests(python: Path, arguments: list[str], results: Path, timeout: float) -> str:
    """Run tests of this checkout in such an environment; the JUnit file ``results`` tells of each. Returns what was printed."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={results}", *arguments]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return run.stdout
