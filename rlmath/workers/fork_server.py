"""The process that forks the reward workers. Started by `worker_pool`, never imported by the trainer.

It imports math-verify once, warms it up, and then forks a worker in milliseconds on request. With a reward function
it has a second process fork them, the template, in which alone the user's module is imported. Messages go over one
socket: "fork", with a file descriptor for the new worker's channel, is answered by "forked <id>"; "kill <id>" ends a
worker and all that descends from it, and "lost <id>" does so with one that has closed its channel, unless it ends by
itself. For every worker that has ended it sends "ended <id> <exit code> <why>", where why is "itself",
"asked", "memory" or "processes". When the pool's process has ended, it ends its workers and exits.

A reward function may start processes. They are a tree below their worker, which adopts its orphans, and this process
adopts those of workers that have ended; so a child that is neither worker nor template is left over, and is killed.
The memory and number of a tree's processes are sampled.

multiprocessing's forkserver is not used: its children import the trainer's main module again (torch, vLLM: many
seconds for every replaced worker), and there is one per process, so its first user decides what it has loaded.

    python -m rlmath.workers.fork_server <socket> <parent's process id> <settings as JSON>
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from rlmath.answers.verifier import Rules, verify_by_parser, verify_by_string
from rlmath.distributed.process import end_with_parent
from rlmath.workers import hooks, process_tree
from rlmath.workers.custom_function import call_function, call_hook, call_scorer
from rlmath.workers.hooks import Hook

PARENT_CHECK_SECONDS = 1.0
"""Interval of the check for a dead parent, needed where a forked copy of the parent keeps the socket open."""

WALL_FACTOR = 10
"""A check by the verifier is ended after the time limit on its processor, and after so many times that by the clock: on
a busy machine it gets a small share of a core. A reward function, which may wait for a network, has the limit by the
clock."""
GRACE_SECONDS = 5.0
"""Added to the pool's time limits for the kernel's own limits, which end a worker if the pool cannot."""

SAMPLE_SECONDS = 0.05
"""Between two looks at the processes that reward functions have started."""
MAX_SAMPLE_SECONDS = 1.0
SAMPLE_SHARE = 0.05
"""Most of one core that these looks take; they become rarer on a machine of many processes."""
MAX_PROCESSES = 64
"""Most processes of one worker, itself included."""
SWEEP_SECONDS = 1.0
"""Longest sweep over left-over processes before requests are looked at again."""
SERVER_NICENESS = -15
CHILD_NICENESS = 10
"""Added to the niceness of this process, and of what a function forks, so that many processes cannot keep this one from
counting and killing them."""
DYING_SECONDS = 0.05
"""Between a process's loss of its channel and its end, where it ends by itself."""
CLOSE_SECONDS = 5.0
"""Time for the last processes to end."""
LENGTH_BYTES = 4
"""Before every message on a worker's channel: its length, big-endian."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of all workers of one pool."""

    memory_bytes: int
    """Address space of every process of a worker, and memory of all of them together."""
    timeout_seconds: float
    rules: Rules
    function: Hook | None
    """Of the user's; None: the verifier."""

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


