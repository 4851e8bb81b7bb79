"""SIGINT (Ctrl-C), SIGTERM and SIGUSR1 make a run save and stop; a second Ctrl-C ends it at once.

Slurm sends SIGTERM or SIGUSR1 before it takes a job's nodes away, a terminal sends SIGINT to
torchrun, and torchrun forwards those that it handles (`launcher_advice`) to its ranks, which are in
sessions of their own. A request is only recorded; the trainer reads it once a step, so that all
ranks save after the same step. The main thread may be inside a long call when a signal arrives:
Python's wake-up descriptor wakes a thread of ours at once (`on_signals`).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from rlmath.config.run_files import EXIT_STATUS_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    NOT_SAVED_IN_TIME,
    again_text,
    read_exit_status,
    write_exit_status,
)
from rlmath.distributed.process import innermost_call, write_stacks

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPT = "SIGINT (Ctrl-C)"
LAUNCHER_ENDED = "the end of the launcher"
REASONS = (None, "SIGTERM", "SIGUSR1", LAUNCHER_ENDED, INTERRUPT)
"""Reasons that can request a stop; ranks agree on an index into this list."""
EXIT_SECONDS = 15.0
"""Seconds that torchrun waits for its ranks beyond the time in which they may save.

A rank that is too late writes its status and its stacks before it ends."""
WANTED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


class StopRequest:
    """Whether this run has to save and stop, and the deadline for it.

    >>> stop = StopRequest(grace_seconds=300.0, output_dir="outputs/run", rank=0)
    >>> stop.requested is None
    True
    """

    def __init__(self, grace_seconds: float, output_dir: str, rank: int) -> None:
        self._grace = grace_seconds
        self._output_dir = output_dir
        self._rank = rank
        self._leads_other_node = rank != 0 and os.environ.get("LOCAL_RANK") == "0"
        """Ctrl-C may have been pressed there: it logs so, which only rank 0 does else."""
        self._requested: str | None = None
        self._interrupted = False
        """Whether Ctrl-C reached this process while nothing else had requested a stop."""
        self._asked = threading.Event()
        self._done = threading.Event()
        self.in_steps = False
        """Whether steps have begun in this process; before that there is nothing new to save."""
        self.saved_step: int | None = None
        """Steps done in the newest complete checkpoint.

        The last line of a run that is ended at once names them."""

    def install(self) -> None:
        """Install the signal handlers; from the main thread, once.

        Child processes get the defaults."""
        on_signals(SIGNALS, self._arrived)
        threading.Thread(target=self._enforce_deadline, name="stop-deadline", daemon=True).start()

    @property
    def requested(self) -> str | None:
        """The first reason for this rank to stop, one of REASONS; None without a request."""
        return self._requested

    def request(self, reason: str) -> None:
        """Request a stop as a signal does; `reason` is one of REASONS.

        From any thread."""
        self._requested = self._requested or reason
        self._asked.set()

    def done(self) -> None:
        """Everything is saved, or there was nothing to save: the deadline no longer applies."""
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def _arrived(self, number: int) -> None:
        # torchrun sends SIGINT at the first Ctrl-C, and SIGTERM at the second.
        if self._interrupted and number in (signal.SIGINT, signal.SIGTERM):
            self._end_at_once()
        # Another rank's request may have come before this rank's own signal: that is no second
        # Ctrl-C.
        if number == signal.SIGINT and self._requested in (None, INTERRUPT):
            self._interrupted = True
        self.request(INTERRUPT if number == signal.SIGINT else signal.Signals(number).name)

    def _enforce_deadline(self) -> None:
        """The thread: waits for the first request, then for the deadline."""
        self._asked.wait()
        if self._done.is_set():
            logger.info("%s: the run is ending already", self._requested)
            return
        seconds = self._granted_seconds()
        hints = ""
        if seconds < self._grace:
            hints = (
                f" (not run.stop_grace_seconds, {self._grace:g}: torchrun kills the ranks soon "
                "after)"
            )
        if self._requested == INTERRUPT:
            hints += "; Ctrl-C again ends it at once, without saving"
        if self._requested == "SIGTERM" and under_torchrun():
            hints += "; if torchrun sent it because another rank has ended, nothing can be saved"
        action = (
            "saves after this step and stops" if self.in_steps else "stops before its next step"
        )
        text = "%s: the run %s, within %g s%s"
        is_warning = self._leads_other_node and self._requested == INTERRUPT
        logger.log(
            logging.WARNING if is_warning else logging.INFO,
            text,
            self._requested,
            action,
            seconds,
            hints,
        )
        if not self._done.wait(seconds):
            self._exit_unsaved(seconds)

    def _granted_seconds(self) -> float:
        """Seconds that this rank may take to save.

        They are those of the settings, but fewer if torchrun would kill it before."""
        if not under_torchrun() or self._requested == LAUNCHER_ENDED:
            return self._grace
        patience = _torchrun_patience()
        return min(self._grace, max(patience - EXIT_SECONDS, 0.75 * patience))

    def _exit_unsaved(self, seconds: float) -> None:
        """Write exit status and stacks, and end the process, which has not saved in time."""
        message = (
            f"rank {self._rank} is still there {seconds:g} s after {self._requested} "
            "(run.stop_grace_seconds is "
            f"{self._grace:g}), in {innermost_call()}; what was done since the newest checkpoint "
            "is lost, "
            f"{again_text(self.saved_step)}"
        )
        try:
            write_exit_status(self._output_dir, NOT_SAVED_IN_TIME, message)
            path = write_stacks(self._output_dir, self._rank, message)
            logger.error("%s; its stacks are in %s", message, path)
        except OSError as error:
            logger.error("%s; its stacks cannot be written: %s", message, error)
        finally:
            logging.shutdown()
            os._exit(NOT_SAVED_IN_TIME)

    def _end_at_once(self) -> NoReturn:
        """End the process after a second Ctrl-C; write the exit status unless there is one."""
        status = FAILURE
        try:
            if os.path.exists(f"{self._output_dir}/{EXIT_STATUS_FILE}"):
                # All is saved, and this process was ending.
                status = read_exit_status(self._output_dir).status
            elif self._rank == 0 or self._leads_other_node:
                message = f"ended at once by a second Ctrl-C; {again_text(self.saved_step)}"
                write_exit_status(self._output_dir, FAILURE, message)
                logger.warning("The run was %s", message)
                logging.shutdown()
        finally:
            os._exit(status)


# ---------------------------------------------------------------- signals


def on_signals(numbers: Iterable[int], react: Callable[[int], None]) -> None:
    """Call `react` with the number of each of these signals that arrives from now on.

    A thread of ours calls it at once, also while the main thread is inside a long call. The main
    thread calls this function, which replaces earlier reactions."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    numbers = frozenset(numbers)

    def pass_on() -> None:
        while True:
            for number in os.read(woken, 64):
                if number in numbers:
                    react(number)

    threading.Thread(target=pass_on, name="signals", daemon=True).start()
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)


