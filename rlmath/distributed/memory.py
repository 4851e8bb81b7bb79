"""The host's memory: how much there is, and how much of it is available."""

from __future__ import annotations

from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with the limit of a control group, its usage, and the part of that which can be reclaimed:
cached files."""


def available_bytes() -> int:
    """Bytes of free memory of this machine, within the limit of this process's control group.

    A process that takes more is killed."""
    free = int(psutil.virtual_memory().available)
    return min(
        [free, *(room for room in map(_room, *zip(*_groups(), strict=True)) if room is not None)]
    )


def total_bytes() -> int:
    """Bytes of all memory of this machine, or a lower limit of this process's control group."""
    limits = (_number(group / files[0]) for group, files in _groups())
    return min(
        [int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)]
    )


def out_of_memory_kills(statistics: Path = Path("/proc/vmstat")) -> int | None:
    """Processes that the kernel has killed for want of memory since its start; None if unknown."""
    try:
        counts = dict(line.split() for line in statistics.read_text("utf-8").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def is_scarce(needed_bytes: int) -> bool:
    """Whether the host's memory is scarce.

    It is if less than a quarter is available, or less than twice the bytes that all of its ranks
    want."""
    return available_bytes() < max(total_bytes() // 4, 2 * needed_bytes)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text("utf-8"))
    except (OSError, ValueError):  # "max" is no number
        return None


def _groups() -> list[tuple[Path, tuple[str, str, str]]]:
    """Folders in which this process's control group may be visible.

    It is at its own path, or at the root of a container's view."""
    try:
        lines = [
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines()
        ]
    except OSError:
        lines = []
    newer = [(_ROOT / path.lstrip("/"), _VERSION_2) for _, kinds, path in lines if kinds == ""]
    older = [
        (_ROOT / "memory" / path.lstrip("/"), _VERSION_1)
        for _, kinds, path in lines
        if "memory" in kinds.split(",")
    ]
    return [*newer, (_ROOT, _VERSION_2), *older, (_ROOT / "memory", _VERSION_1)]


def _room(group: Path, files: tuple[str, str, str]) -> int | None:
    """Bytes that the group may still allocate; None if it does not exist or has no limit."""
    limit = _number(group / files[0])
    used = _number(group / files[1])
    try:
        stats = dict(
            line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines()
        )
        return None if limit is None or used is None else limit - (used - int(stats[files[2]]))
    except (OSError, ValueError, KeyError):
        return None
