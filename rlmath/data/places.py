"""Where prompts lie on the disk."""

from __future__ import annotations

import difflib
from pathlib import Path


def existing_place(path: str) -> Path:
    """The file or folder. ValueError naming the nearest name where it is not there."""
    place = Path(path)
    if place.is_file() or place.is_dir():
        return place
    if not place.parent.is_dir():
        raise ValueError(f"{path}: no such file, and no folder {str(place.parent)!r} either")
    names = [entry.name for entry in place.parent.iterdir()]
    near = difflib.get_close_matches(place.name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {str(place.parent / near[0])!r}?" if near else ""
    raise ValueError(f"{path}: no such file{hint}")
