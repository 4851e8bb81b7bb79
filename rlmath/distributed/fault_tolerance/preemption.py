"""SIGTERM and SIGUSR1 ask a run to save and stop.

Slurm sends them before it takes a job's nodes away, torchrun passes on those that it handles. The handler only notes
the signal; the trainer asks once a step, so that all ranks save after the same step. The main thread may be inside a
long call when a signal comes; Python's wake-up descriptor tells a thread of ours at once, which keeps the time.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading

from rlmath.distributed.fault_tolerance.exit_codes import NOT_SAVED_IN_TIME, write_exit_status
from rlmath.distributed.fault_tolerance.stack_dump import innermost_call, write_stacks

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_ENDED = "the end of the launcher"
REASONS = (None, "SIGTERM", "SIGUSR1", LAUNCHER_ENDED)
"""What a stop may be asked for by; ranks agree on a place in this list."""


class StopRequest:
    """Whether this run shall save and stop, and the clock of how long that may take.

    >>> stop = StopRequest(grace_seconds=300.0, output_dir="outputs/run", rank=0)
    >>> stop.requested is None
    True
    """

    def __init__(self, grace_seconds: float, output_dir: str, rank: int) -> None:
        self._grace, self._output_dir, self._rank = grace_seconds, output_dir, rank
        self._requested: str | None = None
        self._done = threading.Event()
        self._wake, self._poke = os.pipe()
        os.set_blocking(self._poke, False)

    def install(self) -> None:
        """Take over the signals; from the main thread, once. Programs that are started later get their defaults."""
        signal.set_wakeup_fd(self._poke, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._note)
        threading.Thread(target=self._keep_time, name="stop-deadline", daemon=True).start()

    @property
    def requested(self) -> str | None:
        """What asked this rank to stop first: "SIGTERM", "SIGUSR1", LAUNCHER_ENDED; None for nothing."""
        return self._requested

    def request(self, reason: str) -> None:
        """Ask this rank to stop as a signal does; `reason` is one of REASONS. From any thread."""
        if self._requested is None:
            self._requested = reason
        os.write(self._poke, b"\0")

    def done(self) -> None:
        """What was to be saved is saved, or nothing was: the clock stops."""
        self._done.set()

    def _note(self, number: int, _frame: object) -> None:
        if self._requested is None:
            self._requested = signal.Signals(number).name

    def _keep_time(self) -> None:
        """The thread: waits for the first request, then for the deadline."""
        while self._requested is None:
            select.select([self._wake], [], [])
            for number in os.read(self._wake, 64):
                if number in SIGNALS:
                    self._note(number, None)
        logger.info("%s: the run saves after this step and stops, within %g s", self._requested, self._grace)
        if not self._done.wait(self._grace):
            self._give_up()

    def _give_up(self) -> None:
        told = (
            f"rank {self._rank} is still there {self._grace:g} s after {self._requested} (run.stop_grace_seconds), "
            f"in {innermost_call()}"
        )
        try:
            path = write_stacks(self._output_dir, self._rank, told)
            logger.error("%s; its stacks are in %s", told, path)
            write_exit_status(self._output_dir, NOT_SAVED_IN_TIME, told)
        except OSError as error:
            logger.error("%s; its stacks cannot be written: %s", told, error)
        finally:
            logging.shutdown()
            os._exit(NOT_SAVED_IN_TIME)