class ForkServer:
    """Forks and kills workers on request until the parent has ended."""

    def __init__(
        self,
        control: socket.socket,
        parent: int,
        settings: WorkerSettings,
        run_worker: Callable[[int], NoReturn] | None = None,
    ) -> None:
        """Without `run_worker` another process forks the workers: the template, in which the user's module is imported.

        Two processes, because one that has forked thousands waits for locks that it shares with them, and could not
        count and kill them.
        """
        self._control = control
        self._parent = parent
        self._settings = settings
        self._run_worker = run_worker
        self._workers: dict[int, str] = {}
        """By process id: why it is being ended, "" while it is not."""
        self._template_pid, self._template = (0, None) if run_worker else _start_template(settings)
        self._template_status: int | None = None
        """As `waitpid` gives it; None while it is not known to have ended."""
        self._sample_at = 0.0
        self._ended_pipe = os.pipe()
        for end in self._ended_pipe:
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Until the pool has closed its end or has ended; then all that descends from this process has ended too."""
        process_tree.adopt_orphans()
        try:
            self._serve_requests()
        except ConnectionError:
            pass  # the pool has ended with messages of ours unread, or while one was sent
        finally:
            self._sweep(CLOSE_SECONDS, keep_known=False)

    def _serve_requests(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ended_pipe[1], warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._ended_pipe[0], select.POLLIN)
        if self._template is None:
            self._control.send(b"ready")
        else:
            poll.register(self._template, select.POLLIN)
            with contextlib.suppress(
                PermissionError
            ):  # without the right, as in most containers, it is an equal
                os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + SERVER_NICENESS)
        interval = PARENT_CHECK_SECONDS if self._template is None else SAMPLE_SECONDS
        is_asked = True
        while is_asked and os.getppid() == self._parent:
            ready = {fd for fd, _ in poll.poll(interval * 1000)}
            if self._ended_pipe[0] in ready:
                os.read(self._ended_pipe[0], 4096)
            if self._template is not None and self._template.fileno() in ready:
                is_asked = self._handle_template(self._template)
            if self._control.fileno() in ready and not self._handle_request():
                break
            if self._reap() and self._template is not None:
                self._sweep(SWEEP_SECONDS)
            if self._template is not None and time.monotonic() >= self._sample_at:
                self._sample()

    def _handle_request(self) -> bool:
        """Whether there was one: none when the pool has closed its end."""
        message, fds, _, _ = socket.recv_fds(self._control, 64, 1)
        if message == b"fork":
            if self._template is None:
                self._fork(fds[0])
            else:
                with contextlib.suppress(ConnectionError):  # it has ended, which the next look finds out
                    socket.send_fds(self._template, [b"fork"], fds)
            os.close(fds[0])
        elif message:
            verb, worker = message.split()
            end = time.monotonic() + (DYING_SECONDS if verb == b"lost" else 0.0)
            while not self._reap(int(worker)) and time.monotonic() < end:
                time.sleep(process_tree.SWEEP_PAUSE_SECONDS)
            self._kill(int(worker), "asked")
        return bool(message)

    def _fork(self, channel: int) -> None:
        child = os.fork()
        if child == 0:
            assert self._run_worker is not None
            signal.set_wakeup_fd(-1)
            for fd in (*self._ended_pipe, self._control.detach()):
                os.close(fd)
            self._run_worker(channel)
        self._add_worker(child)

    def _handle_template(self, template: socket.socket) -> bool:
        """False where it has ended, or sends what it should not."""
        message = b""
        with contextlib.suppress(ConnectionError):
            message = template.recv(4096)
        if message.isdigit():
            self._add_worker(int(message))
            with contextlib.suppress(ConnectionError):
                template.send(b"known")
        elif message == b"ready" or message.startswith(b"failed: "):
            self._control.send(message)
        else:
            what = "sent what it should not" if message else f"ended with {self._end_of_template()}"
            assert self._settings.function is not None
            setting = self._settings.function.setting
            self._control.send(f"lost: its process that imports {setting} {what}".encode())
            return False
        return True

    def _end_of_template(self) -> str:
        if self._template_status is None:
            self._template_status = os.waitpid(self._template_pid, 0)[1]
        code = os.waitstatus_to_exitcode(self._template_status)
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _add_worker(self, pid: int) -> None:
        self._workers[pid] = ""
        self._control.send(f"forked {pid}".encode())

    def _kill(self, worker: int, why: str, children: Mapping[int, list[int]] | None = None) -> None:
        if worker not in self._workers:
            return
        self._workers[worker] = self._workers[worker] or why
        if self._template is not None:
            process_tree.kill_trees([worker], children or process_tree.children_by_parent())
        else:
            os.kill(worker, signal.SIGKILL)

    def _reap(self, looked_for: int = 0) -> bool:
        """Report the workers that have ended to the pool; whether any process has, or the one that is looked for."""
        any_ended = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                any_ended = True
                pid, status = ended
                if pid == self._template_pid:
                    self._template_status = status
                why = self._workers.pop(pid, None)
                if why is not None:
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(ConnectionError):  # the pool has ended: the next poll finds out
                        self._control.send(f"ended {pid} {code} {why or 'itself'}".encode())
        return any_ended if not looked_for else looked_for not in self._workers

    def _sweep(self, seconds: float, keep_known: bool = True) -> None:
        """Kill children that are no workers, and theirs, until none is left; without `keep_known` all children."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            children = process_tree.children_by_parent()
            known = {*self._workers, self._template_pid} if keep_known else set()
            left = [pid for pid in children.get(os.getpid(), []) if pid not in known]
            if not left:
                return
            process_tree.kill_trees(left, children)
            time.sleep(process_tree.SWEEP_PAUSE_SECONDS)
            self._reap()

    def _sample(self) -> None:
        """End workers whose processes are too many or hold too much memory, and whatever is left over."""
        started = time.process_time()
        children = process_tree.children_by_parent()
        for worker in [pid for pid, why in self._workers.items() if not why]:
            tree = [worker, *process_tree.descendants(worker, children)]
            if len(tree) > MAX_PROCESSES:
                self._kill(worker, "processes", children)
            elif len(tree) > 1 and process_tree.memory_above(tree, self._settings.memory_bytes):
                self._kill(worker, "memory", children)
        self._sweep(SWEEP_SECONDS)
        spent = time.process_time() - started
        self._sample_at = time.monotonic() + max(
            SAMPLE_SECONDS, min(spent / SAMPLE_SHARE, MAX_SAMPLE_SECONDS)
        )


