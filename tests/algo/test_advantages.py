import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from rlmath.algo.advantages import group_normalised


def test_one_right_answer_of_four():
    # mean -2.5; squared distances 56.25 and 3 x 6.25 over G - 1 = 3 give a deviation of 5
    rewards_PG = torch.tensor([[5.0, -5.0, -5.0, -5.0]])
    torch.testing.assert_close(group_normalised(rewards_PG, 0.0), torch.tensor([[1.5, -0.5, -0.5, -0.5]]))


def test_epsilon_is_added_to_the_deviation():
    # mean 2, deviation 2
    rewards_PG = torch.tensor([[0.0, 2.0, 4.0]])
    torch.testing.assert_close(group_normalised(rewards_PG, 2.0), torch.tensor([[-0.5, 0.0, 0.5]]))


def test_groups_do_not_influence_each_other():
    both = group_normalised(torch.tensor([[1.0, 3.0], [100.0, -100.0]]), 1e-6)
    alone = group_normalised(torch.tensor([[1.0, 3.0]]), 1e-6)
    assert torch.equal(both[:1], alone)


@pytest.mark.parametrize("reward", [5.0, -5.0, 0.0, 0.1])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_group_without_contrast_gets_exact_zeros(reward: float, eps: float):
    # Three times 0.1 over 3 is not 0.1 in binary: without the rule rounding would be divided by itself.
    advantages_PG = group_normalised(torch.full((2, 3), reward), eps)
    assert torch.equal(advantages_PG, torch.zeros(2, 3))


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2 samples for a deviation, got 1"):
        group_normalised(torch.ones(3, 1), 1e-6)


def test_the_shape_of_the_rewards_is_checked():
    with pytest.raises(TypeCheckError):
        group_normalised(torch.ones(4), 1e-6)
    with pytest.raises(TypeCheckError):
        group_normalised(torch.ones(2, 2, dtype=torch.int64), 1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20), st.floats(0.0, 10.0))
def test_any_group_agrees_with_the_standard_library(rewards: list[int], eps: float):
    got = group_normalised(torch.tensor([rewards], dtype=torch.float64), eps)[0].tolist()
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    wanted = [(reward - mean) / (deviation + eps) if deviation else 0.0 for reward in rewards]
    assert got == pytest.approx(wanted, abs=1e-12)
