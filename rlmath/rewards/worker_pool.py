"""Verifies answers and calls reward functions in worker processes, each with its own time and memory limit.

    VerifierPool (this process, one thread) -- socket --> forkserver -- fork --> workers

A check that hangs or crashes ends only its own worker; the forkserver replaces it within milliseconds, and no other
answer waits. Start the pool before process groups, CUDA and engines, so that the workers inherit nothing of theirs.
Linux only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from rlmath.rewards.custom_function import FunctionResult, worker_environment
from rlmath.rewards.extraction import extract_answer
from rlmath.rewards.fork_server import WorkerSettings
from rlmath.rewards.verifier import (
    FAILURES,
    STRICT,
    TASKS,
    Rules,
    Verdict,
    usable_solutions,
    verify_by_string,
)

START_SECONDS = 120.0
"""Time limit for the start of the forkserver or a worker, on a busy machine."""
MEMORY_BYTES = 2 * 2**30
"""Address space of one worker; math-verify itself takes about a quarter GiB."""
STUCK_SECONDS = 0.25
"""While jobs are waiting, a worker that has been busy for longer is supplemented by an extra one."""
MAX_EXTRA_WORKERS = 4
"""Most extra workers, per worker of the pool."""
STUCK_NICENESS = 5
"""Niceness of a stuck worker, so that the others get the processor first."""
CACHE_SIZE = 8192
"""Results kept, one per pair of answer and solutions."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Job:
    request: bytes
    future: Future[Any]
    as_result: Callable[[Mapping[str, Any]], Any]
    """Converts a worker's reply, or {"failure": "timeout" or "error"}, to the future's result; both have "seconds"."""

    def finish(self, reply: Mapping[str, Any], seconds: float) -> None:
        self.future.set_result(self.as_result({**reply, "seconds": seconds}))


@dataclass
class _Worker:
    pid: int
    channel: Connection
    deadline: float
    """When it is killed if it is not ready or has not finished its job (time.monotonic)."""
    state: str = "starting"
    """"starting", "idle" or "busy"."""
    job: _Job | None = None
    since: float = 0.0
    """Start of its job (time.monotonic)."""
    stuck_at: float = 0.0
    """When it counts as stuck (time.monotonic)."""
    slowed: bool = False


