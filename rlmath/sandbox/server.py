"""The server that forks sandboxes, hands them calls, and judges what came of them.

`server_program` starts it; a call and the sandbox that executes it are records of `executions`. It
forks sandboxes ahead, and has each execute the calls of one completion. Frames of JSON go over one
socket:

| from the leader | |
|---|---|
| {"call": {...}} | a call, as `Call` has it |
| {"cancel": id} | of a call: it is taken from the queue, or its sandbox is killed; it has no result |
| {"release": key} | of a completion that has ended: its session ends |
| {"ping": 1} | answered at once |

| from the server | |
|---|---|
| {"ready": 1}, or {"failed": reason} | first of all |
| {"pong": 1} | |
| {"id": ..., "status": ..., ...} | the result of a call |

Life of a sandbox, which is stopped while it has nothing to execute, so that no thread of its code
goes on:

    fork --> SPARE -- the first call of a completion --> executes -- reply --> SESSION -- its next call --> executes
                                                            |                     |
                                                            +-- limit, nonsense   +-- evicted, released, "fresh"
                                                            |   or its end        |
                                                            +---------------------+--> killed, then waited for

A reply is one frame of bounded size in strict UTF-8, with the number of the call that is executed;
everything else, and bytes that nobody asked for, end the sandbox. Times are measured from here.
When the leader ends, so do the server and its sandboxes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.sandbox.calls import Limits
from rlmath.sandbox.executions import Call, Execution, Sandbox, Step, has_unread, resident_bytes
from rlmath.sandbox.frames import (
    FrameBuffer,
    Reply,
    decoded_reply,
    encoded_request,
    framed,
    most_reply_bytes,
)
from rlmath.sandbox.process import Confinement, run_sandbox
from rlmath.sandbox.shown import shown_text

SAMPLE_SECONDS = 0.05
"""Interval between two looks at a call's time and threads."""
QUIET_SECONDS = 0.003
"""Time without the end of a call after which a sandbox is forked ahead, where no call waits:
forking takes as long as a short call, whose end would be seen late."""
END_SECONDS = 0.2
"""Time for a sandbox that has closed its channel to end by itself."""
MOST_FAILED_SPARES = 8
TRIAL_SECONDS = 60.0
"""Time limit for the call that is tried before the server is ready."""
MOST_MESSAGE_BYTES = 2**26
READ_BYTES = 2**16


@dataclass(frozen=True)
class ServerSettings:
    limits: Limits
    isolation: str
    cores: int
    """Calls that are executed at the same time."""
    sessions: int
    """Sandboxes that are kept for the next calls of their completions."""
    sessions_memory_bytes: int
    """Memory that they may hold together, beyond what they share with the server."""
    state: str
    preload: Sequence[str]
    """Modules that sandboxes have from the start, where they are installed."""


