"""A Slurm for the tests that need one, and runs that are submitted to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_commands
from tests.slurm.submitted import Submitter


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, up and idle."""
    missing = missing_commands()
    if missing:
        pytest.skip(f"no {', '.join(missing)} here; `make test-slurm` installs Slurm")
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def submitter(slurm: Cluster, tmp_path: Path) -> Iterator[Submitter]:
    """Submits from a folder of the test's own, and leaves nothing in the queue."""
    with Submitter(slurm, tmp_path) as submitter:
        yield submitter
