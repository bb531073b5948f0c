"""Reading text files line by line, plain or gzip-compressed, with line numbers in every complaint."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path


def numbered_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yields ``(line number from 1, line without its end)``.

    Args:
        path: UTF-8 text; ``.gz`` is decompressed on the fly.

    Raises:
        FileNotFoundError: no such file.
        IsADirectoryError: a folder.
        ValueError: a line that is not UTF-8, or a damaged gzip file; the line is named.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    yield number, raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}:{number}: not UTF-8 text ({error.reason} at byte {error.start})."
                    ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: a damaged gzip file ({error}).") from error
