"""Wall-clock seconds of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import record_function

PHASE_PREFIX = "phase: "
"""Begins the names of phases in a profile."""


class PhaseTimers:
    """Adds up the seconds of named phases, which may be entered many times.

    A phase may hold others, and includes their seconds. One that is nested in itself counts once.

    >>> timers = PhaseTimers()
    >>> with timers.phase("rollout"):
    ...     with timers.phase("sync"):
    ...         pass
    >>> sorted(timers.seconds())
    ['rollout', 'sync']

    `on_phase` is called with a phase's name when it is entered and when a phase inside it has
    ended, and with "after rollout" when the outermost one has. It is not called when a block
    raises: the last call names where that was.
    """

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self._seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures its block, also when the block raises."""
        self._open.append(name)
        self._on_phase(name)
        start = time.perf_counter()
        try:
            with record_function(PHASE_PREFIX + name):
                yield
            self._on_phase(self._open[-2] if len(self._open) > 1 else f"after {name}")
        finally:
            self._open.pop()
            if name not in self._open:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Seconds of every finished phase since the last reset, in the order of first endings."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Forgets finished phases; one that is still open counts from its start when it ends."""
        self._seconds.clear()
