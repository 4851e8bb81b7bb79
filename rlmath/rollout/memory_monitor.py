"""Compares a rank's memory after every phase with the plan and with earlier steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

WARM_UP_CYCLES = 3
"""Cycles that later ones are not compared with: allocators, kernels and libraries still settle."""
GROWTH_SHARE = 0.1
"""Share by which an excess over the plan must exceed the largest logged one to be logged, too."""


class MemoryLeak(RuntimeError):
    """More memory is held than the settings allow."""


class MemoryMonitor:
    """Compares one rank's memory, phase by phase, cycle by cycle."""

    def __init__(self, threshold_bytes: int, stop: bool, rank: int, every: int = 1) -> None:
        """`every`: one of so many cycles is compared."""
        self._threshold = threshold_bytes
        self._every = every
        self._stop = stop
        self._rank = rank
        self._cycle = 0
        self._expected: dict[str, int] = {}
        self._earlier: dict[str, int] = {}
        self._logged_over = 0
        """The largest excess over the plan that was logged, after whatever phase (bytes)."""
        self._found: list[str] = []
        """Lines about the phases of this cycle after which too much was held."""
        self.held: dict[str, int] = {}
        """Memory held after each phase of the last cycle (bytes), by phase."""

    def start_cycle(self) -> None:
        """Call it first."""
        self._cycle += 1
        self._found = []

    @property
    def compares(self) -> bool:
        """Whether this cycle is compared.

        Allocators should then have released what they cached before each `observe`."""
        return self._cycle % self._every == 0

    def expect(self, held_bytes: int, planned: Mapping[str, int]) -> None:
        """Set what each phase is compared with.

        `held_bytes` is what is held between two steps, `planned` what each phase should hold on top
        of it (bytes; negative where training memory is offloaded). Memory that is only taken when
        it is touched may stay below."""
        self._expected = {phase: held_bytes + extra for phase, extra in planned.items()}

    def observe(self, phase: str, held_bytes: int, against_earlier: bool = True) -> None:
        """Compare what is held after a phase of this cycle with the plan and with earlier cycles.

        An excess is logged once: what is too much after one phase is too much after the next ones
        and in the next cycles, too."""
        self.held[phase] = held_bytes
        if not self.compares:
            return
        is_logged = False
        # In the first cycle a process still loads code, and maps what it keeps.
        if self._cycle > 1 and phase in self._expected:
            over = held_bytes - self._expected[phase]
            if self._exceeds(
                phase, held_bytes, over, than="planned"
            ) and over > self._logged_over * (1 + GROWTH_SHARE):
                change = (over - self._logged_over) / 2**20
                self._log(
                    f", {change:.0f} MiB more than was logged before" if self._logged_over else ""
                )
                self._logged_over = over
                is_logged = True
        if self._cycle <= WARM_UP_CYCLES or not against_earlier:
            return
        earlier = self._earlier.setdefault(phase, held_bytes)
        if self._exceeds(
            phase, held_bytes, held_bytes - earlier, than="in the same phase of earlier steps"
        ):
            if not is_logged:
                self._log()
            # Growth on top of it is logged again.
            self._earlier[phase] = held_bytes

    def _exceeds(self, phase: str, held_bytes: int, over: int, than: str) -> bool:
        if over <= self._threshold:
            return False
        self._found.append(
            f'after "{phase}" this rank holds {held_bytes / 2**30:.3f} GiB, '
            f"{over / 2**20:.0f} MiB more than {than}"
        )
        return True

    def _log(self, change: str = "") -> None:
        logger.warning(
            "Memory: cycle %d, rank %d: %s%s (memory.leak_threshold_mib is %g)",
            self._cycle,
            self._rank,
            self._found[-1],
            change,
            self._threshold / 2**20,
        )

    def end_cycle(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """MemoryLeak on all ranks where one found excess and `memory.stop_on_leak` is set.

        Call it once training has all its memory again. `gather` gives every rank's lines to every
        rank."""
        if not self._stop:
            return
        by_rank = gather([f"rank {self._rank}: {excess}" for excess in self._found])
        excesses = [line for lines in by_rank for line in lines]
        if excesses:
            raise MemoryLeak(
                f"{'; '.join(excesses)}. memory.stop_on_leak ends the run; raise "
                "memory.leak_threshold_mib "
                f"({self._threshold / 2**20:g}) if this is expected"
            )
