"""The records of a call: its limits, the calls before it, and what came of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

ISOLATIONS = ("landlock", "preloaded", "none")
"""Kinds of confinement of the code. "landlock" reads the interpreter's own files and no others;
"preloaded" opens no file at all, for kernels without Landlock; "none" has limits, but neither a
filter nor Landlock."""
STATES = ("session", "fresh")
"""Whether names live on between the calls of a completion."""
STATUSES = ("ok", "error", "denied", "memory", "timeout", "ended", "refused", "lost")
"""ok; error: it raised; denied: it raised PermissionError; memory: it raised MemoryError; timeout:
of CPU time, or of wall time that it slept through; ended: it ended its process, broke its
channel, or started too many threads; refused: it was not run, being too long; lost: an
infrastructure fault, which is nobody's to learn from."""
KEEPING = ("ok", "error", "denied", "memory")
"""Statuses of calls that ended by themselves, so that what they defined lives on."""
LEAST_OUTPUT = 64
"""Least characters that are shown of a call."""


@dataclass(frozen=True)
class Limits:
    """The limits of a call.

    ValueError for a limit that is not above 0."""

    call_cpu_seconds: float = 5.0
    """CPU time of one call, all its threads together."""
    completion_cpu_seconds: float = 30.0
    """CPU time of all calls of a completion; executing them again for a session that was lost is
    not counted."""
    wall_factor: float = 10.0
    """Factor between a call's CPU time and the time by the clock after which it ends."""
    memory_bytes: int = 2**30
    """Address space of a completion's sandbox, beyond what the interpreter, numpy and sympy
    have."""
    output_characters: int = 4096
    """Longest text shown of a call: its beginning and end, half each, with what was left out
    between them."""
    threads: int = 16
    """Most threads of a call, its own included."""
    source_characters: int = 2**16
    """Longest code."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if not limit > 0:
                raise ValueError(f"the sandbox's {field.name} is {limit}; it must be above 0")
        if self.output_characters < LEAST_OUTPUT:
            raise ValueError(
                f"the sandbox's output_characters is {self.output_characters}; it must be at "
                f"least {LEAST_OUTPUT}"
            )

    @property
    def whole_cpu_seconds(self) -> float:
        """CPU time after which the kernel itself ends a sandbox.

        It is the completion's, and as much for rebuilding."""
        return 2 * self.completion_cpu_seconds + 2 * self.call_cpu_seconds


@dataclass(frozen=True)
class PastCall:
    """An earlier call of a completion, as records, captures and checkpoints keep it.

    >>> PastCall("x = 1", kept=True, cpu_seconds=0.002)
    PastCall(code='x = 1', kept=True, cpu_seconds=0.002)
    """

    code: str
    kept: bool = True
    """Whether what it defined lives on (`CallResult.kept`); one that was killed is not executed
    again."""
    cpu_seconds: float = 0.0
    """CPU time that counts towards the completion's limit."""


@dataclass(frozen=True)
class CallResult:
    """The outcome of a call.

    >>> CallResult("ok", "1\\n", cpu_seconds=0.001, wall_seconds=0.002, queue_seconds=0.0).kept
    True
    """

    status: str
    """One of STATUSES."""
    text: str
    """The text that the model is shown; of a lost call the reason, for the log."""
    cpu_seconds: float
    """CPU time of this call alone, measured from outside."""
    wall_seconds: float
    """Time from its start to its end, earlier calls that were executed again included."""
    queue_seconds: float
    """Time from `submit` to its start."""
    left_out_characters: int = 0
    """Characters of its output that are not in `text`."""
    rebuilt_calls: int = 0
    """Earlier calls that were executed again, as their session was no longer there."""

    @property
    def kept(self) -> bool:
        """Whether what it defined lives on in its session."""
        return self.status in KEEPING

    @property
    def is_infrastructure_fault(self) -> bool:
        """Whether it says something about the machine and nothing about the code."""
        return self.status == "lost"

    def as_past_call(self, code: str) -> PastCall:
        """The record that the completion's next call is submitted with."""
        return PastCall(code, self.kept, self.cpu_seconds)
