"""Why a run ends: the status that every rank publishes, failures that ranks detect, the shutdown.

`heartbeat` exchanges these records over the run's key-value store."""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch.distributed as dist

from rlmath.config.run_files import EXIT_STATUS_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    report_to_torchrun,
    write_exit_status,
)
from rlmath.distributed.process import innermost_call, stacks_path, write_stacks
from rlmath.distributed.run_store import RunStore, record_of

logger = logging.getLogger(__name__)

STACKS_SECONDS = 15.0
"""Seconds that the ranks wait for each other's stacks after a hang."""


# ---------------------------------------------------------------- the state of a rank


@dataclass(frozen=True)
class RankStatus:
    """A rank at its last heartbeat."""

    rank: int
    host: str
    pid_namespace: str
    """Identifies the machine and its space of process ids: only there `pid` means this process."""
    pid: int
    process_start: str
    """Start of the process by the kernel's clock.

    It distinguishes the process from a later one with the same id."""
    phase: str
    phase_seconds: float
    """Seconds that it has been in that phase."""
    entries: int
    """Phases entered so far: among ranks with the same phases, that with the fewest is behind."""
    step: int
    beats: int
    left: bool
    """Whether it has ended without an error; other ranks stop watching it."""

    def __str__(self) -> str:
        """ "rank 3 on node7 (pid 4711), step 12, in rollout for 31 s"."""
        place = f"rank {self.rank} on {self.host} (pid {self.pid})"
        return f"{place}, step {self.step}, in {self.phase} for {self.phase_seconds:.0f} s"


def pid_namespace() -> str:
    """The same for all processes that can see each other's process ids, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def process_start(pid: int) -> str | None:
    """Start of a process (clock ticks since boot); None if it does not exist, or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before the last ")" may hold anything; state and the rest follow it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def has_died(status: RankStatus, own_namespace: str) -> bool:
    """Whether that rank's process is known to have ended; on other machines that is unknown."""
    return (
        status.pid_namespace == own_namespace and process_start(status.pid) != status.process_start
    )


# ---------------------------------------------------------------- failures

Kind = Literal["failed", "gone", "silent", "hang", "store"]


@dataclass(frozen=True)
class Failure:
    kind: Kind
    message: str
    reporter: int
    """The rank that detected it."""


def first_line(error: BaseException) -> str:
    """ "ValueError: the first line of its text".

    The kernel's word for a full disk names none: shared memory is one."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        text += "; no file is named: look for a full disk with df and df -i, among them /dev/shm"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class PeerFailedError(Exception):
    """An error of this rank that follows from the failure of another, which its text names."""


def may_be_caused_by_peer(error: BaseException) -> bool:
    """Whether the error may only mean that another rank has ended.

    Gloo and NCCL raise RuntimeError for that."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


# ---------------------------------------------------------------- the end of a rank


class Shutdown:
    """The shutdown of a rank when the run has failed."""

    def __init__(self, output_dir: str, rank: int, world_size: int) -> None:
        self._output_dir = output_dir
        self._rank = rank
        self._world_size = world_size

    def report_and_exit(self, failure: Failure, store: RunStore, status: RankStatus) -> NoReturn:
        """Log the failure, write the exit status, end the process.

        A thread calls it, as the main one may hang for ever."""
        try:
            if failure.kind == "hang":
                self._report_hang(failure, store, status)
            is_error = (
                self._rank in (0, failure.reporter) or os.environ.get("LOCAL_RANK", "0") == "0"
            )
            log = logger.error if is_error else logger.info
            log("rank %d on %s ends: %s", self._rank, status.host, failure.message)
            self.write_exit_status(failure)
            report_to_torchrun(failure.message)
        except (OSError, RuntimeError) as error:
            logger.error("%s; reporting it failed: %s", failure.message, error)
        finally:
            self.exit_now()

    def write_exit_status(self, failure: Failure) -> None:
        """Write the exit status, on the rank that reported the failure.

        A rank that lost the store does not know why, and does not replace the status that another
        rank has written."""
        # `Path.exists` raises where a network disk does not answer.
        is_known = failure.kind == "store" and os.path.exists(
            f"{self._output_dir}/{EXIT_STATUS_FILE}"
        )
        if self._rank == failure.reporter and not is_known:
            write_exit_status(self._output_dir, FAILURE, failure.message)

    def exit_now(self) -> NoReturn:
        """End the process without clean-up.

        Threads and process groups of a failed run may wait for peers that wait for this rank."""
        logging.shutdown()
        os._exit(FAILURE)

    def statuses(self, store: RunStore) -> dict[int, RankStatus]:
        """The last status of every rank that published one."""
        # All ranks may ask at once: two requests each, if all ranks have published.
        keys = {f"status/{rank}": rank for rank in range(self._world_size)}
        statuses = {
            keys[key]: record_of(RankStatus, record)
            for key, record in store.get_all(list(keys)).items()
        }
        return {rank: status for rank, status in statuses.items() if status is not None}

    def _report_hang(self, failure: Failure, store: RunStore, status: RankStatus) -> None:
        """Every rank writes its stacks; rank 0 waits for all and logs where each rank is."""
        write_stacks(self._output_dir, self._rank, f"{status}: {failure.message}")
        store.set(f"stacks/{self._rank}", innermost_call())
        logged = "stacks/logged"
        deadline = time.monotonic() + STACKS_SECONDS
        waits_for = (
            [f"stacks/{rank}" for rank in range(self._world_size)] if self._rank == 0 else [logged]
        )
        while not store.all_there(waits_for) and time.monotonic() < deadline:
            time.sleep(0.2)
        if self._rank == 0:
            logger.error("%s", self._summary(store, failure))
            store.set(logged, "yes")

    def _summary(self, store: RunStore, failure: Failure) -> str:
        """The text about a hang: status and innermost call of every rank, and which are behind."""
        statuses = self.statuses(store)
        fewest = min((status.entries for status in statuses.values()), default=0)
        all_level = all(status.entries == fewest for status in statuses.values())
        lines = [f"The run hangs: {failure.message}."]
        for rank in range(self._world_size):
            if rank not in statuses:
                lines.append(f"  rank {rank}: never gave a sign of life")
                continue
            call = store.get(f"stacks/{rank}") or "no stacks: its interpreter does not answer"
            behind = "" if all_level or statuses[rank].entries > fewest else "  <- BEHIND"
            lines.append(f"  {statuses[rank]}: {call}{behind}")
        folder = stacks_path(self._output_dir, 0).parent
        return "\n".join([*lines, f"The stacks of all threads are in {folder}"])
