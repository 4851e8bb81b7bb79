"""No process of a test's cluster outlives the test, even one that has left its parents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.slurm import keeper

OWNER = """
import os, subprocess, sys
keeper = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, text=True)
keeper.stdin.write(sys.argv[2] + "\\n")
keeper.stdin.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_daemons_end_with_their_test(tmp_path: Path, how: str) -> None:
    note = tmp_path / "pid"
    leaves = f"(setsid sleep 1000 & echo $! >{note}.new; mv {note}.new {note})"
    command = [sys.executable, "-c", OWNER, keeper.__file__, json.dumps(["/bin/sh", "-c", leaves])]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not note.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    daemon = psutil.Process(int(note.read_text()))
    (parent,) = psutil.Process(owner.pid).children()
    while daemon.ppid() != parent.pid:  # until the shell that started it has ended
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert daemon.is_running()
    owner.kill() if how == "is killed" else owner.stdin.close()
    owner.wait(30)
    _, alive = psutil.wait_procs([parent, daemon], 30)
    assert not alive and os.path.exists(note)
