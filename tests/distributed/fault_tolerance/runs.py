"""Small runs under torchrun, and what may be done to them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlmath.distributed.fault_tolerance.exit_codes import ExitStatus, read_exit_status
from tests.programs import ENVIRONMENT, REPOSITORY, family, wait_for

START_SECONDS = 90.0
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True)
class Run:
    """A run with its console in a file."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    console_path: Path

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def step(self, rank: int = 0) -> int:
        path = self.folder / f"step-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def console(self) -> str:
        return self.console_path.read_text()

    def saved_steps(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("saved-*"))]

    def status(self) -> ExitStatus:
        return read_exit_status(self.folder)

    def ends_within(self, seconds: float) -> int:
        """The launcher's status, after asserting that it ended in time and left no process."""
        everyone = self.family()
        started = time.monotonic()
        status = self.launcher.wait(seconds)
        _, alive = psutil.wait_procs(
            everyone, timeout=max(1.0, started + seconds - time.monotonic())
        )
        assert not alive, self.console()
        return status

    def family(self) -> list[psutil.Process]:
        """The processes that the launcher has started, and the ranks.

        A launcher that was killed is no longer the ranks' parent, even while it is still listed."""
        processes = set(family(self.launcher.pid))
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.add(psutil.Process(int(path.read_text())))
        return list(processes)


@contextmanager
def running(
    folder: Path, behaviour: str, *settings: str, ranks: int = 2, options: tuple[str, ...] = ()
) -> Iterator[Run]:
    """The small run, from its start; killed at the end of the block."""
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *options,
    )
    command = [
        sys.executable,
        *launcher,
        "tests/distributed/fault_tolerance/rank_program.py",
        str(folder),
        behaviour,
        *settings,
    ]
    console = folder.with_suffix(".console.txt")
    with console.open("w") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=output, stderr=output
        )
    run = Run(process, folder, console)
    everyone = []
    try:
        wait_for(lambda: run.step() >= 2 or process.poll() is not None)
        everyone = run.family()
        yield run
    finally:
        for member in [*everyone, process]:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()


def told(pattern: str, console: str) -> bool:
    return re.search(pattern, console) is not None
