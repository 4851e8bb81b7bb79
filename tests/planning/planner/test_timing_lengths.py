"""Lengths of completions.

The moments are compared with a plain sum over many quantiles, and the spread with the step log that
it is from."""

import pytest

from rlmath.planning.planner.lengths import Batch, Lengths, lengths_with_mean


@pytest.mark.parametrize(
    ("median", "spread", "longest"), [(6700, 0.78, 16384), (50, 1.5, 100), (20, 0.1, 32)]
)
def test_moments_are_those_of_the_quantiles(median: float, spread: float, longest: int):
    lengths = Lengths(median, spread, longest)
    n = 20000
    quantiles = [lengths.at((i + 0.5) / n) for i in range(n)]
    assert lengths.moment(1) == pytest.approx(sum(quantiles) / n, rel=2e-3)
    assert lengths.moment(2) == pytest.approx(sum(q * q for q in quantiles) / n, rel=2e-3)
    assert lengths.truncated == pytest.approx(sum(q == longest for q in quantiles) / n, abs=2e-4)


@pytest.mark.parametrize("mean", [1, 31.5, 8000, 16384])
def test_the_mean_is_the_one_that_was_asked_for(mean: float):
    assert lengths_with_mean(mean, 16384).mean == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("mean", [0.5, 101, float("nan")])
def test_a_mean_that_no_completions_have_is_refused(mean: float):
    with pytest.raises(ValueError, match="needed: from 1 to the longest, 100"):
        lengths_with_mean(mean, 100)


def test_the_spread_is_that_of_the_log():
    """The numbers are of AReaL's tutorial: six steps of 16,384 sequences of a 7B model.

    Of 7941.9 tokens 107.8 are the prompt's."""
    assert lengths_with_mean(7941.9 - 107.8, 16384).truncated == pytest.approx(0.1238, rel=1e-2)


def test_tokens_and_squares_of_a_batch():
    batch = Batch(4, 2, 6.0, Lengths(10.0, 0.001, 16))
    assert batch.tokens == pytest.approx(4 * 16, rel=1e-4) and batch.squares == pytest.approx(
        4 * 16**2, rel=1e-4
    )
