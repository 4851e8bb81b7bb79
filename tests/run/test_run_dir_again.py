"""What becomes of what an earlier run left in the folder, beside what `test_run_folder` shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.run.run_dir import claim_run_folder
from rlmath.telemetry.wandb import run_id


def config_of(folder: Path, *overrides: str) -> Config:
    given = (f"run.output_dir={folder}", "model.path=m", "data.train_path=t.jsonl")
    return load_config([], [*given, *overrides])


def test_a_run_that_starts_anew_is_another_one_to_wandb(tmp_path: Path):
    claim_run_folder(tmp_path, config_of(tmp_path))
    first = run_id(tmp_path)
    claim_run_folder(tmp_path, config_of(tmp_path), steps_done=0)
    assert run_id(tmp_path) == first, "one that goes on is the same"
    claim_run_folder(tmp_path, config_of(tmp_path, "run.recover_mode=disabled"))
    assert run_id(tmp_path) != first == run_id(tmp_path / "earlier" / "001")


@pytest.mark.parametrize("steps_done", [None, 3])
def test_halves_of_models_that_a_killed_run_left_are_removed(tmp_path: Path, steps_done: int | None):
    config = config_of(tmp_path)
    claim_run_folder(tmp_path, config)
    for name in ("best_model.partial", "best_model.before.partial", "models/stage-1.partial"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").touch()
    claim_run_folder(tmp_path, config, steps_done)
    assert not list(tmp_path.rglob("*.partial"))
