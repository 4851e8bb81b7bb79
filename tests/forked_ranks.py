"""Training programs on ranks that are forked from the tests' process, whose imports they share.

A run of five steps takes some five seconds, most of them for its engine; under torchrun every rank
imports for ten seconds more. A program counts its seconds from the start of the tests."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

# Programs import these late; here they are imported once, for all.
import rlmath.report.page
import rlmath.rollout.engine
import rlmath.run.loop
import rlmath.run.startup
import rlmath.trainer.grpo
import rlmath.trainer.sft  # noqa: F401
from rlmath.distributed.process import end_with_parent
from tests.programs import ENVIRONMENT, REPOSITORY, family, free_port

Processes = list[multiprocessing.context.ForkProcess]
GRACE_SECONDS = 30.0
"""How long the other ranks may take to end after one has failed, before they are killed."""


def run_ranks(
    ranks: int,
    command: Sequence[str],
    expect: int = 0,
    path: Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end on so many ranks, as torchrun would start them.

    The first rank that fails ends the others, and `expect` is its status (torchrun's would be 1);
    AssertionError for another one. `path` is an additional folder of modules."""
    context = multiprocessing.get_context("fork")
    variables = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if path is not None:
        variables["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{path}"
    processes: Processes = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("output", "errors")]
        for file in files:
            file.touch()
        try:
            for rank in range(ranks):
                environment = ENVIRONMENT | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (command, environment, files, os.getpid())
                process = context.Process(target=run_rank, args=arguments)
                process.start()
                processes.append(process)
            status = first_failure(processes, timeout)
            if status:
                end_gently(processes)
        finally:
            kill(processes)
            output, errors = (file.read_text("utf-8", errors="replace") for file in files)
            if sys.exc_info()[0] is not None:
                print(output, errors, sep="\n")
    end = f"no end within {timeout} s" if status is None else f"status {status}"
    assert status == expect, f"{end} instead of status {expect}\n{output}{errors}"
    return subprocess.CompletedProcess(command, status, output, errors)


def replay(ranks: int, run: Path, *arguments: str, expect: int = 0) -> tuple[dict[str, Any], str]:
    """What a replay of a run's captured step finds, and its console."""
    command = ("-m", "rlmath.trainer", "replay", str(run), *arguments)
    console = run_ranks(ranks, command, expect=expect).stderr
    paths = re.findall(r"\S+/replay\.json", console)
    return json.loads(Path(paths[0]).read_text()) if paths else {}, console


def first_failure(processes: Processes, timeout: float) -> int | None:
    """The status of the first process that fails, 0 where none does, None where time is up."""
    deadline = time.monotonic() + timeout
    running = list(processes)
    while running:
        sentinels = [process.sentinel for process in running]
        if not wait(sentinels, max(0.0, deadline - time.monotonic())):
            return None
        # Asked once: a process may end between two questions.
        statuses = [process.exitcode for process in running]
        for status in statuses:
            if status:
                return status
        running = [
            process for process, status in zip(running, statuses, strict=True) if status is None
        ]
    return 0


def end_gently(processes: Processes) -> None:
    """Ask processes to end, and wait until they have or time is up."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def kill(processes: Processes) -> None:
    """Kill processes that still run, with all that they have started."""
    for process in processes:
        for member in family(process.pid or 0):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.kill()
        process.join()


def run_rank(
    command: Sequence[str], environment: dict[str, str], files: list[Path], parent: int
) -> None:
    """Run a program in this child, with signals, hooks and environment as in a new process.

    Its output and errors are added to two `files`."""
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    tqdm.set_lock(threading.RLock())  # the parent's is shared by processes
    for descriptor, path in enumerate(files, start=1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")
