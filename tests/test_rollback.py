"""A run whose policy diverges goes back to its last good checkpoint.

It continues as if killed runs had never been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlmath.distributed.fault_tolerance.exit_codes import DIVERGED, FINISHED, read_exit_status
from rlmath.run.recovery.rollbacks_file import read_rollbacks
from tests.forked_ranks import run_ranks
from tests.programs import rows
from tests.selection import two_ranks
from tests.spoiled_run import SPOILED_STEP
from tests.test_train_sft import SFT, settings

RANKS = [1, two_ranks(pytest.mark.full)]
STEPS = 6
SOUND = SPOILED_STEP - 1
MORE = (
    f"run.total_steps={STEPS}",
    "save.ckpt_freq_steps=1",
    "save.keep_last=20",
    "algorithm.rollback=2",
    "algorithm.rollback_lr_factor=0.25",
)


def spoiled(program: str, spoil: str, times: int, *more: str) -> tuple[str, ...]:
    config = "configs/demo_sft.yaml" if program == "sft" else "configs/demo.yaml"
    options = ("--program", program, "--spoil", spoil, "--times", str(times), *more)
    return ("tests/spoiled_run.py", "--config", config, *options)


def train(
    place: Path, folder: Path, program: tuple[str, ...], *, ranks: int, expect: int = 0
) -> str:
    """The console of a supervised run on data-parallel ranks."""
    return run_ranks(ranks, [*program, *settings(place, folder, *MORE)], expect=expect).stderr


@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_goes_back_with_a_lower_rate_and_other_prompts_also_when_it_is_killed_in_between(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    """A killed run resumes with the rollback that it had recorded.

    So does one that is killed later."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    console = train(arithmetic, whole, spoiled("sft", "nan", 1), ranks=ranks)
    assert read_exit_status(whole).status == FINISHED and (whole / "hf_model").is_dir()
    assert f"Rollback 1 of at most 2: the run diverged in step {SPOILED_STEP}" in console
    assert f"step-{SOUND:06d}; the learning rate is 0.25 times" in console
    (record,) = read_rollbacks(whole)
    assert (record.step, record.draw_step, record.diverged_step) == (SOUND, SOUND, SPOILED_STEP)
    assert "not finite" in record.reason
    assert [row["step"] for row in rows(whole)] == list(
        range(STEPS + 1)
    )  # each once, 0 is before training
    rates = [row["train/learning_rate"] for row in rows(whole)[1:]]
    assert rates[SOUND] < rates[SOUND - 1] / 2

    train(
        arithmetic, killed, spoiled("sft", "nan", 1, "--kill"), ranks=ranks, expect=-signal.SIGKILL
    )
    assert len(rows(killed)) == SPOILED_STEP + 1 and len(read_rollbacks(killed)) == 1
    train(arithmetic, killed, SFT, ranks=ranks)
    assert rows(killed) == rows(whole) and len(read_rollbacks(killed)) == 1
    for name in ("model.safetensors", "config.json"):
        assert (killed / "hf_model" / name).read_bytes() == (whole / "hf_model" / name).read_bytes()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_makes_no_more_rollbacks_than_it_may(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "run"
    console = train(arithmetic, folder, spoiled("sft", "nan", 9), ranks=ranks, expect=DIVERGED)
    assert read_exit_status(folder).status == DIVERGED
    assert console.count("Rollback ") == 2 and "all 2 of algorithm.rollback are made" in console
    assert [record.step for record in read_rollbacks(folder)] == [SOUND, SOUND]
    second_console = train(
        arithmetic, folder, spoiled("sft", "nan", 9), ranks=ranks, expect=DIVERGED
    )
    assert "Rollback " not in second_console and len(read_rollbacks(folder)) == 2
