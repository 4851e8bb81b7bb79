"""Small JSON files beside prompts and models."""

from __future__ import annotations

import json
from pathlib import Path

from rlmath.data.rows import short


def read_json_object(file: Path, most_bytes: int = 2**24) -> dict:
    """ValueError for a file that cannot be read, is larger or holds something else."""
    try:
        if file.stat().st_size > most_bytes:
            raise ValueError(f"it has {file.stat().st_size} bytes, more than {most_bytes}")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}; download or save it anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: got {short(found)}; needed: a JSON object")
    return found
