"""Training programs whose ranks are children of the tests' process.

A run of five steps takes some five seconds, most of them for its engine: the ranks have what this
process has imported. Ranks that torchrun starts import for ten seconds more."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# What programs import late is imported here, for all of them.
import rlmath.report.page
import rlmath.rollout.engine
import rlmath.run.loop
import rlmath.run.startup
import rlmath.trainer.grpo
import rlmath.trainer.sft  # noqa: F401
from rlmath.distributed.process import end_with_parent
from tests.programs import REPOSITORY


def run_ranks(
    ranks: int, *command: str, expect: int = 0, path: Path | None = None, timeout: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `torchrun --nproc-per-node=ranks command` does.

    The first rank that fails ends the others, and `expect` is its status. `path` is an additional
    folder of modules."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, *([path] if path else [])])),
        }
        processes = [
            context.Process(
                target=run_rank, args=(rank, command, environment, Path(folder), os.getpid())
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            status = first_failure(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        output, errors = ((Path(folder) / name).read_text() for name in ("output", "errors"))
    assert status == expect, f"status {status} after at most {timeout} s\n{output}{errors}"
    return subprocess.CompletedProcess(command, status, output, errors)


def replay(ranks: int, run: Path, *arguments: str, expect: int = 0) -> tuple[dict[str, Any], str]:
    """What a replay of a run's captured step finds, and its console."""
    command = ("-m", "rlmath.trainer", "replay", str(run), *arguments)
    console = run_ranks(ranks, *command, expect=expect).stderr
    paths = re.findall(r"\S+/replay\.json", console)
    return json.loads(Path(paths[0]).read_text()) if paths else {}, console


def first_failure(
    processes: list[multiprocessing.context.ForkProcess], timeout: float
) -> int | None:
    """The status of the first process that fails, 0 where none does, None where time is up."""
    deadline = time.monotonic() + timeout
    running = list(processes)
    while running:
        if not wait([process.sentinel for process in running], deadline - time.monotonic()):
            return None
        failed = [process.exitcode for process in running if process.exitcode]
        if failed:
            return failed[0]
        running = [process for process in running if process.exitcode is None]
    return 0


def run_rank(
    rank: int, command: tuple[str, ...], environment: dict[str, str], folder: Path, parent: int
) -> None:
    """Run a program in this process, a new child; files in `folder` get what it prints."""
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, name in ((1, "output"), (2, "errors")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(REPOSITORY)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
