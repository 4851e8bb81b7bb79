"""Which layers each stage holds.

What ranks hold and need of them is in `test_reshard_plan`."""

from __future__ import annotations

import pytest

from rlmath.rollout.weight_sync.shard_layouts import TrainingLayout, stage_layers, training_layout
from tests.rollout.weight_sync.oracle import Layout


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ((4, 1), [[0, 1, 2, 3]]),
        ((4, 2), [[0, 1], [2, 3]]),
        ((4, 4), [[0], [1], [2], [3]]),
        ((8, 2, 2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ((8, 2, 4), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ((5, 2, 1, 2), [[0, 1], [2, 3, 4]]),
        ((5, 2, 1, None, 1), [[0, 1, 2, 3], [4]]),
        ((5, 2, 1, 2, 3), [[0, 1], [2, 3, 4]]),
        ((8, 4, 1, 1, 3), [[0], [1, 2], [3, 4], [5, 6, 7]]),
        ((7, 3, 1, 3), [[0, 1, 2], [3, 4], [5, 6]]),
        ((14, 4, 2, 2), [[0, 7], [1, 2, 8, 9], [3, 4, 10, 11], [5, 6, 12, 13]]),
        ((10, 3, 2, None, 2), [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9]]),
    ],
)
def test_layers_by_stage(arguments: tuple[int, ...], stages: list[list[int]]) -> None:
    assert stage_layers(*arguments) == tuple(map(tuple, stages))


def test_a_training_layout_is_that_of_the_mesh() -> None:
    mesh = Layout(tensor=2, stages=((0, 2), (1, 3)), virtual=2).mesh(1)
    assert training_layout(4, mesh) == TrainingLayout(2, ((0, 2), (1, 3)))
