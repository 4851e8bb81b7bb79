"""A process that a test leaves behind fails the session and is named.

So does one whose parent has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.programs import ENVIRONMENT, REPOSITORY

ORPHAN = "import subprocess, sys; subprocess.Popen(['sleep', sys.argv[1]], stdout=-3, stderr=-3)"
"""It ends once `sleep` runs; -3: /dev/null."""
LEAVES = f"""
import subprocess, sys
from tests import left_over

left_over.GRACE_SECONDS = 0.2

def test_leaves_an_orphan():
    subprocess.run([sys.executable, "-c", {ORPHAN!r}, "60.{{}}"], check=True)
"""


def test_a_session_that_leaves_a_process_fails_and_names_it(tmp_path: Path) -> None:
    """The inner session has a mark of its own.

    So the outer one does not see what it leaves."""
    seconds = f"60.{os.getpid()}"
    (tmp_path / "test_leaves.py").write_text(LEAVES.format(os.getpid()))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path / "test_leaves.py")],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    (line,) = [line for line in process.stdout.splitlines() if line.endswith(f": sleep {seconds}")]
    os.kill(int(line.split()[1].rstrip(",")), signal.SIGKILL)
    assert (
        "1 passed" in process.stdout
        and "1 processes that tests have started are left" in process.stdout
    )
    assert process.returncode == 1
