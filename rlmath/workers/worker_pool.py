"""Verifies answers and calls the user's functions in worker processes with limits.

Each process has its own time and memory limit.

    WorkerPool (this process, one thread) -- socket --> fork server -- fork --> workers

The time limit of an answer begins when a worker gets it: waiting is never a timeout. A check that
hangs or crashes ends only its own worker, in whose place the fork server forks another one within
milliseconds. A worker sends plain JSON of bounded length; one that sends something else is killed.
States of a worker:

    fork --> STARTING -- it is ready --> IDLE -- request --> BUSY -- reply --> IDLE
                 |                         |                   |
                 +-------------------------+-------------------+-- its channel is closed --> LOST
                 |                                             |                               |
                 +-- it is not ready in time                   +-- the time limit, nonsense    +-- the fork server says
                     or sends nonsense: killed                     or a last reply: killed         why it ended: gone

When the fork server ends, the pool is dead: all that is asked raises. The fork server is a new
program, which inherits no thread, process group or device of this one. Linux only.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import selectors
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
from rlmath.answers.question import usable_question
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
from rlmath.workers.fork_server import MAX_PROCESSES, START_SECONDS, Ended, ForkServer, exit_text
from rlmath.workers.function_calls import (
    FunctionResult,
    HookResult,
    group_result_of,
    hook_result_of,
    result_of,
)
from rlmath.workers.hooks import Hook, as_hook
from rlmath.workers.process_tree import cpu_seconds
from rlmath.workers.worker import LENGTH_BYTES, WorkerSettings, framed

MEMORY_BYTES = 2 * 2**30
"""Address space of one worker; math-verify itself takes about a quarter GiB."""
LOOK_SECONDS = 0.02
"""Least time between two looks at the processor time of a worker."""
LOST_SECONDS = 2.0
"""Time for a worker that has closed its channel to end by itself."""
PROGRESS_SECONDS = 1.0
"""Interval between two reports of progress while results are awaited."""
CACHE_SIZE = 8192
"""Results kept, one per answer, solutions and question."""
MAX_REPLY_BYTES = 2**20
"""Longest message of a worker; its own are far below."""
MAX_HOOK_REPLY_BYTES = 2**24
"""Longest message of a worker that calls a function of another kind than rewards, or one for a
whole group."""
MAX_START_FAILURES = 3
"""Workers that end one after the other before they are ready; then the pool is dead."""
ENDINGS = {
    "asked": "it closed the channel of its worker",
    "memory": "its processes together held more memory than one answer may",
    "processes": f"it started more than {MAX_PROCESSES} processes",
}
"""Messages of failures, by what the fork server says of the worker's end."""
logger = logging.getLogger(__name__)

T = TypeVar("T")


class State(enum.Enum):
    """The state of a worker; the module's docstring has the diagram."""

    STARTING = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()
    LOST = enum.auto()
    """Its channel is closed, and the fork server has yet to report why."""


@dataclass
class _Job:
    """A request that is queued or executed."""

    number: int
    request: bytes
    future: Future[Any]
    as_result: Callable[[Mapping[str, Any]], Any]
    """Converts a worker's reply, or {"failure": "timeout" or "error"}, to the future's result; both
    have "seconds" and "queue_seconds". ValueError, TypeError or KeyError for a reply that is none.
    """
    queued_at: float
    """Time at which it was queued (time.monotonic)."""
    queue_seconds: float = 0.0

    def result(self, reply: Mapping[str, Any], seconds: float) -> Any:
        return self.as_result({**reply, "seconds": seconds, "queue_seconds": self.queue_seconds})


@dataclass(eq=False)
class _Worker:
    """A worker as the pool knows it."""

    number: int
    channel: socket.socket
    deadline: float
    """Time at which it is killed if it is not ready or has not finished its job
    (time.monotonic)."""
    state: State = State.STARTING
    pid: int = 0
    job: _Job | None = None
    since: float = 0.0
    """Start of its job (time.monotonic)."""
    cpu_before: float = 0.0
    """Its processor time at the start of its job (seconds)."""
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    def cpu_seconds(self) -> float:
        """Its processor time since the start of its job; 0 where it has ended."""
        try:
            return cpu_seconds(self.pid) - self.cpu_before
        except OSError:
            return 0.0


