"""The schemes with numbers worked out by hand; those of SimpleRL as its users quote them."""

import pytest

from rlmath.algorithms.types import Score
from rlmath.answers.verifier import Verdict
from rlmath.rewards.schemes import Scheme, function_score, overlong_share, score
from rlmath.workers.function_calls import FunctionResult

RIGHT = Verdict(True, "1/2", "symbolic")
WRONG = Verdict(False, "1/3", "number")
SILENT = Verdict(False, "", "no_answer")


def reward(
    scheme: Scheme, verdict: Verdict, boxed: bool = True, length: int = 10, truncated: bool = False
) -> float:
    return score(scheme, verdict, boxed, length, 100, truncated).reward


def test_scaling_and_bias_are_areals():
    assert reward(Scheme(output_scaling=10.0), RIGHT) == 10.0
    assert reward(Scheme(output_scaling=0.5, output_bias=-1.0), RIGHT) == 1.0
    assert reward(Scheme(output_scaling=0.5, output_bias=-1.0), WRONG) == 0.0
    assert reward(Scheme("mix", output_scaling=2.0), WRONG) == -1.0


def test_the_format_penalty_is_minus_one_by_default():
    assert reward(Scheme("mix"), SILENT, boxed=False) == -1.0


def test_truncated_completions_can_be_worth_nothing():
    masked = Scheme(mask_no_eos_with_zero=True)
    assert reward(masked, RIGHT, truncated=True) == reward(masked, WRONG, truncated=True) == 0.0
    assert reward(masked, WRONG) == -5.0
    assert reward(Scheme(), WRONG, truncated=True) == -5.0


@pytest.mark.parametrize(("length", "share"), [(1, 0.0), (80, 0.0), (85, 0.25), (100, 1.0)])
def test_length_costs_over_the_buffer_only(length, share):
    assert overlong_share(length, limit=100, buffer=20) == share
    assert reward(Scheme(overlong_buffer=20, overlong_penalty=2.0), RIGHT, length=length) == 5.0 - 2.0 * share
    assert reward(Scheme(), RIGHT, length=length) == 5.0


def test_a_score_carries_the_verdict_and_the_box():
    assert score(Scheme(), RIGHT, True, 10, 100, False) == Score(5.0, True, "1/2", "symbolic", True)
    assert score(Scheme(), SILENT, False, 10, 100, False) == Score(-5.0, False, "", "no_answer", False)


def test_a_functions_number_is_the_reward():
    said = FunctionResult(0.25, (("steps", 3.0),))
    assert function_score(Scheme(), said, -1.0, True, 10, 100, False) == Score(
        0.25, True, "", "function", True, (("steps", 3.0),)
    )
    assert function_score(Scheme(output_scaling=4.0), said, -1.0, True, 10, 100, False).reward == 1.0
    assert not function_score(Scheme(), FunctionResult(-1.0), -1.0, True, 10, 100, False).correct
    named = FunctionResult(1.0, (("correct", 0.0),))
    assert not function_score(Scheme(), named, -1.0, True, 10, 100, False).correct


def test_a_function_that_failed_gives_the_reward_for_failures():
    failed = FunctionResult(0.0, failure="error", message="ZeroDivisionError")
    assert function_score(Scheme(), failed, -1.0, False, 10, 100, False) == Score(
        -1.0, False, "ZeroDivisionError", "error", False
    )
