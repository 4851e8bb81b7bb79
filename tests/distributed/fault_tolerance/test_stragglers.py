"""A rank that computes longer than its like, or hears later from the store, is named.

Differences by chance or by layout are not.
"""

from __future__ import annotations

import pytest

from rlmath.distributed.fault_tolerance.stragglers import RECENT_STEPS, slow_texts, usual
from rlmath.distributed.mesh import Mesh
from tests.distributed import straggler_cases
from tests.distributed.rank_pool import RankPool

HOSTS = ["node0", "node0", "node1", "node1"]


def mesh(pipeline: int = 1, world_size: int = 4) -> Mesh:
    return Mesh(0, world_size, 1, pipeline, 1)


def texts(alone: list[list[float]], answers: list[float] | None = None, layout: Mesh | None = None):
    layout = layout or mesh()
    waits = answers or [0.001] * layout.world_size
    steps = [list(zip(row, waits, strict=True)) for row in alone]
    return [text for _, text in slow_texts(steps, HOSTS, layout)]


def test_a_slow_host_is_named_with_its_slowest_rank_and_the_seconds() -> None:
    (text,) = texts([[1.0, 1.1, 2.0, 2.4]] * RECENT_STEPS)
    assert text.startswith(
        "Slow ranks compute longer in a step than others and hold them up: rank 3 on node1 2.40 s, "
    )
    assert "rank 2 on node1 2.00 s; usual are 1.10 s (over 5 steps)." in text


def test_equal_ranks_small_differences_and_few_steps_are_no_sign() -> None:
    assert texts([[1.0, 1.1, 1.2, 1.3]] * RECENT_STEPS) == []
    assert texts([[0.1, 0.1, 0.5, 0.5]] * RECENT_STEPS) == []
    assert texts([[1.0, 1.0, 9.0, 9.0]] * (RECENT_STEPS - 1)) == []


def test_a_rank_that_is_slow_now_and_then_is_no_sign() -> None:
    slow, fine = [1.0, 1.0, 1.0, 3.0], [1.0] * 4
    assert texts([slow, fine, slow, fine, fine]) == []
    assert len(texts([slow, fine, slow, fine, slow])) == 1


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    steps = [[1.0, 1.0, 2.0, 2.0]] * RECENT_STEPS
    assert texts(steps, layout=mesh(pipeline=2)) == []
    (text,) = texts([[1.0, 1.0, 2.0, 4.0]] * RECENT_STEPS, layout=mesh(pipeline=2))
    assert "rank 3 on node1" in text


def test_a_slow_network_is_named_by_the_answers_of_the_store() -> None:
    (text,) = texts([[1.0] * 4] * RECENT_STEPS, answers=[0.002, 0.003, 0.7, 0.9])
    assert text.startswith(
        "Ranks on a slow network or host get later answers from the run's key-value store"
    )
    assert "rank 3 on node1 0.90 s, rank 2 on node1 0.70 s; usual" in text
    assert texts([[1.0] * 4] * RECENT_STEPS, answers=[0.5, 0.6, 0.7, 0.9]) == [], "all wait alike"


def test_half_of_the_ranks_does_not_make_itself_the_measure() -> None:
    assert usual([2.0, 2.0, 1.0, 1.0]) == 1.0
    assert usual([5.0]) == 5.0 and usual([5.0, 3.0]) == 3.0


@pytest.mark.full
@pytest.mark.distributed
def test_the_first_rank_warns_once_of_a_slow_rank_and_a_slow_network(ranks: RankPool) -> None:
    (messages, metrics), *other_ranks = ranks.run(
        3, straggler_cases.steps_with_a_slow_last_rank, 3.0, 2.0
    )
    assert sorted(message.partition(" ")[0] for message in messages) == ["Ranks", "Slow"]
    assert all("rank 2 on " in message for message in messages)
    assert metrics == 2 * RECENT_STEPS * [
        {"seconds/alone_usual": 1.0, "seconds/alone_slowest": 3.0, "seconds/answer_slowest": 2.0}
    ]
    assert other_ranks == 2 * [([], 2 * RECENT_STEPS * [{}])]
