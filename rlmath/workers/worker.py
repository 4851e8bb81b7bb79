"""A worker: a process that verifies answers, or calls the user's function, one by one.

It is forked by `fork_server`, gets JSON requests over its channel from the pool, and answers each
with one JSON reply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from rlmath.answers.verifier import Rules, verify_by_parser, verify_by_string
from rlmath.distributed.process import end_with_parent
from rlmath.workers import process_tree
from rlmath.workers.function_calls import GROUP_REWARD, call_function
from rlmath.workers.hooks import Hook

WALL_FACTOR = 10
"""Factor between a check's limit by the clock and that of processor time: on a busy machine it
gets a small share of a core. A reward function, which may wait for a network, has the limit by
the clock."""
GRACE_SECONDS = 5.0
"""Time by which the kernel's own limits, which end a worker if the pool cannot, exceed the
pool's."""
LENGTH_BYTES = 4
"""Size of the length before every message on a worker's channel, big-endian."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings that a worker starts with."""

    memory_bytes: int
    """Address space of every process of a worker, and memory of all of them together."""
    timeout_seconds: float
    rules: Rules
    function: Hook | None
    """The user's function; None: the verifier."""

    @property
    def wall_seconds(self) -> float:
        """The time limit of one answer by the clock."""
        return self.timeout_seconds * (WALL_FACTOR if self.function is None else 1)

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerSettings:
        values = json.loads(text)
        function = values["function"]
        if function is not None:
            function = Hook(**{**function, "plugins": tuple(function["plugins"])})
        return WorkerSettings(**{**values, "rules": Rules(**values["rules"]), "function": function})


def framed(message: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """A message as it goes over a worker's channel: JSON after its length.

    `default` is as in `json.dumps`."""
    content = json.dumps(message, default=default).encode()
    return len(content).to_bytes(LENGTH_BYTES) + content


def run_worker(
    channel_fd: int, parent: int, settings: WorkerSettings, function: Callable | None
) -> NoReturn:
    """A worker's loop: one request in, one result out, until the channel is closed.

    `parent` is the server's pid."""
    try:
        end_with_parent(parent)
        os.setsid()  # a signal that the function sends to its own group reaches nobody else
        process_tree.adopt_orphans()
        _reset_signals()
        os.set_inheritable(channel_fd, False)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        # A function prints to the fork server's standard output, which the pool logs.
        for stream in (1, 2):
            os.dup2(null if function is None else 1, stream)
        resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if function is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        _serve(socket.socket(fileno=channel_fd), settings, function)
        os._exit(0)
    except OSError:
        os._exit(0)
    finally:
        os._exit(1)


def _reset_signals() -> None:
    """Set handlers so that signals to a whole job have no effect here.

    These are SIGTERM and SIGUSR1, which a cluster sends; they end what a function starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # A handler of Python's is not inherited by another program.
        signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))


def _serve(channel: socket.socket, settings: WorkerSettings, function: Callable | None) -> None:
    """Answer requests from the channel until it is closed."""
    channel.sendall(framed({"ready": os.getpid()}))
    requests = channel.makefile("rb")
    while size := requests.read(LENGTH_BYTES):
        request = json.loads(requests.read(int.from_bytes(size)))
        _limit_request(settings)
        if function is not None:
            assert settings.function is not None
            kind = GROUP_REWARD if settings.function.takes == "group" else settings.function.kind
            result = _call(kind, function, request)
        else:
            result = _verify(request, settings.rules)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(framed({"id": request["id"], **result}))


def _verify(request: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """The verdict on the answer of a request, as a reply."""
    answer = request["answer"]
    solutions = request["solutions"]
    verdict = verify_by_string(answer, solutions, rules) if request["strings"] else None
    verdict = verdict or verify_by_parser(answer, solutions, rules, question=request["question"])
    return {"correct": verdict.correct, "verdict": verdict.verdict}


def _call(kind: str, function: Callable, request: Mapping[str, Any]) -> dict[str, Any]:
    """The function's result, and whether this worker is not fit for further answers."""
    result = call_function(kind, function, request["arguments"])
    flush_streams()
    return result | {"left_over": _has_children()}


def flush_streams() -> None:
    """Print text of the function that no line end follows.

    The function may have closed or replaced the streams."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _has_children() -> bool:
    """Whether processes that the function has started still run.

    Those that have ended are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _limit_request(settings: WorkerSettings) -> None:
    """Let the kernel end this worker after so much (CPU) time, if the pool does not.

    A function may use all cores."""
    # SIGALRM's default action ends the process.
    signal.setitimer(signal.ITIMER_REAL, settings.wall_seconds + GRACE_SECONDS)
    cores = 1 if settings.function is None else os.cpu_count() or 1
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = (
        int(usage.ru_utime + usage.ru_stime + cores * (settings.timeout_seconds + GRACE_SECONDS))
        + 1
    )
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
