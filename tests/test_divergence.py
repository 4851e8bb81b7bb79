"""A run whose policy has diverged ends, says so, and keeps the checkpoint from before."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.checkpoint.directory import complete_checkpoints, read_progress
from rlmath.distributed.fault_tolerance.exit_codes import DIVERGED, FINISHED, read_exit_status
from tests.forked_ranks import run_ranks
from tests.programs import metric_rows
from tests.selection import matrix, two_ranks
from tests.spoiled_run import SPOILED_STEP
from tests.test_train_sft import SFT, settings

SPOILED = (
    "tests/spoiled_run.py",
    "--config",
    SFT[2],
    "--program",
    "sft",
    "--times",
    "9",
    "--spoil",
)


def start(
    place: Path,
    folder: Path,
    program: tuple[str, ...],
    *more: str,
    ranks: int,
    expect: int = DIVERGED,
) -> str:
    """The console of a run of 8 steps on data-parallel ranks."""
    overrides = settings(place, folder, "run.total_steps=8", "save.keep_last=1", *more)
    return run_ranks(ranks, [*program, *overrides], expect=expect).stderr


def saved_steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(folder / "checkpoints")[0]]


@pytest.mark.parametrize("ranks", [1, two_ranks(matrix)])
def test_weights_that_are_not_finite_on_one_rank_are_never_saved(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    """The same command, with sound weights, then resumes from the checkpoint that stayed."""
    folder = tmp_path / "run"
    console = start(arithmetic, folder, (*SPOILED, "nan"), ranks=ranks)
    exit_status = read_exit_status(folder)
    assert exit_status.status == DIVERGED
    assert (
        f"diverged in step {SPOILED_STEP}: there are values that are not finite in the par"
        in exit_status.message
    )
    assert f"on rank {ranks - 1}" in exit_status.message
    assert exit_status.message in console and "Lower optimizer.lr" in console
    assert saved_steps(folder) == [SPOILED_STEP - 1]
    assert not (folder / "hf_model").exists() and len(metric_rows(folder)) == SPOILED_STEP + 1
    start(arithmetic, folder, SFT, "run.total_steps=4", ranks=ranks, expect=0)
    assert read_exit_status(folder).status == FINISHED
    assert [row["step"] for row in metric_rows(folder)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ranks", [1, two_ranks(pytest.mark.full)])
def test_a_row_of_discarded_steps_ends_the_run_and_the_next_start(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "run"
    settings = ("save.keep_last=2", "sft.eval_every_steps=null")
    console = start(arithmetic, folder, (*SPOILED, "scale"), *settings, ranks=ranks)
    exit_status = read_exit_status(folder)
    last, sound = SPOILED_STEP + 3, SPOILED_STEP - 1
    assert exit_status.status == DIVERGED
    assert (
        f"diverged in step {last}: every minibatch of 3 steps in a row was discarded"
        in exit_status.message
    )
    assert f"step-{sound:06d}" in exit_status.message
    assert console.count("the update was skipped: the loss is not finite") == 3
    skipped = {row["step"]: row["train/skipped_updates"] for row in metric_rows(folder)}
    assert skipped == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert saved_steps(folder) == [last - 1, last - 2, sound]
    progress = read_progress(folder / "checkpoints" / f"step-{last - 1:06d}")
    assert (progress.discarded_steps, progress.learned_step) == (2, SPOILED_STEP)
    second_console = start(arithmetic, folder, SFT, *settings, ranks=ranks)
    assert f"diverged in step {last}: every minibatch of 3 steps in a row" in second_console
    assert read_exit_status(folder).status == DIVERGED and saved_steps(folder) == [
        last - 1,
        last - 2,
        sound,
    ]
    assert not (folder / "hf_model").exists()


@pytest.mark.parametrize("ranks", [1, two_ranks(pytest.mark.full)])
def test_a_model_that_the_last_update_broke_is_not_finished(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    """No later minibatch sees it: the weights are finite, and give no log-probs."""
    folder = tmp_path / "run"
    start(
        arithmetic,
        folder,
        SFT,
        "optimizer.lr=1e30",
        "optimizer.warmup_steps=0",
        "run.total_steps=1",
        ranks=ranks,
    )
    exit_status = read_exit_status(folder)
    assert (
        exit_status.status == DIVERGED
        and "gives log-probs that are not finite" in exit_status.message
    )
    assert not (folder / "hf_model").exists()
