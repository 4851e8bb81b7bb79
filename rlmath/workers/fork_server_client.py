"""The pool's connection to its fork server: starts the process, sends it requests, receives its notices, ends it.

One message per packet on a socket; the messages are in `fork_server`. Every method that talks to the process raises
`ServerLost` when it has ended, hangs or sends nonsense; then `end` and `start` replace it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from rlmath.config.terminal import excerpt
from rlmath.workers.fork_server import WorkerSettings
from rlmath.workers.hooks import worker_environment
from rlmath.workers.process_tree import kill_marked

START_SECONDS = 120.0
"""Time limit for the start of the fork server or a worker, on a busy machine."""
ANSWER_SECONDS = 20.0
"""Time limit for the answers of a fork server that has started, which takes milliseconds."""
CLOSE_SECONDS = 10.0
END_SECONDS = 1.0
"""Time limits for its end after its socket is closed: with the pool, and where another one is to be started."""
MARKED_SECONDS = 10.0
"""Time limit for the end of processes that it has left."""
MAX_SERVER_STARTS = 30
"""Most fork servers that are started within SERVER_STARTS_SECONDS; the next one is an error."""
SERVER_STARTS_SECONDS = 600.0
MAX_START_FAILURES = 3
"""Fork servers, or workers, that end one after the other before they are ready; then it is an error."""
MARK = "RLMATH_REWARD_POOL"
"""Environment variable of a fork server and all that descends from it: an id of the pool."""
MAX_PRINTED_LINES = 20
"""Most lines of what a reward function prints that are logged within PRINTED_SECONDS."""
PRINTED_SECONDS = 60.0
MAX_PRINTED_CHARS = 500
"""Of one line."""
LOGGED_SECONDS = 5.0
"""Time for the last lines to be logged when the pool is closed."""

logger = logging.getLogger(__name__)


class ServerLost(Exception):
    """The fork server has ended, hangs or sends nonsense."""


class ServerConnection:
    """One fork server after another. Can be registered with a selector, from each `start` to the next `end`."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Starts the first one."""
        self._settings = settings
        # A fork server that is started later must find what the first one found.
        self._environment = worker_environment() | {MARK: secrets.token_hex(8)}
        self._folder = os.getcwd()
        self._notices: deque[bytes] = deque()
        """What has been received and nobody has looked at."""
        self._starts: deque[float] = deque()
        self._is_ready = False
        self._failures = 0
        """How many ended one after the other before they were ready."""
        self._last_end = ""
        self._printed: threading.Thread | None = None
        self.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def start(self) -> None:
        """Start the process; `await_ready` waits for it. RuntimeError when it was started, or failed, too often."""
        self._check_starts()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        arguments = [str(theirs.fileno()), str(os.getpid()), self._settings.as_json()]
        output = subprocess.DEVNULL if self._settings.function is None else self._log_printed()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlmath.workers.fork_server", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,  # it outlives a signal to our group, to end what the functions have started
            )
        self._starts.append(time.monotonic())
        if output != subprocess.DEVNULL:
            os.close(output)

    def _log_printed(self) -> int:
        """The end of a pipe for the server's standard output, whose lines are logged until all processes that have it
        are gone."""
        ours, theirs = os.pipe()
        assert self._settings.function is not None
        given = ours, self._settings.function.setting
        self._printed = threading.Thread(target=log_printed, args=given, name="reward-prints", daemon=True)
        self._printed.start()
        return theirs

    def _check_starts(self) -> None:
        now = time.monotonic()
        while self._starts and self._starts[0] < now - SERVER_STARTS_SECONDS:
            self._starts.popleft()
        if self._failures >= MAX_START_FAILURES:
            raise RuntimeError(
                f"it ended {self._failures} times before it was ready; the last, {self._last_end}"
            )
        if len(self._starts) >= MAX_SERVER_STARTS:
            raise RuntimeError(
                f"it was started {len(self._starts)} times within {SERVER_STARTS_SECONDS / 60:.0f} minutes; the last, "
                f"{self._last_end}. Is the machine short of memory, or does the reward function end its parent?"
            )

    def await_ready(self) -> None:
        """RuntimeError where the reward function cannot be loaded."""
        message = self._await_message()
        if message.startswith(b"failed: "):
            raise RuntimeError(message.decode(errors="replace").removeprefix("failed: "))
        if message != b"ready":
            raise ServerLost(f"sent {message[:100]!r}")
        self._failures = 0
        self._is_ready = True

    def fork(self, channel: int) -> int:
        """The process id of a new worker, which gets this file descriptor as its channel."""
        self._request(b"fork", [channel])
        while not (message := self._await_message()).startswith(b"forked "):
            self._notices.append(message)
        return int(message.removeprefix(b"forked "))

    def kill(self, worker: int) -> None:
        """Have a worker ended, with all that descends from it."""
        self._request(f"kill {worker}".encode())

    def report_lost(self, worker: int) -> None:
        """As `kill`, for a worker that has closed its channel: its notice says why, if it ends by itself."""
        self._request(f"lost {worker}".encode())

    def receive(self) -> None:
        """Read what the socket holds, for `next_notice`."""
        while (notice := self._read()) is not None:
            self._notices.append(notice)

    def next_notice(self) -> bytes | None:
        """A message that no request awaited, None where there is none."""
        return self._notices.popleft() if self._notices else None

    def end(self, why: str) -> str:
        """End the process and all that descends from it; `why` is for the error of a later `start`. Returns "process
        <id>, <exit code or signal>"."""
        self._socket.close()
        self._notices.clear()
        self._failures += not self._is_ready
        self._is_ready = False
        code = self._end_process(END_SECONDS)
        kill_marked(MARK, self._environment[MARK], MARKED_SECONDS)
        process = f"process {self._process.pid}, {exit_text(code)}"
        self._last_end = f"{process}, {why}"
        return process

    def close(self) -> None:
        """End the process and all that descends from it, for good. No error when it has ended already."""
        self._socket.close()
        if self._end_process(CLOSE_SECONDS) != 0:  # else it has ended the others itself
            kill_marked(MARK, self._environment[MARK], MARKED_SECONDS)
        if self._printed is not None:
            self._printed.join(LOGGED_SECONDS)

    def _end_process(self, seconds: float) -> int:
        """Its exit code. It is killed where it has not ended by itself after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        return self._process.wait()

    def _request(self, message: bytes, fds: Sequence[int] = ()) -> None:
        while True:
            try:
                if fds:
                    socket.send_fds(self._socket, [message], fds)
                else:
                    self._socket.send(message)
                return
            except BlockingIOError:  # it may wait for us to read
                self._await(select.POLLIN | select.POLLOUT)
                notice = self._read()
                self._notices.extend([] if notice is None else [notice])
            except OSError as error:
                raise ServerLost(f"cannot be reached ({error.strerror})") from None

    def _await_message(self) -> bytes:
        while (message := self._read()) is None:
            self._await(select.POLLIN)
        return message

    def _await(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        seconds = ANSWER_SECONDS if self._is_ready else START_SECONDS
        if not poll.poll(seconds * 1000):
            raise ServerLost(f"did not answer for {seconds:.0f} s")

    def _read(self) -> bytes | None:
        """The next message, None where there is none yet."""
        try:
            message = self._socket.recv(4096)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ServerLost(f"cannot be reached ({error.strerror})") from None
        if not message:
            raise ServerLost("has ended")
        if message.startswith(b"lost: "):
            raise ServerLost(f"has ended: {message[6:].decode(errors='replace')}")
        return message


def log_printed(pipe: int, setting: str) -> None:
    """Log the lines that come from a pipe, as those of a setting's function, until its other end is closed: bounded, on
    one line each, with control characters made visible. All is read at once, so that nobody who prints waits."""
    printed, started, rest, more = 0, time.monotonic(), b"", True
    with open(pipe, "rb", buffering=0) as stream:
        while more:
            part = stream.read(2**16)
            more = bool(part)
            if time.monotonic() - started > PRINTED_SECONDS:
                _tell_left_out(printed, setting)
                printed, started = 0, time.monotonic()
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > 2**16 or (rest and not more):
                lines, rest = [*lines, rest], b""
            for line in lines[: max(0, MAX_PRINTED_LINES - printed)]:
                logger.info("%s prints: %s", setting, excerpt(line, MAX_PRINTED_CHARS))
            printed += len(lines)
    _tell_left_out(printed, setting)


def _tell_left_out(printed: int, setting: str) -> None:
    if printed > MAX_PRINTED_LINES:
        text = "%s prints: %d more lines, which are left out (at most %d lines in %.0f s are logged)"
        logger.info(text, setting, printed - MAX_PRINTED_LINES, MAX_PRINTED_LINES, PRINTED_SECONDS)


def exit_text(code: int) -> str:
    """An exit code in words.

    >>> exit_text(-9), exit_text(1)
    ('ended by signal 9', 'exit code 1')
    """
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"
