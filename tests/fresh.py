"""Fresh processes for the price of a fork.

A process that is started anew spends four to six seconds of processor time on importing torch and Transformers. `start` forks two
that wait from the process of the tests, before that has imported Transformers or the package; `run` has one of them fork again
and do what ``python -c CODE ARGUMENTS`` would, with its own modules, environment, folder and output.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]

#: What a waiting process imports when it is first asked for something; torch is there already.
STAGES = {"torch": (), "transformers": ("transformers.modeling_utils", "transformers.generation.utils", "accelerate")}

_waiting: dict[str, Connection] = {}


def start() -> None:
    """Fork the processes that wait; to be called once, when torch has been imported."""
    assert not {"hf_entmax", "transformers"} & set(sys.modules), "fresh processes must not have seen them"
    for stage, imports in STAGES.items() if hasattr(os, "fork") else ():
        here, there = Pipe()
        if not os.fork():
            _wait(there, imports)
        there.close()
        _waiting[stage] = here


def run(
    code: str,
    *arguments: object,
    after: str = "transformers",
    environment: dict[str, str] | None = None,
    folder: Path = ROOT,
    processes: int = 1,
    timeout: int = 240,
) -> subprocess.CompletedProcess[str]:
    """What ``python -c CODE ARGUMENTS`` does in a fresh process.

    Args:
        code: a program.
        arguments: ``sys.argv[1:]``.
        after: what has been imported already, of `STAGES`.
        environment: variables beside those of this process.
        folder: where it runs.
        processes: how many do so at a time, with the variables that torchrun would give them; when one fails, all end.
        timeout: seconds until it is killed.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": paths, **(environment or {})}
    if not _waiting:  # Windows
        if processes > 1:
            pytest.skip("several processes are forked, which only Unix can")
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=timeout)
    _waiting[after].send((code, [*map(str, arguments)], variables, str(folder), processes, timeout))
    returncode, output, errors = _waiting[after].recv()
    return subprocess.CompletedProcess([code, *arguments], returncode, output, errors)


def run_module(name: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``python -m NAME ARGUMENTS`` does in a fresh process; ``options`` are those of `run`."""
    return run(f"import runpy; runpy.run_module({name!r}, run_name='__main__')", *arguments, **options)


def run_file(path: Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``python FILE ARGUMENTS`` does in a fresh process; ``options`` are those of `run`."""
    code = "import runpy, sys; sys.path.insert(0, {!r}); runpy.run_path({!r}, run_name='__main__')"
    return run(code.format(str(path.parent), str(path)), *arguments, **options)


def _wait(channel: Connection, imports: tuple[str, ...]) -> NoReturn:
    """Serve requests until the process of the tests is gone; nothing of its files is held open."""
    null, kept = os.open(os.devnull, os.O_RDWR), channel.fileno()
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            request = channel.recv()
        except EOFError:
            os._exit(0)
        for name in imports:
            __import__(name)
        gc.freeze()  # else the first collection of every process would copy all that they share
        channel.send(_serve(*request))


def _serve(
    code: str, arguments: list[str], variables: dict[str, str], folder: str, processes: int, timeout: int
) -> Any:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, socket.socket() as free:
        if processes > 1:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
            variables |= {"LOCAL_WORLD_SIZE": str(processes)}
        free.close()
        others, alive = os.pipe()  # at its end once all processes but the first are gone
        children = []
        for rank in range(processes):
            if processes > 1:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if not (child := os.fork()):
                os.close(others if rank else alive)
                _run(code, arguments, variables, folder, timeout, output, errors, others if rank == 0 else None)
            children.append(child)
        os.close(others)
        os.close(alive)
        failed = 0
        while children:
            child, status = os.wait()
            children.remove(child)
            if (code_of_child := os.waitstatus_to_exitcode(status)) and not failed:
                failed = code_of_child
                for other in children:
                    os.kill(other, signal.SIGKILL)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return failed, *texts


def _run(
    code: str,
    arguments: list[str],
    variables: dict[str, str],
    folder: str,
    timeout: int,
    output: IO[bytes],
    errors: IO[bytes],
    others: int | None,
) -> NoReturn:
    """Run the program in this process, and end it."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.alarm(timeout)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        for place, file in ((1, output), (2, errors)):
            os.dup2(file.fileno(), place)
        sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), ("r", "w", "w"))
        sys.argv = ["-c", *arguments]
        sys.path[:] = dict.fromkeys([*variables["PYTHONPATH"].split(os.pathsep), *sys.path])
        if threads := variables.get("OMP_NUM_THREADS"):
            import torch

            torch.set_num_threads(int(threads))
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<fresh>", "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if others is not None and not status:
            os.read(others, 1)  # the first process of several holds what they meet at
        os._exit(status)
