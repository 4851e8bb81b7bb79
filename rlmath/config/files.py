"""Files that somebody else wrote, read with bounds: regular files only, JSON of bounded size and depth.

A FIFO in the place of a file would be waited for without end, a device read without end; a text of a few KiB that is
nested thousands of levels deep would take the interpreter's stack. Every mistake is a ValueError that names the file,
and the key where there is one.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 2**24
MAX_YAML_BYTES = 2**20
MAX_DEPTH = 64
"""Levels of lists and objects in JSON."""
MAX_DIGITS = 400
"""Of a number; no float has more before its point."""

_BRACKETS = re.compile(r"[\[{]")
_KEY_OF_LONG_NUMBER = re.compile(rf'"((?:[^"\\]|\\.){{0,100}})"\s*:[\s\[]*-?\d{{{MAX_DIGITS + 1}}}')

# ---------------------------------------------------------------- regular files


def require_regular(path: str | Path) -> int:
    """The size of a file in bytes. ValueError where it is a folder, a FIFO, a device or a socket, OSError where it is
    not there."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f'"{path}" is a {_kind(status.st_mode)}; needed: a regular file')
    return status.st_size


def open_regular(path: str | Path) -> BinaryIO:
    """A file opened for reading, without waiting for anybody. Errors: as `require_regular`."""
    # Opened before it is looked at: what stands there cannot be exchanged between the two.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f'"{path}" is a {_kind(mode)}; needed: a regular file')
    return open(descriptor, "rb")


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """All of a file. ValueError where it is larger or no regular file, OSError where it cannot be read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(most_bytes + 1)
    if max(size, len(content)) > most_bytes:
        raise ValueError(f'"{path}" has {max(size, len(content))} bytes, more than {most_bytes}')
    return content


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


# ---------------------------------------------------------------- JSON


def parse_json(text: str) -> Any:
    """What JSON text holds. ValueError where it is none, is nested deeper than MAX_DEPTH, or has a number of more than
    MAX_DIGITS digits, whose key is named."""
    try:
        found = json.loads(text, parse_int=_whole_number)
    except _LongNumberError as error:
        key = _KEY_OF_LONG_NUMBER.search(text)
        raise ValueError(f'"{key[1]}" is {error}' if key else f"it has {error}") from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    # So few brackets make no such depth, which is so for almost every text.
    if len(_BRACKETS.findall(text)) > MAX_DEPTH and _is_deep(found):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return found


def read_json_object(file: Path, most_bytes: int = MAX_JSON_BYTES) -> dict:
    """ValueError for a file that cannot be read, is larger or holds something else."""
    try:
        found = parse_json(read_regular(file, most_bytes).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; download or save it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: got {type(found).__name__} {str(found)[:60]!r}; needed: a JSON object")
    return found


class _LongNumberError(ValueError):
    """Python's own error names neither the number nor what to change."""


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:
        raise _LongNumberError(f"a number of {len(digits.lstrip('-'))} digits, more than {MAX_DIGITS}")
    return int(digits)


def _is_deep(value: Any) -> bool:
    """Level by level: Python's stack is not used."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += (part for part in one.values() if isinstance(part, dict | list))
            elif isinstance(one, list):
                inner += (part for part in one if isinstance(part, dict | list))
        if not inner:
            return False
        level = inner
    return True
