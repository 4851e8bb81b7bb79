"""The leader's side: calls go in, results come out, and nothing here waits.

>>> with Sandboxes(cores=1) as sandboxes:
...     sandboxes.submit("completion 7", "6 * 7", seed=1)
...     sandboxes.wait()[0][1].text
'42\\n'
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlmath.sandbox import kernel
from rlmath.sandbox.calls import STATES, CallResult, Limits, PastCall
from rlmath.sandbox.frames import FrameBuffer, framed
from rlmath.sandbox.server import MOST_MESSAGE_BYTES, READ_BYTES
from rlmath.sandbox.server_program import ENVIRONMENT, PRELOADED

ATTEMPTS = 3
"""Attempts at a call in all, where it meets a fault of the infrastructure."""
RETRY_SECONDS = 0.2
"""Pause before a call is tried again; each time twice as long."""
START_SECONDS = 120.0
"""Time limit for the start of the server, on a busy machine."""
SILENCE_SECONDS = 10.0
"""A server that has said nothing for so long while calls are pending is asked whether it lives."""
ANSWER_SECONDS = 60.0
"""Time limit for the answer."""
CLOSE_SECONDS = 10.0
"""Time limit for the server's end after its socket is closed."""
BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rlmath.sandbox.server_program import main; main()"
)
FOLDER = str(Path(__file__).resolve().parents[2])
"""The folder that rlmath is in."""

logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A submitted call that has no result yet."""

    key: str
    message: dict[str, Any]
    attempts: int = 1
    retry_at: float | None = None
    """Time at which it is tried again (time.monotonic); None while the server has it."""


class Sandboxes:
    """Executes the calls of completions, each in a sandbox of its own.

    One thread uses it; no method but `wait`, `await_ready` and `close` waits for anything.

    A completion has one call at a time. Its next one is submitted with the earlier ones, so that
    its session can be made again wherever it was lost, evicted or never was:

        sandboxes.submit(key, "x = 2", seed)
        [(key, result)] = sandboxes.wait()
        sandboxes.submit(key, "x + 1", seed, earlier=[result.as_past_call("x = 2")])
    """

    def __init__(
        self,
        cores: int,
        sessions: int = 64,
        *,
        sessions_memory_bytes: int = 4 * 2**30,
        limits: Limits | None = None,
        isolation: str = "landlock",
        state: str = "session",
        python: str = sys.executable,
        preload: Sequence[str] = PRELOADED,
    ) -> None:
        """Starts the server and returns at once.

        `cores` calls are executed at a time. As many sandboxes as `sessions` says are kept for
        further calls of their completions, as long as they hold no more than
        `sessions_memory_bytes` together; the others are ended, those that were used longest ago
        first. `python` is an interpreter with the libraries that the code may import, and `preload`
        names modules of theirs that sandboxes have from the start; with isolation "preloaded" no
        others. ValueError for a setting that is wrong or that this machine lacks.
        """
        for name, number in (
            ("cores", cores),
            ("sessions", sessions),
            ("sessions_memory_bytes", sessions_memory_bytes),
        ):
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        if state not in STATES:
            raise ValueError(f'state is "{state}"; it must be one of {", ".join(STATES)}')
        if (problem := kernel.lacking(isolation)) is not None:
            raise ValueError(problem)
        self._limits = limits or Limits()
        self._settings = {
            "limits": dataclasses.asdict(self._limits),
            "isolation": isolation,
            "cores": cores,
            "sessions": sessions,
            "sessions_memory_bytes": sessions_memory_bytes,
            "state": state,
            "preload": list(preload),
        }
        self._state = state
        self._python = python
        self._pending: dict[int, _Pending] = {}
        self._ids: dict[str, int] = {}
        """Of the pending calls, by their completions."""
        self._done: list[tuple[str, CallResult]] = []
        """Results that needed no server."""
        self._next_id = 0
        self._socket: socket.socket | None = None
        self._failure: str | None = None
        self._start_server()

    # ---------------------------------------------------------------- the face

    def submit(self, key: str, code: str, seed: int, earlier: Sequence[PastCall] = ()) -> None:
        """Queue a call of the completion `key`, whose earlier calls are these in order.

        `seed` is the completion's, of 64 bits. ValueError where the completion has a call already,
        RuntimeError where servers start and cannot work."""
        if key in self._ids:
            raise ValueError(
                f'completion "{key}" has a call already; take its result, or cancel it'
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; it must be a number of 64 bits, not negative")
        cpu_seconds_left = self._limits.completion_cpu_seconds - sum(
            call.cpu_seconds for call in earlier
        )
        refusal = self._refusal(code, cpu_seconds_left)
        if refusal is not None:
            self._done.append((key, refusal))
            return
        past_steps = [(number, seed, call.code) for number, call in enumerate(earlier) if call.kept]
        steps = (
            [*past_steps, (len(earlier), seed, code)]
            if self._state == "session"
            else [(len(earlier), seed, code)]
        )
        self._next_id += 1
        message = {
            "id": self._next_id,
            "key": key,
            "steps": steps,
            "cpu_seconds": min(cpu_seconds_left, self._limits.call_cpu_seconds),
            "submitted_at": time.monotonic(),
        }
        self._ids[key] = self._next_id
        self._pending[self._next_id] = _Pending(key, message)
        self._send({"call": message})

    def poll(self) -> list[tuple[str, CallResult]]:
        """(completion, result) of the calls that have ended since the last time, without waiting.

        RuntimeError where servers start and cannot work."""
        self._flush()
        self._receive()
        self._retry()
        self._check_silence()
        finished = self._done
        self._done = []
        for key, _ in finished:
            self._forget(key)
        return finished

    def wait(self, seconds: float | None = None) -> list[tuple[str, CallResult]]:
        """Wait until there is a result, no call is pending, or the time is over; then as `poll`."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            finished = self.poll()
            seconds_left = 1.0 if end is None else end - time.monotonic()
            if finished or not self._pending or seconds_left <= 0:
                return finished
            times = [
                pending.retry_at
                for pending in self._pending.values()
                if pending.retry_at is not None
            ]
            until_retry = max(0.0, min(times, default=time.monotonic() + 1.0) - time.monotonic())
            writers = [self._socket] if self._unsent and self._socket is not None else []
            readers = [] if self._socket is None else [self._socket]
            select.select(readers, writers, [], min(seconds_left, until_retry, 1.0))

    def cancel(self, key: str) -> None:
        """Drop the completion's pending call, if it has one.

        The call has no result, and what it did is undone with its session."""
        self._done = [(other, result) for other, result in self._done if other != key]
        number = self._forget(key)
        if number is not None and self._socket is not None:
            self._send({"cancel": number})

    def release(self, key: str) -> None:
        """End the session of a completion that has no further call."""
        self.cancel(key)
        if self._socket is not None:
            self._send({"release": key})

    def await_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server has started, before the first call.

        RuntimeError where it cannot."""
        end = time.monotonic() + seconds
        while not self._is_ready:
            if self._socket is None or self._failure is not None:
                raise RuntimeError(
                    self._failure or "the sandboxes' server has ended before it was ready"
                )
            if time.monotonic() > end:
                raise RuntimeError(f"the sandboxes' server was not ready after {seconds:.0f} s")
            select.select([self._socket], [], [], 0.1)
            self._receive()

    @property
    def pending(self) -> int:
        """Calls that have no result yet."""
        return len(self._pending)

    @property
    def server_pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that can be read when there may be results, -1 where no server runs."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """End the server and its sandboxes; pending calls have no result."""
        self._pending.clear()
        self._ids.clear()
        self._end_server(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- calls

    def _refusal(self, code: str, cpu_seconds_left: float) -> CallResult | None:
        """The result of a call that is not executed."""
        text = None
        if len(code) > self._limits.source_characters:
            text = (
                f"the code has {len(code):,} characters; at most "
                f"{self._limits.source_characters:,} are executed\n"
            )
        elif cpu_seconds_left <= 0:
            text = (
                f"all {self._limits.completion_cpu_seconds:g} s of CPU time for calls have "
                "been used\n"
            )
        if text is None:
            return None
        return CallResult("refused", text, cpu_seconds=0.0, wall_seconds=0.0, queue_seconds=0.0)

    def _forget(self, key: str) -> int | None:
        number = self._ids.pop(key, None)
        if number is not None:
            del self._pending[number]
        return number

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the server."""
        if "ready" in message:
            self._is_ready = True
        elif "failed" in message:
            self._failure = f"the sandboxes' server cannot start: {message['failed']}"
        elif "id" in message:
            fields = {name: value for name, value in message.items() if name != "id"}
            self._handle_result(message["id"], CallResult(**fields))

    def _handle_result(self, number: int, outcome: CallResult) -> None:
        """Keep a result, or try again where the infrastructure was at fault."""
        pending = self._pending.get(number)
        if pending is None:
            return  # cancelled
        if outcome.is_infrastructure_fault and pending.attempts < ATTEMPTS:
            logger.warning(
                "A tool call is tried again (%d of %d): %s",
                pending.attempts,
                ATTEMPTS,
                outcome.text,
            )
            pending.retry_at = time.monotonic() + RETRY_SECONDS * 2 ** (pending.attempts - 1)
            pending.attempts += 1
            return
        self._done.append((pending.key, outcome))

    def _retry(self) -> None:
        time_now = time.monotonic()
        for pending in self._pending.values():
            if pending.retry_at is not None and pending.retry_at <= time_now:
                pending.retry_at = None
                self._send({"call": pending.message})

    # ---------------------------------------------------------------- the server

    def _start_server(self) -> None:
        """Start a server; OSError where the machine has no process or descriptor for it."""
        own_end, server_end = socket.socketpair()
        own_end.setblocking(False)
        self._received = FrameBuffer(MOST_MESSAGE_BYTES)
        self._unsent = bytearray()
        self._is_ready = False
        self._heard_at = time.monotonic()
        self._asked_at: float | None = None
        with server_end:
            settings = json.dumps({**self._settings, "socket": server_end.fileno()})
            try:
                self._process = subprocess.Popen(
                    [self._python, "-s", "-P", "-B", "-c", BOOTSTRAP, FOLDER, settings],
                    pass_fds=[server_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError:
                own_end.close()
                raise
        self._socket = own_end

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self._socket is None:
            try:
                self._start_server()
            except OSError as error:
                self._fail_calls(f"the sandboxes' server cannot be started again: {error}")
                return
        self._unsent += framed(json.dumps(message).encode())
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; a server that has ended is found by `_receive`."""
        with contextlib.suppress(OSError):
            while self._unsent and self._socket is not None:
                del self._unsent[: self._socket.send(self._unsent)]

    def _receive(self) -> None:
        """Read from the server and handle its messages, without waiting."""
        while self._socket is not None:
            try:
                part = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self._lose_server("has ended")
                return
            self._heard_at = time.monotonic()
            self._asked_at = None
            self._received.add(part)
            while (message := self._received.take()) is not None:
                self._handle_message(json.loads(message))
            if self._failure is not None:
                raise RuntimeError(self._failure)

    def _check_silence(self) -> None:
        """Ask a server that says nothing whether it lives; one that does not answer is replaced."""
        time_now = time.monotonic()
        if not self._pending or self._socket is None:
            self._heard_at = time_now
            return
        limit = ANSWER_SECONDS if self._is_ready else START_SECONDS
        if self._asked_at is None and time_now - self._heard_at > SILENCE_SECONDS:
            self._asked_at = time_now
            self._send({"ping": 1})
        elif self._asked_at is not None and time_now - self._asked_at > limit:
            self._lose_server(f"has said nothing for {limit:.0f} s")

    def _lose_server(self, failure: str) -> None:
        """Replace a server that is lost.

        Every call that it had is tried again, by another one, or has failed."""
        was_ready = self._is_ready
        self._end_server(0.0)
        code = self._process.returncode
        logger.warning("The sandboxes' server %s (exit status %s)", failure, code)
        reason = f"the sandboxes' server {failure} (exit status {code})"
        self._fail_calls(reason)
        if not was_ready and not self._pending:
            self._failure = f"{reason} before it was ready"

    def _fail_calls(self, reason: str) -> None:
        """Count a failed attempt at every call that the server has."""
        done_keys = {key for key, _ in self._done}
        for number, pending in self._pending.items():
            if pending.retry_at is None and pending.key not in done_keys:
                outcome = CallResult(
                    "lost", reason, cpu_seconds=0.0, wall_seconds=0.0, queue_seconds=0.0
                )
                self._handle_result(number, outcome)

    def _end_server(self, seconds: float) -> None:
        """Close the channel and wait so long for the server to end, then kill it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        self._process.wait()
