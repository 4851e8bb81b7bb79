"""The process that forks the workers of a pool, and the pool's connection to it.

It imports math-verify, or the module of the user's function, once, and then forks a worker in
milliseconds on request. Messages go over one socket, a packet each:

| from the pool | |
|---|---|
| "fork <number>", with a file descriptor | fork a worker; the descriptor is its channel |
| "kill <number>" | end a worker and all that descends from it |

| from the fork server | |
|---|---|
| "ready", or "failed: <reason>" | first of all |
| "ended <number> <exit code> <why>" | of every worker; why is "itself", "asked", "memory" or "processes" |

When the pool's process has ended, the fork server ends its workers and exits.

Processes that a function starts are a tree below their worker, which adopts its orphans; the fork
server adopts those of workers that have ended, and kills them. The memory and number of a tree's
processes are sampled.

multiprocessing's forkserver is not used: its children import the trainer's main module again
(torch, vLLM: many seconds for every replaced worker), and there is one per process, so its first
user decides what it has loaded.

    python -m rlmath.workers.fork_server <socket> <parent's process id> <settings as JSON>
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmath.answers.verifier import verify_by_parser
from rlmath.config.terminal import excerpt
from rlmath.workers import hooks, process_tree
from rlmath.workers.worker import WorkerSettings, flush_streams, run_worker

START_SECONDS = 120.0
"""Time limit for the start of the fork server or a worker, on a busy machine."""
SEND_SECONDS = 20.0
"""Time limit for a request to a fork server that reads none; it takes microseconds."""
CLOSE_SECONDS = 10.0
"""Time limit for the fork server's end after its socket is closed."""
SWEEP_SECONDS = 1.0
"""Longest sweep over left-over processes before requests are read again."""
SAMPLE_SECONDS = 0.05
"""Interval between two looks for workers that have ended, and at the processes that functions
have started."""
MAX_SAMPLE_SECONDS = 1.0
SAMPLE_SHARE = 0.05
"""Most of one core that the looks at processes take; they become rarer on a machine of many
processes."""
MAX_PROCESSES = 64
"""Most processes of one worker, itself included."""
MAX_PRINTED_LINES = 20
"""Most printed lines of a user's function that are logged within PRINTED_SECONDS."""
PRINTED_SECONDS = 60.0
MAX_PRINTED_CHARS = 500
LOGGED_SECONDS = 5.0
"""Time for the last lines to be logged when the pool is closed."""

logger = logging.getLogger(__name__)


class ServerLost(Exception):
    """The fork server has ended, hangs or sends nonsense."""


@dataclass(frozen=True)
class Ended:
    """The end of a worker."""

    number: int
    exit_code: int
    """The exit code; a negative one is the signal that ended it."""
    why: str
    """The cause of its end: "itself", "asked" (the pool), "memory" or "processes" (the fork
    server: a limit)."""


# ---------------------------------------------------------------- in the pool's process


