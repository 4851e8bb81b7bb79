"""A call, the steps that it takes, and the forked sandbox that executes them (see `server`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.sandbox.frames import FrameBuffer, encoded_request
from rlmath.workers.process_tree import PAGE_BYTES, cpu_seconds


@dataclass(frozen=True)
class Step:
    """Code that a sandbox executes: a call, or an earlier one of its completion again."""

    number: int
    seed: int
    code: str

    def digest(self) -> bytes:
        return hashlib.sha256(encoded_request(self.number, self.seed, self.code)).digest()


@dataclass(frozen=True)
class Call:
    """A call as the leader submits it."""

    id: int
    key: str
    step: Step
    past: tuple[Step, ...]
    """The earlier calls that its session is made of."""
    cpu_seconds: float
    """Its limit: what is left of the completion's, if that is less than a call's."""
    submitted_at: float
    """time.monotonic(), which is the machine's."""

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> Call:
        steps = [Step(number, seed, code) for number, seed, code in message["steps"]]
        return Call(
            id=message["id"],
            key=message["key"],
            step=steps[-1],
            past=tuple(steps[:-1]),
            cpu_seconds=message["cpu_seconds"],
            submitted_at=message["submitted_at"],
        )


@dataclass
class Execution:
    """A call that a sandbox executes, behind the earlier calls that it lacks."""

    call: Call
    steps: deque[Step]
    """Steps to be executed; the first is being executed."""
    started: float
    rebuilt_calls: int
    cpu_before: float = 0.0
    """CPU time of its sandbox at the start of the step (seconds)."""
    cpu_limit: float = 0.0
    wall_limit: float = 0.0
    step_started: float = 0.0
    look_at: float = 0.0
    """Time at which its CPU time and threads are checked next."""
    looks: int = 0
    looks_asleep: int = 0
    """Number of looks at which its sandbox slept of its own will."""

    @property
    def is_rebuilding(self) -> bool:
        return len(self.steps) > 1


@dataclass(eq=False)
class Sandbox:
    """A forked process."""

    pid: int
    channel: socket.socket
    received: FrameBuffer
    key: str | None = None
    history: list[bytes] = field(default_factory=list)
    """Digests of the steps that it has executed."""
    execution: Execution | None = None
    unsent: bytes = b""
    lost_at: float | None = None
    """Time at which it closed its channel."""
    was_killed: bool = False
    memory_bytes: int = 0
    """Resident memory after its last call, beyond what the server has."""

    def cpu_seconds(self) -> float:
        with contextlib.suppress(OSError):
            return cpu_seconds(self.pid)
        return 0.0

    def threads(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(f"/proc/{self.pid}/task").st_nlink - 2
        return 1

    def is_asleep(self) -> bool:
        """Whether its main thread waits or has stopped of its own will.

        Waiting for a core or a disk is not of its own will."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self.pid}/stat", "rb", buffering=0) as file:
                return file.readall().rpartition(b")")[2].split()[0] in b"STt"
        return False


def has_unread(sandbox: Sandbox) -> bool:
    """Whether a session has written something that nobody asked for, or has ended."""
    try:
        sandbox.channel.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return bool(sandbox.received)
    except OSError:
        pass
    return True


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where it has ended or /proc is not there."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.readall().split()[1]) * PAGE_BYTES
    return 0
