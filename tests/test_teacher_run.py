"""A whole run that learns from a teacher alone, as a user starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import TRAIN, metric_rows, run, small_run, torchrun_command

pytestmark = [pytest.mark.distributed, pytest.mark.full]

STEPS = 3


def make_teacher(place: Path) -> Path:
    """A random model of another shape than the base."""
    shape = ("--hidden", "96", "--layers", "2", "--seed", "8")
    run("-m", "rlmath.cli.make_tiny_model", "--output", str(place / "teacher"), *shape)
    return place / "teacher"


@pytest.mark.parametrize("loss", ["full", "advantage"])
def test_a_run_without_rewards_comes_closer_to_its_teacher(arithmetic: Path, loss: str) -> None:
    """The KL per token falls.

    The teacher is offloaded between its passes, and the phases are logged."""
    output = arithmetic / loss
    settings = (
        f"teacher.path={make_teacher(arithmetic / ('with_' + loss))}",
        f"teacher.loss={loss}",
        "memory.offload_teacher=true",
        f"run.total_steps={STEPS}",
        "optimizer.lr=3e-3",
        "save.ckpt_freq_secs=null",
    )
    recipe = ("--config", "configs/algorithms/distill.yaml")
    process = run(*torchrun_command(2, *TRAIN, *recipe, *small_run(arithmetic, output), *settings))
    rows = metric_rows(output)
    assert len(rows) == STEPS and all(row["seconds/teacher"] > 0 for row in rows)
    assert rows[0]["train/teacher_kl"] > rows[-1]["train/teacher_kl"] > 0
    if loss == "full":
        assert all(row["advantage"] == 0 for row in rows)
        assert "seconds/logprobs" not in rows[0], "one update a step needs no pass of its own"
    assert "teacher:" in process.stdout + process.stderr
