"""The heartbeat: ranks publish that they live, watch their neighbours, and end when one fails.

    main thread   sets the phase, its progress, its failure: plain attributes, never waits for the network
    beat thread   once a second, over a connection of its own to torchrun's key-value store: writes this rank's status,
                  reads the status of the next ranks in the ring, and the failure of the run if there is one; passes a
                  request to stop on to rank 0
    watch thread  checks that the beat thread gets answers, and that the launcher is alive

The rank that detects a failure (a rank that died, raised or stopped beating; no progress on any
rank) writes it to the store, where the first one stays. All ranks read it with their next beat, log
it and exit. The work of a rank does not grow with the number of ranks.

Silence is counted in beats of the watching rank, not by the clock: a run that was suspended as a
whole continues.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlmath.config.schema import RunConfig
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.fault_tolerance import failure as failures
from rlmath.distributed.fault_tolerance.failure import (
    Failure,
    PeerFailedError,
    RankStatus,
    Shutdown,
    first_line,
)
from rlmath.distributed.fault_tolerance.preemption import (
    LAUNCHER_ENDED,
    REASONS,
    StopRequest,
    under_torchrun,
)
from rlmath.distributed.ranks import this_rank
from rlmath.distributed.run_store import RunStore, record_of

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
NEIGHBOURS = 2
"""Number of ranks that each rank watches.

One would find every loss; two find it also when a watcher's own thread is stuck."""
RECONNECT_SECONDS = 5.0
"""Seconds that a reconnection to the store may take."""
PEER_SECONDS = 3.0
"""Seconds that a rank whose collective failed looks for the cause before it reports itself."""
REPORT_SECONDS = 10.0
"""Seconds that a rank that failed waits until its failure is in the store."""
FAILURE_KEY = "failure"
STOP_KEY = "stop"
DONE_KEY = "done"


def watched(rank: int, world_size: int, ranks_per_node: int) -> list[int]:
    """The ranks that a rank watches: the next ones, and the next on its own node.

    It sees at once that a rank on its own node dies.

    >>> watched(7, 16, 8)
    [8, 9, 0]
    """
    first = rank // ranks_per_node * ranks_per_node
    next_on_node = first + (rank - first + 1) % ranks_per_node
    next_ones = [
        (rank + 1 + offset) % world_size for offset in range(min(NEIGHBOURS, world_size - 1))
    ]
    return list(
        dict.fromkeys(
            [*next_ones, *([next_on_node] if next_on_node not in (rank, world_size) else [])]
        )
    )


