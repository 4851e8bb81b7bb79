"""When checkpoints are due."""

from __future__ import annotations

from rlmath.run.recovery.save_schedule import FIRST_POINT, Frequency, SaveTimes

NEVER = Frequency(None, None, None)


def due(times: SaveTimes, steps: int, seconds_per_step: float = 1.0) -> list[int]:
    return [step for step in range(1, steps + 1) if times.due(step, step * seconds_per_step)]


def test_by_steps_and_by_epochs() -> None:
    assert due(SaveTimes(Frequency(None, 4, None), 10, 0.0), 12) == [4, 8, 12]
    assert due(SaveTimes(Frequency(2, None, None), 3, 0.0), 13) == [6, 12]
    assert due(SaveTimes(Frequency(1, 4, None), 3, 0.0), 9) == [3, 4, 6, 8, 9]


def test_by_seconds_since_the_last_time() -> None:
    assert due(SaveTimes(Frequency(None, None, 600.0), 10, 0.0), 10, 250.0) == [3, 6, 9]


def test_a_first_one_is_due_whatever_the_frequency() -> None:
    assert due(SaveTimes(Frequency(None, None, 600.0), 10, 0.0, FIRST_POINT), 8, 250.0) == [2, 5, 8]


def test_never_is_never() -> None:
    assert NEVER.never
    assert due(SaveTimes(NEVER, 3, 0.0, FIRST_POINT), 100, 1e6) == []
