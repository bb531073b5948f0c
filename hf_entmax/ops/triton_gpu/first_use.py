"""Before a kind of GPU is used for the first time: are the kernels right on it?

The cases of `hf_entmax.ops.self_check` run in a process of their own, as a kernel that reads what it may not ends every later call
of the process that ran it. What they found right is remembered beside Triton's compiled kernels, for this GPU, driver, Triton,
PyTorch and hf_entmax; what they found wrong is looked at again in the next process.

``python -m hf_entmax.ops.triton_gpu.first_use INDEX`` is that process: it prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from hf_entmax._version import __version__
from hf_entmax.ops.self_check import fault

#: A kernel that has not come back by then, compiling included, is taken for one that hangs.
_SECONDS = 600
#: Where a GPU takes no second process (its compute mode, or no memory is left), the cases run in this one.
_UNAVAILABLE = 3
_known: dict[int, str | None] = {}


def fault_of(index: int) -> str | None:
    """Say what the kernels do wrong on a CUDA device, or return None; the first call of a process may take a minute."""
    if index not in _known:
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing else may run now; whoever captures has run the same call before
        right, key = _remembered(), _key(index)
        _known[index] = None if key in right else _examine(index)
        if _known[index] is None and key not in right:
            _remember(right | {key})
    return _known[index]


def _key(index: int) -> str:
    import triton

    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
    kind = torch.cuda.get_device_properties(index)
    versions = f"driver {driver}, triton {triton.__version__}, torch {torch.__version__}, hf_entmax {__version__}"
    return f"{kind.name}, compute capability {kind.major}.{kind.minor}, {versions}"


def _examine(index: int) -> str | None:
    from hf_entmax.ops import triton_gpu

    command = [sys.executable, "-m", "hf_entmax.ops.triton_gpu.first_use", str(index)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the cases of its first use did not end within {_SECONDS} s"
    except OSError:  # no process can be started here
        return fault(triton_gpu, torch.device("cuda", index))
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])["fault"]
    if done.returncode == _UNAVAILABLE:
        return fault(triton_gpu, torch.device("cuda", index))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the process that tried it ended with {done.returncode}: {last}"


def _place() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir, "hf_entmax_checked.json")


def _remembered() -> set[str]:
    try:
        return set(json.loads(_place().read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return set()


def _remember(right: set[str]) -> None:
    try:
        place = _place()
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(sorted(right), indent=1), encoding="utf-8")
        os.replace(beside, place)
    except OSError:
        pass  # then the next process looks again


def _main(index: int) -> int:
    from hf_entmax.ops import triton_gpu

    device = torch.device("cuda", index)
    try:
        torch.ones(1 << 20, device=device).sum().item()
    except RuntimeError:
        return _UNAVAILABLE
    print(json.dumps({"fault": fault(triton_gpu, device)}))
    return 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