def _start_template(settings: WorkerSettings) -> tuple[int, socket.socket]:
    """(its process id, its socket)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [str(theirs.fileno()), str(os.getpid()), settings.as_json(), "template"]
    with theirs:
        command = [sys.executable, "-m", "rlmath.workers.fork_server", *arguments]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return process.pid, ours


def _serve_template(server: socket.socket, parent: int, run_worker: Callable[[int], NoReturn]) -> None:
    """Fork workers that become children of the fork server: each by a process between, which ends once the fork server
    knows the worker, so that it does not take it for left over."""
    end_with_parent(parent)
    server.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(server, 64, 1)
        if not message:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            worker = os.fork()
            if worker:
                server.send(str(worker).encode())
                server.recv(64)
                os._exit(0)
            server.close()
            while os.getppid() == between:
                time.sleep(process_tree.SWEEP_PAUSE_SECONDS)
            run_worker(fds[0])
        os.close(fds[0])
        os.waitpid(between, 0)


def _run_worker(
    channel_fd: int, parent: int, settings: WorkerSettings, function: Callable | None
) -> NoReturn:
    """A worker's main loop: one JSON request in, one JSON result out, until the pool closes the channel. `parent` is
    the fork server's process id."""
    try:
        end_with_parent(parent)
        os.setsid()  # a signal that the function sends to its own group reaches nobody else
        process_tree.adopt_orphans()
        _reset_signals()
        os.set_inheritable(channel_fd, False)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        # What a function prints goes where the template's standard output goes: to the pool's log.
        for stream in (1, 2):
            os.dup2(null if function is None else 1, stream)
        resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if function is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        _serve_requests(socket.socket(fileno=channel_fd), settings, function)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _reset_signals() -> None:
    """SIGTERM and SIGUSR1, which a cluster sends to all processes of a job, stay without effect here, but not in what
    the function starts: there they end a process as everywhere."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # a handler of Python's is not inherited by another program
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    os.register_at_fork(after_in_child=partial(os.nice, CHILD_NICENESS))


def _serve_requests(channel: socket.socket, settings: WorkerSettings, function: Callable | None) -> None:
    channel.sendall(framed({"ready": True}))
    while True:
        request = json.loads(_receive(channel, int.from_bytes(_receive(channel, LENGTH_BYTES))))
        _limit_request(settings)
        if function is not None:
            assert settings.function is not None
            result = _call(settings.function.kind, function, request)
        else:
            result = _verify(request, settings.rules)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(framed({"id": request["id"], **result}))


def framed(message: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """A message as it goes over a worker's channel: JSON after its length; `default` as in `json.dumps`."""
    content = json.dumps(message, default=default).encode()
    return len(content).to_bytes(LENGTH_BYTES) + content


