"""The two sessions of `make test`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.__main__ import combined
from tests.programs import ENVIRONMENT, REPOSITORY, family

SLOW = """import time
import pytest


@pytest.fixture
def kept(tmp_path):
    yield
    time.sleep(0.5)
    ({place!r} / "cleared").write_text("")


def test_waits(kept):
    ({place!r} / "runs").write_text("")
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("statuses", "status"), [([0, 0], 0), ([0, 5], 0), ([5, 5], 5), ([5, 1], 1), ([0, 2], 2), ([-9, 0], -9)]
)
def test_one_that_fails_fails_both_and_one_without_tests_does_not(statuses: list[int], status: int) -> None:
    assert combined(statuses) == status


@pytest.mark.parametrize("ranks", [2])
def test_a_parameter_named_as_the_pool_is_not_the_pool(ranks: int, request: pytest.FixtureRequest) -> None:
    """So `make test-matrix` runs its tests beside those that wait for the pool."""
    assert ranks == 2 and request.node.get_closest_marker("pooled") is None


def test_an_interrupt_reaches_both_once_and_their_fixtures_are_cleared(tmp_path: Path) -> None:
    test = tmp_path / "test_slow.py"
    test.write_text("from pathlib import Path, PosixPath\n" + SLOW.format(place=tmp_path))
    command = [sys.executable, "-m", "tests", "-p", "no:cacheprovider", "-c", "/dev/null", str(test)]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "runs").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    everyone = family(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert (tmp_path / "cleared").exists()
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive
