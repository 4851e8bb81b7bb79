"""Real sandboxes of an engine that a test disturbs: their processes are killed, or results wait."""

from __future__ import annotations

import contextlib
import random
import select
from collections.abc import Sequence

import psutil

from rlmath.config.schema import ToolsConfig
from rlmath.data.tool_fences import most_output_characters
from rlmath.sandbox.calls import CallResult, Limits, PastCall
from rlmath.sandbox.sandboxes import Sandboxes
from tests.programs import wait_for

Results = list[tuple[str, CallResult]]
SERVER_EDGES = (
    "before a call is submitted",
    "with a call that was just submitted",
    "while code runs",
    "behind a result that is not read yet",
    "as a completion ends",
)
"""Edges at which a server is killed, with all its sandboxes."""
SANDBOX_EDGES = ("while its code runs", "between calls")
"""Edges at which sandboxes are killed, and the server lives."""
EDGES = (
    *(f"server {edge}" for edge in SERVER_EDGES),
    *(f"sandbox {edge}" for edge in SANDBOX_EDGES),
)
KEPT_SHARE = 0.7
"""Share of the looks that give no result of delayed sandboxes."""
LOOK_SECONDS = 0.05
BUSY_SECONDS = 0.15
"""CPU time by which a sandbox that works is told from those that wait for a call."""
WORK = "\nimport time\nwhile time.process_time() < {}: pass"


def open_light_sandboxes(settings: ToolsConfig) -> Sandboxes:
    """Sandboxes that start at once: nothing is imported ahead."""
    sandboxes = Sandboxes(
        settings.cores,
        settings.sessions,
        limits=Limits(output_characters=most_output_characters(settings.max_output_tokens)),
        isolation=settings.isolation,
        state=settings.state,
        preload=(),
    )
    sandboxes.await_ready()
    return sandboxes


class KilledSandboxes:
    """Sandboxes of which processes are killed, once, as a completion is at an edge."""

    def __init__(self, sandboxes: Sandboxes, edge: str) -> None:
        """`edge` is one of EDGES.

        A call that is killed while it runs shows what it prints and no more."""
        self._sandboxes = sandboxes
        self._edge = edge
        self._working: set[str] = set()
        """Completions whose call works for a while, so that it can be seen."""
        self.has_killed = False
        self._seen: set[psutil.Process] = set()

    def submit(self, key: str, code: str, seed: int, earlier: Sequence[PastCall] = ()) -> None:
        if self._edge == "server before a call is submitted":
            self._kill_server()
        if self._edge.endswith("code runs") and self._is_due and code.endswith(")"):
            self._working.add(key)
            code += WORK.format(10 * BUSY_SECONDS)
        self._sandboxes.submit(key, code, seed, earlier)
        if self._edge == "server with a call that was just submitted":
            self._kill_server()

    def wait(self, seconds: float) -> Results:
        if self._edge == "server behind a result that is not read yet" and self._is_due:
            select.select([self._sandboxes], [], [])
            self._kill_server()
        results = self._sandboxes.wait(min(seconds, LOOK_SECONDS))
        if self._working:
            self._working -= {key for key, _ in results}
            self._kill_working()
        if self._edge == "sandbox between calls" and results:
            self._kill(self._children())
        return results

    def release(self, key: str) -> None:
        if self._edge == "server as a completion ends":
            self._kill_server()
        self._sandboxes.release(key)

    def close(self) -> None:
        if self._has_server:
            self._seen |= {self._server(), *self._children()}
        self._sandboxes.close()

    def left(self) -> list[psutil.Process]:
        """The processes that are there still, of all that were killed or closed."""
        return [process for process in self._seen if not has_ended(process)]

    @property
    def _is_due(self) -> bool:
        return not self.has_killed and self._has_server

    @property
    def _has_server(self) -> bool:
        return self._sandboxes.fileno() >= 0

    def _server(self) -> psutil.Process:
        return psutil.Process(self._sandboxes.server_pid)

    def _children(self) -> list[psutil.Process]:
        return self._server().children()

    def _kill_server(self) -> None:
        if self._is_due:
            self._seen |= set(self._children())
            self._kill([self._server()])

    def _kill_working(self) -> None:
        if not self._is_due:
            return
        working = working_of(self._server())
        if working:
            if self._edge.startswith("server"):
                self._kill_server()
            else:
                self._kill(working)

    def _kill(self, processes: Sequence[psutil.Process]) -> None:
        if self._is_due:
            self.has_killed = True
            self._seen |= set(processes)
            kill(processes)


