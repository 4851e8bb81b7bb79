"""The benchmark of weight syncs runs, and no plan sends more than it must."""

from __future__ import annotations

import json

import pytest

from tests import programs

pytestmark = [pytest.mark.distributed, pytest.mark.full]


def test_every_case_is_measured_and_sends_the_least() -> None:
    printed = programs.run("tools/bench_sync.py", "--quick").stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len({row["case"] for row in rows}) == 6
    for row in (row for row in rows if row["metric"] == "bytes_sent"):
        moves = row["case"].startswith("resharding") and "nothing to gather" not in row["case"]
        assert (row["value"] > 0) == moves
        assert not moves or row["ratio"] >= 1 / 1.02
    assert all(row["value"] > 0 for row in rows if "seconds" in row["metric"])
