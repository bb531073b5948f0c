"""A CSV file of results that grows row by row, and what every row says of its origin.

The package is imported where it is asked for something, so that rows can be read where it must not be imported.
"""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

#: Options that name places of one machine or change nothing in what is computed; a command that others can use leaves them
#: out.
NOT_IN_COMMAND = ("--out", "--results", "--resume", "--report_to", "--push_to_hub", "--log_steps", "--checkpoint_steps")


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
        """Tell whether a run is there already; what is not given may be anything."""
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, **values: Any) -> None:
        """Append one row, on disk at once."""
        if unknown := sorted(set(values) - set(self.fields)):
            raise ValueError(f"{self.path}: no columns for {unknown}.")
        row = {name: str(values.get(name, "")) for name in self.fields}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as lines:
            with contextlib.suppress(ImportError, OSError):  # Windows, and file systems that know no locks
                import fcntl

                fcntl.flock(lines, fcntl.LOCK_EX)  # other runs append to it too
            writer = csv.DictWriter(lines, self.fields, lineterminator="\n")
            if not lines.seek(0, os.SEEK_END):
                writer.writeheader()
            writer.writerow(row)
            lines.flush()
            os.fsync(lines.fileno())
        self.rows.append(row)


def hardware() -> str:
    """Name the processor or GPU, and how many threads were used."""
    from hf_entmax.bench.timing import device_name

    names = [device_name("cpu"), *([device_name("cuda")] if torch.cuda.is_available() else [])]
    return f"{' + '.join(names)}, {torch.get_num_threads()} thread(s)"


def command(without: Sequence[str] = (), lists: Sequence[str] = (), module: str = "") -> str:
    """Return how the recipe was called, or a module.

    Args:
        without: options to leave out with their value (folders of this machine).
        lists: those of them that take any number of values.
        module: its name, where it is no recipe.
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
    program = ["-m", module] if module else [f"recipes/{Path(sys.argv[0]).name}"]
    return shlex.join(["python", *program, *kept])


def origin(without: Sequence[str] = (), lists: Sequence[str] = (), packages: Sequence[str] = ()) -> dict[str, str]:
    """Say by which command (see `command`), on what and with which versions a row was made."""
    return {"command": command(without, lists), "hardware": hardware(), "versions": versions(*packages)}


def versions(*more: str) -> str:
    """List versions of what computed the numbers; ``more`` names further packages."""
    import hf_entmax

    named = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", *more)]
    return ", ".join([f"hf_entmax {hf_entmax.__version__}", *named, f"python {platform.python_version()}"])
