"""What the monitor of a rank's memory logs, and when it ends the run; numbers are MiB."""

from __future__ import annotations

import logging

import pytest

from rlmath.rollout.memory_monitor import WARM_UP_CYCLES, MemoryLeak, MemoryMonitor

MIB = 2**20
PLANNED = {"offload": -40, "generate": 100}


def cycle(monitor: MemoryMonitor, between: int = 1000, **held: int) -> None:
    monitor.start_cycle()
    monitor.expect(
        between * MIB, {phase: planned_size * MIB for phase, planned_size in PLANNED.items()}
    )
    for phase, size in held.items():
        monitor.observe(phase, size * MIB)
    monitor.end_cycle(lambda mine: [mine])


def warm(stop: bool = False, **held: int) -> MemoryMonitor:
    monitor = MemoryMonitor(10 * MIB, stop, rank=3)
    for _ in range(WARM_UP_CYCLES):
        cycle(monitor, **held)
    return monitor


def test_what_is_planned_is_no_excess(caplog: pytest.LogCaptureFixture) -> None:
    monitor = warm(stop=True, offload=970, generate=1110)
    for _ in range(3):
        cycle(monitor, offload=970, generate=1110)
    assert caplog.records == []
    assert monitor.held == {"offload": 970 * MIB, "generate": 1110 * MIB}


def test_an_excess_over_the_plan_is_logged_once_and_again_with_its_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A GPU on which gradients stay and an engine is larger than planned.

    The excess is there after every phase, in every step. In the first cycle, nothing is measured
    against a plan yet."""
    monitor = warm(offload=1473, generate=1613)
    for _ in range(5):
        cycle(monitor, offload=1473, generate=1613)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        'Memory: cycle 2, rank 3: after "offload" this rank holds 1.438 GiB, 513 MiB more than '
        "planned "
        "(memory.leak_threshold_mib is 10)"
    )
    for held_mib in (1620, 1670, 1670):
        cycle(monitor, offload=1473, generate=held_mib)
    assert len(caplog.records) == 2
    assert "570 MiB more than planned, 57 MiB more than was logged before" in caplog.text


def test_the_run_ends_only_where_it_is_asked_to() -> None:
    continues, ends = (MemoryMonitor(10 * MIB, stop, rank=5) for stop in (False, True))
    for monitor in (continues, ends):
        cycle(monitor)
    cycle(continues, offload=2000, generate=2000)
    with pytest.raises(MemoryLeak) as failure:
        cycle(ends, offload=2000, generate=2000)
    text = str(failure.value)
    assert text.startswith("rank 5: ") and "memory.stop_on_leak" in text and "(10)" in text
    assert '"offload"' in text and "1040 MiB more" in text
    assert '"generate"' in text and "900 MiB more" in text


def test_growth_is_measured_against_the_first_cycle_after_the_warm_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Growth of 4 MiB a cycle is found when it has added up.

    Each time it is within the threshold."""
    monitor = warm(generate=500)
    for grown in range(4):
        cycle(monitor, generate=500 + 4 * grown)
        assert len(caplog.records) == (1 if grown == 3 else 0)
    assert "12 MiB more than in the same phase of earlier steps" in caplog.text


def test_growth_during_the_warm_up_is_none() -> None:
    monitor = MemoryMonitor(10 * MIB, stop=True, rank=0)
    for number in range(WARM_UP_CYCLES):
        cycle(monitor, generate=500 + 50 * number)
    cycle(monitor, generate=1000)
    with pytest.raises(MemoryLeak):
        cycle(monitor, generate=1011)


def test_growth_is_logged_once_and_further_growth_again(caplog: pytest.LogCaptureFixture) -> None:
    monitor = warm(generate=500)
    for held_mib in (500, 600, 600, 605, 700, 700):
        cycle(monitor, generate=held_mib)
    messages = [record.getMessage() for record in caplog.records]
    assert [("cycle 5" in text, "cycle 8" in text) for text in messages] == [
        (True, False),
        (False, True),
    ]
    assert "100 MiB" in messages[0] and "100 MiB" in messages[1]


def test_what_an_earlier_cycle_had_too_much_does_not_end_a_later_one() -> None:
    monitor = warm(stop=True, offload=960)
    with pytest.raises(MemoryLeak):
        cycle(monitor, offload=2000)
    cycle(monitor, offload=960)


def test_a_phase_without_a_plan_is_compared_with_itself_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = warm(other=50_000)
    cycle(monitor, other=50_000)
    assert caplog.records == []
    cycle(monitor, other=50_011)
    assert "11 MiB more than in the same phase" in caplog.text


def test_one_of_so_many_cycles_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Between them, what allocators keep for later would be taken for growth."""
    monitor = MemoryMonitor(10 * MIB, stop=True, rank=0, every=4)
    for held_mib in (500, 900, 900, 500, 900, 900, 900, 505, 900):
        cycle(monitor, generate=held_mib)
        assert monitor.held == {"generate": held_mib * MIB}
    assert caplog.records == []
    for held_mib in (900, 900):
        cycle(monitor, generate=held_mib)
    with pytest.raises(MemoryLeak, match="400 MiB more than in the same phase of earlier steps"):
        cycle(monitor, generate=900)
