"""Keeps the processes of a test's cluster together, and lets none of them live on.

Every line of its input is a command (a JSON list of words), which it starts; at the end of its
input, that is when the test's process ends or closes the pipe, however that comes, all processes
that came of them are killed. Slurm's step daemons leave their parents and live on without them; as
Linux's "child subreaper" the keeper inherits them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 20.0


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, reap)
    try:
        for line in sys.stdin:
            subprocess.Popen(json.loads(line), stdin=subprocess.DEVNULL, start_new_session=True)
    finally:
        kill_all()


def reap(*_: object) -> None:
    """Take leave of children that have ended, inherited ones too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_all() -> None:
    """Those that are started meanwhile, too: each round finds the orphans of the one before."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        family = psutil.Process().children(recursive=True)
        if not family:
            return
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
