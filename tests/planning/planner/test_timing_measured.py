"""Calibrated with one run on this machine's CPU, the plan tells the step of another layout and batch size."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.planning.planner.calibration import Where, fit, read_run
from rlmath.planning.planner.work import DEFAULTS
from tests import programs

pytestmark = [pytest.mark.full, pytest.mark.distributed]
STEPS = 14


def measure(place: Path, name: str, *overrides: str) -> Path:
    """A short run of the demo's model on two ranks; its folder."""
    output = place / name
    run = [
        f"run.output_dir={output}",
        f"model.path={place}/base",
        f"data.train_path={place}/data/train.jsonl",
    ]
    run += [f"run.total_steps={STEPS}", "save.ckpt_freq_secs=null", "telemetry.tensorboard=false", *overrides]
    programs.run(*programs.torchrun_command(2, *programs.TRAIN, *run))
    return output


def test_another_layout_and_batch_are_predicted_within_a_fifth(arithmetic: Path):
    known = read_run(measure(arithmetic, "known", "parallel.tensor=2", "data.prompts_per_step=64"), Where())
    calibrated = fit([known], DEFAULTS["cpu"])
    other = read_run(measure(arithmetic, "other", "parallel.tensor=1", "data.prompts_per_step=32"), Where())
    predicted = other.planned(calibrated).step_seconds
    assert predicted == pytest.approx(other.step_seconds, rel=0.2)