class Heartbeat:
    """One per rank, for the life of the run.

    In the program of every rank, after the process group is there:

    stop.install()
    with Heartbeat(config.run, rank, world_size, output_dir, stop) as heartbeat:
        timers = PhaseTimers(heartbeat.enter_phase)
        ...
        heartbeat.step = number

    An exception that leaves the block is reported to the other ranks, which exit too. Where it
    follows from the end of another rank, a PeerFailedError that names this one takes its place.
    """

    def __init__(
        self,
        settings: RunConfig,
        rank: int,
        world_size: int,
        output_dir: str,
        stop: StopRequest,
        broadcast: Callable[[Any], Any] = broadcast_from_rank_zero,
    ) -> None:
        """A collective of all ranks; `broadcast` gives the object of rank 0 to all of them."""
        self.step = 0
        self._settings = settings
        self._rank = rank
        self._stop = stop
        self._ring = watched(rank, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._world_size = world_size
        self._address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._shutdown = Shutdown(output_dir, rank, world_size)
        self._namespace = failures.pid_namespace()
        self._launcher = os.getppid()
        self._process_start = failures.process_start(os.getpid())
        self._phase = "start"
        self._entered_at = time.monotonic()
        self._entries = 0
        self._progress = 0
        self._failure: BaseException | None = None
        self._cause: Failure | None = None
        """The failure that ends the run, where this rank's error follows from another's."""
        self._place = this_rank()  # engines change the environment later
        self._launcher_lock = threading.Lock()
        self._wake = threading.Event()
        self._reported = threading.Event()
        self._left = False
        self._beats = self._sent_progress = 0
        self._seen_progress: list[int] | None = None
        """The rank that last made progress, and its count of it."""
        self._silence = dict.fromkeys(self._ring, 0.0)
        self._seen: dict[int, RankStatus] = {}
        self._still = self._unanswered = 0.0
        self._slowest_answer = 0.0
        # torchrun keeps the store over restarts, and its count of them differs between nodes.
        self._start = broadcast(uuid.uuid4().hex)
        self._store = self._connect(settings.distributed_timeout_seconds)

    def __enter__(self) -> Heartbeat:
        self._threads = [
            threading.Thread(target=self._beat, name="heartbeat-beat", daemon=True),
            threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.report_failure(error)
            if self._cause is not None:
                raise PeerFailedError(self._cause.message) from error
            return
        self._left = True
        self._wake.set()
        self._threads[0].join(RECONNECT_SECONDS)

    # ------------------------------------------------------------ called by the main thread

    def enter_phase(self, phase: str) -> None:
        """The main thread is in this phase from now on; counts as progress."""
        self._phase = phase
        self._entered_at = time.monotonic()
        self._entries += 1
        self._progress += 1

    def report_progress(self) -> None:
        """A long phase advances: an engine step, a micro-batch.

        Costs nothing."""
        self._progress += 1

    def slowest_answer(self) -> float:
        """Most seconds that the store took to answer this rank since the last call."""
        slowest, self._slowest_answer = self._slowest_answer, 0.0
        return slowest

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks why this one ends.

        Returns when that is done, or after REPORT_SECONDS. The caller then ends the process, else
        the beat thread does REPORT_SECONDS later."""
        if self._failure is None:
            self._failure = error
            self._wake.set()
            if not self._reported.wait(
                REPORT_SECONDS
            ):  # the store is lost, too: write the file at least
                self._shutdown.write_exit_status(self._own_failure(first_line(error)))

    # ------------------------------------------------------------ the beat thread

    def _beat(self) -> None:
        """The beat thread: exchange once in BEAT_SECONDS until this rank leaves."""
        last_beat_time = time.monotonic()
        while not self._left:
            beat_time = time.monotonic()
            passed = min(beat_time - last_beat_time, 2 * BEAT_SECONDS)
            last_beat_time = beat_time
            try:
                if self._failure is not None:
                    self._report_own_failure(self._failure)
                self._exchange(passed)
            except RuntimeError as error:  # what torch's stores raise
                self._reconnect(error)
            except (OSError, ValueError) as error:
                logger.warning("rank %d could not check its neighbours: %s", self._rank, error)
            self._wake.wait(BEAT_SECONDS)
        try:
            self._tell_done()  # since the last beat it may be so
            self._store.set(f"status/{self._rank}", asdict(replace(self._status(), left=True)))
        except RuntimeError as error:
            logger.debug("the store ended before this rank: %s", error)

    def _exchange(self, passed: float) -> None:
        """One beat; `passed` seconds after the last one."""
        start_time = time.perf_counter()
        self._store.set(f"status/{self._rank}", asdict(self._status()))
        failure = record_of(Failure, self._store.get(FAILURE_KEY))
        self._slowest_answer = max(self._slowest_answer, time.perf_counter() - start_time)
        if failure is not None:
            self._end(failure)
        self._share_stop()
        for rank in self._ring:
            self._check_neighbour(rank, passed)
        self._check_progress(passed)
        self._beats += 1
        self._unanswered = 0.0

    def _share_stop(self) -> None:
        """Pass a request to stop that any rank got to rank 0, and learn from it that all is saved.

        Ranks that have only engines are not asked after a step."""
        stop = self._stop
        if self._rank == 0:
            if stop.requested is None and (reason := self._store.get(STOP_KEY)) in REASONS[1:]:
                stop.request(reason)
            self._tell_done()
        elif stop.requested is not None and not stop.is_done:
            self._store.set(STOP_KEY, stop.requested)
            if self._store.get(DONE_KEY) is True:
                stop.done()

    def _tell_done(self) -> None:
        if self._rank == 0 and self._stop.is_done:
            self._store.set(DONE_KEY, True)

    def _check_neighbour(self, rank: int, passed: float) -> None:
        """Read the status of a watched rank; report a failure if it has died or is silent."""
        last_status = self._seen.get(rank)
        if last_status is not None and last_status.left:
            return
        status = record_of(RankStatus, self._store.get(f"status/{rank}"))
        if status is not None:
            self._seen[rank] = status
            if status.left:
                return
            if self._has_died(status):
                cause = (
                    "killed by a signal, by the kernel for want of memory (see dmesg), or by "
                    "the launcher"
                )
                death_text = f"has died: its process ended without reporting an error ({cause})"
                self._report(
                    Failure("gone", f"{status} at its last beat, {death_text}", self._rank)
                )
        has_beaten = status is not None and (
            last_status is None or status.beats > last_status.beats
        )
        self._silence[rank] = 0.0 if has_beaten else self._silence[rank] + passed
        if (seconds := self._silence[rank]) > self._settings.heartbeat_timeout_seconds:
            text = (
                f"rank {rank} has given no sign of life for {seconds:.0f} s "
                "(run.heartbeat_timeout_seconds)"
            )
            last_beat_text = f"its last heartbeat: {status}" if status else "it never sent one"
            self._report(Failure("silent", f"{text}; {last_beat_text}", self._rank))

    def _has_died(self, status: RankStatus) -> bool:
        """Whether the rank's process is gone and has not said that it leaves.

        It says so before it ends, and may have done both since `status` was read."""
        if not failures.has_died(status, self._namespace):
            return False
        newer_status = record_of(RankStatus, self._store.get(f"status/{status.rank}"))
        return newer_status is None or not newer_status.left

    def _check_progress(self, passed: float) -> None:
        """Publish this rank's progress; report a hang if no rank has made any for too long."""
        if self._progress != self._sent_progress:
            self._sent_progress = self._progress
            self._store.set("progress", [self._rank, self._progress])
        latest_progress = self._store.get("progress")
        self._still = 0.0 if latest_progress != self._seen_progress else self._still + passed
        self._seen_progress = latest_progress
        limit = self._settings.hang_timeout_seconds
        if limit is not None and self._still > limit:
            text = f"no rank has made progress for {self._still:.0f} s (run.hang_timeout_seconds)"
            self._report(Failure("hang", text, self._rank))

    def _report(self, failure: Failure) -> None:
        """Write the failure, unless there is one already, and exit with the one in the store."""
        self._end(
            record_of(Failure, self._store.set_first(FAILURE_KEY, asdict(failure))) or failure
        )

    def _end(self, failure: Failure) -> None:
        """End this rank because of a failure; the main thread may log its own error before."""
        if self._failure is None:
            self._shutdown.report_and_exit(failure, self._store, self._status())
        # The main thread logs its own error itself.
        if failure.reporter != self._rank or failure.kind != "failed":
            logger.error(
                "rank %d on %s ends: %s", self._rank, socket.gethostname(), failure.message
            )
            if failures.may_be_caused_by_peer(self._failure):
                self._cause = failure
        self._shutdown.write_exit_status(failure)
        self._reported.set()
        time.sleep(REPORT_SECONDS)
        self._shutdown.exit_now()

    def _report_own_failure(self, error: BaseException) -> None:
        """Write this rank's failure.

        If another rank may have caused it, name that one, or let others do so."""
        reason = first_line(error)
        if not failures.may_be_caused_by_peer(error):
            self._report(self._own_failure(reason))
        statuses_before = self._shutdown.statuses(self._store)
        deadline = time.monotonic() + PEER_SECONDS
        while time.monotonic() < deadline:
            self._exchange(0.0)
            time.sleep(BEAT_SECONDS / 4)
        statuses_after = self._shutdown.statuses(self._store)
        silent_ranks = [
            str(statuses_after[rank])
            for rank in sorted(statuses_before.keys() & statuses_after.keys())
            if statuses_after[rank].beats <= statuses_before[rank].beats
            and not statuses_after[rank].left
        ]
        ending = (
            f". No sign of life any more from: {'; '.join(silent_ranks)}" if silent_ranks else ""
        )
        self._report(self._own_failure(reason + ending))

    def _own_failure(self, reason: str) -> Failure:
        return Failure("failed", f"{self._status()} failed: {reason}", self._rank)

    def _status(self) -> RankStatus:
        """The status of this rank that it publishes."""
        return RankStatus(
            rank=self._rank,
            host=socket.gethostname(),
            pid_namespace=self._namespace,
            pid=os.getpid(),
            process_start=self._process_start or "",
            phase=self._phase,
            phase_seconds=round(time.monotonic() - self._entered_at, 1),
            entries=self._entries,
            step=self.step,
            beats=self._beats,
            left=False,
        )

    # ------------------------------------------------------------ the store and the launcher

    def _connect(self, seconds: float) -> RunStore:
        host, port = self._address
        wait = timedelta(seconds=seconds)
        store = dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
        return RunStore(store, f"rlmath/heartbeat/{self._start}")

    def _reconnect(self, error: RuntimeError) -> None:
        if self._left:
            return
        try:
            self._store = self._connect(RECONNECT_SECONDS)
        except RuntimeError:
            self._store_lost(first_line(error))

    def _store_lost(self, reason: str) -> None:
        """Exit, unless the run is stopping anyway.

        Saving needs no store, and the stop has a deadline of its own."""
        self._check_launcher()
        if self._left or (self._stop.requested and self._failure is None):
            return
        text = (
            "the key-value store of the run at {}:{} is lost ({}); it lives in the launcher of "
            "the first node: that "
            "launcher or its node has ended, or the network to it is cut"
        )
        self._end(Failure("store", text.format(*self._address, reason), self._rank))

    def _check_launcher(self) -> None:
        """Request a stop if torchrun was killed, so that the ranks save and stop.

        On a single node they need nothing of it. On several nodes the first one's launcher holds
        the store, and the others end when they have missed it for some seconds."""
        if not under_torchrun() or os.getppid() == self._launcher:
            return
        with self._launcher_lock:  # two threads look
            if self._stop.requested or self._left:
                return
            place = self._place
            holds_store = place.several_nodes and place.node == 0
            consequence = (
                ", and the run's store with it: other nodes may end before the step is saved"
                if holds_store
                else ""
            )
            if place.is_node_leader:
                logger.error(
                    "torchrun (pid %d) on %s has ended%s", self._launcher, place.host, consequence
                )
            self._stop.request(LAUNCHER_ENDED)

    def _watch(self) -> None:
        """The watch thread: the beat thread may hang in a connection whose other end is gone."""
        while not self._left and self._failure is None:
            time.sleep(BEAT_SECONDS)
            self._check_launcher()
            self._unanswered += BEAT_SECONDS
            if self._unanswered > self._settings.heartbeat_timeout_seconds + RECONNECT_SECONDS:
                self._store_lost(f"no answer for {self._unanswered:.0f} s")
