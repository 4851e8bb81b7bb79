"""Where prompts lie on the disk."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def existing_place(path: str) -> Path:
    """The file or folder. ValueError naming the nearest name where it is not there."""
    if not path:
        raise ValueError("a path of prompts is empty; name a file or a folder")
    place = Path(path)
    if os.path.isfile(place) or os.path.isdir(place):
        return place
    if os.path.exists(place):
        raise ValueError(f"{path}: neither a file nor a folder; needed: one of them")
    if os.path.islink(place):
        raise ValueError(f"{path}: a link to {os.readlink(place)!r}, which is not there")
    if not os.path.isdir(place.parent):
        raise ValueError(f"{path}: no such file, and no folder {str(place.parent)!r} either")
    if not os.access(place.parent, os.R_OK | os.X_OK):
        raise ValueError(f"{path}: the folder {str(place.parent)!r} may not be read; change its permissions")
    names = os.listdir(place.parent)
    near = difflib.get_close_matches(place.name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {str(place.parent / near[0])!r}?" if near else ""
    raise ValueError(f"{path}: no such file{hint}")
