"""What is told of the settings of algorithm and selection before a run starts."""

from __future__ import annotations

import typing

import pytest

from rlmath.algorithms.advantages import AdvantageKind
from rlmath.algorithms.dynamic_sampling import Contrast
from rlmath.algorithms.importance_sampling import CorrectionLevel
from rlmath.algorithms.kl import KLKind
from rlmath.algorithms.losses import LossKind, NormalisationKind
from rlmath.config.help import all_settings
from rlmath.config.load import load_config
from rlmath.trainer.preflight.checks import (
    algorithm_problems,
    algorithm_warnings,
    config_warnings,
    run_problems,
)

PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def problems(*overrides: str) -> list[str]:
    return list(algorithm_problems(load_config([], [*PATHS, *overrides])))


def notes(*overrides: str) -> list[str]:
    return list(algorithm_warnings(load_config([], [*PATHS, *overrides])))


def test_the_defaults_have_no_problem():
    assert problems() == [] and notes() == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=1", "algorithm.advantage=ppo", "data.prompts_per_step=4"],
        ["algorithm.importance_correction=sequence", "algorithm.importance_cap=2"],
        ["data.prompts_per_step=2", "rollout.group_size=2", "algorithm.n_minibatches=4"],
        ["selection.min_completion_tokens=5", "selection.max_completion_tokens=5"],
        ["selection.dynamic_sampling=accuracy", "selection.max_extra_prompts=100"],
        ["algorithm.loss=gspo", "algorithm.clip_ratio=3e-4", "algorithm.n_minibatches=2"],
        ["algorithm.dual_clip=3", "algorithm.recompute_logprobs=false"],
        ["algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "algorithm.advantage=ppo"],
    ],
)
def test_runs_that_can_start(overrides: list[str]):
    assert problems(*overrides) == [] and notes(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["rollout.group_size=1"],
            'rollout.group_size is 1; algorithm.advantage="grpo" compares the completions of a group and needs at '
            'least 2. Raise it, or set algorithm.advantage="ppo".',
        ),
        (
            ["algorithm.importance_correction=token", "algorithm.recompute_logprobs=false"],
            "Set algorithm.recompute_logprobs=true, or the former to null.",
        ),
        (
            ["data.prompts_per_step=2", "rollout.group_size=2", "algorithm.n_minibatches=5"],
            "gives 4 samples a step, which cannot fill 5 minibatches",
        ),
        (
            [
                "rollout.group_size=1",
                "algorithm.advantage=ppo",
                "selection.dynamic_sampling=reward",
                "data.prompts_per_step=4",
            ],
            "a completion alone has none",
        ),
        (
            ["rollout.max_new_tokens=10", "selection.min_completion_tokens=11"],
            "selection.min_completion_tokens is 11, above rollout.max_new_tokens 10",
        ),
        (
            ["selection.min_completion_tokens=9", "selection.max_completion_tokens=8"],
            "selection.max_completion_tokens is 8, below selection.min_completion_tokens 9",
        ),
        (
            ["rollout.min_new_tokens=9", "selection.max_completion_tokens=8"],
            "or rollout.min_new_tokens 9: every completion would be left out. Raise it.",
        ),
    ],
)
def test_settings_that_do_not_fit_together(overrides: list[str], told: str):
    (problem,) = problems(*overrides)
    assert told in problem


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.importance_cap=2"], "importance_cap: no effect without"),
        (["algorithm.importance_mask_low=0.5"], "importance_mask_low: no effect without"),
        (
            ["algorithm.loss=cispo", "algorithm.dual_clip=3", "algorithm.epochs=2"],
            'no effect with algorithm.loss="cispo"',
        ),
        (
            ["algorithm.loss=cispo", "algorithm.clip_ratio_high=0.3"],
            "algorithm.loss, algorithm.clip_ratio_high: no effect, since one minibatch a step",
        ),
        (["algorithm.loss=gspo", "algorithm.epochs=2"], "clip_ratio=0.2 hardly ever clips the mean ratio"),
        (
            [
                "algorithm.importance_correction=token",
                "algorithm.importance_cap=5",
                "algorithm.importance_mask_high=2",
            ],
            "importance_cap=5 has no effect: importance_mask_high=2 is not above it",
        ),
        (["algorithm.kl_in=reward", "algorithm.kl_coef=0.1"], 'algorithm.advantage="grpo" divides by'),
        (
            [
                "selection.dynamic_sampling=accuracy",
                "selection.max_extra_prompts=9",
                "reward.function=own:reward",
            ],
            'return "correct", or take selection.dynamic_sampling=reward',
        ),
        (["selection.dynamic_sampling=reward"], "samples none in their place"),
        (["algorithm.kl_in=reward"], "no effect with algorithm.kl_coef=0"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "an expected gradient of 0"),
        (["selection.max_extra_prompts=4"], "no effect without selection.dynamic_sampling"),
        (
            ["selection.drop_truncated=true", "reward.mask_no_eos_with_zero=true"],
            "no effect with selection.drop_truncated=true",
        ),
    ],
)
def test_settings_without_effect_are_named(overrides: list[str], told: str):
    (note,) = notes(*overrides)
    assert told in note


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        ("algorithm.advantage", AdvantageKind),
        ("algorithm.loss", LossKind),
        ("algorithm.loss_normalisation", NormalisationKind),
        ("algorithm.importance_correction", CorrectionLevel),
        ("algorithm.kl_estimator", KLKind),
        ("selection.dynamic_sampling", Contrast),
    ],
)
def test_the_words_of_the_settings_are_those_of_the_code(key: str, kinds: object):
    assert all_settings()[key].words == typing.get_args(kinds)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("dual_clip", 1.0),
        ("importance_mask_low", 1.0),
        ("importance_mask_high", 1.0),
        ("early_stop_ratio", 1.0),
    ],
)
def test_bounds_lie_on_the_right_side_of_one(key: str, wrong: float):
    assert all_settings()[f"algorithm.{key}"].problem(wrong)


