"""Which layers each stage holds, and which rows of the vocabulary an engine's ranks.

What ranks hold and need of them is in `test_reshard_plan`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmath.rollout.weight_sync.shard_layouts import (
    TrainingLayout,
    engine_blocks,
    stage_layers,
    training_layout,
)
from tests.rollout.weight_sync.oracle import SMALL, Layout


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


@pytest.mark.parametrize(
    ("vocab_size", "rows_by_part"),
    [
        (101, [[64], [37]]),
        (64, [[32], [32]]),
        (33, [[32], [1]]),
        (32, [[32], []]),
        (20, [[20], []]),
    ],
)
def test_a_rank_whose_rows_of_the_vocabulary_are_padding_needs_no_block(
    vocab_size: int, rows_by_part: list[list[int]]
) -> None:
    """An engine of two ranks; the vocabulary may end where the second one begins."""
    shape = replace(SMALL, vocab_size=vocab_size)
    for part, rows in enumerate(rows_by_part):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            blocks = [block for block in engine_blocks(shape, 2, part) if block.parameter == name]
            assert [block.rows for block in blocks] == rows
            assert [block.row for block in blocks] == [rows_by_part[0][0] * part for _ in rows]
