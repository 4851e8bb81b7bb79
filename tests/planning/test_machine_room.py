"""How many ranks a machine has room for: the careless are refused, and what is meant is not."""

from __future__ import annotations

import pytest

from rlmath.planning.machine_room import GIB, Machine, refuse_crowding, room_problems

LAPTOP = Machine(gpus=0, cores=2, memory=24 * GIB)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_small_model_may_have_any_usual_layout_on_two_cores(ranks: int) -> None:
    assert list(room_problems(ranks, LAPTOP, ranks * GIB // 4)) == []


def test_64_ranks_on_two_cores_are_refused_unless_asked_for_by_name() -> None:
    """64 processes of 0.6 GiB are 38.4 GiB, and with 0.25 GiB planned for each 54.4."""
    with pytest.raises(
        ValueError,
        match=r"64 ranks on 2 cores: .* above 8 .* Start fewer, or say --oversubscribe\.$",
    ):
        refuse_crowding(64, LAPTOP)
    cores, memory = room_problems(64, LAPTOP, 16 * GIB)
    assert "2 cores" in cores
    assert memory.startswith(
        "64 ranks need about 54.4 GiB (16.0 planned, 0.6 for the processes of each), "
    )
    assert "this machine has 24.0" in memory
    (problem,) = room_problems(1, LAPTOP, 24 * GIB)
    assert problem.startswith("1 rank needs about 24.6 GiB (24.0 planned, ")
    with pytest.raises(
        ValueError, match=r"run\. Take a smaller model or shorter sequences, or say"
    ):
        refuse_crowding(1, LAPTOP, 24 * GIB)


def test_ranks_that_the_memory_does_not_hold_are_refused_however_many_cores_there_are() -> None:
    """4 x (5.4 + 0.6) GiB are just as much as there is."""
    server = Machine(gpus=0, cores=64, memory=24 * GIB)
    planned = int(4 * 5.4 * GIB)
    assert list(room_problems(4, server, planned)) == []
    (problem,) = room_problems(4, server, planned + GIB)
    assert "the kernel would kill the run" in problem
    assert list(room_problems(256, Machine(gpus=0, cores=64, memory=1000 * GIB))) == []
    assert "above 256" in next(room_problems(257, Machine(gpus=0, cores=64, memory=1000 * GIB)))


def test_every_rank_has_a_gpu_of_its_own() -> None:
    node = Machine(gpus=8, cores=2, memory=GIB)
    assert list(room_problems(8, node)) == [], "cores and memory of the host are no bound of theirs"
    assert next(room_problems(9, node)).startswith(
        "9 ranks on 8 GPUs: every rank takes a GPU of its own."
    )
