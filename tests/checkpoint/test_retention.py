"""Which checkpoints stay, and which give way to newer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.checkpoint.directory import set_newer_aside
from rlmath.checkpoint.retention import Retention, set_superseded_aside
from tests.checkpoint.test_directory import make, steps


@pytest.mark.parametrize(
    ("kept", "keep_last", "keep_models", "left"),
    [
        ((), 2, None, [6, 5]),
        ((2, 4), 2, None, [6, 5, 4, 2]),
        ((2, 4), 1, 1, [6, 4]),
        ((5, 6), 1, 1, [6]),
        ((1, 2, 6), 2, 2, [6, 5, 2]),
    ],
)
def test_superseded_checkpoints_give_way(
    tmp_path: Path, kept: tuple[int, ...], keep_last: int, keep_models: int | None, left: list[int]
) -> None:
    for step in range(1, 7):
        make(tmp_path, step, step in kept)
    aside = set_superseded_aside(tmp_path, Retention(keep_last, keep_models), learned_step=6)
    assert steps(tmp_path) == left
    assert len(aside) == 6 - len(left) and all(path.name.endswith(".partial") for path in aside)


def test_a_checkpoint_before_a_captured_step_stays(tmp_path: Path) -> None:
    for step in range(1, 7):
        make(tmp_path, step)
    set_superseded_aside(tmp_path, Retention(1, None, always=frozenset({2, 9})), learned_step=6)
    assert steps(tmp_path) == [6, 2]


@pytest.mark.parametrize(
    ("keep_last", "learned_step", "left"),
    [
        (2, 6, [6, 5]),
        (2, 5, [6, 5, 4]),
        (2, 3, [6, 5, 2]),
        (1, 5, [6, 4]),
        (1, 1, [6]),
        (6, 3, [6, 5, 4, 3, 2, 1]),
    ],
)
def test_the_newest_checkpoint_that_learned_stays_while_nothing_is_learned(
    tmp_path: Path, keep_last: int, learned_step: int, left: list[int]
) -> None:
    for step in range(1, 7):
        make(tmp_path, step)
    set_superseded_aside(tmp_path, Retention(keep_last, None), learned_step)
    assert steps(tmp_path) == left


def test_a_damaged_checkpoint_does_not_count_as_one_that_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder = make(tmp_path, step)
    (folder / "progress.json").unlink()
    set_superseded_aside(tmp_path, Retention(1, None), learned_step=3)
    assert steps(tmp_path) == [2]


def test_what_was_passed_over_does_not_count_among_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    set_newer_aside(tmp_path, 1)
    make(tmp_path, 2)
    set_superseded_aside(tmp_path, Retention(1, None), learned_step=3)
    assert steps(tmp_path) == [2]
    assert {"step-000002.damaged", "step-000003.damaged"} <= {
        path.name for path in tmp_path.iterdir()
    }
