"""The process that forks the reward workers. Started by `worker_pool`, never imported by the trainer.

It imports math-verify (and the user's reward function) once, warms it up, and then forks a worker in milliseconds on
request. Requests arrive over one socket: "fork", with a file descriptor for the new worker's channel, returns the
worker's process id; "kill <id>" ends a worker. When the pool's process has ended, it exits, and the kernel kills its
workers.

multiprocessing's forkserver is not used: its children import the trainer's main module again (torch, vLLM: many
seconds for every replaced worker), and there is one per process, so its first user decides what it has loaded.

    python -m rlmath.rewards.fork_server <socket> <parent's process id> <settings as JSON>
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlmath.distributed.process import end_with_parent
from rlmath.rewards.custom_function import call_function, load_function
from rlmath.rewards.verifier import Rules, verify_by_parser

PARENT_CHECK_SECONDS = 1.0
"""Interval of the check for a dead parent, needed where a forked copy of the parent keeps the socket open."""

GRACE_SECONDS = 5.0
"""Added to the pool's time limit for the kernel's own limit, which ends a worker if the pool cannot."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of all workers of one pool."""

    memory_bytes: int
    """Address space of one worker."""
    timeout_seconds: float
    rules: Rules
    function: str | None
    """The user's reward function, "package.module:name"."""

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerSettings:
        values = json.loads(text)
        return WorkerSettings(**{**values, "rules": Rules(**values["rules"])})


def serve(control: socket.socket, parent: int, run_worker: Callable[[int], None]) -> None:
    """Fork and kill workers on request until the parent has ended."""
    children: set[int] = set()
    control.send(b"ready")
    while os.getppid() == parent:
        readable, _, _ = select.select([control], [], [], PARENT_CHECK_SECONDS)
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0] == child}
        if not readable:
            continue
        message, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if message == b"fork":
            child = os.fork()
            if child == 0:
                control.close()
                run_worker(fds[0])
            os.close(fds[0])
            children.add(child)
            control.send(str(child).encode())
        else:
            child = int(message.removeprefix(b"kill "))
            if child in children:  # not reaped, so no other process has the id
                os.kill(child, signal.SIGKILL)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _run_worker(channel_fd: int, settings: WorkerSettings, function: Callable | None) -> None:
    """A worker's main loop: one JSON request in, one JSON result out, until the pool closes the channel."""
    end_with_parent(os.getppid())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if function is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        _serve_requests(Connection(channel_fd), settings, function)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _serve_requests(channel: Connection, settings: WorkerSettings, function: Callable | None) -> None:
    channel.send_bytes(b"ready")
    while True:
        request = json.loads(channel.recv_bytes())
        _limit_request(settings.timeout_seconds + GRACE_SECONDS)
        if "row" in request:
            assert function is not None
            found = call_function(function, request["completion"], request["solutions"], request["row"])
            result = dataclasses.asdict(found)
        else:
            verdict = verify_by_parser(request["answer"], request["solutions"], settings.rules)
            result = {"correct": verdict.correct, "verdict": verdict.verdict}
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send_bytes(json.dumps(result).encode())


def _limit_request(seconds: float) -> None:
    """Let the kernel end this worker after so much time, or so much CPU time, if the pool does not."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM's default action ends the process
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    control_fd, parent, settings_json = sys.argv[1:]
    settings = WorkerSettings.from_json(settings_json)
    # Sent to the whole process group by Ctrl-C and by torchrun; only the pool ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # math-verify warns that its time limits are off, and logs what it cannot parse.
    logging.disable(logging.CRITICAL)
    with socket.socket(fileno=int(control_fd)) as control:
        try:
            function = load_function(settings.function) if settings.function else None
        except ValueError as error:
            control.send(f"failed: {error}".encode()[:2000])
            return
        if function is None:
            # Import math-verify and warm up both parsers before the fork; the integral is for math-verify.
            verify_by_parser("\\frac{1}{2}", ("x^2", "\\{1,2\\}", "\\int_0^1 x dx"))
            assert "math_verify" in sys.modules
        gc.collect()
        gc.freeze()
        serve(control, int(parent), lambda channel: _run_worker(channel, settings, function))


if __name__ == "__main__":
    main()
