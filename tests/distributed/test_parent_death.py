"""A process ends with its parent, until it says otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.programs import wait_for

CHILD = (
    "import os, time; from rlmath.distributed.process import end_with_parent, outlive_parent;"
    "end_with_parent(os.getppid()); {more}print(os.getpid(), flush=True); time.sleep(60)"
)
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def pid_after_the_parents_death(more: str) -> int:
    command = [sys.executable, "-c", PARENT, CHILD.format(more=more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.stdout.close()
    return child


def test_it_is_killed_with_its_parent() -> None:
    child = pid_after_the_parents_death("")
    wait_for(
        lambda: (
            not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        )
    )


def test_it_lives_on_where_it_took_that_back() -> None:
    child = pid_after_the_parents_death("outlive_parent(); ")
    time.sleep(1.0)
    assert psutil.pid_exists(child)
    os.kill(child, signal.SIGKILL)


def test_where_the_parent_is_gone_already_it_ends_at_once() -> None:
    code = (
        "from rlmath.distributed.process import end_with_parent; end_with_parent(1); "
        "print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if os.getpid() == 1:
        pytest.skip("this process is the first of all")
    assert done.returncode == 1 and not done.stdout
