"""SIGTERM and SIGUSR1 make a run save and stop.

Slurm sends them before it takes a job's nodes away; torchrun forwards those that it handles (`launcher_advice`). The
handler only records the signal; the trainer reads it once a step, so that all ranks save after the same step. The main
thread may be inside a long call when a signal arrives; Python's wake-up descriptor wakes a thread of ours at once,
which measures the time.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import threading
from pathlib import Path

from rlmath.distributed.fault_tolerance.exit_codes import NOT_SAVED_IN_TIME, write_exit_status
from rlmath.distributed.process import innermost_call, write_stacks

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_ENDED = "the end of the launcher"
REASONS = (None, "SIGTERM", "SIGUSR1", LAUNCHER_ENDED)
"""What can request a stop; ranks agree on an index into this list."""
WANTED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


class StopRequest:
    """Whether this run has to save and stop, and the deadline for it.

    >>> stop = StopRequest(grace_seconds=300.0, output_dir="outputs/run", rank=0)
    >>> stop.requested is None
    True
    """

    def __init__(self, grace_seconds: float, output_dir: str, rank: int) -> None:
        self._grace, self._output_dir, self._rank = grace_seconds, output_dir, rank
        self._requested: str | None = None
        self._done = threading.Event()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def install(self) -> None:
        """Install the signal handlers; from the main thread, once. Child processes get the defaults."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._record)
        threading.Thread(target=self._enforce_deadline, name="stop-deadline", daemon=True).start()

    @property
    def requested(self) -> str | None:
        """What requested the stop of this rank first: "SIGTERM", "SIGUSR1", LAUNCHER_ENDED; None for nothing."""
        return self._requested

    def request(self, reason: str) -> None:
        """Request a stop as a signal does; `reason` is one of REASONS. From any thread."""
        self._requested = self._requested or reason
        os.write(self._waker, b"\0")

    def done(self) -> None:
        """Everything is saved, or there was nothing to save: the deadline no longer applies."""
        self._done.set()

    def _record(self, number: int, _frame: object) -> None:
        self._requested = self._requested or signal.Signals(number).name

    def _enforce_deadline(self) -> None:
        """The thread: waits for the first request, then for the deadline."""
        while self._requested is None:
            select.select([self._woken], [], [])
            for number in os.read(self._woken, 64):
                if number in SIGNALS:
                    self._record(number, None)
        logger.info("%s: the run saves after this step and stops, within %g s", self._requested, self._grace)
        if not self._done.wait(self._grace):
            self._exit_unsaved()

    def _exit_unsaved(self) -> None:
        message = (
            f"rank {self._rank} is still there {self._grace:g} s after {self._requested} (run.stop_grace_seconds), "
            f"in {innermost_call()}"
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


# ---------------------------------------------------------------- torchrun and signals


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_advice(grace_seconds: float) -> str | None:
    """The options that torchrun needs so that a run can save and stop; None if it has them.

    torchrun exits on signals that it does not handle without forwarding them, and kills ranks that are alive some
    seconds (30) after it forwarded a signal.
    """
    if not under_torchrun():
        return None
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    patience = _torchrun_patience()
    wanted = []
    if "SIGUSR1" not in handled:
        wanted.append(f"--signals-to-handle={','.join(WANTED_SIGNALS)}")
    if patience < grace_seconds:
        wanted.append(f"--shutdown-timeout={grace_seconds:.0f}")
    if not wanted:
        return None
    return (
        f"torchrun handles {','.join(handled)} and kills the ranks {patience:g} s after a signal; "
        f"run.stop_grace_seconds is {grace_seconds:g}. To save and stop in order on SIGTERM and SIGUSR1, start it with "
        f"{' '.join(wanted)}"
    )


def _torchrun_patience() -> float:
    """How long the parent, torchrun, waits before it kills its ranks (seconds)."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        command = ""
    if flag := re.search(r"--shutdown[-_]timeout(?:=|\0)(\d+)", command):
        return float(flag[1])
    older = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")  # torchrun's default
    return float(os.environ.get("PET_SHUTDOWN_TIMEOUT", older))
