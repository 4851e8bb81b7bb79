import math

import pytest

from rlmath.algo.early_stop import discard_reason

LEARN = {"ratio_sum": 10.0, "token_count": 10.0, "loss_sum": -3.0, "grad_norm": 0.7, "high": 5.0, "low": 0.2}


def test_a_usual_minibatch_is_learned_from():
    assert discard_reason(**LEARN) is None


def test_the_mean_is_taken_over_tokens():
    assert discard_reason(**LEARN | {"ratio_sum": 60.0}) == "mean importance ratio 6 is above 5"
    assert discard_reason(**LEARN | {"ratio_sum": 60.0, "token_count": 12.0}) is None
    assert discard_reason(**LEARN | {"ratio_sum": 1.0}) == "mean importance ratio 0.1 is below 0.2"


@pytest.mark.parametrize("ratio_sum", [50.0, 2.0])
def test_a_mean_on_its_bound_is_learned_from(ratio_sum: float):
    assert discard_reason(**LEARN | {"ratio_sum": ratio_sum}) is None


@pytest.mark.parametrize("ratio_sum", [50.001, 1.999])
def test_a_mean_just_outside_of_its_bound_is_not(ratio_sum: float):
    assert discard_reason(**LEARN | {"ratio_sum": ratio_sum}) is not None


@pytest.mark.parametrize("ratio_sum", [1e9, 0.0])
def test_without_bounds_any_finite_mean_is_learned_from(ratio_sum: float):
    assert discard_reason(**LEARN | {"ratio_sum": ratio_sum, "high": None, "low": None}) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("key", "name"),
    [("ratio_sum", "importance ratio"), ("loss_sum", "loss"), ("grad_norm", "gradient norm")],
)
@pytest.mark.parametrize("bounds", [{}, {"high": None, "low": None}])
def test_whatever_is_not_finite_discards_and_is_named(key: str, name: str, bad: float, bounds: dict):
    assert discard_reason(**LEARN | bounds | {key: bad}) == f"the {name} is not finite ({bad})"


@pytest.mark.parametrize("bounds", [{}, {"high": None, "low": None}])
def test_a_minibatch_without_tokens_is_discarded(bounds: dict):
    empty = {"ratio_sum": 0.0, "token_count": 0.0, "loss_sum": 0.0, "grad_norm": 0.0}
    assert discard_reason(**LEARN | bounds | empty).startswith("no token has a weight")