class WorkerPool:
    r"""Verifies completions and calls functions in worker processes.

    `submit` and `call` may be used from any thread; futures resolve in the pool's.

    >>> with WorkerPool(workers=1, timeout_seconds=5.0) as pool:
    ...     pool.submit("\\boxed{\\frac{1}{2}}", ("\\boxed{50\\%}",), "math").result().verdict
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
        """Returns at once; a worker is ready a second later.

        `timeout_seconds` is the limit of one answer from its start: of processor time where it is
        verified (by the clock `worker.WALL_FACTOR` times that), and by the clock where the user's
        `function` is called. Raises ValueError for invalid limits."""
        if workers < 1:
            raise ValueError(f"reward.workers is {workers}; it must be at least 1")
        if not 0 < timeout_seconds <= 3600:
            raise ValueError(
                f"reward.timeout_seconds is {timeout_seconds}; it must be above 0 and at most "
                "3600 seconds"
            )
        self.timeout_seconds = timeout_seconds
        self._size = workers
        hook = None if function is None else as_hook(function)
        self._settings = WorkerSettings(memory_bytes, timeout_seconds, rules, function=hook)
        scores = hook is None or (hook.kind in ("reward", "scorer") and hook.takes == "completion")
        self._most_reply_bytes = MAX_REPLY_BYTES if scores else MAX_HOOK_REPLY_BYTES
        self._lock = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._cache: OrderedDict[tuple[str, tuple[str, ...], str], Future[Verdict]] = OrderedDict()
        self._closing = False
        self._broken: str | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._numbers = itertools.count(1)
        self._start_failures = 0
        """How many workers ended one after the other before they were ready."""
        self._server = ForkServer(self._settings)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(
        self, completion: str, solutions: Sequence[str], task: str, question: str = ""
    ) -> Future[Verdict]:
        """Verify a completion; the future is done at once where no parser is needed.

        `question` is as in `answers.verifier.verify`. RuntimeError where the pool is closed or its
        fork server has ended."""
        assert task in TASKS, task
        started = time.perf_counter()
        rules = self._settings.rules
        answer = extract_answer(completion, rules.answer_from)
        few = are_few(solutions)
        verdict = (
            verify_by_string(answer, solutions, rules) if few else verdict_without_solutions(answer)
        )
        if verdict is not None:
            done: Future[Verdict] = Future()
            done.set_result(replace(verdict, seconds=time.perf_counter() - started))
            return done
        assert answer is not None
        return self._verify_in_worker(
            answer.strip(),
            usable_solutions(solutions),
            usable_question(question),
            by_string=not few,
        )

    def call(
        self, completion: str, solutions: Sequence[str], row: Mapping[str, Any]
    ) -> Future[FunctionResult]:
        """Call the user's function on a completion."""
        return self._queue({"arguments": [completion, list(solutions), row]}, result_of)

    def call_group(
        self, completions: Sequence[str], solutions: Sequence[str], row: Mapping[str, Any]
    ) -> Future[list[FunctionResult]]:
        """Call the user's function, which takes groups, on all completions of a prompt.

        The time limit is that of the one call."""
        as_results = partial(group_result_of, count=len(completions))
        return self._queue({"arguments": [list(completions), list(solutions), row]}, as_results)

    def call_hook(self, arguments: Sequence[Any]) -> Future[HookResult]:
        """Call the user's function, of another kind than rewards.

        What JSON has no word for is given as its text."""
        return self._queue({"arguments": arguments}, hook_result_of)

    @staticmethod
    def results(
        futures: Sequence[Future[T]], on_progress: Callable[[], None] = lambda: None
    ) -> list[T]:
        """The results of the futures, when all are there.

        That ends, as every answer has a time limit of its own. `on_progress` is called every second
        until then."""
        unfinished = set(futures)
        while unfinished:
            _, unfinished = wait_for(unfinished, PROGRESS_SECONDS)
            on_progress()
        return [future.result() for future in futures]

    def _verify_in_worker(
        self, answer: str, solutions: tuple[str, ...], question: str, by_string: bool
    ) -> Future[Verdict]:
        """Verify in a worker.

        The same answer to the same question and solutions is verified once."""
        key = (answer, solutions, question)
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
                bool(reply.get("correct")),
                extracted,
                kind,
                seconds=reply["seconds"],
                queue_seconds=reply["queue_seconds"],
            )

        request = {
            "answer": answer,
            "solutions": solutions,
            "question": question,
            "strings": by_string,
        }
        future = self._queue(request, as_result)
        with self._lock:
            self._cache[key] = future
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return future

    def _queue(
        self, request: Mapping[str, Any], as_result: Callable[[Mapping[str, Any]], T]
    ) -> Future[T]:
        """Queue a request for the workers and wake the pool's thread."""
        number = next(self._numbers)
        job = _Job(
            number,
            framed({"id": number, **request}, default=str),
            Future(),
            as_result=as_result,
            queued_at=time.monotonic(),
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
        """End the workers.

        Jobs that have not started are cancelled, running ones raise RuntimeError."""
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
        """Assign jobs, receive results and replace late or dead workers until the pool closes."""
        try:
            self._server.await_ready()
            while not self._closing:
                self._fork_workers()
                self._assign_jobs()
                self._receive()
                self._end_late_workers()
            self._shut_down("the verifier pool was closed")
        except Exception as error:
            logger.exception("The verifier pool's fork server failed")
            self._shut_down(
                f"the verifier pool's fork server is dead ({error}); see its own messages above"
            )

    def _fork_workers(self) -> None:
        """Have a worker for each job, up to as many as configured."""
        busy = sum(worker.job is not None for worker in self._workers)
        for _ in range(len(self._workers), min(self._size, max(1, busy + len(self._pending)))):
            self._fork_worker()

    def _fork_worker(self) -> None:
        """Have the fork server fork a worker, with one end of a new channel."""
        pool_end, worker_end = socket.socketpair()
        pool_end.setblocking(False)
        worker = _Worker(next(self._numbers), pool_end, time.monotonic() + START_SECONDS)
        self._selector.register(pool_end, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        with worker_end:
            self._server.fork(worker.number, worker_end.fileno())

    def _assign_jobs(self) -> None:
        for worker in [worker for worker in self._workers if worker.state is State.IDLE]:
            if (job := self._next_job()) is not None:
                self._assign(worker, job)

    def _next_job(self) -> _Job | None:
        with self._lock:
            while self._pending:
                job = self._pending.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _assign(self, worker: _Worker, job: _Job) -> None:
        """Send a job to an idle worker; its time limit begins."""
        assigned_at = time.monotonic()
        job.queue_seconds = assigned_at - job.queued_at
        worker.state = State.BUSY
        worker.job = job
        worker.since = assigned_at
        worker.deadline = assigned_at + self.timeout_seconds
        worker.cpu_before = 0.0
        worker.cpu_before = worker.cpu_seconds()
        worker.unsent = memoryview(job.request)
        self._send(worker)

    def _receive(self) -> None:
        """Wait for the fork server, workers, jobs or the next deadline, and handle what came."""
        times = [worker.deadline for worker in self._workers if worker.state is not State.IDLE]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        ready = {key.fileobj: (key.data, mask) for key, mask in self._selector.select(timeout)}
        if ready.pop(self._wake_receiver, None):
            self._wake_receiver.recv(4096)
        server_speaks = ready.pop(self._server, None)
        for worker, mask in ready.values():
            if mask & selectors.EVENT_READ:
                self._receive_reply(worker)
            elif worker.state is State.BUSY:
                self._send(worker)
        for ended in self._server.ended_workers() if server_speaks else ():
            self._handle_end(ended)

    def _send(self, worker: _Worker) -> None:
        """Send what the worker's socket takes of its request."""
        events = selectors.EVENT_READ
        try:
            while worker.unsent:
                worker.unsent = worker.unsent[worker.channel.send(worker.unsent) :]
        except BlockingIOError:
            events |= selectors.EVENT_WRITE
        except OSError:
            self._lose(worker)
            return
        self._selector.modify(worker.channel, events, worker)

    def _receive_reply(self, worker: _Worker) -> None:
        """Read from a worker's channel and handle its reply when that is complete."""
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
            self._handle_nonsense(worker)
        elif len(worker.received) >= end:
            message = bytes(worker.received[LENGTH_BYTES:end])
            surplus = worker.received[end:]
            worker.received.clear()
            try:
                self._handle_reply(worker, json.loads(message), is_last=bool(surplus))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self._handle_nonsense(worker)

    def _handle_reply(self, worker: _Worker, reply: dict[str, Any], is_last: bool) -> None:
        """Resolve the job's future, and replace the worker after its last reply.

        A reply is the last one when more than a reply has come, when the worker may be short of
        memory or stack, and when what the function has started still runs."""
        if worker.state is State.STARTING and type(reply["ready"]) is int:
            worker.state = State.IDLE
            worker.pid = reply["ready"]
            self._start_failures = 0
            return
        job = worker.job
        if job is None or reply["id"] != job.number:
            raise ValueError("an answer that nobody asked for")
        result = job.result(reply, time.monotonic() - worker.since)
        worker.job = None
        worker.state = State.IDLE
        job.future.set_result(result)
        if (
            is_last
            or reply.get("left_over")
            or "error" in (reply.get("verdict"), reply.get("failure"))
        ):
            self._kill(worker)

    def _handle_nonsense(self, worker: _Worker) -> None:
        if worker.state is State.STARTING:
            self._fail_start(worker, "sent something else than that it is ready")
        else:
            self._fail(
                worker, {"failure": "error", "message": "it wrote into the channel of its worker"}
            )

    def _handle_end(self, ended: Ended) -> None:
        """Fail the job of a worker that has ended."""
        worker = next(
            (candidate for candidate in self._workers if candidate.number == ended.number), None
        )
        if worker is not None and worker.state is not State.LOST:
            self._receive_reply(worker)  # what it sent before its end counts
        if worker is None or worker not in self._workers:
            return
        if not worker.pid:
            problem = (
                f"ended before it was ready ({exit_text(ended.exit_code)}); is the memory "
                "limit too small?"
            )
            self._fail_start(worker, problem)
            return
        message = ENDINGS.get(ended.why, f"its worker ended ({exit_text(ended.exit_code)})")
        reply = {"failure": "error", "message": message}
        self._fail(worker, reply)

    def _end_late_workers(self) -> None:
        """End the workers whose deadline has passed and that have no time left."""
        time_now = time.monotonic()
        for worker in [
            worker
            for worker in self._workers
            if worker.state is not State.IDLE and worker.deadline <= time_now
        ]:
            if worker.state is State.STARTING:
                self._fail_start(worker, f"was not ready after {START_SECONDS:.0f} s")
            elif worker.state is State.LOST:
                self._fail(worker, {"failure": "error", "message": ENDINGS["asked"]})
            else:
                self._receive_reply(worker)  # a result that was sent in time counts
                if worker.state is State.BUSY and not self._extend(worker, time_now):
                    self._fail(worker, {"failure": "timeout", "message": "timeout"})

    def _extend(self, worker: _Worker, time_now: float) -> bool:
        """Whether a worker that verifies has processor time left; then its deadline is moved."""
        end = worker.since + self._settings.wall_seconds
        seconds_left = self.timeout_seconds - worker.cpu_seconds()
        if self._settings.function is not None or time_now >= end or seconds_left <= 0:
            return False
        worker.deadline = min(end, time_now + max(seconds_left, LOOK_SECONDS))
        return True

    def _fail(self, worker: _Worker, reply: Mapping[str, Any]) -> None:
        """End a worker; its job, if it has one, gets this reply as its result."""
        self._kill(worker)
        if worker.job is not None:
            worker.job.future.set_result(worker.job.result(reply, time.monotonic() - worker.since))

    def _fail_start(self, worker: _Worker, failure: str) -> None:
        """End a worker that did not become ready.

        RuntimeError when that happens too often."""
        self._kill(worker)
        self._start_failures += 1
        if self._start_failures >= MAX_START_FAILURES:
            raise RuntimeError(
                f"{MAX_START_FAILURES} workers one after the other failed; the last {failure}"
            )

    def _kill(self, worker: _Worker) -> None:
        self._server.kill(worker.number)
        self._workers.remove(worker)
        self._close_channel(worker)

    def _close_channel(self, worker: _Worker) -> None:
        if worker.state is not State.LOST:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.state = State.LOST

    def _lose(self, worker: _Worker) -> None:
        """Close a worker's channel.

        The fork server reports why the worker ended, or it is killed."""
        self._close_channel(worker)
        worker.deadline = time.monotonic() + LOST_SECONDS

    def _shut_down(self, reason: str) -> None:
        """Cancel or fail all jobs and forget the workers."""
        with self._lock:
            self._broken = None if self._closing else reason
            pending = list(self._pending)
            self._pending.clear()
        for job in pending:
            if self._closing:
                job.future.cancel()
            elif job.future.set_running_or_notify_cancel():
                job.future.set_exception(RuntimeError(reason))
        for worker in self._workers:
            self._close_channel(worker)
            if worker.job is not None:
                worker.job.future.set_exception(RuntimeError(reason))
        self._workers.clear()


def _is_reusable(future: Future[Verdict]) -> bool:
    """Whether a result is pending or decided; a failure may be due to a busy machine."""
    if not future.done():
        return True
    return (
        not future.cancelled()
        and not future.exception()
        and future.result().verdict not in FAILURES
    )
