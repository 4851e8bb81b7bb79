"""The processes of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import RankPool


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankPool]:
    """Ended with the last of these tests: threads of gloo's that are left over wake up a hundred times a second, which
    takes a quarter of two cores from all tests that follow."""
    pool = RankPool()
    yield pool
    pool.close()