class VerifierPool:
    """Scores completions. `submit` and `call` from any thread; futures resolve in the pool's thread.

    >>> with VerifierPool(workers=1, timeout_seconds=5.0) as pool:  # doctest: +SKIP
    ...     pool.submit("\\\\boxed{\\\\frac{1}{2}}", ("\\\\boxed{50\\\\%}",), "math").result().verdict
    'symbolic'
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        memory_bytes: int = MEMORY_BYTES,
        rules: Rules = STRICT,
        function: str | None = None,
    ) -> None:
        """Returns at once; workers are ready a second later. Raises ValueError for invalid limits."""
        if workers < 1:
            raise ValueError(f"reward.workers is {workers}; it must be at least 1")
        if not 0 < timeout_seconds < 3600:
            raise ValueError(
                f"reward.timeout_seconds is {timeout_seconds}; it must be above 0 and below 3600 seconds"
            )
        self.timeout_seconds = timeout_seconds
        self._size = workers
        self._rules = rules
        self._lock = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._cache: OrderedDict[tuple[str, tuple[str, ...]], Future[Verdict]] = OrderedDict()
        self._closing = False
        self._broken: str | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        settings = WorkerSettings(memory_bytes, timeout_seconds, rules, function)
        self._control, self._server = _start_forkserver(settings)
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(self, completion: str, solutions: Sequence[str], task: str) -> Future[Verdict]:
        """Verify a completion. What needs no parser is decided in this call, and the future is already done.

        Raises RuntimeError when the pool is closed or its forkserver is dead.
        """
        assert task in TASKS, task
        started = time.perf_counter()
        answer = extract_answer(completion, self._rules.answer_from)
        verdict = verify_by_string(answer, solutions, self._rules)
        if verdict is not None:
            done: Future[Verdict] = Future()
            done.set_result(replace(verdict, seconds=time.perf_counter() - started))
            return done
        assert answer is not None
        return self._verify_by_parser(answer.strip(), usable_solutions(solutions))

    def call(
        self, completion: str, solutions: Sequence[str], row: Mapping[str, Any]
    ) -> Future[FunctionResult]:
        """Call the user's function on a completion."""
        request = {"completion": completion, "solutions": list(solutions), "row": row}

        def as_result(reply: Mapping[str, Any]) -> FunctionResult:
            if "reward" not in reply:
                return FunctionResult(0.0, failure=reply["failure"], message=reply["failure"])
            metrics = tuple((name, value) for name, value in reply["metrics"])
            return FunctionResult(reply["reward"], metrics, reply["failure"], reply["message"])

        return self._queue(_Job(json.dumps(request).encode(), Future(), as_result))

    def results(self, futures: Sequence[Future[T]]) -> list[T | None]:
        """The results of the futures, after at most one answer's time limit; None for those not done by then."""
        _, late = wait_for(futures, self.timeout_seconds + STUCK_SECONDS)
        for future in late:
            future.cancel()
        return [None if future in late else future.result() for future in futures]

    def _verify_by_parser(self, answer: str, solutions: tuple[str, ...]) -> Future[Verdict]:
        """Verify in a worker; the same answer to the same solutions is verified once."""
        key = (answer, solutions)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None and _is_reusable(cached):
                self._cache.move_to_end(key)
                return cached

        def as_result(reply: Mapping[str, Any]) -> Verdict:
            kind = reply.get("failure") or reply["verdict"]
            return Verdict(bool(reply.get("correct")), answer, kind, reply["seconds"])

        request = json.dumps({"answer": answer, "solutions": solutions}).encode()
        future = self._queue(_Job(request, Future(), as_result))
        with self._lock:
            self._cache[key] = future
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return future

    def _queue(self, job: _Job) -> Future[Any]:
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
        self._control.close()
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
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

    def _run(self) -> None:
        """The pool's thread: start workers, assign jobs, receive results, replace workers that are late or dead."""
        try:
            message = self._receive_control()
            if message != b"ready":
                raise RuntimeError(message.decode(errors="replace").removeprefix("failed: "))
            while not self._closing:
                self._adjust_workers()
                self._assign_jobs()
                self._receive_results()
                self._drop_late()
            self._shut_down("the verifier pool was closed")
        except Exception as error:
            logger.exception("The verifier pool's forkserver failed")
            self._shut_down(f"the verifier pool's forkserver is dead ({error}); see its own messages above")

    def _adjust_workers(self) -> None:
        """Keep as many workers as configured, and one more for each stuck one while jobs are waiting."""
        now = time.monotonic()
        stuck = [worker for worker in self._workers if worker.state == "busy" and worker.stuck_at <= now]
        for worker in stuck:
            if not worker.slowed:
                worker.slowed = True
                with contextlib.suppress(ProcessLookupError):  # it may just have ended
                    os.setpriority(os.PRIO_PROCESS, worker.pid, STUCK_NICENESS)
        wanted = self._size + (min(len(stuck), MAX_EXTRA_WORKERS * self._size) if self._pending else 0)
        while len(self._workers) < wanted:
            self._workers.append(self._fork_worker())
        for worker in [worker for worker in self._workers if worker.state == "idle" and not self._pending]:
            if len(self._workers) - len(stuck) > self._size:
                self._drop(worker, "error")

    def _assign_jobs(self) -> None:
        for worker in [worker for worker in self._workers if worker.state == "idle"]:
            job = self._next_job()
            if job is None:
                return
            now = time.monotonic()
            worker.state, worker.job, worker.since = "busy", job, now
            worker.deadline = now + self.timeout_seconds
            worker.stuck_at = now + min(STUCK_SECONDS, self.timeout_seconds / 2)
            try:
                worker.channel.send_bytes(job.request)
            except OSError:
                self._drop(worker, "error")

    def _next_job(self) -> _Job | None:
        with self._lock:
            while self._pending:
                job = self._pending.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _receive_results(self) -> None:
        now = time.monotonic()
        times = [worker.deadline for worker in self._workers if worker.state != "idle"]
        if self._pending:
            times += [w.stuck_at for w in self._workers if w.state == "busy" and w.stuck_at > now]
        timeout = max(0.0, min(times) - now) if times else None
        ready = wait([self._wake_receiver, *(worker.channel for worker in self._workers)], timeout)
        if self._wake_receiver in ready:
            self._wake_receiver.recv(4096)
        for worker in [worker for worker in self._workers if worker.channel in ready]:
            self._receive_result(worker)

    def _receive_result(self, worker: _Worker) -> None:
        try:
            message = worker.channel.recv_bytes()
        except (EOFError, OSError):
            if worker.state == "starting":
                message = "a worker ended before it was ready; is the memory limit too small?"
                raise RuntimeError(message) from None
            self._drop(worker, "error")
            return
        job, worker.job = worker.job, None
        worker.state = "idle"
        if job is None:
            return
        reply = json.loads(message)
        job.finish(reply, time.monotonic() - worker.since)
        if worker.slowed or reply.get("verdict") == "error":  # it may be out of memory or stack: replace it
            self._drop(worker, "error")

    def _drop_late(self) -> None:
        now = time.monotonic()
        for worker in [one for one in self._workers if one.state != "idle" and one.deadline <= now]:
            if worker.state == "starting":
                raise RuntimeError(f"a worker was not ready after {START_SECONDS:.0f} s")
            if not worker.channel.poll():  # a result that was sent in time counts
                self._drop(worker, "timeout")

    def _drop(self, worker: _Worker, failure: str) -> None:
        """End a worker and finish its job as a failure."""
        self._control.send(f"kill {worker.pid}".encode())
        self._workers.remove(worker)
        worker.channel.close()
        if worker.job is not None:
            worker.job.finish({"failure": failure}, time.monotonic() - worker.since)

    def _fork_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
        pid = int(self._receive_control())
        return _Worker(pid, Connection(ours.detach()), deadline=time.monotonic() + START_SECONDS)

    def _receive_control(self) -> bytes:
        message = self._control.recv(4096)
        if not message:
            raise EOFError(f"it ended with exit code {self._server.wait()}")
        return message

    def _shut_down(self, reason: str) -> None:
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
            worker.channel.close()
            if worker.job is not None:
                worker.job.future.set_exception(RuntimeError(reason))
        self._workers.clear()


def _is_reusable(future: Future[Verdict]) -> bool:
    """Whether a result is pending or decided; a failure may be due to a busy machine."""
    if not future.done():
        return True
    return not future.cancelled() and not future.exception() and future.result().verdict not in FAILURES


def _start_forkserver(settings: WorkerSettings) -> tuple[socket.socket, subprocess.Popen]:
    """(the control socket, one message per packet; the forkserver's process)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_SECONDS)
    arguments = [str(theirs.fileno()), str(os.getpid()), settings.as_json()]
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "rlmath.rewards.fork_server", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=worker_environment(),
        )
    return ours, server
