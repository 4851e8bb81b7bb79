"""Answer checks in worker processes, each with a time and a memory limit of its own.

    VerifierPool (this process, one thread) -- socket --> forkserver -- fork --> workers

A check that hangs or crashes ends its own worker only; the forkserver has a new one within milliseconds, and
no other answer waits. Start the pool before process groups, CUDA and engines: nothing of theirs then leaks into
the workers. Linux only.
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
from rlmath.rewards.fork_server import Settings
from rlmath.rewards.verifier import FAILURES, STRICT, TASKS, Rules, Verdict, cheap_verdict, usable_solutions

START_SECONDS = 120.0
"""How long the forkserver or a worker may take to be ready, on a busy machine."""

MEMORY_BYTES = 2 * 2**30
"""Address space of one worker; math-verify itself takes about a quarter GiB."""

STUCK_SECONDS = 0.25
"""A worker that is busy for longer gets help from one more, while answers wait."""

MOST_HELPERS = 4
"""Most helpers per worker."""

STUCK_NICENESS = 5
"""A stuck worker yields the processor to those that get on."""

CACHE_SIZE = 8192
"""Verdicts kept, one per pair of answer and solutions."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Job:
    question: bytes
    future: Future[Any]
    """Whoever asked waits for it."""
    settle: Callable[[Mapping[str, Any]], Any]
    """Makes the future's result of a worker's answer, or of {"failure": "timeout" or "error"}; both with "seconds"."""


@dataclass
class _Worker:
    pid: int
    channel: Connection
    deadline: float
    """When it is given up (time.monotonic): ready by then, or the job done by then."""
    state: str = "starting"
    """"starting", "idle" or "busy"."""
    job: _Job | None = None
    since: float = 0.0
    """When it got its job (time.monotonic)."""
    stuck_at: float = 0.0
    """When it counts as stuck (time.monotonic)."""
    slowed: bool = False