class ForkServer:
    """The fork server as the pool sees it; a selector may wait for `ended_workers`.

    Every method raises ServerLost when the process has ended, hangs or sends nonsense."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Starts the process; `await_ready` waits for it."""
        self._socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._printed: threading.Thread | None = None
        arguments = [str(server_end.fileno()), str(os.getpid()), settings.as_json()]
        output = (
            subprocess.DEVNULL
            if settings.function is None
            else self._log_printed(settings.function.setting)
        )
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlmath.workers.fork_server", *arguments],
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                env=hooks.worker_environment(),
                # it outlives a signal to our group, to end what the functions have started
                start_new_session=True,
            )
        if output != subprocess.DEVNULL:
            os.close(output)

    def fileno(self) -> int:
        return self._socket.fileno()

    def _log_printed(self, setting: str) -> int:
        """The end of a pipe for the server's standard output.

        Its lines are logged until no process has it open."""
        read_end, write_end = os.pipe()
        self._printed = threading.Thread(target=log_printed, args=(read_end, setting), daemon=True)
        self._printed.start()
        return write_end

    def await_ready(self) -> None:
        """RuntimeError where the reward function cannot be loaded."""
        self._socket.settimeout(START_SECONDS)
        message = self._receive()
        if message.startswith(b"failed: "):
            raise RuntimeError(message.decode(errors="replace").removeprefix("failed: "))
        if message != b"ready":
            raise self._lost(f"sent {message[:100]!r}")
        self._socket.settimeout(SEND_SECONDS)

    def fork(self, number: int, channel: int) -> None:
        """Have a worker forked, which gets this file descriptor as its channel."""
        self._request(f"fork {number}", [channel])

    def kill(self, number: int) -> None:
        """Have a worker ended, with all that descends from it."""
        self._request(f"kill {number}")

    def _request(self, message: str, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [message.encode()], fds)
        except OSError as error:
            raise self._lost(f"cannot be reached ({error})") from None

    def ended_workers(self) -> list[Ended]:
        """The workers that have ended since the last call."""
        ended = []
        while select.select([self._socket], [], [], 0)[0]:
            message = self._receive()
            try:
                _, number, code, reason = message.decode("ascii").split()
                ended.append(Ended(int(number), int(code), reason))
            except ValueError:
                raise self._lost(f"sent {message[:100]!r}") from None
        return ended

    def _receive(self) -> bytes:
        try:
            message = self._socket.recv(4096)
        except OSError as error:
            raise self._lost(f"cannot be reached ({error})") from None
        if not message:
            raise self._lost("has ended")
        return message

    def _lost(self, event: str) -> ServerLost:
        """The error, with how the process has ended."""
        exit_status = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_status = f", {exit_text(self._process.wait(1.0))}"
        return ServerLost(
            f"process {self._process.pid} {event}{exit_status}. Is the machine short of memory, "
            "or does a function end its parent?"
        )

    def close(self) -> None:
        """End the process and all that descends from it.

        No error when it has ended already."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self._process.kill()
        self._process.wait()
        if self._printed is not None:
            self._printed.join(LOGGED_SECONDS)


def log_printed(pipe: int, setting: str) -> None:
    """Log the lines that come from a pipe, as those of a setting's function, until it ends.

    They are bounded, on one line each, with control characters made visible. All is read at once,
    so that nobody who prints waits."""
    printed = 0
    started = time.monotonic()
    unfinished_line = b""
    is_open = True
    with open(pipe, "rb", buffering=0) as stream:
        while is_open:
            part = stream.read(2**16)
            is_open = bool(part)
            if time.monotonic() - started > PRINTED_SECONDS:
                _tell_left_out(printed, setting)
                printed = 0
                started = time.monotonic()
            *lines, unfinished_line = (unfinished_line + part).split(b"\n")
            if len(unfinished_line) > 2**16 or (unfinished_line and not is_open):
                lines = [*lines, unfinished_line]
                unfinished_line = b""
            for line in lines[: max(0, MAX_PRINTED_LINES - printed)]:
                logger.info("%s prints: %s", setting, excerpt(line, MAX_PRINTED_CHARS))
            printed += len(lines)
    _tell_left_out(printed, setting)


def _tell_left_out(printed: int, setting: str) -> None:
    """Log how many printed lines were left out, if any."""
    if printed > MAX_PRINTED_LINES:
        text = (
            "%s prints: %d more lines, which are left out (at most %d lines in %.0f s are logged)"
        )
        logger.info(text, setting, printed - MAX_PRINTED_LINES, MAX_PRINTED_LINES, PRINTED_SECONDS)


def exit_text(code: int) -> str:
    """An exit code in words.

    >>> exit_text(-9), exit_text(1)
    ('ended by signal 9', 'exit code 1')
    """
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


# ---------------------------------------------------------------- in the fork server's process


@dataclass
class _Child:
    """A worker as the fork server knows it."""

    number: int
    why: str = ""
    """Why it is being ended; "" while it is not."""


class _Server:
    """Forks and kills workers on request until the pool has ended."""

    def __init__(
        self,
        control: socket.socket,
        parent: int,
        settings: WorkerSettings,
        function: Callable | None,
    ) -> None:
        self._control = control
        self._parent = parent
        self._settings = settings
        self._function = function
        self._workers: dict[int, _Child] = {}
        """Workers by their process ids."""
        self._of_module: set[int] = set()
        """Processes that the user's module started when it was imported."""
        self._sample_at = 0.0

    def serve(self) -> None:
        """Serve until the pool has closed its end or has ended.

        Then all that descends from this process has ended too."""
        process_tree.adopt_orphans()
        self._of_module.update(process_tree.children_by_parent().get(os.getpid(), []))
        try:
            self._control.send(b"ready")
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            while os.getppid() == self._parent:
                if poll.poll(SAMPLE_SECONDS * 1000) and not self._handle_request():
                    break
                if self._reap() and self._function is not None:
                    self._sweep(SWEEP_SECONDS)
                if self._function is not None and time.monotonic() >= self._sample_at:
                    self._sample()
        except ConnectionError:
            pass  # the pool has ended with messages of ours unread, or while one was sent
        finally:
            self._of_module.clear()
            self._workers.clear()
            self._sweep(CLOSE_SECONDS / 2)

    def _handle_request(self) -> bool:
        """Whether there was one: none when the pool has closed its end."""
        message, fds, _, _ = socket.recv_fds(self._control, 64, 1)
        if not message:
            return False
        verb, number = message.split()
        if verb == b"fork":
            self._fork(int(number), fds[0])
        else:
            worker = next(
                (pid for pid, child in self._workers.items() if child.number == int(number)), None
            )
            if worker is not None:
                self._kill(worker, "asked", process_tree.children_by_parent())
        return True

    def _fork(self, number: int, channel: int) -> None:
        """Fork a worker that gets this file descriptor as its channel."""
        server = os.getpid()
        child = os.fork()
        if child == 0:
            self._control.close()
            run_worker(channel, server, self._settings, function=self._function)
        os.close(channel)
        self._workers[child] = _Child(number)

    def _kill(self, worker: int, why: str, children: Mapping[int, list[int]]) -> None:
        """End a worker's processes; the first reason is kept."""
        self._workers[worker].why = self._workers[worker].why or why
        process_tree.kill_trees([worker], children)

    def _reap(self) -> bool:
        """Report the workers that have ended to the pool; whether any process has."""
        any_ended = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                any_ended = True
                worker = self._workers.pop(ended[0], None)
                if worker is not None:
                    code = os.waitstatus_to_exitcode(ended[1])
                    # If the pool has ended, the next poll finds out.
                    with contextlib.suppress(ConnectionError):
                        self._control.send(
                            f"ended {worker.number} {code} {worker.why or 'itself'}".encode()
                        )
        return any_ended

    def _sweep(self, seconds: float) -> None:
        """Kill children that are no workers, and theirs, until none is left."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            children = process_tree.children_by_parent()
            known_pids = self._workers.keys() | self._of_module
            left_over = [pid for pid in children.get(os.getpid(), []) if pid not in known_pids]
            if not left_over:
                return
            process_tree.kill_trees(left_over, children)
            time.sleep(process_tree.SWEEP_PAUSE_SECONDS)
            self._reap()

    def _sample(self) -> None:
        """End workers with too many processes or too much memory, and processes left over."""
        started = time.process_time()
        children = process_tree.children_by_parent()
        for worker in [pid for pid, child in self._workers.items() if not child.why]:
            tree = [worker, *process_tree.descendants(worker, children)]
            if len(tree) > MAX_PROCESSES:
                self._kill(worker, "processes", children)
            elif len(tree) > 1 and process_tree.memory_above(tree, self._settings.memory_bytes):
                self._kill(worker, "memory", children)
        self._sweep(SWEEP_SECONDS)
        spent = time.process_time() - started
        pause = max(SAMPLE_SECONDS, min(spent / SAMPLE_SHARE, MAX_SAMPLE_SECONDS))
        self._sample_at = time.monotonic() + pause


def main() -> None:
    """Load what workers need, report to the pool, and serve it until it ends."""
    socket_fd, parent, settings_json = sys.argv[1:]
    settings = WorkerSettings.from_json(settings_json)
    # A cluster, Ctrl-C and torchrun send these signals to all processes of a job; only the pool
    # ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # math-verify warns that its time limits are off, and logs what it cannot parse.
    logging.disable(logging.CRITICAL)
    function = None
    with socket.socket(fileno=int(socket_fd)) as control:
        if settings.function is None:
            _warm_up()
        else:
            sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
            try:
                function = hooks.load(settings.function)
            except ValueError as error:
                control.send(f"failed: {error}".encode()[:2000])
                return
            # The user's module may have set SIGCHLD to be ignored: then no process could be waited
            # for.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            flush_streams()
        gc.collect()
        gc.freeze()
        _Server(control, int(parent), settings, function=function).serve()


def _warm_up() -> None:
    """Load the grammar and math-verify, and use both once, before workers are forked."""
    # Imported here, as a process with a reward function does not need it.
    from rlmath.answers.answers_equal import warm_up_math_verify

    verify_by_parser("\\frac{1}{2}", ("x^2", "\\{1,2\\}"))
    warm_up_math_verify()


if __name__ == "__main__":
    main()
