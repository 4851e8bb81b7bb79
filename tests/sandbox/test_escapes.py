"""Code that tries to leave the sandbox ends as it must, for root and for an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rlmath.sandbox import kernel
from rlmath.sandbox.calls import CallResult
from tests.programs import REPOSITORY
from tests.sandbox.escapes import AFTERWARDS, ESCAPES, SECRET, WRITTEN, run_all
from tests.selection import matrix

NOBODY = 65534
NEEDS_LANDLOCK = pytest.mark.skipif(
    kernel.lacking("landlock") is not None, reason="the kernel has no Landlock"
)
pytestmark = [
    NEEDS_LANDLOCK,
    pytest.mark.skipif(
        os.uname().machine != "x86_64", reason="system calls are written as x86-64's numbers"
    ),
]


@pytest.fixture(scope="module")
def bystander() -> Iterator[psutil.Process]:
    """A process of the same user, which no code may touch."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


@pytest.fixture(scope="module")
def results(bystander: psutil.Process) -> dict[str, CallResult]:
    results = run_all(sys.executable)
    assert bystander.is_running() and bystander.status() == psutil.STATUS_SLEEPING
    return results


@pytest.fixture(scope="module")
def results_of_a_user() -> dict[str, CallResult]:
    """Results of calls as the user `nobody`, in an interpreter that this user can execute."""
    if os.getuid() != 0:
        pytest.skip("the tests are an ordinary user's already")
    python = next(
        (path for path in (sys.executable, "/usr/bin/python3") if nobody_can_run(path)), None
    )
    if python is None:
        pytest.skip(
            "no interpreter that nobody can execute, 3.11 or newer, and reads the repository with"
        )
    done = subprocess.run(
        [python, "-m", "tests.sandbox.escapes"], **as_nobody(), timeout=300, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row.pop("name"): CallResult(**row) for row in rows}


def as_nobody() -> dict:
    return {
        "user": NOBODY,
        "group": NOBODY,
        "extra_groups": [],
        "cwd": "/",
        "env": {
            "PYTHONPATH": str(REPOSITORY),
            "PATH": "/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        "capture_output": True,
        "text": True,
    }


def nobody_can_run(python: str) -> bool:
    source = "import sys, tests.sandbox.escapes; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([python, "-c", source], **as_nobody(), timeout=60).returncode == 0
    except OSError:
        return False


def check(name: str, outcome: CallResult) -> None:
    escape = ESCAPES[name]
    assert outcome.status in escape.statuses, outcome
    assert escape.text in outcome.text, outcome
    assert SECRET not in outcome.text and "\x1b" not in outcome.text
    assert len(outcome.text) < 1100, (
        "an output of 1,000 characters, and the line that says what was left out"
    )


@pytest.mark.parametrize("name", ESCAPES)
def test_code_cannot_leave_the_sandbox(name: str, results: dict[str, CallResult]) -> None:
    check(name, results[name])


@matrix
@pytest.mark.parametrize("name", ESCAPES)
def test_code_of_an_ordinary_user_cannot_leave_the_sandbox(
    name: str, results_of_a_user: dict[str, CallResult]
) -> None:
    check(name, results_of_a_user[name])


def test_the_server_lives_on_and_nothing_was_written(results: dict[str, CallResult]) -> None:
    assert len(ESCAPES) > 60
    assert (results[AFTERWARDS].status, results[AFTERWARDS].text) == ("ok", "42\n")
    assert not WRITTEN.exists()
    assert not [name for name, outcome in results.items() if outcome.is_infrastructure_fault]
