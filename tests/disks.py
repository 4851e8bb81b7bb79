"""Small disks that can be filled, of blocks and of inodes, and files that may not grow."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "4m", inodes: int = 64) -> Iterator[Path]:
    """A disk of its own (tmpfs) at `folder`; skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={size},nr_inodes={inodes}",
        "tmpfs",
        str(folder),
    ]
    if (
        os.geteuid() != 0
        or subprocess.run(command, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("only root may mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def use_up_inodes(disk: Path) -> list[Path]:
    """Make files until there can be no more; remove them to have inodes again."""
    paths = []
    with contextlib.suppress(OSError):
        while True:
            path = disk / f"inode-{len(paths)}"
            path.touch(exist_ok=False)
            paths.append(path)
    assert os.statvfs(disk).f_favail == 0
    return paths


def use_up_space(disk: Path) -> Path:
    """Fill a file until not a byte more fits; remove it to have room again."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    assert os.statvfs(disk).f_bavail == 0
    return path


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """No file may grow beyond this many bytes.

    As on a full disk, a write is cut short and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """The permissions of nobody in particular, where root runs the tests."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)
