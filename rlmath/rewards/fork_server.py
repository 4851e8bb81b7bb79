"""The process that forks answer checkers. Started by `pool`, never imported by the trainer.

Why not multiprocessing's forkserver: its children import the trainer's main module again (torch, vLLM: many
seconds for every replaced worker), and it is one per process, so that whoever starts it first decides what it
has loaded.

A small process imports math-verify (and the user's reward function) once, warms it up, and then forks a worker in
milliseconds whenever it is told to. It talks over one socket: "fork" comes with a file descriptor, the new worker's
channel, and is answered with its process id; "kill <id>" ends a worker. It ends itself, and the kernel then its
workers, when the pool's process is gone.

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
from rlmath.rewards.verifier import Rules, deep_verdict

PARENT_CHECK_SECONDS = 1.0
"""How soon an orphaned forkserver notices, should a forked copy of the parent still hold the socket open."""

GRACE_SECONDS = 5.0
"""How much later than the pool's limit the kernel ends a worker, should the pool not be there to do it."""


@dataclass(frozen=True)
class Settings:
    """What the workers of one pool have in common."""

    memory_bytes: int
    """Address space of one worker."""
    timeout_seconds: float
    rules: Rules
    function: str | None
    """The user's reward function, "package.module:name"."""

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        values = json.loads(text)
        return Settings(**{**values, "rules": Rules(**values["rules"])})


def serve(control: socket.socket, parent: int, run_worker: Callable[[int], None]) -> None:
    """Forks and kills workers on demand until the parent is gone."""
    children: set[int] = set()
    control.send(b"ready")
    while os.getppid() == parent:
        readable, _, _ = select.select([control], [], [], PARENT_CHECK_SECONDS)
        _reap(children)
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
            if child in children:  # not reaped, so the id is still its own
                os.kill(child, signal.SIGKILL)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for child in tuple(children):
        if os.waitpid(child, os.WNOHANG)[0] == child:
            children.remove(child)


def _run_worker(channel_fd: int, settings: Settings, function: Callable | None) -> None:
    """A worker's whole life: one JSON question in, one JSON answer out, until the pool closes the channel."""
    end_with_parent(os.getppid())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if function is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        _answer_questions(Connection(channel_fd), settings, function)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _answer_questions(channel: Connection, settings: Settings, function: Callable | None) -> None:
    channel.send_bytes(b"ready")
    while True:
        question = json.loads(channel.recv_bytes())
        _limit_this_answer(settings.timeout_seconds + GRACE_SECONDS)
        if "row" in question:
            assert function is not None
            said = call_function(function, question["completion"], question["solutions"], question["row"])
            answer = dataclasses.asdict(said)
        else:
            verdict = deep_verdict(question["answer"], question["solutions"], settings.rules)
            answer = {"correct": verdict.correct, "verdict": verdict.verdict}
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send_bytes(json.dumps(answer).encode())


def _limit_this_answer(seconds: float) -> None:
    """Should the pool not end this worker in time, the kernel does: after so much time, or so much CPU time."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM's default action: the end
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    control_fd, parent, settings_json = sys.argv[1:]
    settings = Settings.from_json(settings_json)
    # These reach the whole process group: Ctrl-C, and torchrun's call to save and stop. The pool decides when we end.
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
        # So that no worker pays for the first parse of either judge.
        deep_verdict("\\int_0^1 x dx", ("\\frac{1}{2}", "x^2", "\\{1,2\\}"))
        gc.collect()
        gc.freeze()
        serve(control, int(parent), lambda channel: _run_worker(channel, settings, function))


if __name__ == "__main__":
    main()
