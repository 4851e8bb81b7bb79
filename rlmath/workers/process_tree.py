"""The processes that descend from a process: their ids, their memory, and their end.

A process that calls `adopt_orphans` becomes the parent of every descendant whose own parent ends (a
"subreaper"), so a descendant cannot leave the tree, neither by a new session nor by a double fork.
Linux only; needs no privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SWEEP_PAUSE_SECONDS = 0.001
"""Pause between two passes over processes that are ending."""

_PR_SET_CHILD_SUBREAPER = 36
_CPUCLOCK_SCHED = 2
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make the orphans among this process's descendants its children from now on.

    OSError where the kernel refuses."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def children_by_parent() -> dict[int, list[int]]:
    """All processes of the machine by their parents, those that wait to be reaped included.

    It takes 10 to 40 microseconds for each."""
    children: dict[int, list[int]] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):
            children.setdefault(_parent_of(pid), []).append(pid)
    return children


def descendants(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """All processes below a process, parents before their children.

    `children` is from `children_by_parent`."""
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, [])
    return pids[1:]


def memory_above(pids: Iterable[int], limit: int) -> bool:
    """Whether processes hold more than `limit` bytes together.

    Shared pages count once (proportional set size)."""
    pids = list(pids)
    return sum(map(_resident_bytes, pids)) > limit and sum(map(_proportional_bytes, pids)) > limit


def cpu_seconds(pid: int) -> float:
    """Processor time of a process of this machine, without its children (seconds).

    OSError where it has ended."""
    # The clock is computed as in clock_getcpuclockid(3).
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def kill_trees(roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> None:
    """SIGKILL for children of this process, their descendants and the process groups of all these.

    `children` is from `children_by_parent`. What is forked meanwhile outlives it, as an orphan of
    the process that adopts orphans. A group is killed at once, so one that only forks cannot outrun
    it."""
    tree = [pid for root in roots for pid in (root, *descendants(root, children))]
    groups = set()
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for pid in tree:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    """The parent of a process; OSError where it has ended."""
    return int(_read(pid, "stat").rpartition(b")")[2].split(None, 2)[1])


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.readall()


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(_read(pid, "statm").split()[1]) * PAGE_BYTES
    return 0


def _proportional_bytes(pid: int) -> int:
    """Resident memory, with shared pages divided by the number of their users.

    All of the resident memory where the kernel does not know."""
    with contextlib.suppress(OSError, ValueError):
        for line in _read(pid, "smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident_bytes(pid)
