"""How much disk a run asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlmath.config.schema import Config, RunConfig, SaveConfig, StagesConfig, ValidationConfig
from rlmath.run.recovery.save_schedule import export_bytes, most_models, output_bytes
from tests.tiny_models import shape_of

NO_CHECKPOINTS = SaveConfig(ckpt_freq_secs=None)


def test_models_of_stages_and_the_best_one_count_until_they_are_there(
    tied_model: Path, tmp_path: Path
) -> None:
    shape = shape_of(tied_model)
    plain = Config(run=RunConfig(output_dir=str(tmp_path), device="cpu"), save=NO_CHECKPOINTS)
    model = export_bytes(plain, shape)
    assert output_bytes(plain, shape) == model and most_models(plain) == 1
    staged = replace(plain, stages=StagesConfig(steps=[1, 1, 1]), validation=ValidationConfig(keep_best=True))
    assert output_bytes(staged, shape) == 6 * model and most_models(staged) == 6
    for name in ("models/stage-1", "best_model"):
        (tmp_path / name).mkdir(parents=True)
    assert output_bytes(staged, shape) == 4 * model and most_models(staged) == 6
