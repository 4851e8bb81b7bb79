"""Verifies answers and calls reward functions in worker processes, each with its own time and memory limit.

    VerifierPool (this process, one thread) -- socket --> fork server -- fork --> workers

The time limit of an answer begins when a worker gets it: waiting is never a timeout. While answers wait there are more
workers, up to a limit. A check that hangs or crashes ends only its own worker; the fork server replaces it within
milliseconds. A fork server that ends is replaced too, and what its workers were scoring is scored again. Nothing that
a worker sends is trusted: it is plain JSON of bounded length, checked as what a stranger sends.

Its fork server is a new program, which inherits no thread, process group or device of this one. Linux only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

from rlmath.answers.extraction import extract_answer, split_boxes
from rlmath.answers.verifier import (
    FAILURES,
    STRICT,
    TASKS,
    VERDICTS,
    Rules,
    Verdict,
    are_few,
    usable_solutions,
    verdict_without_solutions,
    verify_by_string,
)
from rlmath.workers.custom_function import (
    FunctionResult,
    HookResult,
    checked_hook_result,
    checked_result,
)
from rlmath.workers.fork_server import LENGTH_BYTES, MAX_PROCESSES, WorkerSettings, framed
from rlmath.workers.fork_server_client import (
    ANSWER_SECONDS,
    MAX_START_FAILURES,
    START_SECONDS,
    ServerConnection,
    ServerLost,
    exit_text,
)
from rlmath.workers.hooks import Hook, as_hook
from rlmath.workers.process_tree import cpu_seconds

MEMORY_BYTES = 2 * 2**30
"""Address space of one worker; math-verify itself takes about a quarter GiB."""
STUCK_SECONDS = 0.25
"""While jobs are waiting, a worker that has verified one answer for longer (processor time) is supplemented by an
extra one."""
STUCK_SHARE = 0.5
"""So is one whose reward function has used this share of its answer's time limit."""
MIN_EXTRA_WORKERS = 4
"""Most extra workers: as many as the pool has, or this number where it has fewer."""
STUCK_NICENESS = 5
"""Niceness of a stuck worker that verifies, so that the others get the processor first."""
LOOK_SECONDS = 0.02
"""Least time between two looks at the processor time of a worker."""
PROGRESS_SECONDS = 1.0
"""Between two reports of progress while results are awaited."""
CACHE_SIZE = 8192
"""Results kept, one per pair of answer and solutions."""
MAX_REPLY_BYTES = 2**20
"""Longest message of a worker; its own are far below."""
MAX_HOOK_REPLY_BYTES = 2**24
"""Likewise where a function of another kind than rewards is called."""
MAX_SERVER_DEATHS = 3
"""An answer fails when the fork server has ended so often while that answer alone was scored."""
logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Job:
    number: int
    request: bytes
    future: Future[Any]
    as_result: Callable[[Mapping[str, Any]], Any]
    """Converts a worker's reply, or {"failure": "timeout" or "error"}, to the future's result; both have "seconds" and
    "queue_seconds". ValueError, TypeError or KeyError for a reply that is none."""
    queued_at: float
    """time.monotonic()."""
    queue_seconds: float | None = None
    """How long it waited for a worker; None while it does."""
    needs_fresh_worker: bool = False
    """It failed in a worker that an earlier answer may have damaged."""
    was_interrupted: bool = False
    """The fork server ended while it was scored."""
    runs_alone: bool = False
    """That happened twice; from then on nothing else is scored beside it."""
    server_deaths: int = 0
    """While it alone was scored."""

    def result(self, reply: Mapping[str, Any], seconds: float) -> Any:
        return self.as_result({**reply, "seconds": seconds, "queue_seconds": self.queue_seconds or 0.0})

    def finish(self, reply: Mapping[str, Any], seconds: float) -> None:
        self.future.set_result(self.result(reply, seconds))


