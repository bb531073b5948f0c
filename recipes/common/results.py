"""CSV files that grow by one row per finished run, and what every row says about its origin."""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

import hf_entmax
from hf_entmax.bench.timing import device_name

#: The last columns of every table of runs.
END = "steps best_step train_seconds tokens_per_second processes command hardware versions"


def columns(*names: str) -> tuple[str, ...]:
    """Names between blanks, as a tuple."""
    return tuple(" ".join(names).split())


class Results:
    """A CSV file that grows by a row for each finished run, and knows which runs it holds.

    Args:
        path: the file; it is made with its folders when the first row comes.
        fields: its columns.

    Raises:
        ValueError: if the file exists with other columns, or cannot be written.
    """

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        self.path = path
        self.fields = tuple(fields)
        self.rows: list[dict[str, str]] = []
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        if (path.is_dir() if there == path else not there.is_dir()) or not os.access(there, os.W_OK):
            raise ValueError(f"{path} cannot be written, because of {there}: give another file for the results.")
        if path.exists() and path.stat().st_size:
            with path.open(newline="", encoding="utf-8") as lines:
                reader = csv.DictReader(lines)
                if tuple(reader.fieldnames or ()) != self.fields:
                    raise ValueError(
                        f"{path} has the columns {reader.fieldnames}, not {list(self.fields)}: use another file."
                    )
                self.rows = list(reader)

    def has(self, **key: Any) -> bool:
        """Whether a run is there already; what is not given may be anything."""
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, **values: Any) -> None:
        """Append one row, on disk at once."""
        if unknown := sorted(set(values) - set(self.fields)):
            raise ValueError(f"{self.path}: no columns for {unknown}.")
        row = {name: str(values.get(name, "")) for name in self.fields}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as lines, _exclusive(lines):
            writer = csv.DictWriter(lines, self.fields, lineterminator="\n")
            if not lines.seek(0, os.SEEK_END):
                writer.writeheader()
            writer.writerow(row)
            lines.flush()
            os.fsync(lines.fileno())
        self.rows.append(row)


@contextlib.contextmanager
def _exclusive(file: IO[str]) -> Iterator[None]:
    """Keep other runs from appending to a file meanwhile; the lock goes when the file is closed."""
    with contextlib.suppress(ImportError, OSError):  # Windows, and file systems that know no locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def hardware() -> str:
    """The processor or GPU, and how many threads were used."""
    name = device_name("cpu")
    if torch.cuda.is_available():
        name += f" + {device_name('cuda')}"
    return f"{name}, {torch.get_num_threads()} thread(s)"


def command(without: Sequence[str] = (), lists: Sequence[str] = ()) -> str:
    """How the recipe was called.

    Args:
        without: options to leave out with their value (folders of this machine).
        lists: those of them that take any number of values.
    """
    kept = []
    skip = 0  # so many values may still belong to an option that is left out
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        if name in without:
            skip = 0 if equals else len(sys.argv) if name in lists else 1
        elif skip and not word.startswith("--"):
            skip -= 1
        else:
            kept.append(word)
            skip = 0
    return shlex.join(["python", f"recipes/{Path(sys.argv[0]).name}", *kept])


def origin(without: Sequence[str] = (), lists: Sequence[str] = (), packages: Sequence[str] = ()) -> dict[str, str]:
    """By which command (see `command`), on what and with which versions a row was made."""
    return {"command": command(without, lists), "hardware": hardware(), "versions": versions(*packages)}


def versions(*more: str) -> str:
    """Versions of what computed the numbers; ``more`` names further packages."""
    packages = ["torch", "transformers", *more]
    named = [f"{name} {metadata.version(name)}" for name in packages]
    return ", ".join([f"hf_entmax {hf_entmax.__version__}", *named, f"python {platform.python_version()}"])
