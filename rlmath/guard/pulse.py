"""What a rank tells about itself with every beat, and whether its process is still there."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pulse:
    """A rank as it was at its last beat."""

    rank: int
    host: str
    home: str
    """Names the machine and its space of process ids: only there `pid` means this process."""
    pid: int
    born: str
    """When the process started, by the kernel's clock; tells it from a later one with the same id."""
    phase: str
    phase_seconds: float
    """How long it has been in that phase (seconds)."""
    entries: int
    """Phases entered so far: of ranks that walk the same phases, the one with the fewest is behind."""
    step: int
    beats: int
    left: bool
    """It has ended in order; nobody need watch it any more."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Pulse:
        return Pulse(**json.loads(text))

    def __str__(self) -> str:
        """ "rank 3 on node7 (pid 4711), step 12, in rollout for 31 s"."""
        place = f"rank {self.rank} on {self.host} (pid {self.pid})"
        return f"{place}, step {self.step}, in {self.phase} for {self.phase_seconds:.0f} s"


def host_name() -> str:
    return socket.gethostname()


def home() -> str:
    """The same for all processes that can see each other's process ids, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def birth_of(pid: int) -> str | None:
    """When the process started (clock ticks since boot); None if it is gone, or dead and not yet buried."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before the last ")" may hold anything; state and the rest follow it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def is_gone(pulse: Pulse, my_home: str) -> bool:
    """Whether that rank's process is known to have ended; on other machines that cannot be known."""
    return pulse.home == my_home and birth_of(pulse.pid) != pulse.born