class Server:
    """Sandboxes and the queue of calls, until the leader has ended."""

    def __init__(
        self, control: socket.socket, settings: ServerSettings, confinement: Confinement
    ) -> None:
        self._control = control
        self._settings = settings
        self._limits = settings.limits
        self._confinement = confinement
        self._messages = FrameBuffer(MOST_MESSAGE_BYTES)
        self._unsent = bytearray()
        self._waiting: OrderedDict[int, Call] = OrderedDict()
        self._spares: deque[Sandbox] = deque()
        self._sessions: OrderedDict[str, Sandbox] = OrderedDict()
        """By completions; the one that was used longest ago is first."""
        self._running: dict[int, Sandbox] = {}
        """Sandboxes that execute a call, by the call's id."""
        self._open: dict[int, Sandbox] = {}
        """Sandboxes by the descriptors of their channels."""
        self._ending: dict[int, Sandbox] = {}
        """Sandboxes that were killed or have closed their channel, by process id, until they are
        waited for."""
        self._poll = select.poll()
        self._pid = os.getpid()
        self._resident_bytes = resident_bytes(self._pid)
        self._failed_spares = 0
        """Sandboxes that ended one after the other before they had a call."""

    def serve(self) -> None:
        """Serve until the leader closes its end."""
        wake, wake_sender = socket.socketpair()
        for end in (wake, wake_sender, self._control):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
        self._poll.register(wake, select.POLLIN)
        try:
            problem = self._trial_problem()
            self._send({"ready": 1} if problem is None else {"failed": problem})
            while True:
                self._start_calls()
                self._poll.register(
                    self._control, select.POLLIN | (select.POLLOUT if self._unsent else 0)
                )
                events = self._poll.poll(self._seconds_to_wait() * 1000)
                for descriptor, event in events:
                    if descriptor == wake.fileno():
                        _drain(wake)
                    elif descriptor != self._control.fileno():
                        self._handle_channel(descriptor, event)
                    elif not self._handle_control(event):
                        return
                self._reap()
                self._look_at_limits()
                if not events:
                    self._fork_ahead()
        finally:
            self._end_all()

    def _trial_problem(self) -> str | None:
        """The reason why a call cannot be executed; None where one was."""
        sandbox = self._fork()
        self._spares.append(sandbox)
        sandbox.channel.settimeout(TRIAL_SECONDS)
        try:
            sandbox.channel.sendall(framed(encoded_request(0, seed=0, code="6 * 7")))
            while (payload := sandbox.received.take()) is None:
                part = sandbox.channel.recv(READ_BYTES)
                if not part:
                    return "a sandbox ended before its first call"
                sandbox.received.add(part)
            text = decoded_reply(payload, self._limits.output_characters).text
            return None if text == "42\n" else f"a sandbox cannot be confined: {text}"
        except (OSError, ValueError) as error:
            return f"a sandbox cannot execute a call: {error}"
        finally:
            self._kill(sandbox)

    # ---------------------------------------------------------------- the leader

    def _handle_control(self, event: int) -> bool:
        """Read the leader's messages and send what is unsent; False when the leader has ended."""
        try:
            if event & select.POLLOUT:
                self._flush()
            if event & ~select.POLLOUT:
                part = self._control.recv(READ_BYTES)
                if not part:
                    return False
                self._messages.add(part)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        while (message := self._messages.take()) is not None:
            self._handle_message(json.loads(message))
        return True

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the leader."""
        if "call" in message:
            call = Call.from_json(message["call"])
            self._waiting[call.id] = call
        elif "cancel" in message:
            if self._waiting.pop(message["cancel"], None) is None:
                sandbox = self._running.get(message["cancel"])
                if sandbox is not None:
                    self._kill(sandbox)
        elif "release" in message:
            sandbox = self._sessions.get(message["release"])
            if sandbox is not None:
                self._kill(sandbox)
        elif "ping" in message:
            self._send({"pong": 1})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._unsent += framed(json.dumps(message).encode())
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the next poll finds out
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            del self._unsent[: self._control.send(self._unsent)]

    # ---------------------------------------------------------------- calls

    def _start_calls(self) -> None:
        """Hand calls to sandboxes, in the order of their coming, as far as there are cores."""
        while self._waiting and len(self._running) < self._settings.cores:
            _, call = self._waiting.popitem(last=False)
            try:
                sandbox, missing = self._sandbox_for(call)
            except OSError as error:
                queue_seconds = time.monotonic() - call.submitted_at
                self._report(
                    call,
                    "lost",
                    f"no sandbox could be forked: {error}",
                    queue_seconds=queue_seconds,
                )
                continue
            sandbox.execution = Execution(
                call,
                steps=deque([*missing, call.step]),
                started=time.monotonic(),
                rebuilt_calls=len(missing),
            )
            self._running[call.id] = sandbox
            self._start_step(sandbox, sandbox.execution)

    def _sandbox_for(self, call: Call) -> tuple[Sandbox, list[Step]]:
        """The completion's sandbox, or another one with the steps that it lacks.

        OSError where none can be forked."""
        digests = [step.digest() for step in call.past]
        session = self._sessions.get(call.key)
        if session is not None:
            if session.history == digests and not has_unread(session):
                self._sessions.move_to_end(call.key)
                os.kill(session.pid, signal.SIGCONT)
                return session, []
            self._kill(session)
        sandbox = self._spares.popleft() if self._spares else self._fork()
        if self._settings.state == "session":
            sandbox.key = call.key
            self._sessions[call.key] = sandbox
        return sandbox, list(call.past)

    def _start_step(self, sandbox: Sandbox, execution: Execution) -> None:
        """Send a step to its sandbox and set its limits."""
        step = execution.steps[0]
        started = time.monotonic()
        rebuilding = 2 * self._limits.call_cpu_seconds
        execution.cpu_limit = rebuilding if execution.is_rebuilding else execution.call.cpu_seconds
        execution.wall_limit = self._limits.wall_factor * execution.cpu_limit
        execution.cpu_before = sandbox.cpu_seconds()
        execution.step_started = started
        execution.look_at = started + min(SAMPLE_SECONDS, execution.cpu_limit)
        execution.looks = execution.looks_asleep = 0
        sandbox.unsent = framed(encoded_request(step.number, step.seed, step.code))
        self._send_request(sandbox)

    def _send_request(self, sandbox: Sandbox) -> None:
        """Send what the channel takes."""
        events = select.POLLIN
        try:
            while sandbox.unsent:
                sandbox.unsent = sandbox.unsent[sandbox.channel.send(sandbox.unsent) :]
        except BlockingIOError:
            events |= select.POLLOUT
        except OSError:
            pass  # it has ended: its channel says so
        self._poll.modify(sandbox.channel, events)

    def _handle_channel(self, descriptor: int, event: int) -> None:
        """Handle an event of a sandbox's channel."""
        sandbox = self._open.get(descriptor)
        if sandbox is None:
            return
        if event & select.POLLOUT:
            self._send_request(sandbox)
        if event & ~select.POLLOUT:
            self._receive(sandbox)

    def _receive(self, sandbox: Sandbox) -> None:
        """Read from a sandbox's channel and handle its reply; anything else ends the sandbox."""
        try:
            part = sandbox.channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lose(sandbox)
            return
        sandbox.received.add(part)
        execution = sandbox.execution
        try:
            payload = sandbox.received.take()
            if payload is None and execution is not None:
                return
            if payload is None or execution is None or sandbox.received:
                raise ValueError("bytes that nobody asked for")
            reply = decoded_reply(payload, self._limits.output_characters)
            if reply.number != execution.steps[0].number:
                raise ValueError("a reply to another call")
        except ValueError:
            self._end(
                sandbox,
                "ended",
                "the code wrote into the channel of its sandbox; what it had defined is lost\n",
            )
            return
        self._handle_reply(sandbox, execution, reply)

    def _handle_reply(self, sandbox: Sandbox, execution: Execution, reply: Reply) -> None:
        """Go on with the next step, or report the call's result.

        The sandbox is stopped until its next call."""
        sandbox.history.append(execution.steps[0].digest())
        if execution.is_rebuilding:
            execution.steps.popleft()
            self._start_step(sandbox, execution)
            return
        if sandbox.key is not None:
            os.kill(sandbox.pid, signal.SIGSTOP)
        text, left_out = shown_text(
            reply.text, reply.dropped_characters, self._limits.output_characters
        )
        self._finish(sandbox, execution, reply.status, text=text, left_out=left_out)
        self._failed_spares = 0
        if sandbox.key is None:
            self._kill(sandbox)
        else:
            sandbox.memory_bytes = max(0, resident_bytes(sandbox.pid) - self._resident_bytes)
            self._evict()

    def _finish(
        self,
        sandbox: Sandbox,
        execution: Execution,
        status: str,
        text: str,
        left_out: int = 0,
        used: float | None = None,
    ) -> None:
        """Report a call that a sandbox executes no longer.

        `used` is the CPU time of a sandbox that has ended."""
        total = sandbox.cpu_seconds() if used is None else used
        cpu = 0.0 if execution.is_rebuilding else max(0.0, total - execution.cpu_before)
        sandbox.execution = None
        del self._running[execution.call.id]
        self._report(
            execution.call,
            status,
            text,
            cpu_seconds=cpu,
            wall_seconds=time.monotonic() - execution.started,
            queue_seconds=execution.started - execution.call.submitted_at,
            left_out_characters=left_out,
            rebuilt_calls=execution.rebuilt_calls,
        )

    def _report(self, call: Call, status: str, text: str, **figures: float) -> None:
        """Send a result; `figures` are fields of `CallResult`."""
        self._send({"id": call.id, "status": status, "text": text, **figures})

    def _end(self, sandbox: Sandbox, status: str, text: str) -> None:
        """Kill a sandbox.

        Its call, if it executes one, has this result; while rebuilding it is lost."""
        execution = sandbox.execution
        if execution is not None:
            if execution.is_rebuilding:
                step = execution.steps[0].number + 1
                status = "lost"
                text = f"the session cannot be rebuilt: call {step}, executed again: {text}"
            self._finish(sandbox, execution, status, text=text)
        self._kill(sandbox)

    # ---------------------------------------------------------------- limits

    def _look_at_limits(self) -> None:
        """Check the calls that are due, and kill sandboxes that live without a channel."""
        time_now = time.monotonic()
        for sandbox in [*self._running.values()]:
            execution = sandbox.execution
            if execution is not None and sandbox.lost_at is None and execution.look_at <= time_now:
                self._look_at(sandbox, execution, time_now)
        for sandbox in [*self._ending.values()]:
            # It has closed its channel and lives: its code did that.
            if (
                not sandbox.was_killed
                and sandbox.lost_at is not None
                and sandbox.lost_at + END_SECONDS <= time_now
            ):
                sandbox.was_killed = True
                os.kill(sandbox.pid, signal.SIGKILL)

    def _look_at(self, sandbox: Sandbox, execution: Execution, time_now: float) -> None:
        """End a call that is above a limit.

        Wall time that it did not sleep through is the machine's fault."""
        seconds_used = sandbox.cpu_seconds() - execution.cpu_before
        execution.looks += 1
        execution.looks_asleep += sandbox.is_asleep()
        execution.look_at = time_now + SAMPLE_SECONDS
        if seconds_used >= execution.cpu_limit:
            self._end(sandbox, "timeout", _timeout_text(f"{execution.cpu_limit:g} s of CPU time"))
        elif time_now - execution.step_started >= execution.wall_limit:
            limit = f"{execution.wall_limit:g} s"
            if 2 * execution.looks_asleep >= execution.looks:
                self._end(sandbox, "timeout", _timeout_text(f"{limit}, most of which it slept,"))
            else:
                self._end(
                    sandbox,
                    "lost",
                    f"the call got {seconds_used:.2f} s of CPU time in {limit}: is the machine busy?",
                )
        elif sandbox.threads() > self._limits.threads:
            self._end(
                sandbox,
                "ended",
                f"PermissionError: the call started more than {self._limits.threads} threads and "
                "was ended\n",
            )

    def _seconds_to_wait(self) -> float:
        """Time until the next look, or until a sandbox should be forked ahead."""
        if self._wants_spare():
            return QUIET_SECONDS if self._running and not self._waiting else 0.0
        times = [
            sandbox.execution.look_at
            for sandbox in self._running.values()
            if sandbox.execution is not None and sandbox.lost_at is None
        ]
        times += [
            sandbox.lost_at + END_SECONDS
            for sandbox in self._ending.values()
            if sandbox.lost_at is not None and not sandbox.was_killed
        ]
        return max(0.0, min(times, default=time.monotonic() + 60.0) - time.monotonic())

    # ---------------------------------------------------------------- processes

    def _wants_spare(self) -> bool:
        return len(self._spares) < self._settings.cores + 1

    def _fork_ahead(self) -> None:
        """Fork a sandbox for the first call of a completion to come."""
        if self._wants_spare():
            with contextlib.suppress(OSError):  # tried again when it is needed
                self._spares.append(self._fork())

    def _fork(self) -> Sandbox:
        """Fork a sandbox.

        OSError where the machine has no memory or process for it."""
        server_end, sandbox_end = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            server_end.close()
            sandbox_end.close()
            raise
        if pid == 0:
            run_sandbox(sandbox_end, self._pid, self._confinement)
        sandbox_end.close()
        server_end.setblocking(False)
        sandbox = Sandbox(
            pid, server_end, FrameBuffer(most_reply_bytes(self._limits.output_characters))
        )
        self._open[server_end.fileno()] = sandbox
        self._poll.register(server_end, select.POLLIN)
        return sandbox

    def _evict(self) -> None:
        """End the sessions that were used longest ago, until number and memory are in limits."""
        memory = sum(sandbox.memory_bytes for sandbox in self._sessions.values())
        for sandbox in [*self._sessions.values()]:
            too_many = len(self._sessions) > self._settings.sessions
            if not too_many and memory <= self._settings.sessions_memory_bytes:
                return
            if sandbox.execution is None:
                memory -= sandbox.memory_bytes
                self._kill(sandbox)

    def _forget(self, sandbox: Sandbox) -> None:
        """Close a sandbox's channel, so that it gets no further call."""
        if sandbox.channel.fileno() >= 0:
            self._poll.unregister(sandbox.channel)
            del self._open[sandbox.channel.fileno()]
            sandbox.channel.close()
        if sandbox.key is not None and self._sessions.get(sandbox.key) is sandbox:
            del self._sessions[sandbox.key]
        if sandbox in self._spares:
            self._spares.remove(sandbox)
        self._ending[sandbox.pid] = sandbox

    def _kill(self, sandbox: Sandbox) -> None:
        """Kill a sandbox, whose call has been reported, or is cancelled."""
        self._forget(sandbox)
        if sandbox.execution is not None:
            del self._running[sandbox.execution.call.id]
            sandbox.execution = None
        sandbox.was_killed = True
        os.kill(sandbox.pid, signal.SIGKILL)

    def _lose(self, sandbox: Sandbox) -> None:
        """Close the channel of a sandbox that closed its end.

        The sandbox ends by itself, or is killed in a moment; how it ended says whose fault that is.
        RuntimeError where sandboxes end that have executed nothing, one after the other."""
        if sandbox in self._spares:
            self._failed_spares += 1
            if self._failed_spares >= MOST_FAILED_SPARES:
                raise RuntimeError(
                    f"{self._failed_spares} sandboxes have ended before they were given a call"
                )
        self._forget(sandbox)
        sandbox.lost_at = time.monotonic()

    def _reap(self) -> None:
        """Wait for the processes that have ended, and report the calls that ended with them."""
        for pid in [*self._ending]:
            ended_pid, status, usage = os.wait4(pid, os.WNOHANG)
            if not ended_pid:
                continue
            sandbox = self._ending.pop(pid)
            if sandbox.execution is not None:
                seconds_used = usage.ru_utime + usage.ru_stime
                self._report_ended(sandbox, os.waitstatus_to_exitcode(status), seconds_used)

    def _report_ended(self, sandbox: Sandbox, exit_code: int, used: float) -> None:
        """Report the call of a process that has ended by itself.

        `used` is the CPU time that it has used in all.

        Code cannot send SIGKILL; the kernel does, to a process that has used all of its CPU time,
        or for want of memory.
        """
        execution = sandbox.execution
        assert execution is not None
        status = "ended"
        text = "the code ended its own process; what it had defined is lost\n"
        if exit_code == -signal.SIGKILL and not sandbox.was_killed:
            if used >= self._limits.whole_cpu_seconds:
                status = "timeout"
                text = _timeout_text("the completion's CPU time")
            else:
                status = "lost"
                text = "the sandbox was killed from outside: is the machine out of memory?"
        elif exit_code < 0 and not sandbox.was_killed:
            text = (
                f"the code crashed its own process ({signal.strsignal(-exit_code)}); what it "
                "had defined is lost\n"
            )
        if execution.is_rebuilding:
            status = "lost"
            text = f"the session cannot be rebuilt: {text.strip()}"
        self._finish(sandbox, execution, status, text=text, used=used)

    def _end_all(self) -> None:
        """Kill and wait for all sandboxes."""
        for sandbox in [*self._open.values()]:
            sandbox.execution = None
            self._kill(sandbox)
        for pid in self._ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _drain(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while wake.recv(READ_BYTES):
            pass


def _timeout_text(limit_text: str) -> str:
    return (
        f"TimeoutError: the call took more than {limit_text} and was ended; "
        "what it had defined is lost\n"
    )
