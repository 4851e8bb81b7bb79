"""The schemes with numbers worked out by hand; those of SimpleRL as its users quote them."""

from dataclasses import replace
from typing import Any

import pytest

from rlmath.algorithms.types import Score
from rlmath.answers.verifier import Verdict
from rlmath.config.schema import RewardConfig
from rlmath.rewards.schemes import overlong_share
from rlmath.rewards.several_rewards import rewards_of, score_of
from rlmath.workers.function_calls import FunctionResult

RIGHT = Verdict(True, "1/2", "symbolic")
WRONG = Verdict(False, "1/3", "number")
SILENT = Verdict(False, "", "no_answer")
DEFAULT = RewardConfig()


def score(
    result: Verdict | FunctionResult, settings: RewardConfig = DEFAULT, **facts: Any
) -> Score:
    """The score of a run whose one reward is the verifier's, or a function's."""
    function = "m:f" if isinstance(result, FunctionResult) else None
    settings = replace(settings, function=function, function_failure=-1.0)
    all_facts = {"boxed": True, "length": 10, "limit": 100, "truncated": False} | facts
    return score_of(settings, {rewards_of(settings)[0].name: result}, **all_facts)


def reward(settings: RewardConfig, verdict: Verdict, **facts: Any) -> float:
    return score(verdict, settings, **facts).reward


def test_scaling_and_bias_are_areals():
    assert reward(RewardConfig(output_scaling=10.0), RIGHT) == 10.0
    assert reward(RewardConfig(output_scaling=0.5, output_bias=-1.0), RIGHT) == 1.0
    assert reward(RewardConfig(output_scaling=0.5, output_bias=-1.0), WRONG) == 0.0
    assert reward(RewardConfig("mix", output_scaling=2.0), WRONG) == -1.0


def test_the_format_penalty_is_minus_one_by_default():
    assert reward(RewardConfig("mix"), SILENT, boxed=False) == -1.0


def test_truncated_completions_can_be_worth_nothing():
    masked = RewardConfig(mask_no_eos_with_zero=True)
    assert reward(masked, RIGHT, truncated=True) == reward(masked, WRONG, truncated=True) == 0.0
    assert reward(masked, WRONG) == -5.0
    assert reward(DEFAULT, WRONG, truncated=True) == -5.0


@pytest.mark.parametrize(("length", "share"), [(1, 0.0), (80, 0.0), (85, 0.25), (100, 1.0)])
def test_length_costs_over_the_buffer_only(length, share):
    assert overlong_share(length, limit=100, buffer=20) == share
    assert (
        reward(RewardConfig(overlong_buffer=20, overlong_penalty=2.0), RIGHT, length=length)
        == 5.0 - 2.0 * share
    )
    assert reward(DEFAULT, RIGHT, length=length) == 5.0


def test_a_score_carries_the_verdict_and_the_box():
    assert score(RIGHT) == Score(5.0, True, "1/2", "symbolic", True)
    assert score(SILENT, boxed=False) == Score(-5.0, False, "", "no_answer", False)


def test_a_functions_number_is_the_reward():
    function_result = FunctionResult(0.25, (("steps", 3.0),))
    assert score(function_result) == Score(0.25, True, "", "function", True, (("steps", 3.0),))
    assert score(function_result, RewardConfig(output_scaling=4.0)).reward == 1.0
    assert not score(FunctionResult(-1.0)).correct
    named_result = FunctionResult(1.0, (("correct", 0.0),))
    assert not score(named_result).correct


def test_a_function_that_failed_gives_the_reward_for_failures():
    failed = FunctionResult(0.0, failure="error", message="ZeroDivisionError")
    assert score(failed, boxed=False) == Score(-1.0, False, "ZeroDivisionError", "error", False)