def end_at_interrupt(rank: int) -> None:
    """Make Ctrl-C end this process at once, without a traceback.

    That holds until a `StopRequest` is installed. The main thread calls it."""

    def end(_number: int) -> None:
        if rank == 0:
            logger.warning(
                "%s before the first step: the same command starts the run again", INTERRUPT
            )
            logging.shutdown()
        os._exit(FAILURE)

    on_signals([signal.SIGINT], end)


# ---------------------------------------------------------------- torchrun


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_advice(grace_seconds: float) -> str | None:
    """The options that torchrun needs so that a run can save and stop; None if it has them.

    Torchrun exits on signals that it does not handle without forwarding them, and kills ranks that
    are alive some seconds (30) after it forwarded one."""
    if not under_torchrun():
        return None
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    patience = _torchrun_patience()
    options = []
    reasons = []
    if "SIGUSR1" not in handled:
        options.append(f"--signals-to-handle={','.join(WANTED_SIGNALS)}")
        reasons.append("does not pass SIGUSR1 on")
    if patience < grace_seconds + EXIT_SECONDS:
        options.append(f"--shutdown-timeout={grace_seconds + EXIT_SECONDS:.0f}")
        reasons.append(f"kills the ranks {patience:g} s after a signal, Ctrl-C too")
    if not options:
        return None
    return (
        f"torchrun {', and '.join(reasons)}. To save whatever a step takes, start it with "
        f"{' '.join(options)}"
    )


def _torchrun_patience() -> float:
    """Seconds that the parent, torchrun, waits before it kills its ranks."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError:
        command = ""
    if flag := re.search(r"--shutdown[-_]timeout(?:=|\0)(\d+)", command):
        return float(flag[1])
    older = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")  # torchrun's default
    return float(os.environ.get("PET_SHUTDOWN_TIMEOUT", older))