def _receive(channel: socket.socket, size: int) -> bytes:
    """EOFError when the pool has closed its end."""
    content = bytearray()
    while len(content) < size:
        part = channel.recv(min(size - len(content), 2**20))
        if not part:
            raise EOFError("the channel is closed")
        content += part
    return bytes(content)


def _verify(request: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    answer, solutions = request["answer"], request["solutions"]
    verdict = verify_by_string(answer, solutions, rules) if request["strings"] else None
    verdict = verdict or verify_by_parser(answer, solutions, rules)
    return {"correct": verdict.correct, "verdict": verdict.verdict}


def _call(kind: str, function: Callable, request: Mapping[str, Any]) -> dict[str, Any]:
    """The function's result, and whether this worker is not fit for further answers."""
    if "arguments" in request:
        result = call_hook(kind, function, request["arguments"])
    else:
        call = call_scorer if kind == "scorer" else call_function
        scored = call(function, request["completion"], request["solutions"], request["row"])
        result = dataclasses.asdict(scored)
    _flush_streams()
    return result | {"left_over": _has_children()}


def _flush_streams() -> None:
    """Print what the function has not ended a line after; it may have closed or replaced the streams."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _has_children() -> bool:
    """Whether processes that the function has started still run; those that have ended are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _limit_request(settings: WorkerSettings) -> None:
    """Let the kernel end this worker after so much time, or so much CPU time, if the pool does not. A function may use
    all cores at once."""
    # SIGALRM's default action ends the process.
    signal.setitimer(signal.ITIMER_REAL, settings.wall_seconds + GRACE_SECONDS)
    cores = 1 if settings.function is None else os.cpu_count() or 1
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + cores * (settings.timeout_seconds + GRACE_SECONDS)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    socket_fd, parent, settings_json, *role = sys.argv[1:]
    settings = WorkerSettings.from_json(settings_json)
    # Sent to all processes of a job by a cluster, by Ctrl-C and by torchrun; only the pool ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # math-verify warns that its time limits are off, and logs what it cannot parse.
    logging.disable(logging.CRITICAL)
    with socket.socket(fileno=int(socket_fd)) as channel:
        if role:
            _be_template(channel, int(parent), settings)
        elif settings.function is not None:
            ForkServer(channel, int(parent), settings).serve()
        else:
            _warm_up()
            gc.collect()
            gc.freeze()
            run_worker = partial(_run_worker, parent=os.getpid(), settings=settings, function=None)
            ForkServer(channel, int(parent), settings, run_worker).serve()


def _warm_up() -> None:
    """Load the grammar and math-verify, and use both once, before workers are forked."""
    # Not in a process with a reward function.
    from rlmath.answers.answers_equal import warm_up_math_verify

    verify_by_parser("\\frac{1}{2}", ("x^2", "\\{1,2\\}"))
    warm_up_math_verify()


def _be_template(server: socket.socket, parent: int, settings: WorkerSettings) -> None:
    assert settings.function is not None
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        function = hooks.load(settings.function)
    except ValueError as error:
        server.send(f"failed: {error}".encode()[:2000])
        return
    # The user's module may have ignored the ends of its children: then no process could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _flush_streams()
    gc.collect()
    gc.freeze()
    run_worker = partial(_run_worker, parent=parent, settings=settings, function=function)
    _serve_template(server, parent, run_worker)


if __name__ == "__main__":
    main()