@dataclass(eq=False)
class _Worker:
    pid: int
    channel: socket.socket
    deadline: float
    """When it is killed if it is not ready or has not finished its job (time.monotonic)."""
    state: str = "starting"
    """"starting", "idle", "busy", or "lost": its channel is closed, and the fork server has yet to report why."""
    job: _Job | None = None
    since: float = 0.0
    """Start of its job (time.monotonic)."""
    cpu_before: float = 0.0
    """Its processor time at the start of its job (seconds)."""
    stuck_at: float = 0.0
    """When to look whether it is stuck (time.monotonic)."""
    is_stuck: bool = False
    was_ready: bool = False
    jobs: int = 0
    """How many it has got."""
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))


class VerifierPool:
    """Scores completions. `submit` and `call` from any thread; futures resolve in the pool's thread.

    >>> with VerifierPool(workers=1, timeout_seconds=5.0) as pool:
    ...     pool.submit("\\\\boxed{\\\\frac{1}{2}}", ("\\\\boxed{50\\\\%}",), "math").result().verdict
    'symbolic'
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        memory_bytes: int = MEMORY_BYTES,
        rules: Rules = STRICT,
        function: str | Hook | None = None,
    ) -> None:
        """Returns at once; the first of at most `workers` workers is ready a second later.

        `timeout_seconds` is the limit of one answer from its start: of processor time where it is verified, with
        `WALL_FACTOR` times that by the clock, and by the clock where `function`, of the user's, is called. Raises
        ValueError for invalid limits.
        """
        if workers < 1:
            raise ValueError(f"reward.workers is {workers}; it must be at least 1")
        if not 0 < timeout_seconds <= 3600:
            raise ValueError(
                f"reward.timeout_seconds is {timeout_seconds}; it must be above 0 and at most 3600 seconds"
            )
        self.timeout_seconds = timeout_seconds
        self._size = workers
        hook = None if function is None else as_hook(function)
        self._settings = WorkerSettings(memory_bytes, timeout_seconds, rules, hook)
        scores = hook is None or hook.kind in ("reward", "scorer")
        self._most_reply_bytes = MAX_REPLY_BYTES if scores else MAX_HOOK_REPLY_BYTES
        self._lock = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._cache: OrderedDict[tuple[str, tuple[str, ...]], Future[Verdict]] = OrderedDict()
        self._closing = False
        self._broken: str | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._numbers = itertools.count(1)
        self._worker_failures = 0
        """How many ended one after the other before they were ready."""
        self._server = ServerConnection(self._settings)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(self, completion: str, solutions: Sequence[str], task: str) -> Future[Verdict]:
        """Verify a completion. What needs no parser is decided in this call, and the future is already done.

        Raises RuntimeError when the pool is closed, or its fork server has ended too often.
        """
        assert task in TASKS, task
        started = time.perf_counter()
        rules = self._settings.rules
        answer = extract_answer(completion, rules.answer_from)
        few = are_few(solutions)
        verdict = verify_by_string(answer, solutions, rules) if few else verdict_without_solutions(answer)
        if verdict is not None:
            done: Future[Verdict] = Future()
            done.set_result(replace(verdict, seconds=time.perf_counter() - started))
            return done
        assert answer is not None
        return self._verify_in_worker(answer.strip(), usable_solutions(solutions), by_string=not few)

    def call(
        self, completion: str, solutions: Sequence[str], row: Mapping[str, Any]
    ) -> Future[FunctionResult]:
        """Call the user's function on a completion."""
        request = {"completion": completion, "solutions": list(solutions), "row": row}
        return self._queue(request, checked_result)

    def call_hook(self, arguments: Sequence[Any]) -> Future[HookResult]:
        """Call the user's function, of another kind than rewards. What JSON has no word for is given as its text."""
        hook = self._settings.function
        assert hook is not None
        return self._queue({"arguments": arguments}, partial(checked_hook_result, hook.kind, arguments))

    @staticmethod
    def results(futures: Sequence[Future[T]], on_progress: Callable[[], None] = lambda: None) -> list[T]:
        """The results of the futures, when all are there: every answer has a time limit of its own, so that ends.
        `on_progress` is called every second until then."""
        late = set(futures)
        while late:
            _, late = wait_for(late, PROGRESS_SECONDS)
            on_progress()
        return [future.result() for future in futures]

    def _verify_in_worker(self, answer: str, solutions: tuple[str, ...], by_string: bool) -> Future[Verdict]:
        """Verify in a worker; the same answer to the same solutions is verified once."""
        key = (answer, solutions)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None and _is_reusable(cached):
                self._cache.move_to_end(key)
                return cached

        def as_result(reply: Mapping[str, Any]) -> Verdict:
            kind = reply.get("failure") or reply["verdict"]
            if kind not in VERDICTS:
                raise ValueError(f"{kind!r} is no verdict")
            extracted = split_boxes(answer)[0]
            return Verdict(
                bool(reply.get("correct")), extracted, kind, reply["seconds"], reply["queue_seconds"]
            )

        future = self._queue({"answer": answer, "solutions": solutions, "strings": by_string}, as_result)
        with self._lock:
            self._cache[key] = future
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return future

    def _queue(self, request: Mapping[str, Any], as_result: Callable[[Mapping[str, Any]], T]) -> Future[T]:
        number = next(self._numbers)
        job = _Job(
            number, framed({"id": number, **request}, default=str), Future(), as_result, time.monotonic()
        )
        with self._lock:
            if self._broken:
                raise RuntimeError(self._broken)
            if self._closing:
                raise RuntimeError("the verifier pool is closed")
            self._pending.append(job)
        self._wake()
        return job.future

    def close(self) -> None:
        """End the workers. Jobs that have not started are cancelled, running ones raise RuntimeError."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()
        self._server.close()
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"w")
        except BlockingIOError:
            pass  # the socket is full of wake-ups already
        except OSError:
            assert self._closing

    # ---------------------------------------------------------------- the pool's thread

    def _run(self) -> None:
        """Score until the pool is closed, with one fork server after another."""
        try:
            while not self._closing:
                try:
                    self._score_jobs()
                except ServerLost as lost:
                    if not self._closing:
                        self._replace_server(str(lost))
            self._shut_down("the verifier pool was closed")
        except Exception as error:
            logger.exception("The verifier pool's fork server failed")
            self._shut_down(f"the verifier pool's fork server is dead ({error}); see its own messages above")

    def _score_jobs(self) -> None:
        """Start workers, assign jobs, receive results, replace workers that are late or dead."""
        self._server.await_ready()
        while not self._closing:
            self._adjust_workers()
            self._assign_jobs()
            self._receive()
            self._drop_late()

    def _adjust_workers(self) -> None:
        """Have a worker for each job, up to as many as configured, and while jobs are waiting one more for each stuck
        one."""
        now = time.monotonic()
        stuck = [worker for worker in self._workers if worker.state == "busy" and self._is_stuck(worker, now)]
        busy = sum(worker.job is not None for worker in self._workers)
        wanted = min(self._size, max(1, busy + len(self._pending)))
        if self._pending:
            wanted += min(len(stuck), max(self._size, MIN_EXTRA_WORKERS))
        while len(self._workers) < wanted:
            self._fork_worker()
        for worker in [worker for worker in self._workers if worker.state == "idle" and not self._pending]:
            if len(self._workers) - len(stuck) > self._size:
                self._drop(worker)

    def _is_stuck(self, worker: _Worker, now: float) -> bool:
        if worker.is_stuck or worker.stuck_at > now:
            return worker.is_stuck
        if self._settings.function is None:
            left = self._stuck_seconds - _cpu_seconds_since(worker)
            if left > 0:
                worker.stuck_at = now + max(left, LOOK_SECONDS)
                return False
            with contextlib.suppress(ProcessLookupError):  # it may just have ended
                os.setpriority(os.PRIO_PROCESS, worker.pid, STUCK_NICENESS)
        worker.is_stuck = True
        return True

    @property
    def _stuck_seconds(self) -> float:
        most = STUCK_SHARE * self.timeout_seconds
        return most if self._settings.function is not None else min(STUCK_SECONDS, most)

    def _assign_jobs(self) -> None:
        for worker in [worker for worker in self._workers if worker.state == "idle"]:
            job = self._next_job(is_fresh=worker.jobs == 0)
            if job is not None:
                self._assign(worker, job)
        self._provide_fresh_worker()

    def _assign(self, worker: _Worker, job: _Job) -> None:
        now = time.monotonic()
        if job.queue_seconds is None:
            job.queue_seconds = now - job.queued_at
        worker.state, worker.job, worker.since = "busy", job, now
        worker.jobs += 1
        worker.deadline = now + self.timeout_seconds
        worker.stuck_at, worker.is_stuck = now + self._stuck_seconds, False
        if self._settings.function is None:
            worker.cpu_before = 0.0
            worker.cpu_before = _cpu_seconds_since(worker)
        worker.unsent = memoryview(job.request)
        self._send(worker)

    def _next_job(self, is_fresh: bool) -> _Job | None:
        """The next job for a worker; those that need a fresh one stay in front where it is not."""
        busy = [worker.job for worker in self._workers if worker.job is not None]
        if any(job.runs_alone for job in busy):
            return None
        stay: list[_Job] = []
        found = None
        with self._lock:
            while found is None and self._pending and not (busy and self._pending[0].runs_alone):
                job = self._pending.popleft()
                if not (job.future.running() or job.future.set_running_or_notify_cancel()):
                    continue
                if is_fresh or not job.needs_fresh_worker:
                    found = job
                    continue
                stay.append(job)
                if job.runs_alone:
                    break
            self._pending.extendleft(reversed(stay))
        return found

    def _provide_fresh_worker(self) -> None:
        """Fork a worker where the next job needs a fresh one and none is there, in the place of an idle one where there
        are as many as may be."""
        with self._lock:
            is_needed = bool(self._pending) and self._pending[0].needs_fresh_worker
        used = next((worker for worker in self._workers if worker.state == "idle" and worker.jobs), None)
        if not is_needed or not all(worker.jobs for worker in self._workers):
            return
        if len(self._workers) < self._size:
            self._fork_worker()
        elif used is not None:
            self._drop(used)
            self._fork_worker()

    def _put_back(self, job: _Job, is_last: bool = False) -> None:
        with self._lock:
            (self._pending.append if is_last else self._pending.appendleft)(job)

    def _receive(self) -> None:
        """Wait for the fork server, workers, new jobs or the next time limit, and handle what has come."""
        now = time.monotonic()
        times = [worker.deadline for worker in self._workers if worker.state != "idle"]
        if self._pending:
            times += [w.stuck_at for w in self._workers if w.state == "busy" and not w.is_stuck]
        timeout = max(0.0, min(times) - now) if times else None
        ready = {key.fileobj: (key.data, mask) for key, mask in self._selector.select(timeout)}
        if ready.pop(self._wake_receiver, None):
            self._wake_receiver.recv(4096)
        if ready.pop(self._server, None):
            self._server.receive()
        for worker, mask in ready.values():
            if mask & selectors.EVENT_READ:
                self._receive_result(worker)
            elif worker.state == "busy":
                self._send(worker)
        while (notice := self._server.next_notice()) is not None:
            self._handle_notice(notice)

    def _send(self, worker: _Worker) -> None:
        """Send what the worker's socket takes of its request."""
        try:
            while worker.unsent:
                worker.unsent = worker.unsent[worker.channel.send(worker.unsent) :]
        except BlockingIOError:
            self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)
        except OSError:
            self._lose(worker)
        else:
            self._selector.modify(worker.channel, selectors.EVENT_READ, worker)

    def _receive_result(self, worker: _Worker) -> None:
        try:
            part = worker.channel.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lose(worker)
            return
        worker.received += part
        if len(worker.received) < LENGTH_BYTES:
            return
        end = LENGTH_BYTES + int.from_bytes(worker.received[:LENGTH_BYTES])
        if end > self._most_reply_bytes:
            self._fail_broken(worker)
        elif len(worker.received) >= end:
            message, more = bytes(worker.received[LENGTH_BYTES:end]), worker.received[end:]
            worker.received.clear()
            try:
                self._handle_reply(worker, json.loads(message), is_last=bool(more))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self._fail_broken(worker)

    def _handle_reply(self, worker: _Worker, reply: dict[str, Any], is_last: bool) -> None:
        """A worker is replaced after its last reply: when more than a reply has come, when it may be short of memory or
        stack, and when what the function has started still runs."""
        if worker.state == "starting" and reply["ready"] is True:
            worker.state, worker.was_ready = "idle", True
            self._worker_failures = 0
            return
        job = worker.job
        if job is None or reply["id"] != job.number:
            raise ValueError("an answer that nobody asked for")
        if reply.get("exhausted") and self._score_again(worker):
            self._drop(worker)
            return
        result = job.result(reply, time.monotonic() - worker.since)
        worker.job, worker.state = None, "idle"
        is_slowed = worker.is_stuck and self._settings.function is None
        broke = "error" in (reply.get("verdict"), reply.get("failure"))
        if is_last or is_slowed or broke or reply.get("left_over"):
            self._drop(worker)
        job.future.set_result(result)

    def _fail_broken(self, worker: _Worker) -> None:
        """A worker has sent something else than a reply."""
        if worker.state == "starting":
            self._count_worker_failure("sent something else than that it is ready")
        elif not self._score_again(worker):
            self._drop(worker, "error", "it wrote into the channel of its worker")
            return
        self._drop(worker)

    def _score_again(self, worker: _Worker, is_last: bool = False) -> bool:
        """Whether its job is scored again, in a fresh worker: where an answer before it may be to blame."""
        job = worker.job
        if job is None or job.needs_fresh_worker or worker.jobs < 2 or self._settings.function is None:
            return False
        self._repeat(worker, job, is_last)
        return True

    def _repeat(self, worker: _Worker, job: _Job, is_last: bool = False) -> None:
        """`is_last`: after all that is waiting."""
        worker.job = None
        job.needs_fresh_worker = True
        self._put_back(job, is_last)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for worker in [one for one in self._workers if one.state != "idle" and one.deadline <= now]:
            if worker.state == "lost":
                raise ServerLost(f"did not end a worker within {ANSWER_SECONDS:.0f} s")
            if worker.state == "starting":
                self._count_worker_failure(f"was not ready after {START_SECONDS:.0f} s")
                self._drop(worker)
            else:
                self._receive_result(worker)  # a result that was sent in time counts
                if worker.state == "busy" and not self._extend(worker, now):
                    self._score_again(worker, is_last=True)
                    self._drop(worker, "timeout", "timeout")

    def _extend(self, worker: _Worker, now: float) -> bool:
        """Whether a worker that verifies has not had its time on the processor yet: then it gets what is left."""
        end = worker.since + self._settings.wall_seconds
        left = self.timeout_seconds - _cpu_seconds_since(worker)
        if self._settings.function is not None or now >= end or left <= 0:
            return False
        worker.deadline = min(end, now + max(left, LOOK_SECONDS))
        return True

    def _drop(self, worker: _Worker, failure: str = "error", message: str = "error") -> None:
        """End a worker and finish its job, if it has one, as a failure."""
        self._server.kill(worker.pid)
        self._forget(worker)
        if worker.job is not None:
            worker.job.finish({"failure": failure, "message": message}, time.monotonic() - worker.since)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._close_channel(worker)
        worker.state = "dropped"

    def _close_channel(self, worker: _Worker) -> None:
        if worker.state != "lost":
            self._selector.unregister(worker.channel)
            worker.channel.close()

    def _lose(self, worker: _Worker) -> None:
        """Its channel is closed: the fork server reports why."""
        self._server.report_lost(worker.pid)
        self._close_channel(worker)
        worker.state = "lost"
        worker.deadline = time.monotonic() + ANSWER_SECONDS

    def _handle_notice(self, notice: bytes) -> None:
        """ "ended <id> <exit code> <why>": finish or repeat the worker's job."""
        try:
            _, pid, code, why = notice.decode("ascii").split()
            worker = next((one for one in self._workers if one.pid == int(pid)), None)
            is_killed = int(code) == -signal.SIGKILL and why == "itself"
        except ValueError:
            raise ServerLost(f"sent {notice[:100]!r}") from None
        if worker is not None and worker.state != "lost":
            self._receive_result(worker)  # what it sent before its end counts
        if worker is None or worker.state == "dropped":
            return
        if not worker.was_ready:
            self._count_worker_failure(f"ended before it was ready ({code}); is the memory limit too small?")
        self._forget(worker)
        job = worker.job
        if job is None or (why not in ("memory", "processes") and self._score_again(worker)):
            return
        if is_killed and not job.needs_fresh_worker:  # from outside, perhaps for want of memory
            self._repeat(worker, job)
            return
        message = _ENDINGS.get(why, f"its worker ended ({exit_text(int(code))})")
        job.finish({"failure": "error", "message": message}, time.monotonic() - worker.since)

    def _count_worker_failure(self, what: str) -> None:
        self._worker_failures += 1
        if self._worker_failures >= MAX_START_FAILURES:
            raise RuntimeError(f"{MAX_START_FAILURES} workers one after the other failed; the last {what}")

    # ---------------------------------------------------------------- the fork server

    def _replace_server(self, why: str) -> None:
        """Start another one, and have scored again what was being scored. RuntimeError when that is too often."""
        self._selector.unregister(self._server)
        process = self._server.end(why)
        again = self._abandon_jobs()
        self._server.start()
        self._selector.register(self._server, selectors.EVENT_READ)
        text = (
            "The reward workers' fork server (%s) %s; another one is started, and %d answers are scored again"
        )
        logger.warning(text, process, why, again)

    def _abandon_jobs(self) -> int:
        """Put back what was being scored; how many. One of them may have ended the server: what sees that twice is
        scored alone from then on."""
        workers, self._workers = self._workers, []
        for worker in workers:
            self._close_channel(worker)
        jobs = [worker.job for worker in workers if worker.job is not None]
        for job in reversed(jobs):
            job.runs_alone, job.was_interrupted = job.was_interrupted, True
            job.server_deaths += len(jobs) == 1
            if job.server_deaths < MAX_SERVER_DEATHS:
                self._put_back(job)
            else:
                message = f"the workers' fork server ended {job.server_deaths} times while it was scored"
                job.finish({"failure": "error", "message": message}, 0.0)
        return len(jobs)

    def _fork_worker(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            pid = self._server.fork(theirs.fileno())
        worker = _Worker(pid, ours, deadline=time.monotonic() + START_SECONDS)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _shut_down(self, reason: str) -> None:
        with self._lock:
            self._broken = None if self._closing else reason
            pending = list(self._pending)
            self._pending.clear()
        for job in pending:
            if job.future.running():
                job.future.set_exception(RuntimeError(reason))
            elif self._closing:
                job.future.cancel()
            elif job.future.set_running_or_notify_cancel():
                job.future.set_exception(RuntimeError(reason))
        for worker in self._workers:
            self._close_channel(worker)
            if worker.job is not None:
                worker.job.future.set_exception(RuntimeError(reason))
        self._workers.clear()


_ENDINGS = {
    "asked": "it closed the channel of its worker",
    "memory": "its processes together held more memory than one answer may",
    "processes": f"it started more than {MAX_PROCESSES} processes",
}
"""By what the fork server says: the message of the failure."""


def _cpu_seconds_since(worker: _Worker) -> float:
    """Processor time of a worker since the start of its job; 0 where it has ended (seconds)."""
    try:
        return cpu_seconds(worker.pid) - worker.cpu_before
    except OSError:
        return 0.0


def _is_reusable(future: Future[Verdict]) -> bool:
    """Whether a result is pending or decided; a failure may be due to a busy machine."""
    if not future.done():
        return True
    return not future.cancelled() and not future.exception() and future.result().verdict not in FAILURES
