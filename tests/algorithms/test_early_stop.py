import math
from dataclasses import replace

import pytest

from rlmath.algorithms.early_stop import EarlyStop, discard_reason

USUAL = {"ratio": 10.0, "proximal_kl": 0.4, "loss": -3.0, "tokens": 10.0}
BOUNDS = EarlyStop(ratio_high=5.0, ratio_low=0.2, kl=0.05)
UNBOUNDED = EarlyStop(None, None, None)


@pytest.mark.parametrize("bounds", [BOUNDS, UNBOUNDED, EarlyStop()])
def test_a_usual_minibatch_is_learned_from(bounds: EarlyStop):
    assert discard_reason(USUAL, 0.7, bounds) is None


def test_means_are_taken_over_tokens():
    six = USUAL | {"ratio": 60.0}
    assert discard_reason(six, 0.7, BOUNDS) == "mean importance ratio 6 is above 5"
    assert discard_reason(six | {"tokens": 12.0}, 0.7, BOUNDS) is None
    low = USUAL | {"ratio": 1.0}
    assert discard_reason(low, 0.7, BOUNDS) == "mean importance ratio 0.1 is below 0.2"
    far = USUAL | {"proximal_kl": 0.6}
    assert (
        discard_reason(far, 0.7, BOUNDS) == "mean approximate KL 0.06 nats per token is above 0.05"
    )
    assert discard_reason(far | {"tokens": 12.0}, 0.7, BOUNDS) is None


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({"ratio": 50.0}, {"ratio": 50.001}),
        ({"ratio": 2.0}, {"ratio": 1.999}),
        ({"proximal_kl": 0.5}, {"proximal_kl": 0.5001}),
    ],
)
def test_a_mean_on_its_bound_is_learned_from(inside: dict[str, float], outside: dict[str, float]):
    assert discard_reason(USUAL | inside, 0.7, BOUNDS) is None
    assert discard_reason(USUAL | outside, 0.7, BOUNDS) is not None


@pytest.mark.parametrize(
    ("off", "passes"),
    [("ratio_high", {"ratio": 1e9}), ("ratio_low", {"ratio": 0.0}), ("kl", {"proximal_kl": 1e9})],
)
def test_each_bound_can_be_left_out_alone(off: str, passes: dict[str, float]):
    outside = USUAL | passes
    assert discard_reason(outside, 0.7, BOUNDS) is not None
    assert discard_reason(outside, 0.7, replace(BOUNDS, **{off: None})) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("ratio", "importance ratio"),
        ("loss", "loss"),
        (
            "proximal_kl",
            "approximate KL",
        ),  # a token of probability 0 has a ratio of 0 and an infinite KL
        ("tokens", "number of tokens"),
    ],
)
@pytest.mark.parametrize("bounds", [BOUNDS, UNBOUNDED])
def test_a_number_that_is_not_finite_discards_and_is_named(
    field: str, name: str, bad: float, bounds: EarlyStop
):
    assert discard_reason(USUAL | {field: bad}, 0.7, bounds) == f"the {name} is not finite ({bad})"
    assert discard_reason(USUAL, bad, bounds) == f"the gradient norm is not finite ({bad})"


@pytest.mark.parametrize("bounds", [BOUNDS, UNBOUNDED])
@pytest.mark.parametrize("tokens", [0.0, -1.0])
def test_a_minibatch_without_tokens_is_discarded(tokens: float, bounds: EarlyStop):
    reason = discard_reason(dict.fromkeys(USUAL, 0.0) | {"tokens": tokens}, 0.0, bounds)
    assert reason is not None and reason.startswith("no token has a weight")


def test_what_is_not_finite_is_named_before_what_is_out_of_bounds():
    assert (
        discard_reason(USUAL | {"ratio": 1e9, "loss": math.nan}, 0.7, BOUNDS)
        == "the loss is not finite (nan)"
    )
