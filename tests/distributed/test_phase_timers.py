import time

import pytest

from rlmath.distributed.phase_timers import PhaseTimers


def test_seconds_of_a_phase_add_up():
    timers = PhaseTimers()
    for _ in range(2):
        with timers.phase("rollout"):
            time.sleep(0.02)
    assert timers.seconds()["rollout"] >= 0.04


def test_an_outer_phase_includes_the_inner_one():
    timers = PhaseTimers()
    with timers.phase("update"):
        with timers.phase("forward"):
            time.sleep(0.02)
    assert timers.seconds()["update"] >= timers.seconds()["forward"] >= 0.02


def test_a_phase_nested_in_itself_counts_once():
    timers = PhaseTimers()
    start = time.perf_counter()
    with timers.phase("sync"), timers.phase("sync"):
        time.sleep(0.02)
    assert 0.02 <= timers.seconds()["sync"] <= time.perf_counter() - start


def test_reset_forgets_and_what_was_handed_out_stays():
    timers = PhaseTimers()
    with timers.phase("a"):
        pass
    taken = timers.seconds()
    timers.reset()
    assert timers.seconds() == {}
    assert list(taken) == ["a"]


def test_the_observer_is_told_where_the_program_is():
    places: list[str] = []
    timers = PhaseTimers(places.append)
    with timers.phase("rollout"), timers.phase("sync"):
        pass
    assert places == ["rollout", "sync", "rollout", "after rollout"]


def test_after_an_error_the_last_word_is_where_it_was():
    places: list[str] = []
    timers = PhaseTimers(places.append)
    with pytest.raises(KeyError), timers.phase("update"), timers.phase("loss"):
        raise KeyError
    with timers.phase("save"):
        pass
    assert places == ["update", "loss", "save", "after save"]
