"""The drill of 200 cycles: nothing is left behind."""

from __future__ import annotations

import json

import pytest

from tests import programs

pytestmark = [pytest.mark.distributed, pytest.mark.full]

MOST_GROWTH = 0.01
MOST_ABOVE_THE_TWO_LIVES = 0.05


def test_200_cycles_leave_nothing_behind() -> None:
    printed = programs.run("tools/bench_memory.py", timeout=1800).stdout
    ratios = {row["metric"]: row["ratio"] for row in map(json.loads, printed.splitlines())}
    assert ratios["resident"] >= 1 / (1 + MOST_GROWTH)
    assert ratios["resident_in_training"] >= 1 / (1 + MOST_ABOVE_THE_TWO_LIVES)