class LosingSandboxes:
    """Sandboxes that are killed whenever they execute a call of some completions."""

    def __init__(self, sandboxes: Sandboxes, *losing: str) -> None:
        """`losing` are the names of the completions' sessions."""
        self._sandboxes = sandboxes
        self.losing = set(losing)

    def submit(self, key: str, code: str, seed: int, earlier: Sequence[PastCall] = ()) -> None:
        if key in self.losing:
            code = WORK.format(60)
        self._sandboxes.submit(key, code, seed, earlier)

    def wait(self, seconds: float) -> Results:
        results = self._sandboxes.wait(min(seconds, LOOK_SECONDS))
        kill(working_of(psutil.Process(self._sandboxes.server_pid)))
        return results

    def release(self, key: str) -> None:
        self._sandboxes.release(key)

    def close(self) -> None:
        self._sandboxes.close()


class DelayedSandboxes:
    """Sandboxes whose results are given later than they come, by a seeded number of looks."""

    def __init__(self, sandboxes: Sandboxes, seed: int) -> None:
        self._sandboxes = sandboxes
        self._random = random.Random(seed)
        self._kept: Results = []

    def submit(self, key: str, code: str, seed: int, earlier: Sequence[PastCall] = ()) -> None:
        self._sandboxes.submit(key, code, seed, earlier)

    def wait(self, seconds: float) -> Results:
        """Some of the results that have come, in any order, or none."""
        self._kept += self._sandboxes.wait(0.0 if self._kept else seconds)
        if not self._kept or self._random.random() < KEPT_SHARE:
            return []
        count = self._random.randint(1, len(self._kept))
        self._random.shuffle(self._kept)
        results_now = self._kept[:count]
        self._kept = self._kept[count:]
        return results_now

    def release(self, key: str) -> None:
        self._sandboxes.release(key)

    def close(self) -> None:
        self._sandboxes.close()


class HeldSandboxes:
    """Sandboxes that hold back the results of some completions until a test lets them go."""

    def __init__(self, sandboxes: Sandboxes, *held: str) -> None:
        """`held` are the names of the completions' sessions; take one out to let it go."""
        self._sandboxes = sandboxes
        self.held = set(held)
        self._arrived: Results = []

    def submit(self, key: str, code: str, seed: int, earlier: Sequence[PastCall] = ()) -> None:
        self._sandboxes.submit(key, code, seed, earlier)

    def wait(self, seconds: float) -> Results:
        self._arrived += self._sandboxes.wait(min(seconds, LOOK_SECONDS))
        results = [entry for entry in self._arrived if entry[0] not in self.held]
        self._arrived = [entry for entry in self._arrived if entry[0] in self.held]
        return results

    def await_result(self, key: str) -> None:
        """Wait until a result that is held back is there."""
        assert key in self.held
        while all(name != key for name, _ in self._arrived):
            self._arrived += self._sandboxes.wait()

    def release(self, key: str) -> None:
        self._sandboxes.release(key)

    def close(self) -> None:
        self._sandboxes.close()


def working_of(server: psutil.Process) -> list[psutil.Process]:
    """The sandboxes of a server that execute WORK; sessions between calls are stopped."""
    working = []
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_seconds = sum(child.cpu_times()[:2])
            if child.status() != psutil.STATUS_STOPPED and cpu_seconds > BUSY_SECONDS:
                working.append(child)
    return working


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, of which some may have ended, and wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(lambda: all(map(has_ended, processes)), 20.0)


def has_ended(process: psutil.Process) -> bool:
    """Whether nothing is open in a process any more, though nobody may have waited for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
