"""The folder of a run: nobody else works in it, and a resumed run is the run that began there."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from huggingface_hub import HfApi

from common.row_file import Results
from common.settings import RunSettings

#: Settings that may differ when a run is resumed: they change nothing in what is computed.
MAY_DIFFER_ON_RESUME = (
    "out", "resume", "push_to_hub", "report_to", "results", "log_steps", "checkpoint_steps", "coverage",
)  # fmt: skip
LOCK = "lock"
_held: list[FileLock] = []  # until the process ends, however it ends

#: What torchrun and the programs of MPI call the number of processes that they start.
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def open_folder(settings: RunSettings, recipe: str, fields: Sequence[str] = ()) -> Path:
    """Take ``settings.out`` for this run, after a look at everything that would fail later.

    The folder gets ``settings.json``, which says whose it is. `common.trainer.RecipeTrainer` adds checkpoints, the best model
    and ``trainer_state.json`` with the losses and the measures on dev, `common.results.finish` ``result.json``.

    Args:
        settings: of the recipe.
        recipe: its name.
        fields: columns of the results file.

    Raises:
        ValueError: before anything is written, if the folder holds another run or foreign files, another process is at work
            in it, or the settings of a resumed run differ; if fewer processes run than the launcher was asked for, or cannot
            share a batch; if the model's folder is not there, the results cannot be written or the Hub cannot be reached.
    """
    folder, state = Path(settings.out), PartialState(cpu=not torch.accelerator.is_available())
    say_processes(recipe, state)
    if not settings.out:
        raise ValueError("--out is missing: give the folder of the run.")
    if settings.batch_size % (settings.gradient_accumulation * state.num_processes):
        raise ValueError(
            f"batch_size={settings.batch_size} examples per step cannot be shared by {state.num_processes} process(es) with "
            f"gradient_accumulation={settings.gradient_accumulation}: choose a multiple of their product."
        )
    check_model(getattr(settings, "model", ""))
    if settings.results and fields:
        Results(Path(settings.results), fields)
    try:
        if settings.push_to_hub:
            HfApi().whoami()
    except Exception as error:
        raise ValueError(
            f"--push_to_hub {settings.push_to_hub}: no access to the Hub ({error}). Log in with `hf auth login`, or leave it "
            "out."
        ) from error
    given = {name: value for name, value in dataclasses.asdict(settings).items() if name not in MAY_DIFFER_ON_RESUME}
    identity = json.loads(json.dumps({"recipe": recipe, "processes": state.num_processes, **given}))
    _check_owner(folder, identity, settings)
    state.wait_for_everyone()
    if state.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _held.append(FileLock(folder / LOCK, is_singleton=True))
            _held[-1].acquire(blocking=False)
        except Timeout as error:
            raise ValueError(
                f"--out {folder}: another process is at work there; wait for it, or give another folder."
            ) from error
        write(folder / "settings.json", json.dumps(identity, indent=1))
    state.wait_for_everyone()
    return folder


def _check_owner(folder: Path, identity: dict[str, Any], settings: RunSettings) -> None:
    """Raise an error where the folder is not this run's, or this run does not say that it goes on."""
    if folder.is_file():
        raise ValueError(f"--out {folder} is a file; give a folder.")
    held = folder / "settings.json"
    if not held.exists():
        if folder.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
            raise ValueError(f"--out {folder} holds files that are no run's: give a new or empty folder.")
        return
    if not (any(folder.glob("checkpoint-*")) or (folder / "result.json").exists()):
        return  # an earlier start wrote no checkpoint: nothing is lost
    if not settings.resume:
        raise ValueError(f"--out {folder} holds a run already: add --resume to go on with it, or give another.")
    # A run may be older than an option: it had the default.
    before = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(settings)
        if field.name in identity
    } | json.loads(held.read_text(encoding="utf-8"))
    changed = [key for key in {**before, **identity} if before.get(key) != identity.get(key)]
    if changed:
        says = "; ".join(f"{key} was {before.get(key)!r}, is now {identity.get(key)!r}" for key in changed)
        raise ValueError(f"--resume {folder}: the run was started differently ({says}). Use the same settings.")


def write(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half-written."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write what was answered, one line each, on the main process."""
    if PartialState().is_main_process:
        write(path, "".join(" ".join(line.splitlines()) + "\n" for line in lines))


def check_model(where: str) -> None:
    """Raise ``ValueError`` if ``where`` looks like a path and there is no such folder."""
    path = Path(where)
    looks = where.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2
    if looks and not path.is_dir():
        raise ValueError(f"model={where!r}: there is no such folder; give one that is there, or a Hub id OWNER/NAME.")


def say_processes(recipe: str, state: PartialState | None = None) -> None:
    """Print how many processes run a recipe, on what; None is one process.

    Raises:
        ValueError: if fewer run than were asked for.
    """
    running = state.num_processes if state else 1
    check_processes(running)
    if state is None or state.is_main_process:
        where = f" on {state.device.type}" if state else ""
        print(f"{recipe}: {running} process{'es' if running > 1 else ''}{where}.", flush=True)


def check_processes(running: int) -> None:
    """Raise ``ValueError`` if fewer processes share the work than the launcher was asked for: each would train by itself."""
    asked = max((int(os.environ[name]) for name in SIZES if os.environ.get(name, "").isdecimal()), default=1)
    # Accelerate gives its script the address of the group where it was asked for several processes, and without MPI it then
    # starts one on a CPU: nobody has a rank in that group.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    alone = running == 1 and launched and not any(name in os.environ for name in SIZES)
    if asked > running or alone:
        wanted = "several" if alone else asked
        raise ValueError(
            f"{wanted} processes were asked for, and {running} share(s) the work. On CPUs `accelerate launch` starts one however "
            "many it is asked for, unless it is configured with MPI (recipes/configs/accelerate/two_cpu_processes.yaml); without "
            "MPI use `torchrun --standalone --nproc_per_node N recipes/...`. If one is meant, give --num_processes 1 and unset "
            "MASTER_ADDR and MASTER_PORT."
        )
