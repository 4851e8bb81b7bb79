"""The programs behind `make test`, `make test-matrix` and `make test-full`.

The first two start two sessions of pytest beside each other; the last runs all tests or one part.

python -m tests [--matrix | --part PART | --full] [arguments of pytest]

Tests with ranks wait for processes to start and for each other, and many of the others wait for
time limits: one after the other they would leave a core idle for half of the time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from rlmath.distributed.process import end_with_parent
from tests.parts import paths_of

NEVER = "not full and not gpu and not slurm"
SESSIONS = {
    "test": (
        "Tests without ranks",
        f"not distributed and not program and not matrix and {NEVER}",
        f"(distributed or program) and not matrix and {NEVER}",
    ),
    "matrix": (
        "Whole programs, and tests without ranks",
        f"matrix and not pooled and {NEVER}",
        f"matrix and pooled and {NEVER}",
    ),
}
"""The marks of both sessions for each program, and the title of the first session's output.

That output is shown last."""
NO_TESTS = 5
"""pytest's status where nothing was chosen."""


def start(marks: str, output: IO[str] | None, arguments: list[str]) -> subprocess.Popen[bytes]:
    """A session of the tests with these marks.

    An interrupt at the terminal reaches it through us alone: a second one would break off its
    clearing up."""
    process_id = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-m", marks, *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        process_group=0,
        preexec_fn=lambda: end_with_parent(process_id),
    )


def combined(statuses: list[int]) -> int:
    """A failure where there is one; pytest's "no tests" only where no session had any."""
    failed = [status for status in statuses if status not in (0, NO_TESTS)]
    return failed[0] if failed else min(statuses)


def run_full(paths: list[str], arguments: list[str]) -> int:
    """Every test of these files and folders, one after the other."""
    session = start("", None, [*paths, *arguments])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: session.send_signal(signal.SIGINT))
    return session.wait()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--full"]:
        return run_full([], arguments[1:])
    if arguments[:1] == ["--part"]:
        try:
            return run_full(paths_of(arguments[1]), arguments[2:])
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    kind = "matrix" if arguments[:1] == ["--matrix"] else "test"
    title, beside, shown = SESSIONS[kind]
    arguments = arguments[kind == "matrix" :]
    with tempfile.TemporaryFile("w+") as output:
        sessions = [
            start(beside, output, ["-o", "cache_dir=.pytest_cache/beside", *arguments]),
            start(shown, None, arguments),
        ]

        def pass_on(number: int, _: object) -> None:
            for session in sessions:
                session.send_signal(signal.SIGINT)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, pass_on)
        statuses = [session.wait() for session in reversed(sessions)]
        output.seek(0)
        print(f"\n{title}:", output.read(), sep="\n", flush=True)
    return combined(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
