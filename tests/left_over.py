"""Processes that tests have started and that are still there.

Children of this process are not enough: a child that was killed leaves its own children to init. So
importing this module sets a variable of the environment, which every process of a session inherits.
"""

from __future__ import annotations

import os
import time
import uuid

import psutil

VARIABLE = "RLMATH_TEST_SESSION"
GRACE_SECONDS = 10.0
"""Time for processes that are ending: they were asked to, or see that their parent is gone."""
ENDS_WITH_US = "multiprocessing.resource_tracker"
"""What multiprocessing keeps beside a process that spawns others; it ends when that one does."""


SESSION = uuid.uuid4().hex
os.environ[VARIABLE] = SESSION


def left_over(grace_seconds: float) -> list[psutil.Process]:
    """The processes of this session that do not end within the time."""
    deadline = time.monotonic() + grace_seconds
    while (processes := _of_session()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes


def described(process: psutil.Process) -> str:
    """One line: id, parent, memory, age and command."""
    try:
        with process.oneshot():
            mib = process.memory_info().rss / 2**20
            age = time.time() - process.create_time()
            command = " ".join(process.cmdline())[:300]
            return (
                f"process {process.pid}, child of {process.ppid()}, {mib:.0f} MiB, {age:.0f} s "
                f"old: {command}"
            )
    except psutil.Error:
        return f"process {process.pid}, which has ended meanwhile"


def _of_session() -> list[psutil.Process]:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid()
        and (process.pid in children or _is_marked(process))
        and _counts(process)
    ]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(VARIABLE) == SESSION
    except (psutil.Error, OSError):
        return False


def _counts(process: psutil.Process) -> bool:
    try:
        own_tracker = process.ppid() == os.getpid() and ENDS_WITH_US in " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not own_tracker
    except psutil.Error:
        return False