class VerifierPool:
    """Judges completions. `submit` and `call` from any thread; futures resolve in the pool's thread.

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
        """Returns at once; workers are ready a second later. Raises ValueError for impossible limits."""
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
        self._verdicts: OrderedDict[tuple[str, tuple[str, ...]], Future[Verdict]] = OrderedDict()
        self._closing = False
        self._broken: str | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._control, self._server = _start_forkserver(
            Settings(memory_bytes, timeout_seconds, rules, function)
        )
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(self, completion: str, solutions: Sequence[str], task: str) -> Future[Verdict]:
        """The verdict on a completion, to come. What needs no parser is decided here, and the future is done.

        Raises RuntimeError when the pool is closed or its forkserver is dead.
        """
        assert task in TASKS, task
        started = time.perf_counter()
        answer = extract_answer(completion, self._rules.answer_from)
        verdict = cheap_verdict(answer, solutions, self._rules)
        if verdict is not None:
            done: Future[Verdict] = Future()
            done.set_result(replace(verdict, seconds=time.perf_counter() - started))
            return done
        assert answer is not None
        return self._deep(answer.strip(), usable_solutions(solutions))

    def call(
        self, completion: str, solutions: Sequence[str], row: Mapping[str, Any]
    ) -> Future[FunctionResult]:
        """What the user's function says of a completion, to come."""
        question = {"completion": completion, "solutions": list(solutions), "row": row}

        def settle(answer: Mapping[str, Any]) -> FunctionResult:
            if "reward" not in answer:
                return FunctionResult(0.0, failure=answer["failure"], message=answer["failure"])
            metrics = tuple((name, value) for name, value in answer["metrics"])
            return FunctionResult(answer["reward"], metrics, answer["failure"], answer["message"])

        return self._queue(_Job(json.dumps(question).encode(), Future(), settle))

    def results(self, futures: Sequence[Future[T]]) -> list[T | None]:
        """What the futures hold, waiting no longer than one answer's limit; None for what is not judged by then."""
        _, late = wait_for(futures, self.timeout_seconds + STUCK_SECONDS)
        for future in late:
            future.cancel()
        return [None if future in late else future.result() for future in futures]

    def _deep(self, answer: str, solutions: tuple[str, ...]) -> Future[Verdict]:
        """A verdict by a worker; the same answer to the same solutions is judged once."""
        key = (answer, solutions)
        with self._lock:
            known = self._verdicts.get(key)
            if known is not None and _worth_keeping(known):
                self._verdicts.move_to_end(key)
                return known

        def settle(said: Mapping[str, Any]) -> Verdict:
            kind = said.get("failure") or said["verdict"]
            return Verdict(bool(said.get("correct")), answer, kind, said["seconds"])

        question = json.dumps({"answer": answer, "solutions": solutions}).encode()
        future = self._queue(_Job(question, Future(), settle))
        with self._lock:
            self._verdicts[key] = future
            if len(self._verdicts) > CACHE_SIZE:
                self._verdicts.popitem(last=False)
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
        """Ends the workers. Checks that have not begun are cancelled, those under way raise RuntimeError."""
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
            pass  # enough wake-ups are waiting already
        except OSError:
            assert self._closing

    def _run(self) -> None:
        """The pool's thread: hand out jobs, take answers, replace who is late or dead, help where one is stuck."""
        try:
            self._receive_ready()
            while not self._closing:
                self._staff()
                self._hand_out()
                self._take_answers()
                self._give_up_late()
            self._end("the verifier pool was closed")
        except Exception as error:
            logger.exception("The verifier pool's forkserver failed")
            self._end(f"the verifier pool's forkserver is dead ({error}); see its own messages above")

    def _receive_ready(self) -> None:
        message = self._receive_control()
        if message != b"ready":
            raise RuntimeError(message.decode(errors="replace").removeprefix("failed: "))

    def _staff(self) -> None:
        """As many workers as there should be, and one more for each that is stuck while answers wait."""
        now = time.monotonic()
        stuck = [worker for worker in self._workers if worker.state == "busy" and worker.stuck_at <= now]
        for worker in stuck:
            if not worker.slowed:
                worker.slowed = True
                _slow_down(worker.pid)
        wanted = self._size + (min(len(stuck), MOST_HELPERS * self._size) if self._pending else 0)
        while len(self._workers) < wanted:
            self._workers.append(self._fork_worker())
        for worker in [worker for worker in self._workers if worker.state == "idle" and not self._pending]:
            if len(self._workers) - len(stuck) > self._size:
                self._drop(worker, "error")

    def _hand_out(self) -> None:
        for worker in [worker for worker in self._workers if worker.state == "idle"]:
            job = self._next_job()
            if job is None:
                return
            now = time.monotonic()
            worker.state, worker.job = "busy", job
            worker.since = now
            worker.deadline = now + self.timeout_seconds
            worker.stuck_at = now + min(STUCK_SECONDS, self.timeout_seconds / 2)
            try:
                worker.channel.send_bytes(job.question)
            except OSError:
                self._drop(worker, "error")

    def _next_job(self) -> _Job | None:
        with self._lock:
            while self._pending:
                job = self._pending.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _take_answers(self) -> None:
        now = time.monotonic()
        times = [worker.deadline for worker in self._workers if worker.state != "idle"]
        if self._pending:
            times += [w.stuck_at for w in self._workers if w.state == "busy" and w.stuck_at > now]
        patience = max(0.0, min(times) - now) if times else None
        ready = wait([self._wake_receiver, *(worker.channel for worker in self._workers)], patience)
        if self._wake_receiver in ready:
            self._wake_receiver.recv(4096)
        for worker in [worker for worker in self._workers if worker.channel in ready]:
            self._take_answer(worker)

    def _take_answer(self, worker: _Worker) -> None:
        try:
            message = worker.channel.recv_bytes()
        except (EOFError, OSError):
            if worker.state == "starting":
                raise RuntimeError(
                    "a worker ended before it was ready; is the memory limit too small?"
                ) from None
            self._drop(worker, "error")
            return
        job, worker.job = worker.job, None
        worker.state = "idle"
        if job is None:
            return
        answer = json.loads(message)
        job.future.set_result(job.settle(answer | {"seconds": time.monotonic() - worker.since}))
        if worker.slowed or answer.get("verdict") == "error":  # maybe out of memory or of stack: start afresh
            self._drop(worker, "error")

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for worker in [
            worker for worker in self._workers if worker.state != "idle" and worker.deadline <= now
        ]:
            if worker.state == "starting":
                raise RuntimeError(f"a worker was not ready after {START_SECONDS:.0f} s")
            if not worker.channel.poll():  # an answer that is there counts, however late we look
                self._drop(worker, "timeout")

    def _drop(self, worker: _Worker, failure: str) -> None:
        """Ends a worker and settles its job."""
        self._control.send(f"kill {worker.pid}".encode())
        self._workers.remove(worker)
        worker.channel.close()
        if worker.job is not None:
            worker.job.future.set_result(
                worker.job.settle({"failure": failure, "seconds": time.monotonic() - worker.since})
            )

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

    def _end(self, reason: str) -> None:
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


def _worth_keeping(future: Future[Verdict]) -> bool:
    """Whether a verdict is on its way or decided; one that failed may have met a busy machine."""
    if not future.done():
        return True
    return not future.cancelled() and not future.exception() and future.result().verdict not in FAILURES


def _slow_down(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may just have ended
        os.setpriority(os.PRIO_PROCESS, pid, STUCK_NICENESS)


def _start_forkserver(settings: Settings) -> tuple[socket.socket, subprocess.Popen]:
    """The control socket, one message per packet, and the process behind it."""
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