# ---------------------------------------------------------------- partial rollouts

CARRY = ["rollout.tail=carry", "algorithm.importance_correction=token", "algorithm.importance_mask_high=5"]


def carry_problems(*overrides: str) -> list[str]:
    return [one for one in run_problems(load_config([], [*PATHS, *overrides]), 1, None) if "rollout." in one]


@pytest.mark.parametrize(
    "overrides",
    [
        CARRY,
        [*CARRY[:2], "algorithm.importance_cap=2"],
        [*CARRY, "data.prompts_per_step=4", "rollout.max_groups_in_flight=12", "rollout.max_staleness=2"],
        [*CARRY, "data.prompts_per_step=4", "rollout.max_groups_in_flight=4", "rollout.slice_tokens=100"],
        ["rollout.tail=carry", "rollout.max_staleness=0"],
        ["rollout.tail=defer", "algorithm.recompute_logprobs=false"],
        ["rollout.tail=carry", "rollout.max_staleness=0", "algorithm.recompute_logprobs=false"],
    ],
)
def test_partial_rollouts_that_can_start(overrides: list[str]) -> None:
    assert carry_problems(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (CARRY[:1], "algorithm.importance_mask_high=5 (or algorithm.importance_cap)"),
        (CARRY[:2], "a clipped ratio to these is no bound on an update's size"),
        ([CARRY[0], CARRY[2]], "algorithm.importance_correction=token"),
        ([*CARRY, "algorithm.recompute_logprobs=false"], "algorithm.recompute_logprobs=true"),
        (
            [*CARRY, "data.prompts_per_step=4", "rollout.max_groups_in_flight=9"],
            "rollout.max_groups_in_flight is 9; needed: from data.prompts_per_step, 4,",
        ),
        (
            [*CARRY, "data.prompts_per_step=4", "rollout.max_groups_in_flight=3"],
            "4 x 2 = 8, since more could not all be learned in time",
        ),
    ],
)
def test_partial_rollouts_that_would_be_wrong(overrides: list[str], told: str) -> None:
    assert any(told in problem for problem in carry_problems(*overrides))


def test_settings_of_partial_rollouts_without_effect_are_told() -> None:
    def told(*overrides: str) -> list[str]:
        found = config_warnings(load_config([], [*PATHS, *overrides]))
        return [one for one in found if "rollout." in one]

    assert told() == told(*CARRY, "rollout.slice_tokens=100") == []
    assert told("rollout.slice_tokens=100", "rollout.max_staleness=3") == [
        'rollout.max_staleness, rollout.slice_tokens: no effect with rollout.tail="wait".'
    ]
    assert told("rollout.tail=defer", "rollout.slice_tokens=100") == []
    assert told("rollout.tail=defer", "rollout.max_staleness=3", "rollout.max_groups_in_flight=200") == [
        'rollout.max_staleness, rollout.max_groups_in_flight: no effect with rollout.tail="defer".'
    ]
    assert "a step has short groups only" in told("rollout.tail=defer", "algorithm.advantage=reinforce++")[0]
    assert (
        "nothing is deferred"
        in told("rollout.tail=defer", "rollout.max_new_tokens=64", "rollout.slice_tokens=64")[0]
    )
    assert "carries nothing" in told(*CARRY, "rollout.max_staleness=0")[0]
    assert told(*CARRY, "rollout.max_new_tokens=64", "rollout.slice_tokens=64") == [], (
        "a step samples for two"
    )
