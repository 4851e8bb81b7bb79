"""Settings of the curriculum that make no sense together are refused before anything starts.

Others are warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.schema import Config, DataConfig, RolloutConfig
from rlmath.planning.checks import file_problems, run_problems
from rlmath.planning.setting_warnings import config_warnings


def config(ranks: int = 0, group_size: int = 8, **data: object) -> Config:
    rollout = RolloutConfig(ranks=ranks, group_size=group_size)
    return replace(Config(), data=DataConfig(**data), rollout=rollout)  # pyright: ignore


def problems(given: Config) -> list[str]:
    return [problem for problem in run_problems(given, 2, None) if problem.startswith("data.")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (config(ranks=1, curriculum="band"), "depends on the clock"),
        (config(curriculum="band", band_low=0.6, band_high=0.5), "no pass rate lies between"),
        (config(curriculum="skip_solved", solved_samples=33), "4 x 8 = 32 completions"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Config, told: str) -> None:
    (problem,) = problems(given)
    assert told in problem


@pytest.mark.parametrize(
    "given",
    [
        config(ranks=1),
        config(curriculum="band", band_low=0.5, band_high=0.5),
        config(curriculum="skip_solved", solved_samples=32),
        config(curriculum="band", solved_samples=33),
    ],
)
def test_what_makes_sense_is_not(given: Config) -> None:
    assert problems(given) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            config(band_low=0.2, curriculum_floor=0.3),
            "data.curriculum_floor: no effect with data.curriculum=none.",
        ),
        (
            config(curriculum="band", solved_samples=3),
            "data.solved_samples: no effect without data.curriculum=skip_solved.",
        ),
        (
            config(curriculum="skip_solved", band_high=0.5),
            "data.band_high: no effect without data.curriculum=band.",
        ),
        (
            config(curriculum="band", band_low=0.0, band_high=1.0),
            'data.curriculum="band" skips nothing with data.band_low=0 and data.band_high=1.',
        ),
    ],
)
def test_settings_without_effect_are_told(given: Config, told: str) -> None:
    assert told in config_warnings(given)


def test_a_history_that_is_not_there_is_told_before_the_start(tmp_path: Path) -> None:
    settings = config(train_path=__file__, history_path=str(tmp_path / "rates.jsonl"))
    (problem,) = file_problems(settings)
    assert problem.startswith("data.history_path: there is no file")
    assert list(file_problems(settings, "sft")) == []
