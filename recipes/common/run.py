"""The folder of one training run: who owns it, its log, its checkpoint, its finished model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common.folder import say_processes
from common.settings import RunSettings

#: Settings that may differ when a run is resumed: they change nothing in what is computed.
MAY_DIFFER_ON_RESUME = (
    "out", "resume", "push_to_hub", "report_to", "results", "log_steps", "checkpoint_steps", "coverage",
)  # fmt: skip
LOCK = "lock"

#: Locks of this process, by folder; they go when the process ends, however it ends.
_LOCKS: dict[Path, IO[str]] = {}

#: Files with a line per step.
LOGS = ("log.jsonl", "alphas.jsonl")

#: One of these is there as soon as a run has done something.
STARTED = ("log.jsonl", "checkpoint", "checkpoint.old", "model", "model.old", "result.json")


class Run:
    """A training run and its folder.

    ``settings.json`` says whose folder it is, ``log.jsonl`` has a line per optimiser step and evaluation, ``alphas.jsonl``
    every learned alpha now and then, as ``AlphaLoggingCallback`` writes it; ``checkpoint`` is the last complete state,
    ``model`` the best model on dev with its tokenizer. What the model answered on the test set stands in a text file beside
    them.

    Args:
        settings: of the recipe; ``settings.out`` is the folder.
        name: of the recipe.

    Raises:
        ValueError: before anything is written, if the folder holds another run or foreign files, if another process is at
            work in it, if the settings of a resumed run differ, if ``settings.model`` names a folder that is not there, or if
            a tracker is unknown or not installed; if fewer processes run than the launcher was asked for.
    """

    def __init__(self, settings: RunSettings, name: str) -> None:
        if not settings.out:
            raise ValueError("--out is missing: give the folder of the run.")
        _check_trackers(settings.report_to)
        check_model(getattr(settings, "model", ""))
        self.settings, self.name = settings, name
        self.folder = Path(settings.out)
        self.accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),  # else the processes of torchrun would not find each other
            mixed_precision=settings.mixed_precision,
            log_with=list(settings.report_to) or None,
            project_dir=str(self.folder),
        )
        say_processes(name, self.accelerator)
        # Accelerate would divide every loss by what its own settings say; the weights in `Training.step` are shares already.
        self.accelerator.gradient_accumulation_steps = 1
        self.identity = {
            "recipe": name,
            "processes": self.accelerator.num_processes,
            **{key: value for key, value in dataclasses.asdict(settings).items() if key not in MAY_DIFFER_ON_RESUME},
        }
        if settings.batch_size % (settings.gradient_accumulation * self.accelerator.num_processes):
            raise ValueError(
                f"batch_size={settings.batch_size} examples per step cannot be shared by {self.accelerator.num_processes} "
                f"process(es) with gradient_accumulation={settings.gradient_accumulation}: choose a multiple of their product."
            )
        self.resumes = self._claim()
        self.accelerator.wait_for_everyone()
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            _lock(self.folder)
            write_atomically(self.folder / "settings.json", json.dumps(self.identity, indent=1))
        if settings.report_to:
            self.accelerator.init_trackers(name, config={k: str(v) for k, v in self.identity.items()})
        self.accelerator.wait_for_everyone()

    def _claim(self) -> bool:
        """Whether there is something to go on with; an error where the folder is not this run's."""
        if self.folder.is_file():
            raise ValueError(f"--out {self.folder} is a file; give a folder.")
        held = self.folder / "settings.json"
        if not held.exists():
            if self.folder.exists() and any(entry.name != LOCK for entry in self.folder.iterdir()):
                raise ValueError(f"--out {self.folder} holds files that are no run's: give a new or empty folder.")
            return False
        started = any((self.folder / name).exists() for name in STARTED)
        if not started and not any(self.folder.glob("checkpoint-*")):
            return False  # an earlier start failed before its first step: nothing is lost
        if not self.settings.resume:
            raise ValueError(
                f"--out {self.folder} holds a run already: add --resume to go on with it, or give another."
            )
        fields = [field for field in dataclasses.fields(self.settings) if field.name in self.identity]
        # A run may be older than an option: it had the default.
        before = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in fields
        } | json.loads(held.read_text(encoding="utf-8"))
        changed = [key for key in {**before, **self.identity} if before.get(key) != _plain(self.identity.get(key))]
        if changed:
            says = "; ".join(f"{key} was {before.get(key)!r}, is now {self.identity.get(key)!r}" for key in changed)
            raise ValueError(
                f"--resume {self.folder}: the run was started differently ({says}). Use the same settings."
            )
        return self.checkpoint is not None

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.accelerator.is_main_process

    def say(self, text: str) -> None:
        """Print on the main process."""
        self.accelerator.print(text, flush=True)

    def log(self, step: int, **values: float) -> None:
        """One line of ``log.jsonl``, and the trackers'."""
        self.note("log.jsonl", step, **values)
        if self.settings.report_to:
            self.accelerator.log(values, step=step)

    def note(self, name: str, step: int, **values: Any) -> None:
        """One line of a log, which must be one of `LOGS`."""
        if self.main:
            with (self.folder / name).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps that will be done again; all of them for a new run."""
        for path in (self.folder / name for name in LOGS):
            if not (self.main and path.exists()):
                continue
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step > 0:
                        kept.append(line + "\n")
                except json.JSONDecodeError:
                    continue  # cut off when the run was killed
            write_atomically(path, "".join(kept))
        self.accelerator.wait_for_everyone()

    def write(self, name: str, lines: Iterable[str]) -> None:
        """A text file of the folder, by the main process, one line each: what was answered."""
        if self.main:
            write_atomically(self.folder / name, "".join(" ".join(line.splitlines()) + "\n" for line in lines))

    @property
    def checkpoint(self) -> Path | None:
        """The last complete checkpoint, also where the run was killed between two renames."""
        return next((p for p in (self.folder / "checkpoint", self.folder / "checkpoint.old") if p.exists()), None)

    def save_checkpoint(self) -> None:
        """Write everything that training needs to go on exactly, in place of the previous checkpoint."""
        self.replace("checkpoint", lambda folder: self.accelerator.save_state(str(folder), safe_serialization=False))

    def load_checkpoint(self) -> None:
        """Restore model, optimiser, schedule, progress and the random numbers of every process."""
        self.accelerator.load_state(str(self.checkpoint))

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Make the subfolder ``name`` anew; until it is complete the previous one stays in its place.

        Raises:
            OSError: where writing fails (disk full); the previous folder is as it was.
        """
        new, old, final = (self.folder / f"{name}{end}" for end in (".new", ".old", ""))
        if self.main:
            shutil.rmtree(new, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            write(new)
        except Exception as error:  # safetensors and torch.save report a full disk each in a way of their own
            shutil.rmtree(new, ignore_errors=True)
            kept = f"the previous one is intact in {final}" if final.exists() else "there was none before"
            raise OSError(
                f"could not write {final} ({error}); {kept}. Make room and start again with --resume."
            ) from error
        self.accelerator.wait_for_everyone()
        if self.main:
            shutil.rmtree(old, ignore_errors=True)
            if final.exists():
                os.replace(final, old)
            os.replace(new, final)
            shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def unsharded(self, model: Any) -> Any:
        """A prepared model as one process can use and save it; on all processes at the same time.

        Under FSDP2 it is a copy with the weights of all processes: generation takes another number of steps on each of them,
        so that sharded models would wait for each other. It must fit into one device.
        """
        plain = self.accelerator.unwrap_model(model)
        if self.accelerator.distributed_type != DistributedType.FSDP:
            return plain
        state = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in plain.state_dict().items()
        }
        kind = next(base for base in type(plain).__mro__ if not issubclass(base, FSDPModule))
        with torch.random.fork_rng():  # whoever starts a model anew draws random numbers
            copy = kind(plain.config)
        copy.load_state_dict(state)
        return copy.to(self.accelerator.device).train(plain.training)

    def save_model(self, model: Any, tokenizer: Any) -> None:
        """``save_pretrained`` of a model that is not sharded and its tokenizer as the subfolder ``model``."""

        def write(folder: Path) -> None:
            if self.main:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)

        self.replace("model", write)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half-written."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def _lock(folder: Path) -> None:
    """Keep other processes out of a folder until this one ends.

    Raises:
        ValueError: if one is at work there.
    """
    place = folder.resolve()
    if place in _LOCKS:
        return
    file = (folder / LOCK).open("a", encoding="utf-8")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"--out {folder}: another process is at work there; wait for it, or give another folder."
        ) from error
    except (ImportError, OSError):  # Windows, and file systems that know no locks
        pass
    _LOCKS[place] = file


def check_model(where: str) -> None:
    """Say before anything is written that a folder with a model is not there.

    Raises:
        ValueError: if ``where`` looks like a path, and there is no such folder.
    """
    path = Path(where)
    looks = where.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2
    if looks and not path.is_dir():
        raise ValueError(f"model={where!r}: there is no such folder; give one that is there, or a Hub id OWNER/NAME.")


def _check_trackers(names: list[str]) -> None:
    installed = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(
                f"report_to: there is no tracker {name!r}; there are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}."
            )
        if name not in installed:
            raise ValueError(
                f"report_to: the tracker {name!r} is not installed (pip install {name}); "
                f"installed are: {', '.join(sorted(installed)) or 'none'}."
            )
