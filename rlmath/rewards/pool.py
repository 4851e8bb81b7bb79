"""Answer checks in worker processes, each with a time and a memory limit of its own.

    VerifierPool (this process, one thread) -- socket --> forkserver -- fork --> workers

A check that hangs or crashes ends its own worker only; the forkserver has a new one within milliseconds, and
no other answer waits. Start the pool before process groups, CUDA and engines: nothing of theirs then leaks into
the workers. Linux only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

import rlmath
from rlmath.rewards.verify import MAX_ANSWER_CHARS, TASKS, Verdict, cheap_verdict, extract_boxed

START_SECONDS = 120.0
"""How long the forkserver or a worker may take to be ready, on a busy machine."""

MEMORY_BYTES = 2 * 2**30
"""Address space of one worker; math-verify itself takes about a quarter GiB."""

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    answer: str
    solutions: tuple[str, ...]
    future: Future[Verdict]


@dataclass
class _Worker:
    pid: int
    channel: Connection
    deadline: float
    """When it is given up (time.monotonic): ready by then, or the job done by then."""
    state: str = "starting"
    """"starting", "idle" or "busy"."""
    job: _Job | None = None


class VerifierPool:
    """Judges completions. `submit` from any thread; futures resolve in the pool's thread.

    >>> with VerifierPool(workers=1, timeout_seconds=5.0) as pool:  # doctest: +SKIP
    ...     pool.submit("\\\\boxed{\\\\frac{1}{2}}", ("\\\\boxed{0.5}",), "math").result().verdict
    'symbolic'
    """

    def __init__(self, workers: int, timeout_seconds: float, memory_bytes: int = MEMORY_BYTES) -> None:
        """Returns at once; workers are ready a second later. Raises ValueError for impossible limits."""
        if workers < 1:
            raise ValueError(f"reward.workers is {workers}; it must be at least 1")
        if not 0 < timeout_seconds < 3600:
            raise ValueError(
                f"reward.timeout_seconds is {timeout_seconds}; it must be above 0 and below 3600 seconds"
            )
        self._size = workers
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._closing = False
        self._broken: str | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._control, self._server = _start_forkserver(memory_bytes, timeout_seconds)
        self._thread = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._thread.start()

    def submit(self, text: str, solutions: Sequence[str], task: str) -> Future[Verdict]:
        """The verdict on a completion, to come. What needs no parser is decided here, and the future is done.

        Raises RuntimeError when the pool is closed or its forkserver is dead.
        """
        assert task in TASKS, task
        future: Future[Verdict] = Future()
        answer = extract_boxed(text)
        verdict = cheap_verdict(answer, solutions)
        if verdict is not None:
            future.set_result(verdict)
            return future
        golds = tuple(solution for solution in solutions if len(solution) <= 2 * MAX_ANSWER_CHARS)
        with self._lock:
            if self._broken:
                raise RuntimeError(self._broken)
            if self._closing:
                raise RuntimeError("the verifier pool is closed")
            self._pending.append(_Job(answer or "", golds, future))
        self._wake()
        return future

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
        """The pool's thread: hand out jobs, take answers, replace who is late or dead."""
        try:
            self._receive_control()
            while not self._closing:
                while len(self._workers) < self._size:
                    self._workers.append(self._fork_worker())
                self._hand_out()
                self._take_answers()
                self._give_up_late()
            self._end("the verifier pool was closed")
        except Exception as error:
            logger.exception("The verifier pool's forkserver failed")
            self._end(f"the verifier pool's forkserver is dead ({error}); see its own messages above")

    def _hand_out(self) -> None:
        for worker in [worker for worker in self._workers if worker.state == "idle"]:
            job = self._next_job()
            if job is None:
                return
            question = json.dumps({"answer": job.answer, "solutions": job.solutions}).encode()
            worker.state, worker.job = "busy", job
            worker.deadline = time.monotonic() + self._timeout_seconds
            try:
                worker.channel.send_bytes(question)
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
        deadlines = [worker.deadline for worker in self._workers if worker.state != "idle"]
        patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
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
        if answer["verdict"] == "error":  # out of memory or of stack: start afresh
            worker.job = job
            self._drop(worker, "error")
        else:
            job.future.set_result(Verdict(answer["correct"], job.answer.strip(), answer["verdict"]))

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for worker in [
            worker for worker in self._workers if worker.state != "idle" and worker.deadline <= now
        ]:
            if worker.state == "starting":
                raise RuntimeError(f"a worker was not ready after {START_SECONDS:.0f} s")
            if not worker.channel.poll():  # an answer that is there counts, however late we look
                self._drop(worker, "timeout")

    def _drop(self, worker: _Worker, verdict: str) -> None:
        """Ends a worker and settles its job."""
        self._control.send(f"kill {worker.pid}".encode())
        self._workers.remove(worker)
        worker.channel.close()
        if worker.job is not None:
            worker.job.future.set_result(Verdict(False, worker.job.answer.strip(), verdict))

    def _fork_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
        pid = int(self._receive_control())
        return _Worker(pid, Connection(ours.detach()), deadline=time.monotonic() + START_SECONDS)

    def _receive_control(self) -> bytes:
        message = self._control.recv(64)
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


def _start_forkserver(memory_bytes: int, timeout_seconds: float) -> tuple[socket.socket, subprocess.Popen]:
    """The control socket, one message per packet, and the process behind it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_SECONDS)
    source = str(Path(rlmath.__file__).parent.parent)
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [str(theirs.fileno()), str(os.getpid()), str(memory_bytes), str(timeout_seconds)]
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "rlmath.rewards.forkserver", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )
    return ours, server
