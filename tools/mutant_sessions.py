"""Copies of the project at HEAD, and sessions of pytest in them, of which no process is left.

Forked sessions have their libraries already; others are new processes (`tools/mutant_server.py`).
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from rlmath.distributed.process import end_with_parent
from tools import mutant_recorder, mutant_server

VARIABLE = "RLMATH_MUTANTS_COPY"
"""Environment variable of all that a session of tests starts: the copy of the project."""
OPTIONS = ("-p", "sitecustomize", "-p", "no:cacheprovider")
LOOKS_SECONDS = 0.25
"""Between two looks whether a session hangs."""


def make_copy(folder: Path) -> Path:
    """HEAD of the project in a new folder, with links to the environments."""
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", ".", str(folder)], check=True)
    for environment in Path.cwd().glob(".venv*/"):
        (folder / environment.name).symlink_to(environment)
    shutil.copy(mutant_recorder.__file__, folder / "sitecustomize.py")
    (folder / ".mutants").mkdir()
    return folder


def end_processes(folder: Path, server: int | None = None) -> None:
    """Kill all that sessions in a copy have started, except their server, until nothing is left.

    What a killed process has started goes to init, but has the variable."""
    marked = {VARIABLE: str(folder)}.items()
    while remaining := [
        process
        for process in psutil.process_iter(["environ"])
        if process.pid != server and marked <= (process.info["environ"] or {}).items()
    ]:
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Sessions:
    """Sessions of pytest in a copy, one after the other.

    They end with the thread that makes this object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own_pid = os.getpid()
        variables = {
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "",  # the copy's modules are compiled once
            "OMP_NUM_THREADS": "1",
            VARIABLE: str(folder),
        }
        self._server = subprocess.Popen(
            [sys.executable, mutant_server.__file__],
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(own_pid),
        )

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        end_processes(self.folder)
        self._server.communicate()

    def run(
        self,
        arguments: Sequence[str],
        forked: bool = False,
        seconds: float = float("inf"),
        hangs: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """The status of a session; None where the time did not suffice, or it hangs."""
        requests = self._server.stdin
        answers = self._server.stdout
        assert requests is not None and answers is not None
        request = {"arguments": [*OPTIONS, *arguments], "forked": forked}
        requests.write(json.dumps(request).encode() + b"\n")
        requests.flush()
        until = time.monotonic() + seconds
        while not (has_ended := bool(select.select([answers], [], [], LOOKS_SECONDS)[0])):
            if time.monotonic() > until or hangs():
                break
        end_processes(self.folder, self._server.pid)
        status = answers.readline()
        if not status:
            output = self.folder / mutant_server.OUTPUT
            raise RuntimeError(
                f"the server of sessions ended with {self._server.wait()}, see {output}"
            )
        return int(status) if has_ended else None
