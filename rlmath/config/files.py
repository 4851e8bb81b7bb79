"""Files that somebody else wrote, read with bounds: regular files only, JSON of bounded size.

A FIFO in the place of a file would be waited for without end, a device read without end. Every
mistake is a ValueError that names the file.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 2**24
MAX_YAML_BYTES = 2**20

# ---------------------------------------------------------------- regular files


def require_regular(path: str | Path) -> int:
    """The size of a file in bytes.

    ValueError where it is a folder, a FIFO, a device or a socket, OSError where it is not there."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f'"{path}" is a {_kind(status.st_mode)}; needed: a regular file')
    return status.st_size


def open_regular(path: str | Path) -> BinaryIO:
    """A file opened for reading, without waiting for anybody.

    Errors: as `require_regular`."""
    # Opened before it is looked at: what stands there cannot be exchanged between the two.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f'"{path}" is a {_kind(mode)}; needed: a regular file')
    return open(descriptor, "rb")


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """The content of a file.

    ValueError where it is larger or no regular file, OSError where it cannot be read."""
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


def parse_json(text: str, unique_keys: bool = False) -> Any:
    """The content of JSON text.

    ValueError where it is none, or is nested too deep for the interpreter. With `unique_keys` also
    where an object has a key twice; without, the last one counts."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition if unique_keys else None)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, character {error.colno}"
        place = (
            line if "\n" in text.strip() else f"character {min(error.pos, len(text.rstrip())) + 1}"
        )
        raise ValueError(f"{error.msg} at {place}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen_keys: set[str] = set()
        repeated_key = next(key for key, _ in pairs if key in seen_keys or seen_keys.add(key))
        raise ValueError(f"the key {repeated_key[:40]!r} stands twice")
    return mapping


def read_json(file: Path, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file.

    ValueError where it is larger, no regular file or no JSON, OSError where it cannot be read."""
    return parse_json(read_regular(file, most_bytes).decode("utf-8"))


def read_json_object(file: Path, most_bytes: int = MAX_JSON_BYTES) -> dict:
    """The object in a JSON file.

    ValueError for a file that cannot be read, is larger or holds something else."""
    try:
        contents = read_json(file, most_bytes)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; download or save it again") from error
    if not isinstance(contents, dict):
        raise ValueError(
            f"{file}: got {type(contents).__name__} {str(contents)[:60]!r}; needed: a JSON object"
        )
    return contents
