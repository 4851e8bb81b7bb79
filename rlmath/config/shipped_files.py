"""Files that belong to rlmath and are no Python modules: configs, locks, launchers.

In a checkout they are beside the package, in an installed wheel inside it (setup.py puts them
there)."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "shipped_files"
FOLDERS = ("configs", "launch", "requirements")


def shipped(name: str) -> Path:
    """The file or folder `name`, which begins with one of FOLDERS.

    An example is `shipped("configs/demo.yaml")`."""
    assert name.split("/")[0] in FOLDERS, name
    root = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent
    return root / name


def shipped_config(path: Path) -> Path | None:
    """The shipped file that a relative path such as `configs/demo.yaml` names, if any."""
    parts = path.parts
    if not parts or parts[0] != "configs" or ".." in parts:
        return None
    file = shipped(path.as_posix())
    return file if file.is_file() else None
