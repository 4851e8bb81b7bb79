"""A whole run that learns from a teacher alone, as a user starts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlmath.cli import make_tiny_model
from tests.forked_ranks import run_ranks
from tests.programs import TRAIN, metric_rows, small_run
from tests.selection import two_ranks

STEPS = 3


def make_teacher(place: Path) -> Path:
    """A random model of another shape than the base."""
    shape = ("--hidden", "96", "--layers", "2", "--seed", "8")
    with torch.random.fork_rng():
        make_tiny_model.main(["--output", str(place / "teacher"), *shape])
    return place / "teacher"


@pytest.mark.parametrize("ranks", [1, two_ranks(pytest.mark.full)])
@pytest.mark.parametrize("loss", ["full", "advantage"])
def test_a_run_without_rewards_comes_closer_to_its_teacher(
    arithmetic: Path, tmp_path: Path, loss: str, ranks: int
) -> None:
    """The KL per token falls.

    The teacher is offloaded between its passes, and the phases are logged."""
    output = tmp_path / "run"
    settings = (
        f"teacher.path={make_teacher(tmp_path)}",
        f"teacher.loss={loss}",
        "memory.offload_teacher=true",
        f"run.total_steps={STEPS}",
        "optimizer.lr=3e-3",
        "save.ckpt_freq_secs=null",
    )
    recipe = ("--config", "configs/algorithms/distill.yaml")
    process = run_ranks(
        ranks,
        [*TRAIN, *recipe, *small_run(arithmetic, output), f"parallel.tensor={ranks}", *settings],
    )
    rows = metric_rows(output)
    assert len(rows) == STEPS and all(row["seconds/teacher"] > 0 for row in rows)
    assert rows[0]["train/teacher_kl"] > rows[-1]["train/teacher_kl"] > 0
    if loss == "full":
        assert all(row["advantage"] == 0 for row in rows)
        assert "seconds/logprobs" not in rows[0], "one update a step needs no pass of its own"
    assert "teacher:" in process.stdout + process.stderr
